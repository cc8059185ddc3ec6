"""A worker process whose handler blocks its thread: `python blocking_process.py <database url> <drain seconds>`."""

import sys
import time
from pathlib import Path

from flowfabric import Fabric

LEASE_TTL_MS = 120_000

fabric = Fabric(sys.argv[1] if __name__ == "__main__" else None)


@fabric.task
def block(file: str) -> None:
    """Say in a file that this run has started, and do not return in the time of a test."""
    Path(file).touch()
    time.sleep(600)


if __name__ == "__main__":
    fabric.run_worker(lease_ttl_ms=LEASE_TTL_MS, drain_seconds=float(sys.argv[2]))
