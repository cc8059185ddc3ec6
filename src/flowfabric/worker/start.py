"""The start of a worker process: it waits for a server that is not there yet, and fails in a line to act on."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator

from flowfabric.model.errors import EngineError, TransportError, reason_of
from flowfabric.pauses import is_done_before, is_set_within, pauses
from flowfabric.settings import SettingsError
from flowfabric.worker.interrupts import calling_on_interrupts

logger = logging.getLogger(__name__)

FAILED = 1
MISUSED = 2
INTERRUPTED = 130
WAIT_SECONDS = (0.2, 5.0)
"""The first and the longest pause between two tries to reach the server."""


class StartError(Exception):
    """A process cannot start; the text says why and what to do."""

    def __init__(self, text: str, *, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


async def connected(connect: Callable[[], Awaitable[object]]) -> bool:
    """Connect as soon as the server answers; False when SIGTERM or SIGINT came meanwhile, connected or not.

    Only a server that may answer later by itself is waited for; anything else is a StartError.
    """
    stopping = asyncio.Event()
    is_waiting = False
    with calling_on_interrupts(stopping.set):
        for pause in pauses(*WAIT_SECONDS):
            try:
                if not await is_done_before(stopping, connect()):
                    return False
            except TransportError as fault:
                if not fault.retryable:
                    raise StartError(reason_of(fault), exit_code=FAILED) from fault
                if not is_waiting:
                    is_waiting = True
                    logger.warning("waiting for the server: %s", reason_of(fault))
                if await is_set_within(stopping, pause):
                    return False
            except EngineError as refused:
                raise StartError(reason_of(refused), exit_code=FAILED) from refused
            except SettingsError as wrong:
                raise StartError(str(wrong), exit_code=MISUSED) from wrong
            else:
                break
    if is_waiting:
        logger.warning("the server answers: the wait is over")
    return not stopping.is_set()


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
