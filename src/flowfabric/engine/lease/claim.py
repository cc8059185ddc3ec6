"""Claims by lane: lease the best claimable executions of a worker's lanes in one statement."""

import asyncio
import time
from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.transition import CLAIM_PARAMETERS
from flowfabric.engine.core.watermark import Appeared
from flowfabric.engine.lease.catch_up import CatchUp
from flowfabric.engine.lease.claimed import LEAST_AHEAD_MS, Queues, claimed_of
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.lease.limited import Lessee, LimitedClaims
from flowfabric.engine.lease.scans import RECLAIM_LIMITS, Scan, Scans, Wanted
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.handle import MAX_LEASE_TTL_MS, Handle
from flowfabric.model.ids import (
    ExecutionId,
    WorkerInstanceId,
    check_lane_id,
    check_worker_id,
    format_execution_id,
    mint_uuid_texts,
)
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.text import check_items, check_range

SQL = statements_beside(__file__)

MAX_LANES = 64
MAX_LIMIT = 1000
MAX_SLOTS = 2**31 - 1
DEFAULT_LEASE_TTL_MS = 30_000
MAX_AT_ONCE = 2
CATCH_UP_SECONDS = 1.0
"""How often claims on a busy lane expire leases and promote delays when no reconciler runs."""
POLL_SECONDS = 1.0
"""The longest a waiting claim goes without searching the queues when no hint arrives."""

_ROUTE_NO, _QUEUE_NO, _PLACE = 3, 4, 5


