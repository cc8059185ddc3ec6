"""The grid: what every operation does in every state an execution can be in, written from the specification."""
