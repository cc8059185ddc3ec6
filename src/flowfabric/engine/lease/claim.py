"""Claiming: the best claimable executions of a worker's lanes, leased in one statement."""

import asyncio
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.transition import CLAIM_PARAMETERS
from flowfabric.engine.lease.catch_up import CatchUp
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import MAX_LEASE_TTL_MS, Handle
from flowfabric.model.ids import (
    ID_FORMAT,
    ExecutionId,
    WorkerInstanceId,
    check_lane_id,
    check_worker_id,
    format_execution_id,
    mint_uuid_texts,
)
from flowfabric.model.kinds import check_kinds
from flowfabric.model.outcomes import ClaimedExecution
from flowfabric.model.policy import DEFAULT_RECLAIM_CAP, POLICY_RECLAIM_CAP, check_capabilities, read_stored_policy
from flowfabric.model.states import AttemptType, HandleKind
from flowfabric.model.text import check_items, check_range, check_short

SQL = statements_beside(__file__)

MAX_LANES = 64
MAX_LIMIT = 1000
DEFAULT_LEASE_TTL_MS = 30_000
MAX_AT_ONCE = 2
CATCH_UP_SECONDS = 1.0
"""How late expired leases and elapsed delays may join a lane that never empties while no reconciler runs."""
POLL_SECONDS = 1.0
"""The longest pause between two looks at the queues while a claim waits without hints."""

_KINDS = {"fresh": HandleKind.FRESH, "resumed": HandleKind.RESUMED, "reclaimed": HandleKind.RECLAIMED}
_TYPES = {str(attempt_type): attempt_type for attempt_type in AttemptType}
_read_tags = msgspec.json.Decoder(dict[str, str]).decode
_NO_TAGS: dict[str, str] = {}
_QUEUE_NO, _PLACE = 3, 4
_place = itemgetter(_PLACE)


class Wanted(NamedTuple):
    """Which queues of its lanes a claim may take from; without kinds or a namespace, of any."""

    capabilities: tuple[str, ...]
    kinds: tuple[str, ...] | None
    namespace: str | None

    @classmethod
    def of(cls, capabilities: Sequence[str], kinds: Sequence[str] | None, namespace: str | None) -> "Wanted":
        """What a caller asks for, checked."""
        return cls(
            check_capabilities(capabilities),
            None if kinds is None else check_kinds(kinds),
            None if namespace is None else check_short(namespace, "namespace"),
        )

    async def parameters(self, store: Store) -> dict[str, object]:
        """The same by the names of the statements' parameters."""
        return {
            "capabilities": self.capabilities,
            "kind_nos": None if self.kinds is None else await store.kind_nos(self.kinds),
            "namespace_no": None if self.namespace is None else await store.namespace_no(self.namespace),
        }


