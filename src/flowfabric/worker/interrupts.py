"""Signals that ask a process to end."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def calling_on_interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Call on the first SIGTERM or SIGINT; outside the main thread, where no signal arrives, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, action in before.items():
            signal.signal(number, signal.SIG_DFL if action is None else action)

    def first(*_: object) -> None:
        restore()
        loop.call_soon_threadsafe(stop)

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        restore()
