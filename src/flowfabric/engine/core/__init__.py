"""Shared code of the engine: state transitions, row locks, lease ends, wakeups, watermarks, signing keys."""
