"""Blocking calls from an event loop, each in its own thread."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


async def off_loop(call: Callable[[], Answer]) -> Answer:
    """Run a blocking call in a new thread and return its result.

    Does not use `asyncio.to_thread`, because handlers may block all of its threads. The thread is not a daemon: even if
    the caller is cancelled, the process does not exit before the call has returned.
    """
    answer: Future[Answer] = Future()
    # A future in this state is not cancelled together with its caller.
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="flowfabric-embedded").start()
    return await asyncio.wrap_future(answer)
