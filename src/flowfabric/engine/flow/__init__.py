"""Flows: graphs of executions, the cascade along their edges, and their cancellation."""
