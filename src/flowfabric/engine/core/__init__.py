"""What several rooms share: the table of moves, held rows, how leases end, wakeups, watermarks, signing keys."""
