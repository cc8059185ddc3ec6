"""Group commit: concurrent callers share one statement, and each gets its own answer after the commit."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

from flowfabric.db.faults import StoreFault
from flowfabric.loops import check_engine_loop
from flowfabric.tasks import create_shared_task

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Locked:
    """The answer for an item that a shared statement skipped, because its row is locked or it must run alone."""


LOCKED: Final = Locked()


class _Entry(Generic[Item, Answer]):
    __slots__ = ("answer", "item", "keys", "tries")

    def __init__(self, item: Item, keys: tuple[Hashable, ...], answer: "asyncio.Future[Answer]") -> None:
        self.item = item
        self.keys = keys
        self.answer = answer
        self.tries = 0


class Batch(Generic[Item, Answer]):
    """Collects concurrent items into shared statements; a bad item does not affect the others.

    A statement contains each key at most once; a second item with the same key waits for the first one's answer. An
    item whose row is locked goes into the next statement, and runs alone if the row is still locked. If a statement
    fails because of an item, its items are repeated one by one. Cancelling a caller does not withdraw its item. A call
    in another event loop than the one that created the batch is refused.
    """

    MAX_SHARED_TRIES = 2
    """How many shared statements an item is part of before it runs alone."""
    MAX_ALONE = 4
    """The most items that run alone at the same time, so that locked rows do not keep every connection waiting."""

    def __init__(
        self,
        together: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Locked | Exception]]],
        alone: Callable[[Item], Awaitable[Answer]],
        *,
        keys: Callable[[Item], tuple[Hashable, ...]],
        size: int = 128,
        streams: int = 2,
        weigh: Callable[[Item], int] | None = None,
    ) -> None:
        """Run shared statements with `together` and single items with `alone`.

        `size` is the most items of a statement, `streams` the number of statements at the same time. `keys` returns
        what an item locks. With `weigh`, a statement takes no more items once their weights add up to `size`.
        """
        self._loop = asyncio.get_running_loop()
        self._together = together
        self._alone = alone
        self._keys = keys
        self._size = size
        self._streams = streams
        self._weigh = weigh
        self._waiting: deque[_Entry[Item, Answer]] = deque()
        self._in_flight: set[Hashable] = set()
        self._running = 0
        self._alone_slots = asyncio.Semaphore(self.MAX_ALONE)
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, item: Item) -> "asyncio.Future[Answer]":
        """Queue one item; return a future of its answer or its error."""
        # A task in a foreign loop may die with it, and would count as running for ever.
        check_engine_loop(self._loop)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting.append(_Entry(item, self._keys(item), answer))
        if self._running < self._streams:
            self._running += 1
            self._spawn(self._stream())
        return answer

    async def run(self, items: Sequence[Item]) -> list[Answer | Exception]:
        """Return the answers to the items of one caller, in order.

        The items share one statement; items with a repeated key run in a further one.
        """
        check_engine_loop(self._loop)
        answers: list[Answer | Locked | Exception] = [LOCKED] * len(items)
        remaining = list(range(len(items)))
        while remaining:
            seen: set[Hashable] = set()
            now: list[int] = []
            later: list[int] = []
            for at in remaining:
                keys = self._keys(items[at])
                (later if keys and not seen.isdisjoint(keys) else now).append(at)
                # Also the keys of items that run later: a further item with one of them must run after those.
                seen.update(keys)
            for _ in range(self.MAX_SHARED_TRIES):
                for at, answer in zip(now, await self._try_together([items[at] for at in now]), strict=True):
                    answers[at] = answer
                now = [at for at in now if answers[at] is LOCKED]
                if not now:
                    break
            for at, answer in zip(now, await asyncio.gather(*(self._try_alone(items[at]) for at in now)), strict=True):
                answers[at] = answer
            remaining = later
        # No item is LOCKED any more; the condition is for the type checker.
        return [answer for answer in answers if not isinstance(answer, Locked)]

    async def drain(self) -> None:
        """Wait until nothing is queued or running."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = create_shared_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self) -> None:
        try:
            # One turn of the event loop lets concurrent callers join the first statement.
            await asyncio.sleep(0)
            while entries := self._take():
                self._answer(entries, await self._try_together([entry.item for entry in entries]))
        finally:
            # Counted apart from self._tasks: a task that waits for a lock must not keep a new stream from starting.
            self._running -= 1

    def _take(self) -> list[_Entry[Item, Answer]]:
        taken: list[_Entry[Item, Answer]] = []
        skipped: list[_Entry[Item, Answer]] = []
        waiting, in_flight, left, weigh = self._waiting, self._in_flight, self._size, self._weigh
        while waiting and left > 0:
            entry = waiting.popleft()
            if in_flight.isdisjoint(entry.keys):
                in_flight.update(entry.keys)
                taken.append(entry)
                left -= 1 if weigh is None else weigh(entry.item)
            else:
                skipped.append(entry)
        waiting.extendleft(reversed(skipped))
        return taken

    async def _try_together(self, items: list[Item]) -> Sequence[Answer | Locked | Exception]:
        """Run one shared statement; if an item makes it fail, run each item alone."""
        try:
            return await self._together(items)
        except StoreFault as fault:
            if fault.is_store_failure:
                return [fault.copy() for _ in items]
        except Exception as error:
            if len(items) == 1:
                return [error]
        return await asyncio.gather(*map(self._try_alone, items))

    async def _try_alone(self, item: Item) -> Answer | Exception:
        async with self._alone_slots:
            try:
                return await self._alone(item)
            except Exception as error:
                return error

    def _answer(self, entries: list[_Entry[Item, Answer]], answers: Sequence[Answer | Locked | Exception]) -> None:
        in_flight = self._in_flight
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, Locked):
                entry.tries += 1
                if entry.tries < self.MAX_SHARED_TRIES:
                    in_flight.difference_update(entry.keys)
                    self._waiting.appendleft(entry)
                else:
                    # Wait for the lock in a separate task, so that the stream continues with other items.
                    self._spawn(self._answer_alone(entry))
                continue
            in_flight.difference_update(entry.keys)
            future = entry.answer
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    async def _answer_alone(self, entry: _Entry[Item, Answer]) -> None:
        self._answer([entry], [await self._try_alone(entry.item)])
        # Items with the same keys may have waited for this one.
        while entries := self._take():
            self._answer(entries, await self._try_together([entry.item for entry in entries]))
