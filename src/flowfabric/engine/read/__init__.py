"""Reads: one execution, lists of them, why they wait, and whether the rows are consistent."""
