"""The streams of attempts: appending frames, closing streams, and deleting their frames."""