class Claim:
    """The claim family of operations."""

    def __init__(self, store: Store, catch_up: CatchUp, finish: Finish) -> None:
        self._store = store
        self._catch_up = catch_up
        self._finish = finish
        # Claims meet at the head of the queue, and each keeps the locks it lost with; two at once pay, more do not.
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)
        self.closing = False
        """Set at shutdown: no claim waits any longer."""
        self._refuses_waits = False
        self._under_way = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def claim(
        self,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        max_wait_ms: int = 0,
    ) -> Handle | None:
        """Lease the best claimable execution of a lane; None when there is none within the wait.

        Kinds and a namespace, where given, are all that is taken.
        """
        claimed = await self.claim_many(
            lanes=(lane_id,),
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            kinds=kinds,
            namespace=namespace,
            lease_ttl_ms=lease_ttl_ms,
            limit=1,
            max_wait_ms=max_wait_ms,
        )
        return claimed[0].handle if claimed else None

    async def claim_many(
        self,
        *,
        lanes: Sequence[str],
        worker_id: str,
        worker_instance_id: str,
        limit: int,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        max_wait_ms: int = 0,
    ) -> list[ClaimedExecution]:
        """Lease up to `limit` executions of several lanes, by priority, then age; empty when there are none.

        Kinds and a namespace, where given, are all that is taken.
        """
        lane_ids = sorted({check_lane_id(lane) for lane in check_items(lanes, "lanes")})
        if not 1 <= len(lane_ids) <= MAX_LANES:
            raise error("invalid_input", f"lanes: 1 to {MAX_LANES} lane ids, got {len(lane_ids)}")
        wanted = Wanted.of(capabilities, kinds, namespace)
        worker_id = check_worker_id(worker_id, "worker_id")
        instance = WorkerInstanceId(check_worker_id(worker_instance_id, "worker_instance_id"))
        check_range(lease_ttl_ms, "lease_ttl_ms", 1, MAX_LEASE_TTL_MS)
        check_range(limit, "limit", 1, MAX_LIMIT)
        check_range(max_wait_ms, "max_wait_ms", 0, MAX_LEASE_TTL_MS)
        if self._refuses_waits and max_wait_ms:
            raise error("unavailable", "claim: the engine is shutting down")
        self._under_way += 1
        self._is_idle.clear()
        try:
            return await self._search(lane_ids, wanted, worker_id, instance, lease_ttl_ms, limit, max_wait_ms)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._is_idle.set()

    async def _search(
        self,
        lane_ids: Sequence[str],
        wanted: Wanted,
        worker_id: str,
        instance: WorkerInstanceId,
        lease_ttl_ms: int,
        limit: int,
        max_wait_ms: int,
    ) -> list[ClaimedExecution]:
        worker_no = await self._store.worker_no(worker_id, instance)
        deadline = time.monotonic() + max_wait_ms / 1000
        wakeups = self._store.wakeups
        while not self.closing:
            wakes = wakeups.wakes(lane_ids)
            async with self._turn:
                if self.closing:
                    break
                claimed = await self._look(lane_ids, wanted, worker_no, instance, lease_ttl_ms, limit)
            left = deadline - time.monotonic()
            if claimed or left <= 0 or self._refuses_waits:
                return claimed
            await wakeups.wait_for_work(lane_ids, min(left, POLL_SECONDS), since=wakes)
        return []

    def refuse_waits(self) -> None:
        """End waiting claims with nothing, and reject new ones that would wait."""
        self._refuses_waits = True
        self._store.wakeups.wake_all()

    async def wait_idle(self) -> None:
        """Wait until no claim is under way."""
        await self._is_idle.wait()

    async def drain(self) -> None:
        """Wait until the claims under way are answered; those behind them find nothing."""
        self.closing = True
        self._store.wakeups.wake_all()
        for _ in range(MAX_AT_ONCE):
            await self._turn.acquire()
        for _ in range(MAX_AT_ONCE):
            self._turn.release()

    async def _look(
        self,
        lanes: Sequence[str],
        wanted: Wanted,
        worker_no: int,
        instance: WorkerInstanceId,
        lease_ttl_ms: int,
        limit: int,
    ) -> list[ClaimedExecution]:
        """One search: from the watermarks, else over whole queues, else again after doing what is due."""
        await self._catch_up.run(lanes, within_seconds=CATCH_UP_SECONDS)
        watermarks = self._store.wakeups.watermarks
        claimed: list[ClaimedExecution] = []
        met: set[ExecutionId] = set()
        wanted_queues = await wanted.parameters(self._store)
        is_unshared = False
        while len(claimed) < limit:
            queues, firsts, lasts = watermarks.spans()
            left = limit - len(claimed)
            try:
                rows = await self._store.fetch(
                    SQL.claim_best,
                    lanes=lanes,
                    **wanted_queues,
                    worker_no=worker_no,
                    lease_ttl_ms=lease_ttl_ms,
                    limit=left,
                    span_queues=queues,
                    span_firsts=firsts,
                    span_lasts=lasts,
                    unshared=is_unshared,
                    lease_ids=mint_uuid_texts(left),
                    reclaim_cap=DEFAULT_RECLAIM_CAP,
                    policy_reclaim_cap=POLICY_RECLAIM_CAP,
                    **CLAIM_PARAMETERS,
                )
            except EngineError:
                if not claimed:
                    raise
                # What an earlier walk has leased is not lost over one that fails.
                break
            note = None
            if rows and rows[-1][_PLACE] is None:
                note, walk_ms = rows[-1][0], rows.pop()["timeout_ms"]
                if walk_ms is not None:
                    watermarks.walked_whole(walk_ms / 1000)
            at_reclaim_limit: list[tuple[ExecutionId, int]] = []
            reclaimed: list[ExecutionId] = []
            # Each queue's rows come in order; together they come queue by queue.
            rows.sort(key=_place)
            for row in rows:
                watermarks.raise_to(row[_QUEUE_NO], row[_PLACE])
                if row[0] == "reclaim_limit":
                    execution_id = format_execution_id(row["partition_key"], row["execution_id"])
                    # An execution that could not be ended is skipped, or this loop would find it forever.
                    if execution_id not in met:
                        met.add(execution_id)
                        at_reclaim_limit.append((execution_id, row["lease_epoch"]))
                else:
                    claimed.append(claimed_of(row, instance, lease_ttl_ms))
                    if row[0] == "reclaimed":
                        reclaimed.append(claimed[-1].execution_id)
            if reclaimed:
                await self._finish.warn_of_losses(reclaimed)
            if at_reclaim_limit:
                await self._finish.end_at_reclaim_cap(at_reclaim_limit)
                continue
            if note in ("more", "short"):
                is_unshared = note == "short"
                continue
            if claimed:
                break
            if queues and watermarks.may_walk_whole:
                watermarks.clear()
            elif not await self._catch_up.run(lanes, within_seconds=0):
                break
        return claimed


def claimed_of(row: Record, instance: WorkerInstanceId, lease_ttl_ms: int) -> ClaimedExecution:
    """What a worker gets of a row that a statement has just leased to it."""
    (
        branch,
        partition,
        uuid,
        _queue_no,
        _place,
        lane_id,
        priority,
        retry_count,
        lease_id,
        lease_epoch,
        attempt_id,
        attempt_type,
        attempt_index,
        now,
        execution_kind,
        input_payload,
        payload_encoding,
        policy,
        tags,
        attempt_timeout_ms,
        execution_deadline_at,
    ) = row
    # Inlined: hot path.
    execution_id = ExecutionId(ID_FORMAT % (partition, uuid))
    return ClaimedExecution(
        execution_id=execution_id,
        lease_id=lease_id,
        lease_epoch=lease_epoch,
        attempt_index=attempt_index,
        attempt_id=attempt_id,
        attempt_type=_TYPES[attempt_type],
        lease_expires_at=now + lease_ttl_ms,
        handle=Handle(
            kind=_KINDS[branch],
            execution_id=execution_id,
            attempt_index=attempt_index,
            attempt_id=attempt_id,
            lease_id=lease_id,
            lease_epoch=lease_epoch,
            lease_ttl_ms=lease_ttl_ms,
            lane_id=lane_id,
            worker_instance_id=instance,
        ),
        lane_id=lane_id,
        execution_kind=execution_kind,
        input_payload=input_payload,
        payload_encoding=payload_encoding,
        tags=_read_tags(tags) if tags else _NO_TAGS,
        policy=read_stored_policy(policy),
        retry_count=retry_count,
        priority=priority,
        attempt_timeout_ms=attempt_timeout_ms,
        execution_deadline_at=execution_deadline_at,
    )
