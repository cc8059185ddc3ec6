"""Tests with injected faults: cancelled calls, broken connections, and killed processes and servers."""
