"""The storage of events."""
