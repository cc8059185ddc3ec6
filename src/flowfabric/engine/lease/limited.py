"""Claims on lanes with limits: pick candidates, admit those within their limits, lease them, in one transaction."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, cast
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import array_text, statements_beside
from flowfabric.engine.core.admission import LIMITED, Admissions, Admitted, Denied, is_reserved
from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.core.transition import CLAIM_PARAMETERS
from flowfabric.engine.core.turns import Span, Turns
from flowfabric.engine.core.watermark import Appeared, ScanWatermarks
from flowfabric.engine.lease.catch_up import CatchUp
from flowfabric.engine.lease.claimed import LEAST_AHEAD_MS, Queues, claimed_of
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.lease.heads import Heads
from flowfabric.engine.lease.room import RoomWaits
from flowfabric.engine.lease.round import Chosen, Reserved, Round, candidate_of, read_round, record_round
from flowfabric.engine.lease.scans import RECLAIM_LIMITS, Scan, Scans, Wanted
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import WorkerInstanceId, mint_uuid_texts
from flowfabric.model.lease import ClaimedExecution

SQL = statements_beside(__file__)

REACH = 50
"""How many more entries than it may lease a statement reads at first, to find those that are within their limits."""
MAX_REACH = 4000
MAX_KINDS = 1024
"""How many kinds of claims are cached."""
MAX_ROUNDS = 20
"""How many rounds a claim makes to find others behind executions that are locked or were denied."""
MAX_SPANS = 1000
"""How many queues a claim looks at together once it has found some without room."""
MAX_QUEUES = 100_000
"""How many queues are cached; each key of a quota has its own."""
DEEP_SECONDS = 10.0
"""How long a claim reads by queue after so many entries without room were ahead of others."""
NO_ROUTES: Mapping[str, object] = {
    "lanes": (),
    "capabilities": (),
    "kind_nos": None,
    "namespace_no": None,
    "is_filtered": False,
    "span_sources": (0,),
    "span_firsts": (0,),
    "span_lasts": (0,),
    "scanned_to": 0,
}
"""The parameters of a statement that reads no routes."""
LIFE_SECONDS = 1.0
"""How long the routes with limits are cached, and how long a lane without limited work is left to other claims."""


class Lessee(NamedTuple):
    """Who gets the leases of a claim."""

    worker_no: int
    instance: WorkerInstanceId
    lease_ttl_ms: int


Take = Callable[[Transaction, Sequence[Chosen], int], Awaitable[Sequence[Record]]]
"""Lease or grant admitted executions, of which so many can start at once; return the rows of those taken."""


class LimitedClaims:
    """Claims what lanes with limits have: within the limits, and in the same order as work without limits."""

    def __init__(self, store: Store, admissions: Admissions, catch_up: CatchUp, finish: Finish) -> None:
        self._store = store
        self._admissions = admissions
        self._catch_up = catch_up
        self._finish = finish
        self._scans = Scans(store)
        self._queues = Queues(MAX_QUEUES)
        self._reserved: dict[tuple[str, ...], Reserved] = {}
        self._quiet: dict[Wanted, tuple[int, float]] = {}
        self._heads = Heads(store)
        self._deep: dict[Wanted, float] = {}
        self._reaches: dict[Wanted, int] = {}
        self._turn = asyncio.Lock()
        self._waits = RoomWaits(store.wakeups)

    async def close(self) -> None:
        """Wake no more claims."""
        self._waits.close()

    async def are_needed(self, wanted: Wanted) -> bool:
        """Whether the lanes may have claimable work with limits; without it, a claim needs no admission."""
        reserved = await self._reserved_of(wanted.lanes)
        if not reserved.route_nos:
            return False
        quiet = self._quiet.get(wanted)
        appearances = self._store.wakeups.watermarks.appearances(reserved.route_nos)
        return quiet is None or quiet[0] != appearances or time.monotonic() >= quiet[1]

    async def claim(self, wanted: Wanted, lessee: Lessee, *, limit: int, slots: int) -> list[ClaimedExecution]:
        """Lease the best executions that are within their limits; those with limits only if they can start at once."""
        claimed: list[ClaimedExecution] = []

        async def lease(transaction: Transaction, chosen: Sequence[Chosen], slots: int) -> Sequence[Record]:
            return await self._lease(transaction, chosen, slots, lessee)

        async def leased(rows: Sequence[Record]) -> None:
            claimed.extend(claimed_of(row, lessee.instance, lessee.lease_ttl_ms, self._queues) for row in rows)
            reclaimed = [
                one.execution_id for one, row in zip(claimed[-len(rows) :], rows, strict=True) if row[0] == "reclaimed"
            ]
            if reclaimed:
                self._store.wakeups.stream(reclaimed)
                await self._finish.warn_of_reclaims(reclaimed)

        await self.search(wanted, lease, leased, limit=limit, slots=slots)
        return claimed

    async def search(
        self,
        wanted: Wanted,
        take: Take,
        taken: Callable[[Sequence[Record]], Awaitable[None]],
        *,
        limit: int,
        slots: int,
    ) -> None:
        """Take the best executions that are within their limits; call `taken` with their rows after each commit."""
        reserved = await self._reserved_of(wanted.lanes)
        if reserved.takes_turns or self._deep.get(wanted, 0) > time.monotonic():
            await self._search_in_turns(reserved, wanted, take, taken, limit=min(limit, slots))
            return
        appearances = self._store.wakeups.watermarks.appearances(reserved.route_nos)
        serving = wanted._replace(capabilities=(*wanted.capabilities, *reserved.capabilities))
        scan = await self._scans.of(serving, by_route=True)
        # One at a time: two at once would pass over what the other has locked, and wait for its quota keys.
        async with self._turn:
            with scan.watermarks.scanning() as appeared:
                has_limited = await self._search(
                    scan, appeared, reserved, wanted, take, taken, limit=limit, slots=slots
                )
        if has_limited:
            self._quiet.pop(wanted, None)
        else:
            if len(self._quiet) >= MAX_KINDS:
                self._quiet.clear()
            self._quiet[wanted] = appearances, time.monotonic() + LIFE_SECONDS

    async def _search(
        self,
        scan: Scan,
        appeared: Appeared,
        reserved: Reserved,
        wanted: Wanted,
        take: Take,
        taken: Callable[[Sequence[Record]], Awaitable[None]],
        *,
        limit: int,
        slots: int,
    ) -> bool:
        """Search until enough is taken or nothing is left; return whether there are executions with limits."""
        count = 0
        passed: list[UUID] = []
        full: set[int] = set()
        closed_keys: set[int] = set()
        has_limited = False
        rounds = scanned_to = 0
        reach = min(max(limit + REACH, self._reaches.get(wanted, 0) // 2), MAX_REACH)
        where: Mapping[str, object] = {}
        while count < limit:
            # A scan that was cut short continues in the same spans: new ones would start a full scan again.
            where = {**where, "scanned_to": scanned_to} if scanned_to else scan.where
            given = {**where, "skipped": passed, "passed_queues": [*full], "closed_keys": [*closed_keys]}
            since = self._waits.now
            try:
                found = await self._round(
                    given, reserved, take, limit=limit - count, slots=max(0, slots - count), reach=reach
                )
            except EngineError:
                if not count:
                    raise
                # The caller must get what the earlier rounds have taken.
                break
            if len(self._reaches) >= MAX_KINDS:
                self._reaches.clear()
            self._reaches[wanted] = reach
            has_limited = has_limited or found.has_limited
            self._waits.add(wanted.lanes, found.limiting_keys.items(), found.retry_after_ms, since=since)
            self._raise(scan.watermarks, found, appeared)
            if found.taken:
                count += len(found.taken)
                await taken(found.taken)
            scanned_to = found.cut_at or 0
            if found.is_at_reach and reach == MAX_REACH and count < limit:
                # So many entries without room are ahead that the others are found by their queues.
                now = time.monotonic()
                self._deep = {
                    **{each: until for each, until in self._deep.items() if until > now},
                    wanted: now + DEEP_SECONDS,
                }
                await self._search_in_turns(reserved, wanted, take, taken, limit=min(limit, slots) - count)
                break
            if found.at_reclaim_limit:
                await self._finish.end_at_reclaim_limit(found.at_reclaim_limit)
            passed += found.passed
            closed_keys |= found.closed_keys
            full |= found.full_queues.keys()
            rounds += 1
            if found.is_at_reach and reach < MAX_REACH:
                # Their entries have taken the place of others that may be within their limits.
                reach = min(4 * reach, MAX_REACH)
                scanned_to = 0
            elif found.at_reclaim_limit or (rounds < MAX_ROUNDS and found.hides_others):
                scanned_to = 0
            elif not scanned_to:
                if count:
                    break
                if where["span_sources"] and scan.watermarks.may_scan_all:
                    scan.watermarks.end()
                elif await self._catch_up.run(wanted.lanes, min_interval_seconds=0):
                    passed, full, closed_keys = [], set(), set()
                else:
                    break
        # Enough was taken before the first entry with limits was read: there may be some behind.
        return has_limited or (count >= limit and await self._has_entries(reserved))

    async def _has_entries(self, reserved: Reserved) -> bool:
        """Whether the routes with limits have entries."""
        (row,) = await self._store.fetch(SQL.read_has_entries, route_nos=sorted(reserved.route_nos))
        has_entries: bool = row["has_entries"]
        return has_entries

    async def _search_in_turns(
        self,
        reserved: Reserved,
        wanted: Wanted,
        take: Take,
        taken: Callable[[Sequence[Record]], Awaitable[None]],
        *,
        limit: int,
    ) -> None:
        """Take from the queues in the order of their turns until enough is taken or nothing is left."""
        count = rounds = width = 0
        passed: list[UUID] = []
        missed: list[tuple[Turns, int, int]] = []
        while count < limit and rounds < MAX_ROUNDS:
            rounds += 1
            since = self._waits.now
            turns = await self._heads.turns_of(wanted, (*wanted.capabilities, *reserved.capabilities))
            with turns.scanning() as changes:
                spans = turns.choose(limit - count, turns.now_ms, width=width)
                if not spans:
                    if count or not await self._catch_up.run(wanted.lanes, min_interval_seconds=0):
                        break
                    turns.expire()
                    continue
                try:
                    found = await self._round_of_spans(turns, spans, reserved, take, limit=limit - count, passed=passed)
                except EngineError:
                    if not count:
                        raise
                    break
                record_round(turns, spans, found, changes)
            self._waits.add(wanted.lanes, found.limiting_keys.items(), found.retry_after_ms, since=since)
            if found.taken:
                count += len(found.taken)
                rounds = width = 0
                await taken(found.taken)
            else:
                # Many queues without room may be before the first one that has some.
                width = min(4 * len(spans), MAX_SPANS)
            passed += found.passed
            missed += [(turns, *each) for each in found.missed]
            if found.at_reclaim_limit:
                await self._finish.end_at_reclaim_limit(found.at_reclaim_limit)
        for turns, queue_no, place in missed:
            # The next claim may find them free.
            turns.appeared(queue_no, place)

    async def _round_of_spans(
        self,
        turns: Turns,
        spans: Sequence[Span],
        reserved: Reserved,
        take: Take,
        *,
        limit: int,
        passed: Sequence[UUID],
    ) -> Round:
        """Pick from spans of queues, admit and take in one transaction."""

        async def claim(transaction: Transaction) -> Round:
            rows = await transaction.fetch(
                SQL.pick_candidates,
                **NO_ROUTES,
                skipped=passed,
                passed_queues=(),
                closed_keys=(),
                reach=0,
                limit=sum(span.share for span in spans),
                queue_nos=[span.queue_no for span in spans],
                first_places=[span.first_place for span in spans],
                last_places=[span.last_place for span in spans],
                shares=[span.share for span in spans],
                **RECLAIM_LIMITS,
            )
            found, picked = read_round(rows, reserved, reach=1)
            numbers = {(span.queue_no, span.first_place >> BAND_BITS): number for number, span in enumerate(spans)}
            places = [(numbers[row["queue_no"], row["place"] >> BAND_BITS], row["place"]) for row in picked]
            ordered = [picked[at] for at in turns.order(spans, places)][:limit]
            await self._take(transaction, found, ordered, take, len(ordered), None)
            leased = {row["execution_id"] for row in found.taken}
            for row, (number, place) in zip(picked, places, strict=True):
                if row["execution_id"] not in leased:
                    count, left = found.spans[number]
                    found.spans[number] = count, place if left is None else min(place, left)
            return found

        return await self._store.transact(claim)

    async def _take(
        self,
        transaction: Transaction,
        found: Round,
        picked: Sequence[Record],
        take: Take,
        slots: int,
        closed_keys: Collection[int] | None,
    ) -> None:
        """Admit candidates and take what is admitted."""
        chosen = await self._admitted(transaction, found, picked, slots, closed_keys)
        if chosen:
            found.taken = await take(transaction, chosen, slots)
            taken = {row["execution_id"] for row in found.taken}
            for row, _ in chosen:
                if row["execution_id"] not in taken:
                    if row["quota_key_nos"] is not None:
                        # Rolls back what it was admitted for.
                        raise error("internal", "a locked execution was admitted but not leased")
                    found.keep(row["route_no"], row["place"])

    async def _round(
        self, where: Mapping[str, object], reserved: Reserved, take: Take, *, limit: int, slots: int, reach: int
    ) -> Round:
        """Pick from the routes, admit and take in one transaction."""

        closed_keys = cast("Collection[int]", where["closed_keys"])

        async def claim(transaction: Transaction) -> Round:
            rows = await transaction.fetch(
                SQL.pick_candidates,
                **where,
                reach=reach,
                limit=limit,
                queue_nos=(),
                first_places=(),
                last_places=(),
                shares=(),
                **RECLAIM_LIMITS,
            )
            found, picked = read_round(rows, reserved, reach)
            found.is_full = len(picked) == limit
            await self._take(transaction, found, picked, take, slots, closed_keys)
            return found

        return await self._store.transact(claim)

    async def _admitted(
        self,
        transaction: Transaction,
        found: Round,
        picked: Sequence[Record],
        slots: int,
        closed_keys: Collection[int] | None,
    ) -> list[Chosen]:
        """The candidates to take, in order."""
        limited = [row for row in picked[:slots] if row["quota_key_nos"] is not None]
        verdicts: dict[UUID, Admitted | Denied | None] = {}
        if limited:
            candidates = [candidate_of(row, is_in_order=closed_keys is not None) for row in limited]
            judged = await self._admissions.admit(transaction, candidates, closed_keys=closed_keys or ())
            verdicts = {row["execution_id"]: verdict for row, verdict in zip(limited, judged, strict=True)}
        chosen: list[Chosen] = []
        for row in picked:
            verdict = verdicts.get(row["execution_id"])
            if isinstance(verdict, Admitted | Denied) and verdict.end is not None:
                found.end = verdict.end if found.end is None else min(found.end, verdict.end)
            if isinstance(verdict, Admitted):
                chosen.append((row, verdict.slot_keys))
            elif row["quota_key_nos"] is None and (found.end is None or row["nth"] <= found.end):
                chosen.append((row, row["slot_keys"] or ()))
            else:
                found.keep(row["route_no"], row["place"])
                if isinstance(verdict, Denied):
                    found.has_denied = True
                    found.passed.append(row["execution_id"])
                    found.closed_keys.update(verdict.closed_keys)
                    found.fill(row["queue_no"], row["quota_key_nos"], verdict.retry_after_ms)
        return chosen

    async def _lease(
        self, transaction: Transaction, chosen: Sequence[Chosen], slots: int, lessee: Lessee
    ) -> Sequence[Record]:
        if unknown := self._queues.missing(row["queue_no"] for row, _ in chosen):
            for row in await transaction.fetch(SQL.list_queues, queue_nos=unknown):
                self._queues.add(*row)
        return await transaction.fetch(
            SQL.lease_admitted,
            partition_keys=[row["partition_key"] for row, _ in chosen],
            execution_ids=[row["execution_id"] for row, _ in chosen],
            route_nos=[row["route_no"] for row, _ in chosen],
            entries=[row["entry"] for row, _ in chosen],
            branches=[row["branch"] for row, _ in chosen],
            slot_keys=[array_text(slot_keys) if slot_keys else None for _, slot_keys in chosen],
            worker_no=lessee.worker_no,
            lease_ttl_ms=lessee.lease_ttl_ms,
            slots=slots,
            least_ahead_ms=LEAST_AHEAD_MS,
            known_queues=(),
            knows_queues=True,
            lease_ids=mint_uuid_texts(len(chosen)),
            **CLAIM_PARAMETERS,
        )

    @staticmethod
    def _raise(watermarks: ScanWatermarks, found: Round, appeared: Appeared) -> None:
        """Raise the watermarks up to the first entry that stays unclaimed."""
        if found.scan_us is not None:
            is_cut = found.cut_at is not None or found.is_full or found.is_at_reach
            furthest = max((row["place"] for row in found.taken), default=0)
            watermarks.record_full_scan(found.scan_us / 1_000_000, up_to=furthest if is_cut else None)
        for row in found.taken:
            route_no, place = row["route_no"], row["place"]
            kept = found.kept.get((route_no, place >> BAND_BITS))
            if kept is None or kept > place:
                watermarks.raise_to(route_no, place, appeared)

    async def _reserved_of(self, lanes: tuple[str, ...]) -> Reserved:
        known = self._reserved.get(lanes)
        changes = self._store.wakeups.watermarks.changes
        if known is None or known.valid_until <= time.monotonic() or known.changes != changes:
            rows = await self._store.fetch(SQL.list_reserved, lanes=lanes, limited=LIMITED)
            if len(self._reserved) >= MAX_KINDS:
                self._reserved.clear()
            known = self._reserved[lanes] = Reserved(
                frozenset(row["route_no"] for row in rows),
                tuple(sorted({each for row in rows for each in row["required"] if is_reserved(each)})),
                any(row["takes_turns"] for row in rows),
                time.monotonic() + LIFE_SECONDS,
                changes,
            )
        return known
