"""Access to Postgres: connections, statements, batches, hints, migrations and the embedded server."""
