"""The start and the end of a worker process.

It waits for a server that is not up yet, reports a failed start in one line, and ends within a bounded time.
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
"""The first and the longest pause between two attempts to connect."""
LEFT_SECONDS = 2.0
"""How long to wait for remaining asyncio tasks, and then for remaining threads."""
CLOSE_SECONDS = 15.0
"""How long disconnecting may take."""


class StartError(Exception):
    """The process cannot start; the text says why and what to do."""

    def __init__(self, text: str, *, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


async def connect_when_available(connect: Callable[[], Awaitable[object]], interrupted: asyncio.Event) -> bool:
    """Connect as soon as the server answers; return False if a signal arrived meanwhile, connected or not.

    Errors that may go away by themselves are retried; any other error is a StartError.
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
    """Run a coroutine as `asyncio.run` does, but end the process if its tasks or threads do not stop soon.

    The process then ends without the clean-up of a normal exit, which would wait for them.
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
    # Not wait_for: a cancelled shutdown would wait for the threads.
    ending = asyncio.create_task(asyncio.get_running_loop().shutdown_default_executor())
    ended, _ = await asyncio.wait((ending,), timeout=LEFT_SECONDS)
    if not ended:
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("asyncio_"))
        logger.warning("the process ends without waiting for threads that do not return: %s", ", ".join(names))
    return bool(ended)


def _end_process(failure: BaseException | None) -> NoReturn:
    exit_code: object = 0
    try:
        with reporting_on_stderr():
            if failure is not None:
                raise failure
    except SystemExit as leaving:
        exit_code = leaving.code
    except BaseException as error:
        exit_code = FAILED
        traceback.print_exception(error)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(exit_code if isinstance(exit_code, int) else FAILED)


async def close_within_limit(close: Coroutine[Any, Any, None]) -> None:
    """Disconnect, but give up after CLOSE_SECONDS."""
    closing = asyncio.create_task(close)
    ended, _ = await asyncio.wait((closing,), timeout=CLOSE_SECONDS)
    if ended:
        closing.result()
    else:
        logger.warning("disconnecting took longer than %g s: the process ends without it", CLOSE_SECONDS)


@contextlib.contextmanager
def reporting_on_stderr() -> Iterator[None]:
    """Report a StartError as one line on stderr and an exit code; turn an interrupt into an exit code."""
    try:
        yield
    except StartError as failed:
        sys.stderr.write(f"flowfabric: {' '.join(str(failed).split())}\n")
        raise SystemExit(failed.exit_code) from None
    except KeyboardInterrupt:
        # SIGINT outside of the time in which the worker handles signals.
        raise SystemExit(INTERRUPTED) from None
