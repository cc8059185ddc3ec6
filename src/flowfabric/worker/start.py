"""The start and the end of a worker process.

It waits for a server that is not there yet, fails in a line to act on, and ends in a bounded time.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, NoReturn

from flowfabric.model.errors import EngineError, TransportError, reason_of
from flowfabric.pauses import is_done_before, is_set_within, pauses
from flowfabric.settings import SettingsError

logger = logging.getLogger(__name__)

FAILED = 1
MISUSED = 2
INTERRUPTED = 130
WAIT_SECONDS = (0.2, 5.0)
"""The first and the longest pause between two tries to reach the server."""
LEFT_SECONDS = 2.0
"""How long to wait for remaining tasks, and then for remaining threads."""
CLOSE_SECONDS = 15.0
"""How long disconnecting may take."""


class StartError(Exception):
    """A process cannot start; the text says why and what to do."""

    def __init__(self, text: str, *, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


async def connect_when_available(connect: Callable[[], Awaitable[object]], interrupted: asyncio.Event) -> bool:
    """Connect as soon as the server answers; False when a signal came meanwhile, connected or not.

    Only a server that may answer later by itself is waited for; anything else is a StartError.
    """
    is_waiting, began = False, time.monotonic()
    for pause in pauses(*WAIT_SECONDS):
        try:
            if not await is_done_before(interrupted, connect()):
                return False
        except TransportError as fault:
            if not fault.retryable:
                raise StartError(reason_of(fault), exit_code=FAILED) from fault
            if not is_waiting:
                is_waiting = True
                logger.warning("waiting for the server: %s", reason_of(fault))
            if await is_set_within(interrupted, pause):
                return False
        except EngineError as refused:
            raise StartError(reason_of(refused), exit_code=FAILED) from refused
        except SettingsError as wrong:
            raise StartError(str(wrong), exit_code=MISUSED) from wrong
        else:
            break
    if is_waiting:
        logger.warning("the server answers after %.1f s", time.monotonic() - began)
    return not interrupted.is_set()


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as `asyncio.run` does, and end the process where tasks or threads of it do not stop soon.

    Such a process ends without the clean-up of an ordinary exit, which would wait for them.
    """
    failure: BaseException | None = None
    runner = asyncio.Runner()
    try:
        runner.run(work)
    except BaseException as error:
        failure = error
    try:
        is_stopped = runner.run(_shut_down())
    except KeyboardInterrupt as interrupt:
        failure, is_stopped = failure or interrupt, False
    if not is_stopped:
        _end_process(failure)
    runner.close()
    if failure is not None:
        raise failure


async def _shut_down() -> bool:
    """Cancel the remaining tasks and shut down the executor; return whether both finished in time."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=LEFT_SECONDS)
        if left:
            return False
    # Not cancelled where it takes too long: it would wait for the threads then.
    ending = asyncio.create_task(asyncio.get_running_loop().shutdown_default_executor())
    ended, _ = await asyncio.wait((ending,), timeout=LEFT_SECONDS)
    if not ended:
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("asyncio_"))
        logger.warning("threads of the event loop do not return, this process ends without them: %s", ", ".join(names))
    return bool(ended)


def _end_process(failure: BaseException | None) -> NoReturn:
    exit_code: object = 0
    try:
        with reporting_on_stderr():
            if failure is not None:
                raise failure
    except SystemExit as told:
        exit_code = told.code
    except BaseException as error:
        exit_code = FAILED
        traceback.print_exception(error)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(exit_code if isinstance(exit_code, int) else FAILED)


async def close_within_limit(close: Coroutine[Any, Any, None]) -> None:
    """Disconnect, for a bounded time."""
    closing = asyncio.create_task(close)
    ended, _ = await asyncio.wait((closing,), timeout=CLOSE_SECONDS)
    if ended:
        closing.result()
    else:
        logger.warning("disconnecting takes longer than %g s and is given up", CLOSE_SECONDS)


@contextlib.contextmanager
def reporting_on_stderr() -> Iterator[None]:
    """Turn a start that fails into a line on stderr and an exit code, and an interrupt into an exit code."""
    try:
        yield
    except StartError as failed:
        sys.stderr.write(f"flowfabric: {' '.join(str(failed).split())}\n")
        raise SystemExit(failed.exit_code) from None
    except KeyboardInterrupt:
        # SIGINT before or after the time in which the worker handles signals.
        raise SystemExit(INTERRUPTED) from None
