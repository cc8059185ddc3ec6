"""A worker process that gets SIGTERM after it connects and before its worker starts: `... <database url>`."""

import os
import signal
import sys
from collections.abc import Iterator

from flowfabric import Fabric


def lanes() -> Iterator[str]:
    """Yield the lanes of the worker, which reads them when it is created."""
    os.kill(os.getpid(), signal.SIGTERM)
    yield "default"


if __name__ == "__main__":
    Fabric(sys.argv[1]).run_worker(lanes=lanes())
