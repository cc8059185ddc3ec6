"""A process whose work ends while a thread of it does not return: `python ending_process.py <text of a StartError>`."""

import asyncio
import signal
import sys
import time

from flowfabric.worker.start import MISUSED, StartError, reporting_on_stderr, run_to_end


async def say_cancelled() -> None:
    """Say on stdout that the tasks that were left are cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        sys.stdout.write("cancelled\n")
        sys.stdout.flush()


async def work() -> None:
    """Leave a thread and a task behind, and end, with an error where a text is given."""
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
    left = asyncio.create_task(say_cancelled())
    await asyncio.sleep(0)
    assert not left.done()
    if len(sys.argv) > 1:
        raise StartError(sys.argv[1], exit_code=MISUSED)


if __name__ == "__main__":
    # A process that is started in the background may ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with reporting_on_stderr():
        run_to_end(work())
