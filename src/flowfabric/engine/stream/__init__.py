"""Streams: appending frames, closing, reading and following."""
