"""Streams of attempts: appending frames, closing, reading and following, and deleting frames."""
