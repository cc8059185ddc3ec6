"""What surrounds executions: workers, lanes and database sessions."""
