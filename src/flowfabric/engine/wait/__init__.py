"""Suspend, signal, resume and time out executions."""
