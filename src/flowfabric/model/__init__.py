"""Value types and rules of the engine; no I/O, no clock, no async."""
