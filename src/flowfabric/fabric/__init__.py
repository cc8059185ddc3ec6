"""What users hold: a fabric, its tasks, and the runs of what was submitted."""
