"""Leases: claiming, granting, renewing, delaying, expiring, reclaiming and finishing."""
