"""Group commit: many concurrent callers share one statement, each gets its own answer after the commit."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

from flowfabric.db.faults import StoreFault
from flowfabric.tasks import create_shared_task

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Locked:
    """The answer of a shared statement for an item it left out: its row is held elsewhere, or it must be done alone."""


LOCKED: Final = Locked()


class _Entry(Generic[Item, Answer]):
    __slots__ = ("answer", "item", "keys", "passes")

    def __init__(self, item: Item, keys: tuple[Hashable, ...], answer: "asyncio.Future[Answer]") -> None:
        self.item = item
        self.keys = keys
        self.answer = answer
        self.passes = 0


class Batch(Generic[Item, Answer]):
    """Gathers concurrent items into shared statements and survives the worst of them.

    A statement holds each key once; a second item of the same key waits for the first one's answer. A row that is
    locked elsewhere goes into the next statement and, locked again, is done alone. A statement that fails over one
    of its items is repeated item by item. A caller that is cancelled does not take its item back.
    """

    MAX_PASSES = 2
    MAX_ALONE = 4
    """Items done alone at the same time: rows held elsewhere must not keep every connection waiting."""

    def __init__(
        self,
        together: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Locked | Exception]]],
        alone: Callable[[Item], Awaitable[Answer]],
        *,
        keys: Callable[[Item], tuple[Hashable, ...]],
        size: int = 128,
        streams: int = 2,
    ) -> None:
        self._together = together
        self._alone = alone
        self._keys = keys
        self._size = size
        self._streams = streams
        self._waiting: deque[_Entry[Item, Answer]] = deque()
        self._flying: set[Hashable] = set()
        self._running = 0
        self._places_alone = asyncio.Semaphore(self.MAX_ALONE)
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, item: Item) -> "asyncio.Future[Answer]":
        """Queue one item; the future holds its answer or its error."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Entry(item, self._keys(item), answer))
        if self._running < self._streams:
            self._running += 1
            self._spawn(self._stream())
        return answer

    async def run(self, items: Sequence[Item]) -> list[Answer | Exception]:
        """Answer the items of one caller in their order, in one statement; a key given twice takes a second one."""
        answers: list[Answer | Locked | Exception] = [LOCKED] * len(items)
        rest = list(range(len(items)))
        while rest:
            seen: set[Hashable] = set()
            now: list[int] = []
            later: list[int] = []
            for at in rest:
                keys = self._keys(items[at])
                (later if keys and not seen.isdisjoint(keys) else now).append(at)
                # Also of what is put off: whatever shares a key with it comes after it.
                seen.update(keys)
            for _ in range(self.MAX_PASSES):
                for at, answer in zip(now, await self._try([items[at] for at in now]), strict=True):
                    answers[at] = answer
                now = [at for at in now if answers[at] is LOCKED]
                if not now:
                    break
            for at, answer in zip(now, await asyncio.gather(*(self._one(items[at]) for at in now)), strict=True):
                answers[at] = answer
            rest = later
        return [answer for answer in answers if not isinstance(answer, Locked)]

    async def drain(self) -> None:
        """Wait until nothing is queued or under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = create_shared_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self) -> None:
        try:
            # One turn of the loop lets the callers of this instant join the first statement.
            await asyncio.sleep(0)
            while entries := self._take():
                self._settle(entries, await self._try([entry.item for entry in entries]))
        finally:
            # Counted apart from the tasks: those that wait for a lock must not keep a new stream from starting.
            self._running -= 1

    def _take(self) -> list[_Entry[Item, Answer]]:
        taken: list[_Entry[Item, Answer]] = []
        passed_over: list[_Entry[Item, Answer]] = []
        waiting, flying, size = self._waiting, self._flying, self._size
        while waiting and len(taken) < size:
            entry = waiting.popleft()
            if flying.isdisjoint(entry.keys):
                flying.update(entry.keys)
                taken.append(entry)
            else:
                passed_over.append(entry)
        waiting.extendleft(reversed(passed_over))
        return taken

    async def _try(self, items: list[Item]) -> Sequence[Answer | Locked | Exception]:
        """One shared statement; where it fails over an item, each alone."""
        try:
            return await self._together(items)
        except StoreFault as fault:
            if fault.is_store_failure:
                return [fault.copy() for _ in items]
        except Exception as error:
            if len(items) == 1:
                return [error]
        return await asyncio.gather(*map(self._one, items))

    async def _one(self, item: Item) -> Answer | Exception:
        async with self._places_alone:
            try:
                return await self._alone(item)
            except Exception as error:
                return error

    def _settle(self, entries: list[_Entry[Item, Answer]], answers: Sequence[Answer | Locked | Exception]) -> None:
        flying = self._flying
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, Locked):
                entry.passes += 1
                if entry.passes < self.MAX_PASSES:
                    flying.difference_update(entry.keys)
                    self._waiting.appendleft(entry)
                else:
                    # Waits for the lock in a task of its own, so that the stream goes on with the rest.
                    self._spawn(self._settle_alone(entry))
                continue
            flying.difference_update(entry.keys)
            future = entry.answer
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    async def _settle_alone(self, entry: _Entry[Item, Answer]) -> None:
        self._settle([entry], [await self._one(entry.item)])
        # An item of the same key may have waited for this one.
        while entries := self._take():
            self._settle(entries, await self._try([entry.item for entry in entries]))
