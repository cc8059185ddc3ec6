"""Waiting tails: woken by hints of their streams, and by one query for all of them."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from flowfabric.db.statements import Statement, full_columns
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId
from flowfabric.pauses import is_set_within
from flowfabric.tasks import create_shared_task

_COLUMNS = (
    "partition_keys",
    "execution_ids",
    "attempt_indexes",
    "mss",
    "seqs",
    "last_attempt_indexes",
    "are_following",
)


class Wait(NamedTuple):
    """What a tail waits for: a frame from a position on, or the end of the last attempt that it reads."""

    partition_key: int
    execution_id: str
    attempt_index: int
    ms: int
    seq: int
    last_attempt_index: int
    is_following: bool
    """Whether the end ends the wait although the attempt has no stream."""


class ParkedTail:
    """A tail that waits."""

    __slots__ = ("changed", "wait")

    def __init__(self, wait: Wait, changed: asyncio.Event) -> None:
        self.wait = wait
        self.changed = changed
        """Set when its query may find something; cleared before each query."""


class ParkedTails:
    """Wakes the waiting tails of this process: on hints of their streams, and by polling for all in one statement.

    The statement also runs on a hint that may concern any stream. It finds the waits that may be over, and only their
    tails query. Without waiting tails nothing runs.
    """

    HINTED_SECONDS = 5.0
    """The pause between two polls while hints arrive."""
    UNHINTED_SECONDS = (0.1, 1.0)
    """The first and the longest pause between two polls while no hints arrive."""
    PAUSE_SECONDS = 0.01
    """The shortest pause after a query."""
    PAUSE_SHARE = 2
    """A query is followed by a pause of at least this many times its duration."""
    MAX_WAITS = 1_000
    """The most waits in one statement."""

    def __init__(self, store: Store, list_changed: Statement) -> None:
        self._store = store
        self._list_changed = list_changed
        self._tails: set[ParkedTail] = set()
        self._poll = 0.0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, execution_id: ExecutionId, wait: Wait) -> Iterator[ParkedTail]:
        """Wake a tail from now on; it queries first, and stores what it waits for then."""
        wakeups = self._store.wakeups
        if not self._tails:
            # What was missed before comes before the first query.
            wakeups.streams_missed.clear()
        self._poll = self.UNHINTED_SECONDS[0]
        with wakeups.watch_stream(execution_id) as changed:
            tail = ParkedTail(wait, changed)
            self._tails.add(tail)
            try:
                yield tail
            finally:
                self._tails.discard(tail)

    async def is_woken_within(self, tail: ParkedTail, seconds: float) -> bool:
        """Wait until a tail is woken, for at most these seconds; return whether it is."""
        if self._task is None or self._task.done():
            self._task = create_shared_task(self._query_loop())
        return await is_set_within(tail.changed, seconds)

    def wake_all(self) -> None:
        """Wake every tail."""
        for tail in self._tails:
            tail.changed.set()

    async def close(self) -> None:
        """Stop querying."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _query_loop(self) -> None:
        hints, missed = self._store.wakeups.hints, self._store.wakeups.streams_missed
        shortest, longest = self.UNHINTED_SECONDS
        while self._tails:
            await is_set_within(missed, self.HINTED_SECONDS if hints.is_listening else self._poll)
            missed.clear()
            poll = self._poll
            began = time.monotonic()
            try:
                has_woken = await self._query()
            except EngineError as refused:
                if not refused.retryable:
                    # Their own queries tell why.
                    self.wake_all()
                # What was missed is still to be found.
                missed.set()
                await asyncio.sleep(longest)
                continue
            duration = time.monotonic() - began
            if self._poll == poll:
                self._poll = shortest if has_woken else min(poll * 2, longest)
            await asyncio.sleep(min(max(self.PAUSE_SECONDS, duration * self.PAUSE_SHARE), longest))

    async def _query(self) -> bool:
        """Wake the tails whose waits may be over; return whether there were any."""
        # Before the first statement: a tail may end its query, which began before that, and wait for something else.
        waiting: dict[Wait, list[asyncio.Event]] = {}
        for tail in self._tails:
            waiting.setdefault(tail.wait, []).append(tail.changed)
        waits = list(waiting)
        has_woken = False
        for first in range(0, len(waits), self.MAX_WAITS):
            some = waits[first : first + self.MAX_WAITS]
            for row in await self._store.fetch(self._list_changed, **full_columns(_COLUMNS, some)):
                has_woken = True
                for changed in waiting[some[row["nth"] - 1]]:
                    changed.set()
        return has_woken
