"""Claims by lane: lease the best claimable executions of a worker's lanes in one statement."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.transition import CLAIM_PARAMETERS
from flowfabric.engine.core.watermark import BAND_BITS, Appeared, ScanWatermarks
from flowfabric.engine.execution.checking import MAX_PRIORITY
from flowfabric.engine.lease.catch_up import CatchUp
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.handle import MAX_LEASE_TTL_MS, Handle
from flowfabric.model.ids import (
    ID_FORMAT,
    ExecutionId,
    LaneId,
    WorkerInstanceId,
    check_lane_id,
    check_worker_id,
    format_execution_id,
    mint_uuid_texts,
)
from flowfabric.model.kind import check_kinds
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.policy import DEFAULT_RECLAIM_CAP, POLICY_RECLAIM_CAP, check_capabilities, read_stored_policy
from flowfabric.model.states import AttemptType, HandleKind
from flowfabric.model.text import check_items, check_range, check_short

SQL = statements_beside(__file__)

MAX_LANES = 64
MAX_LIMIT = 1000
MAX_SLOTS = 2**31 - 1
DEFAULT_LEASE_TTL_MS = 30_000
MAX_AT_ONCE = 2
CATCH_UP_SECONDS = 1.0
"""How often claims on a busy lane expire leases and promote delays when no reconciler runs."""
LEAST_AHEAD_MS = 5_000
"""An attempt with a shorter timeout is not claimed before a slot is free, because its time runs from the claim."""
POLL_SECONDS = 1.0
"""The longest a waiting claim goes without searching the queues when no hint arrives."""

RECLAIM_LIMITS = {"reclaim_limit": DEFAULT_RECLAIM_CAP, "policy_reclaim_limit": POLICY_RECLAIM_CAP}
"""How often a lease may be lost: without a policy, and with a policy that sets no limit."""

_KINDS = {
    "fresh": HandleKind.FRESH,
    "resumed": HandleKind.RESUMED,
    "parked": HandleKind.RESUMED,
    "reclaimed": HandleKind.RECLAIMED,
}
_TYPES = {str(attempt_type): attempt_type for attempt_type in AttemptType}
_read_tags = msgspec.json.Decoder(dict[str, str]).decode
_NO_TAGS: dict[str, str] = {}
_ROUTE_NO, _QUEUE_NO, _PLACE = 3, 4, 5


class Wanted(NamedTuple):
    """What a claim may take; None means any kind or any namespace."""

    lanes: tuple[str, ...]
    capabilities: tuple[str, ...]
    kinds: tuple[str, ...] | None
    namespace: str | None

    @classmethod
    def of(
        cls, lanes: Sequence[str], capabilities: Sequence[str], kinds: Sequence[str] | None, namespace: str | None
    ) -> "Wanted":
        """Check the arguments of a claim."""
        return cls(
            tuple(lanes),
            check_capabilities(capabilities),
            None if kinds is None else check_kinds(kinds),
            None if namespace is None else check_short(namespace, "namespace"),
        )


class Scan(NamedTuple):
    """How a claim searches: by route, or by queue when it wants few of many queues."""

    is_by_queue: bool
    watermarks: ScanWatermarks
    parameters: dict[str, object]

    @property
    def where(self) -> dict[str, object]:
        """The parameters of the next statement: what to claim and which spans of places to read."""
        sources, firsts, lasts = self.watermarks.spans()
        return {**self.parameters, "span_sources": sources, "span_firsts": firsts, "span_lasts": lasts, "scanned_to": 0}


class Scans:
    """Chooses how a claim searches.

    A route lists everything a worker may run, in order, so a claim reads only what it takes. A claim for certain kinds
    would read past all others there; when it wants few of the queues, it reads those queues instead.
    """

    MAX_QUEUES = 8
    """The number of queues that one statement can merge."""
    COVERAGE_SECONDS = 30.0
    """How long the number of wanted queues is cached; an old number costs time, never correctness."""
    MAX_CACHED = 1024

    def __init__(self, store: Store) -> None:
        self._store = store
        self._coverage: dict[Wanted, tuple[bool, float]] = {}

    async def of(self, wanted: Wanted) -> Scan:
        """Return the scan for a claim."""
        store, watermarks = self._store, self._store.wakeups.watermarks
        is_filtered = wanted.kinds is not None or wanted.namespace is not None
        parameters: dict[str, object] = {
            "lanes": wanted.lanes,
            "capabilities": wanted.capabilities,
            "kind_nos": None if wanted.kinds is None else await store.kind_nos(wanted.kinds),
            "namespace_no": None if wanted.namespace is None else await store.namespace_no(wanted.namespace),
        }
        is_by_queue = is_filtered and await self._wants_few(wanted, parameters)
        return Scan(
            is_by_queue,
            watermarks.of_queues(wanted) if is_by_queue else watermarks.of_routes(wanted),
            {**parameters, "is_filtered": is_filtered},
        )

    async def _wants_few(self, wanted: Wanted, parameters: Mapping[str, object]) -> bool:
        now = time.monotonic()
        known = self._coverage.get(wanted)
        if known is None or known[1] < now:
            (row,) = await self._store.fetch(SQL.read_coverage, **parameters)
            if len(self._coverage) >= self.MAX_CACHED:
                self._coverage.clear()
            wants_few = row["wanted"] < row["queues"] and row["wanted"] <= self.MAX_QUEUES
            known = self._coverage[wanted] = wants_few, now + self.COVERAGE_SECONDS
        return known[0]


class Claim:
    """The operations that claim by lane."""

    def __init__(self, store: Store, catch_up: CatchUp, finish: Finish) -> None:
        self._store = store
        self._catch_up = catch_up
        self._finish = finish
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
        scan = await self._scans.of(wanted)
        with scan.watermarks.scanning() as appeared:
            claimed = await self._claim_from(scan, appeared, wanted, worker_no, instance, lease_ttl_ms, limit, slots)
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


class Queues:
    """A cache of the lane and kind of each queue this process claimed from; neither ever changes."""

    MAX_KNOWN = 256

    def __init__(self) -> None:
        self._known: dict[int, tuple[LaneId, str]] = {}

    @property
    def known(self) -> list[int]:
        """The numbers of the cached queues."""
        return list(self._known)

    def of(self, queue_no: int, lane_id: str | None, execution_kind: str | None) -> tuple[LaneId, str]:
        """Return the lane and kind of a queue; None for either means the queue is cached."""
        if lane_id is None or execution_kind is None:
            return self._known[queue_no]
        found = LaneId(lane_id), execution_kind
        if len(self._known) < self.MAX_KNOWN:
            self._known[queue_no] = found
        return found


def claimed_of(row: Record, instance: WorkerInstanceId, lease_ttl_ms: int, queues: Queues) -> ClaimedExecution:
    """Build what a worker gets from the row of a claim statement."""
    (
        branch,
        partition,
        uuid,
        _route_no,
        queue_no,
        place,
        lane_id,
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
    lane_id, execution_kind = queues.of(queue_no, lane_id, execution_kind)
    if attempt_id is None:
        # The lease that begins an attempt gives the attempt its id.
        attempt_id = lease_id
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
        has_waited=branch == "resumed",
        retry_count=retry_count,
        priority=MAX_PRIORITY - (place >> BAND_BITS),
        attempt_timeout_ms=attempt_timeout_ms,
        execution_deadline_at=execution_deadline_at,
    )
