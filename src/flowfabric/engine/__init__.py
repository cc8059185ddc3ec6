"""The operations: the only code that changes an execution."""
