"""SIGTERM and SIGINT: the first asks the process to stop, the second ends it."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def calling_on_interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first SIGTERM or SIGINT; on the second, end the process at once with exit code 143 or 130.

    Outside the main thread, which receives no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def first(*_: object) -> None:
        for number in before:
            signal.signal(number, _end_at_once)
        loop.call_soon_threadsafe(stop)

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, signal.SIG_DFL if action is None else action)


def _end_at_once(number: int, _: object) -> None:
    # Not an exception: it would wait for threads, and could not get through a handler that blocks the event loop.
    logger.warning("%s again: this process ends at once", signal.Signals(number).name)
    os._exit(128 + number)
