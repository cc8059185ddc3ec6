"""Threads for handlers that are plain functions."""

import asyncio
import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Threads:
    """Runs plain functions off the event loop, at most `size` at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The function's result; a caller that is cancelled returns only when the function has."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._size, "flowfabric-handler")
        running = self._pool.submit(contextvars.copy_context().run, _call, function, args, kwargs)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            # A thread cannot be stopped, and its slot is not free before it ends.
            if not running.done():
                ended = asyncio.wrap_future(running)
                await asyncio.wait((ended,))
                ended.exception()
            raise

    def close(self) -> None:
        """Start no function any more; those that run are left to end by themselves."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        # A future cannot hold it: whoever waits for the future would wait for ever.
        raise RuntimeError("the handler raised StopIteration") from error
