"""A subscription to a feed: an async iterator over its events that can be awaited, closed and resumed."""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Generic, Self, TypeVar

from flowfabric.engine.event.reader import Buffer
from flowfabric.model.cursor import encode_cursor
from flowfabric.model.errors import error
from flowfabric.model.feed import FeedEvent
from flowfabric.model.position import Position

Event = TypeVar("Event", bound=FeedEvent, covariant=True)
Start = Callable[[Buffer[Event]], Awaitable[tuple[Position, "asyncio.Task[None]"]]]
"""Finds the position to start from, and starts the reader."""


class Subscription(Generic[Event]):
    """The events of a feed, in order, without an end: `async for event in subscription`.

    It starts when it is awaited or entered, or else with the first event that is asked for. Close it with `aclose()` or
    leave its block; it is closed too when nothing refers to it any more. It is used by one task at a time, in the event
    loop of its engine.
    """

    def __init__(self, cursor: bytes, start: Start[Event], *, operation: str, loop: asyncio.AbstractEventLoop) -> None:
        self._cursor = cursor
        self._start = start
        self._operation = operation
        self._loop = loop
        self._buffer: Buffer[Event] = Buffer()
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._is_in_use = False
        """Whether a call waits for the next event."""
        self._has_ended = False

    @property
    def cursor(self) -> bytes:
        """The position to save: subscribed with it, a feed continues after the events that were taken.

        It moves on while no event matches, so that it does not become too old.
        """
        buffer = self._buffer
        if not buffer.events and buffer.reached is not None:
            self._cursor = encode_cursor(buffer.reached)
            buffer.reached = None
        return self._cursor

    def __await__(self) -> Generator[object, None, Self]:
        """Start now: every event committed after this is delivered, and a cursor that is too old is refused."""
        return self._entered().__await__()

    async def __aenter__(self) -> Self:
        """Start now."""
        return await self._entered()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the subscription."""
        await self.aclose()

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event."""
        self._check_loop()
        if self._is_in_use:
            raise RuntimeError(
                f"{self._operation}: another task waits for the next event of this subscription; subscribe in each task"
            )
        self._is_in_use = True
        try:
            return await self._next()
        finally:
            self._is_in_use = False

    async def _next(self) -> Event:
        buffer = self._buffer
        while True:
            if self._has_ended or buffer.is_closed:
                raise StopAsyncIteration
            if buffer.events and not buffer.drops_queued:
                event = buffer.take()
                self._cursor = event.cursor
                return event
            if buffer.disconnected is not None:
                self._has_ended = True
                raise error("stream_disconnected", {"cursor": self.cursor, "reason": buffer.disconnected})
            if buffer.failure is not None:
                self._has_ended = True
                raise buffer.failure
            if self._task is None:
                await self._started()
            else:
                await buffer.wait()

    async def aclose(self) -> None:
        """Stop reading; events that were read and not taken are dropped, and `cursor` stays before them."""
        self._check_loop()
        self._buffer.close()
        if self._task is not None:
            await _ended(self._task)

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"{self._operation}: the engine of this subscription is connected in another event loop; connect an "
                "engine in each event loop, or run the call where it is connected: "
                "`asyncio.run_coroutine_threadsafe(call, loop)`"
            )

    async def _entered(self) -> Self:
        self._check_loop()
        if self._buffer.is_closed:
            raise RuntimeError(
                f"{self._operation}: this subscription is closed; subscribe again with its cursor to continue"
            )
        return await self._started()

    async def _started(self) -> Self:
        async with self._starting:
            if self._task is None and not self._buffer.is_closed:
                position, task = await self._start(self._buffer)
                if self._buffer.is_closed:
                    await _ended(task)
                    return self
                self._task = task
                self._cursor = encode_cursor(position)
                # The reader does not refer to the subscription, so that dropping the subscription ends the reader.
                weakref.finalize(self, _cancel, self._loop, self._task).atexit = False
        return self


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait((task,))


def _cancel(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    # The garbage collector may run in any thread, and after the loop has ended.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(task.cancel)
