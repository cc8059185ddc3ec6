"""A process that ends while one of its threads does not: `python ending_process.py <seconds> [<text of an error>]`."""

import asyncio
import signal
import sys
import time

from flowfabric.worker import start
from flowfabric.worker.start import MISUSED, StartError, reporting_on_stderr, run_to_end


async def report_cancelled() -> None:
    """Print a line when the remaining tasks are cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        sys.stdout.write("cancelled\n")
        sys.stdout.flush()


async def work() -> None:
    """Leave a thread and a task behind; fail if an error text is given."""
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
    left = asyncio.create_task(report_cancelled())
    await asyncio.sleep(0)
    assert not left.done()
    if len(sys.argv) > 2:
        raise StartError(sys.argv[2], exit_code=MISUSED)


if __name__ == "__main__":
    # A process that was started in the background may ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start.LEFT_SECONDS = float(sys.argv[1])
    with reporting_on_stderr():
        run_to_end(work())
