"""Pure values and rules: what the words mean."""
