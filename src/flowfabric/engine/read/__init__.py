"""Read operations: view, list, count and explain executions, and check stored rows for consistency."""
