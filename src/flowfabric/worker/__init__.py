"""The worker: claims executions, runs their handlers and reports the results."""
