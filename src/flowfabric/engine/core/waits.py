"""Waits of many callers for something that one statement can look for."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from flowfabric.engine.core.wakeups import Wakeups
from flowfabric.model.errors import EngineError, error
from flowfabric.pauses import is_set_within
from flowfabric.tasks import create_shared_task

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


class SharedWaits(ABC, Generic[Key, Answer]):
    """Looks for what the callers of this process wait for, all in one statement: on a hint, and by polling.

    The first hints after a quiet time lead to a query at once. While hints keep coming, the pause between queries grows
    with their duration and with the number that found nothing, so that the number of queries stays bounded.
    """

    AT_ONCE = 2
    """Hinted queries without a pause after a quiet time: one for a new waiter, one for its result."""
    PAUSE_SECONDS = (0.001, 0.02)
    """The first and the longest pause after a hinted query that found nothing; each pause is twice the one before."""
    PAUSE_SHARE = 2
    """A hinted query is followed by a pause of at least this many times its duration."""
    POLL_SECONDS = (0.02, 1.0)
    """The first and the longest pause between two polls."""

    def __init__(self, wakeups: Wakeups, *, operation: str) -> None:
        self._wakeups = wakeups
        self._operation = operation
        self._waiting: dict[Key, list[asyncio.Future[Answer]]] = {}
        self._unqueried: set[asyncio.Future[Answer]] = set()
        """Waiters that no query has covered yet."""
        self._hinted: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._refuses = False

    @abstractmethod
    def _watch(self) -> AbstractContextManager[asyncio.Event]:
        """Yield an event that is set by the hints of what callers wait for."""

    @abstractmethod
    async def _find(self, wanted: Sequence[Key]) -> Sequence[tuple[Key, Answer | EngineError]]:
        """Query once; return the answer for each waiter whose wait is over."""

    async def _wait_for(self, key: Key, seconds: float | None) -> Answer | None:
        """Wait until a query finds an answer; return None if the time is over before."""
        if self._refuses:
            raise self._refusal()
        future = self._future(key)
        try:
            await asyncio.wait((future,), timeout=seconds)
            # Query at least once, however short the timeout.
            if future in self._unqueried and not future.done():
                await self._query([key])
            return future.result() if future.done() else None
        finally:
            future.cancel()
            self._unqueried.discard(future)

    def refuse(self) -> None:
        """Fail current waiters and reject new ones."""
        self._refuses = True
        self._fail_all(self._refusal())

    async def close(self) -> None:
        """Fail current waiters and stop querying."""
        self.refuse()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _future(self, key: Key) -> "asyncio.Future[Answer]":
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(future)
        self._unqueried.add(future)
        if self._hinted is not None:
            self._hinted.set()
        if self._task is None or self._task.done():
            self._task = create_shared_task(self._query_loop())
        return future

    async def _query_loop(self) -> None:
        with self._watch() as hinted:
            # The first query is for the waiter that started this loop.
            hinted.set()
            self._hinted = hinted
            await self._wakeups.hints.listen()
            await self._query_when_hinted(hinted)

    async def _query_when_hinted(self, hinted: asyncio.Event) -> None:
        shortest_pause, longest_pause = self.PAUSE_SECONDS
        shortest_poll, longest_poll = self.POLL_SECONDS
        pause, poll, at_once = shortest_pause, shortest_poll, self.AT_ONCE
        while self._waiting:
            is_hinted = await is_set_within(hinted, poll)
            hinted.clear()
            poll, at_once = (shortest_poll, at_once - 1) if is_hinted else (min(poll * 2, longest_poll), self.AT_ONCE)
            # Remove cancelled waiters.
            for key in [each for each, waiters in self._waiting.items() if all(one.done() for one in waiters)]:
                del self._waiting[key]
            if not self._waiting:
                return
            began = time.monotonic()
            has_answered = await self._query(list(self._waiting))
            duration = time.monotonic() - began
            if self._waiting and at_once < 0:
                pause = shortest_pause if has_answered else min(pause * 2, longest_pause)
                await asyncio.sleep(min(max(pause, duration * self.PAUSE_SHARE), longest_poll))

    async def _query(self, wanted: Sequence[Key]) -> bool:
        """Query once, and answer the waiters whose wait is over; return whether there were any."""
        try:
            found = await self._find(wanted)
        except EngineError as refused:
            if not refused.retryable:
                self._fail_all(refused)
            return False
        for key in wanted:
            self._unqueried.difference_update(self._waiting.get(key, ()))
        for key, answer in found:
            for future in self._waiting.pop(key, ()):
                if future.done():
                    continue
                if isinstance(answer, EngineError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        return bool(found)

    def _fail_all(self, refused: EngineError) -> None:
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(refused)
        self._waiting.clear()

    def _refusal(self) -> EngineError:
        return error("unavailable", f"{self._operation}: the engine is closing")
