"""A worker process that logs a line and stops itself: `python logging_process.py <database url> [configured]`."""

import logging
import os
import signal
import sys

from flowfabric import Fabric

fabric = Fabric(sys.argv[1] if __name__ == "__main__" else None)
logger = logging.getLogger("app.orders")


@fabric.task
def greet(name: str) -> None:
    """Log a line at each level."""
    logger.debug("not shown")
    logger.info("hello %s", name)


@fabric.task
async def fail() -> None:
    """Fail, and stop the process."""
    os.kill(os.getpid(), signal.SIGTERM)
    raise ValueError("no luck")


if __name__ == "__main__":
    # As libraries do; this does not set up logging.
    logging.getLogger("library").addHandler(logging.NullHandler())
    if len(sys.argv) > 2:
        logging.basicConfig(format="%(levelname)s|%(ff_task)s|%(message)s", level=logging.ERROR)
    fabric.run_worker(worker_instance_id="w-1")
