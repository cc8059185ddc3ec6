"""Blocking calls of an event loop, each in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


async def off_loop(call: Callable[[], Answer]) -> Answer:
    """The answer of a blocking call.

    Not by `asyncio.to_thread`: handlers may block all of its threads. The thread is no daemon: where the caller is
    cancelled, the process does not end before the call has returned.
    """
    answer: Future[Answer] = Future()
    # From now on a cancelled caller does not cancel it.
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="flowfabric-embedded").start()
    return await asyncio.wrap_future(answer)
