"""The cascade: the ends of members resolve the edges that leave them, at once in this process, or by a sweep of any.

An end queues an entry in its own commit. Settling it is one transaction, or one per EDGE_LIMIT edges, and the last one
deletes the entry: after a crash it is settled from where it was, and each edge counts once.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import is_connection_fault
from flowfabric.engine.core.wakeups import CascadeKey
from flowfabric.engine.flow.resolve import EDGE_LIMIT, Resolver, Settled
from flowfabric.engine.store import Store
from flowfabric.model.edge import CascadeResult
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import FlowId
from flowfabric.model.text import check_range
from flowfabric.pauses import pauses
from flowfabric.tasks import create_shared_task

SQL = statements_beside(__file__)

ENTRY_LIMIT = 500
"""How many entries one transaction settles at most."""
LEFT_SECONDS = (0.002, 0.1)
"""The first and the longest pause before entries that were locked elsewhere are tried again."""
TRIES = 8
"""How often this process tries an entry that is locked elsewhere before it leaves it to the sweep."""
PATIENCE_SECONDS = 2.0
"""How long a caller waits for entries that are locked elsewhere."""
LEFT_OVER_MS = 1_000
"""How old an entry is when a sweep settles it instead of the process that queued it."""
LOCKED_SECONDS = 1.0
"""How long a sweep leaves an entry aside that is locked elsewhere while there are others."""
SKIPPED_SECONDS = 15.0
"""How long a sweep leaves an entry aside that it failed to settle."""

logger = logging.getLogger(__name__)


class Cascade:
    """Settles the entries that this process has queued, in the background, and those that others have left."""

    def __init__(self, store: Store, resolver: Resolver) -> None:
        self._store = store
        self._resolver = resolver
        self._queue: deque[tuple[CascadeKey, int]] = deque()
        """Entries to settle, each with the number of tries so far."""
        self._task: asyncio.Task[None] | None = None
        self._set_aside: dict[CascadeKey, float] = {}
        store.wakeups.on_members_ended = self._queue_entries

    async def cascade_completion(self, event_id: int) -> CascadeResult:
        """Settle the entry of one event: resolve the edges that leave the executions that ended with it.

        Nothing is resolved if the entry is settled already, or is being settled elsewhere.
        """
        check_range(event_id, "event_id", 0, 2**63 - 1)
        rows = await self._store.fetch(SQL.read_entry, event_id=event_id)
        keys = [CascadeKey(row["partition_key"], event_id) for row in rows]
        resolved, before = 0, -1
        # Edges whose children were locked are tried again, until all edges of a round are locked.
        while keys and resolved > before:
            before, is_cut = resolved, True
            while is_cut:
                done, left, is_cut = await self._settle(keys)
                resolved += done.resolved
            keys = left
        return CascadeResult(resolved=resolved)

    async def settle_flow(self, partition_key: int, flow_id: FlowId) -> None:
        """Settle every queued entry of one flow, also those that its settling queues."""
        waits = pauses(*LEFT_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not await self.settle_free(partition_key, flow_id):
            if time.monotonic() > deadline:
                raise error("retry_exhausted", f"flow {flow_id} is locked by another session: repeat the call")
            await asyncio.sleep(next(waits))

    async def settle_free(self, partition_key: int, flow_id: FlowId) -> bool:
        """Settle the queued entries of one flow as far as nothing is locked elsewhere; return whether none is left."""
        while keys := await self._entries_of(partition_key, flow_id):
            done, left, is_cut = await self._settle(keys)
            if not done.resolved and not is_cut and len(left) == len(keys):
                # Another settler has locked the flow, or another session its children.
                return False
        return True

    async def settle_left_over(self, *, since: int, limit: int = ENTRY_LIMIT) -> int:
        """Settle entries that the processes that queued them have left, the oldest first; return how many edges."""
        rows = await self._store.fetch(
            SQL.list_old_entries, since=since, older_than_ms=LEFT_OVER_MS, limit=limit + len(self._set_aside)
        )
        now = time.monotonic()
        self._set_aside = {key: until for key, until in self._set_aside.items() if until > now}
        found = [CascadeKey(row["partition_key"], row["event_id"]) for row in rows]
        keys = [key for key in found if key not in self._set_aside][:limit]
        if not keys:
            return 0
        try:
            done, left, is_cut = await self._settle(keys)
        except EngineError as fault:
            if is_connection_fault(fault):
                raise
            return sum([await self._settle_alone(key) for key in keys])
        if len(keys) == limit and not is_cut:
            # All that is left is locked elsewhere, and there may be entries behind it that are not.
            self._set_aside.update(dict.fromkeys(left, time.monotonic() + LOCKED_SECONDS))
        return done.resolved

    async def drain(self) -> None:
        """Wait until the entries that this process has queued are settled or left to the sweep."""
        while self._task is not None:
            await asyncio.wait({self._task})

    def _queue_entries(self, keys: Sequence[CascadeKey]) -> None:
        self._queue.extend((key, 0) for key in keys)
        if self._task is None:
            self._task = create_shared_task(self._run())

    async def _run(self) -> None:
        waits = pauses(*LEFT_SECONDS)
        limit = ENTRY_LIMIT
        try:
            while self._queue:
                taken = [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]
                tries = dict(taken)
                try:
                    done, left, is_cut = await self._settle(list(tries))
                except EngineError as fault:
                    if not await self._retry_alone(list(tries), fault):
                        return
                    continue
                # A transaction reads every entry that it is given, so it is given few if it settles few.
                limit = min(ENTRY_LIMIT, 2 * limit) if not is_cut else max(1, 2 * (len(taken) - len(left)))
                progressed = is_cut or done.resolved > 0
                self._queue.extendleft(
                    (key, 0 if progressed else tries[key] + 1)
                    for key in reversed(left)
                    if progressed or tries[key] < TRIES
                )
                if progressed:
                    waits = pauses(*LEFT_SECONDS)
                elif left:
                    await asyncio.sleep(next(waits))
        finally:
            self._task = None

    async def _retry_alone(self, keys: Sequence[CascadeKey], fault: EngineError) -> bool:
        """Settle entries one by one after a failure of all together; return False if the store cannot be reached."""
        if is_connection_fault(fault):
            logger.debug("the cascade is left to the sweep: %s", fault)
            self._queue.clear()
            return False
        for key in keys:
            try:
                await self._settle_alone(key)
            except EngineError:
                self._queue.clear()
                return False
        return True

    async def _settle_alone(self, key: CascadeKey) -> int:
        """Settle one entry; an entry that fails is left aside for a while. Raise if the store cannot be reached."""
        try:
            done, left, is_cut = await self._settle([key])
        except EngineError as fault:
            if is_connection_fault(fault):
                raise
            logger.warning("event %d of the cascade could not be settled and is tried again: %s", key.event_id, fault)
            self._set_aside[key] = time.monotonic() + SKIPPED_SECONDS
            return 0
        if is_cut and left:
            self._queue.append((key, 0))
        return done.resolved

    async def _settle(self, keys: Sequence[CascadeKey]) -> Settled:
        """Settle entries in one transaction: at most EDGE_LIMIT edges."""

        async def settle(transaction: Transaction) -> Settled:
            return await self._resolver.settle(transaction, keys, limit=EDGE_LIMIT)

        done, left, is_cut = await self._store.transact(settle)
        await self._resolver.after_commit(done)
        return done, left, is_cut

    async def _entries_of(self, partition_key: int, flow_id: FlowId) -> list[CascadeKey]:
        rows = await self._store.fetch(
            SQL.list_entries_of_flow, partition_key=partition_key, flow_id=flow_id, limit=ENTRY_LIMIT
        )
        return [CascadeKey(row["partition_key"], row["event_id"]) for row in rows]
