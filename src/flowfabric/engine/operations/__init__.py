"""The operations of the engine, one method each, family by family; no logic."""
