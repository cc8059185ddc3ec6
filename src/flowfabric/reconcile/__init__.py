"""The background work of the engine: sweeps and the loop that runs them."""
