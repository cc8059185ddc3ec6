"""Places: where an execution is in its queue."""

BAND_BITS = 48
"""A place is the priority band shifted left by these bits, plus a sequence number."""
