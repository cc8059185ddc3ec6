"""Suspended executions: waitpoints, signals, resumes and timeouts."""
