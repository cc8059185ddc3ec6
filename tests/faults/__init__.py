"""Faults on purpose: cancelled calls, broken connections, and histories of processes that meet both."""
