"""Signals that ask a process to end."""

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
    """Call on the first SIGTERM or SIGINT, and end the process at once on the second, with exit code 143 or 130.

    Outside the main thread, where no signal arrives, this does nothing.
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
    # An exit by an exception waits for threads, and a handler that blocks the event loop never lets it through.
    logger.warning("%s again: this process ends at once", signal.Signals(number).name)
    os._exit(128 + number)
