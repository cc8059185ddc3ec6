"""Waits: suspending, signalling, resuming and timing out executions."""
