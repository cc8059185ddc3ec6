"""Executions as such: creating, cancelling, tags, results and retention."""
