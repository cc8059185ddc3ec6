"""The API for applications: a fabric, its tasks, and the runs of submitted calls."""
