"""Create and cancel executions, tag them, wait for their results and delete them after their retention."""
