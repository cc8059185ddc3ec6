"""Postgres as a tool: connections, statements, batches, hints, migrations and the embedded server."""
