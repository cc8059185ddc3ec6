"""The grid: what every operation does in every state of an execution, written from the specification."""
