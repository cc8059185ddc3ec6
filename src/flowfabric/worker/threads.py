"""Threads for handlers that are plain `def` functions."""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

_Job = tuple[Future[Any], Callable[[], Any]]


class Threads:
    """Runs plain functions off the event loop, at most `size` at a time.

    The threads are daemons: a function that never returns does not keep the process alive.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    async def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function and return its result; if cancelled, wait until the function returns if it has started."""
        running: Future[Any] = Future()
        self._jobs.put((running, partial(contextvars.copy_context().run, _call, function, args, kwargs)))
        if not self._idle.acquire(blocking=False) and self._started < self._size:
            name = f"flowfabric-handler_{self._started}"
            self._started += 1
            threading.Thread(target=self._work, name=name, daemon=True).start()
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            # A thread cannot be stopped, and its slot is occupied until it returns.
            if not running.done():
                ended = asyncio.wrap_future(running)
                await asyncio.wait((ended,))
                ended.exception()
            raise

    def close(self) -> None:
        """Start no more functions; running ones end by themselves."""
        try:
            while (job := self._jobs.get_nowait()) is not None:
                job[0].cancel()
        except queue.Empty:
            pass
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self._idle.release()
                job = self._jobs.get()
            if job is None:
                return
            running, call = job
            if running.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    running.set_exception(error)
                else:
                    running.set_result(result)
                    del result
            del job, running, call


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        # A future cannot hold StopIteration: the caller would wait forever.
        raise RuntimeError("the handler raised StopIteration") from error