class Claim:
    """The operations that claim by lane."""

    def __init__(self, store: Store, catch_up: CatchUp, finish: Finish, limited: LimitedClaims) -> None:
        self._store = store
        self._catch_up = catch_up
        self._finish = finish
        self._limited = limited
        self._scans = Scans(store)
        self._queues = Queues()
        # Concurrent claims compete for the head of a queue. Two at once raise throughput, more do not.
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)
        self.closing = False
        """Set at shutdown: claims return nothing instead of searching or waiting."""
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
        """Lease the best claimable execution of a lane; None if there is none within `max_wait_ms`.

        `kinds` and `namespace` restrict what is claimed.
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
        slots: int | None = None,
    ) -> list[ClaimedExecution]:
        """Lease up to `limit` executions of several lanes by priority, then age; empty if there are none.

        `kinds` and `namespace` restrict what is claimed. If only the first `slots` can start at once, the others have
        an attempt timeout long enough to wait: an attempt's time runs from its claim.
        """
        lane_ids = sorted({check_lane_id(lane) for lane in check_items(lanes, "lanes")})
        if not 1 <= len(lane_ids) <= MAX_LANES:
            raise error("invalid_input", f"lanes: expected 1 to {MAX_LANES} lane ids, got {len(lane_ids)}")
        wanted = Wanted.of(lane_ids, capabilities, kinds, namespace)
        worker_id = check_worker_id(worker_id, "worker_id")
        instance = WorkerInstanceId(check_worker_id(worker_instance_id, "worker_instance_id"))
        check_range(lease_ttl_ms, "lease_ttl_ms", 1, MAX_LEASE_TTL_MS)
        check_range(limit, "limit", 1, MAX_LIMIT)
        if slots is not None:
            check_range(slots, "slots", 0, MAX_SLOTS)
        check_range(max_wait_ms, "max_wait_ms", 0, MAX_LEASE_TTL_MS)
        if self._refuses_waits and max_wait_ms:
            raise error("unavailable", "claim: the engine is shutting down; claim from another engine")
        self._under_way += 1
        self._is_idle.clear()
        try:
            return await self._search(wanted, worker_id, instance, lease_ttl_ms, limit, max_wait_ms, slots)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._is_idle.set()

    async def _search(
        self,
        wanted: Wanted,
        worker_id: str,
        instance: WorkerInstanceId,
        lease_ttl_ms: int,
        limit: int,
        max_wait_ms: int,
        slots: int | None,
    ) -> list[ClaimedExecution]:
        worker_no = await self._store.worker_no(worker_id, instance)
        deadline = time.monotonic() + max_wait_ms / 1000
        wakeups = self._store.wakeups
        while not self.closing:
            wakes = wakeups.wakes(wanted.lanes)
            async with self._turn:
                if self.closing:
                    break
                claimed = await self._scan_once(wanted, worker_no, instance, lease_ttl_ms, limit, slots)
            seconds = deadline - time.monotonic()
            if claimed or seconds <= 0 or self._refuses_waits:
                return claimed
            await wakeups.wait_for_work(wanted.lanes, min(seconds, POLL_SECONDS), since=wakes)
        return []

    def refuse_waits(self) -> None:
        """Make waiting claims return nothing, and reject new claims with a wait."""
        self._refuses_waits = True
        self._store.wakeups.wake_all()

    async def wait_idle(self) -> None:
        """Wait until no claim is running."""
        await self._is_idle.wait()

    async def drain(self) -> None:
        """Wait for the running claims; claims that wait for their turn return nothing."""
        self.closing = True
        self._store.wakeups.wake_all()
        for _ in range(MAX_AT_ONCE):
            await self._turn.acquire()
        for _ in range(MAX_AT_ONCE):
            self._turn.release()

    async def _scan_once(
        self,
        wanted: Wanted,
        worker_no: int,
        instance: WorkerInstanceId,
        lease_ttl_ms: int,
        limit: int,
        slots: int | None,
    ) -> list[ClaimedExecution]:
        """Scan from the watermarks; if that finds nothing, scan everything, then process due work and retry."""
        await self._catch_up.run(wanted.lanes, min_interval_seconds=CATCH_UP_SECONDS)
        if await self._limited.are_needed(wanted):
            claimed = await self._limited.claim(
                wanted,
                Lessee(worker_no, instance, lease_ttl_ms),
                limit=limit,
                slots=limit if slots is None else min(slots, limit),
            )
        else:
            scan = await self._scans.of(wanted)
            with scan.watermarks.scanning() as appeared:
                claimed = await self._claim_from(
                    scan, appeared, wanted, worker_no, instance, lease_ttl_ms, limit, slots
                )
        if claimed:
            self._store.wakeups.events(EventFamily.LEASE)
        return claimed

    async def _claim_from(
        self,
        scan: Scan,
        appeared: Appeared,
        wanted: Wanted,
        worker_no: int,
        instance: WorkerInstanceId,
        lease_ttl_ms: int,
        limit: int,
        slots: int | None,
    ) -> list[ClaimedExecution]:
        statement = SQL.claim_by_queue if scan.is_by_queue else SQL.claim_by_route
        watermarks = scan.watermarks
        source_at = _QUEUE_NO if scan.is_by_queue else _ROUTE_NO
        claimed: list[ClaimedExecution] = []
        refused: list[UUID] = []
        scanned_to = 0
        where: dict[str, object] = {}
        while len(claimed) < limit:
            # A scan that was cut short continues in the same spans: new ones would start a full scan again.
            where = {**where, "scanned_to": scanned_to} if scanned_to else scan.where
            left = limit - len(claimed)
            try:
                rows = await self._store.fetch(
                    statement,
                    **where,
                    worker_no=worker_no,
                    lease_ttl_ms=lease_ttl_ms,
                    limit=left,
                    slots=left if slots is None else max(0, slots - len(claimed)),
                    least_ahead_ms=LEAST_AHEAD_MS,
                    skipped=refused,
                    known_queues=self._queues.known,
                    knows_queues=False,
                    lease_ids=mint_uuid_texts(left),
                    **RECLAIM_LIMITS,
                    **CLAIM_PARAMETERS,
                )
            except EngineError:
                if not claimed:
                    raise
                # The caller must get the leases of the earlier statements.
                break
            note, scanned_to = None, 0
            if rows and rows[-1][_PLACE] is None:
                # A note uses the two columns that hold the time limits of a lease.
                note, scan_us, cut_at = (last := rows.pop())[0], last["timeout_ms"], last["deadline_at"]
                # Entries before this place are of other kinds, granted or locked.
                scanned_to = cut_at or 0
                if scan_us is not None:
                    is_cut = note == "cut_short" or len(rows) == left
                    furthest = max((row[_PLACE] for row in rows), default=0)
                    watermarks.record_full_scan(scan_us / 1_000_000, up_to=furthest if is_cut else None)
            at_reclaim_limit: list[tuple[ExecutionId, int]] = []
            reclaimed: list[ExecutionId] = []
            is_passed_over = False
            for row in rows:
                watermarks.raise_to(row[source_at], row[_PLACE], appeared)
                if row[0] == "too_short":
                    is_passed_over = True
                elif row[0] == "reclaim_limit":
                    # If it cannot be ended, the next statement must not find it again.
                    refused.append(row["execution_id"])
                    execution_id = format_execution_id(row["partition_key"], row["execution_id"])
                    at_reclaim_limit.append((execution_id, row["lease_epoch"]))
                else:
                    claimed.append(claimed_of(row, instance, lease_ttl_ms, self._queues))
                    if row[0] == "reclaimed":
                        reclaimed.append(claimed[-1].execution_id)
            if is_passed_over:
                # An execution that was not leased is below the watermarks.
                watermarks.end()
            if reclaimed:
                self._store.wakeups.stream(reclaimed)
                await self._finish.warn_of_reclaims(reclaimed)
            if at_reclaim_limit:
                await self._finish.end_at_reclaim_limit(at_reclaim_limit)
                continue
            if note == "cut_short":
                continue
            if claimed or is_passed_over:
                break
            if where["span_sources"] and watermarks.may_scan_all:
                watermarks.end()
            elif not await self._catch_up.run(wanted.lanes, min_interval_seconds=0):
                break
        return claimed
