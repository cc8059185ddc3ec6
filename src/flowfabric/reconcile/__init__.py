"""What the engine does by itself, and the one loop that does it."""
