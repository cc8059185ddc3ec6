"""Grants: reserve an execution for one worker for a short time, by search or by its id."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.admission import Admissions
from flowfabric.engine.core.consequence import EndedLease
from flowfabric.engine.core.keys import Keys
from flowfabric.engine.core.row import LockedWithGrant, check_named, execution_keys, lock_with_grant, read_with_grant
from flowfabric.engine.core.transition import PROMOTED
from flowfabric.engine.lease.catch_up import CatchUp
from flowfabric.engine.lease.claim import CATCH_UP_SECONDS
from flowfabric.engine.lease.claim import SQL as CLAIM_SQL
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.lease.limited import LimitedClaims
from flowfabric.engine.lease.round import Chosen
from flowfabric.engine.lease.scans import RECLAIM_LIMITS, Scan, Scans, Wanted
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.grant import (
    DEFAULT_GRANT_TTL_MS,
    MAX_GRANT_TTL_MS,
    MIN_GRANT_TTL_MS,
    ClaimGrant,
    Granted,
    GrantKind,
    NoWork,
    ReclaimGrant,
    grant_id,
    sign_grant,
)
from flowfabric.model.ids import (
    ExecutionId,
    LaneId,
    check_lane_id,
    check_worker_id,
    format_execution_id,
    partition_text,
)
from flowfabric.model.policy import check_capabilities, reclaim_cap
from flowfabric.model.text import check_limit, check_range, check_text, json_text

SQL = statements_beside(__file__)

MAX_SCAN = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Grantee:
    """The worker that asks for a grant, the grant's lifetime, and what is stored with it."""

    worker_id: str
    worker_instance_id: str
    grant_ttl_ms: int
    capability_hash: str | None = None
    route_snapshot: str | None = None
    admission_summary: str | None = None

    @classmethod
    def of(
        cls,
        worker_id: str,
        worker_instance_id: str,
        grant_ttl_ms: int,
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> "Grantee":
        """Check a caller's arguments."""
        check_range(grant_ttl_ms, "grant_ttl_ms", MIN_GRANT_TTL_MS, MAX_GRANT_TTL_MS)
        return cls(
            worker_id=check_worker_id(worker_id, "worker_id"),
            worker_instance_id=check_worker_id(worker_instance_id, "worker_instance_id"),
            grant_ttl_ms=grant_ttl_ms,
            capability_hash=_optional_text(capability_hash, "capability_hash"),
            route_snapshot=check_json(route_snapshot_json, "route_snapshot_json"),
            admission_summary=_optional_text(admission_summary, "admission_summary"),
        )


class Grants:
    """The operations that reserve executions."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        catch_up: CatchUp,
        finish: Finish,
        limited: LimitedClaims,
        admissions: Admissions,
    ) -> None:
        self._store = store
        self._keys = keys
        self._catch_up = catch_up
        self._finish = finish
        self._limited = limited
        self._admissions = admissions
        self._scans = Scans(store)

    async def claim_for_worker(
        self,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        grant_ttl_ms: int = DEFAULT_GRANT_TTL_MS,
    ) -> Granted | NoWork:
        """Reserve for a worker the execution that a claim would take; `claim_execution` then leases it."""
        grantee = Grantee.of(worker_id, worker_instance_id, grant_ttl_ms)
        lane = check_lane_id(lane_id)
        wanted = Wanted.of((lane,), worker_capabilities, kinds, namespace)
        await self._catch_up.run((lane,), min_interval_seconds=CATCH_UP_SECONDS)
        if await self._limited.are_needed(wanted):
            return await self._search_limited(grantee, wanted)
        scan = await self._scans.of(wanted)
        refused: list[UUID] = []
        scanned_to = 0
        where: dict[str, object] = {}
        while True:
            # A scan that was cut short continues in the same spans: new ones would start a full scan again.
            where = {**where, "scanned_to": scanned_to} if scanned_to else scan.where
            found = await self._search(grantee, scan, where, refused)
            if isinstance(found, Granted):
                return found
            scanned_to = found if isinstance(found, int) else 0
            if scanned_to:
                continue
            if isinstance(found, LockedWithGrant):
                # If it cannot be ended, the next statement must not find it again.
                refused.append(found.execution_id)
                await self._finish.end_at_reclaim_limit([(found.id, found.lease_epoch)])
            elif where["span_sources"] and scan.watermarks.may_scan_all:
                scan.watermarks.end()
            elif not await self._catch_up.run((lane,), min_interval_seconds=0):
                return NoWork()

    async def _search_limited(self, grantee: Grantee, wanted: Wanted) -> Granted | NoWork:
        """Grant the best execution that is within its limits; the grant takes its slots."""
        granted: Granted | NoWork = NoWork()
        issued: Granted | NoWork = granted

        async def grant(transaction: Transaction, chosen: Sequence[Chosen], _: int) -> Sequence[Record]:
            nonlocal issued
            ((row, slot_keys),) = chosen
            locked = await read_with_grant(transaction, row["partition_key"], row["execution_id"])
            kind = GrantKind.RECLAIM if locked.is_lost else GrantKind.CLAIM
            issued = await self.issue(transaction, locked, kind, grantee, wanted.capabilities, slot_keys=slot_keys)
            return [row]

        async def taken(_: Sequence[Record]) -> None:
            # Only now: a transaction that was rolled back and repeated may have found nothing the second time.
            nonlocal granted
            granted = issued

        await self._limited.search(wanted, grant, taken, limit=1, slots=1)
        return granted

    async def _search(
        self, grantee: Grantee, scan: Scan, where: Mapping[str, object], skipped: Sequence[UUID]
    ) -> Granted | LockedWithGrant | int | None:
        """Grant the best execution that one statement finds; None if there is none.

        Returns an execution at its reclaim limit as its row, and for a search that was cut short the place to continue.
        """
        statement = CLAIM_SQL.lock_best_of_queues if scan.is_by_queue else CLAIM_SQL.lock_best_of_routes
        offered = cast("tuple[str, ...]", where["capabilities"])

        async def search(transaction: Transaction) -> tuple[Record, Granted | LockedWithGrant | None]:
            (row,) = await transaction.fetch(statement, **where, **RECLAIM_LIMITS, skipped=skipped, limit=1)
            if row["execution_id"] is None:
                return row, None
            locked = await read_with_grant(transaction, row["partition_key"], row["execution_id"])
            if locked.is_lost and locked.reclaim_count >= reclaim_cap(locked.execution_policy):
                return row, locked
            kind = GrantKind.RECLAIM if locked.is_lost else GrantKind.CLAIM
            return row, await self.issue(transaction, locked, kind, grantee, offered)

        # Watermarks are set after the commit: an execution whose grant is rolled back must not be below them.
        with scan.watermarks.scanning() as appeared:
            row, found = await self._store.transact(search)
        if row["scan_us"] is not None:
            scan.watermarks.record_full_scan(row["scan_us"] / 1_000_000, up_to=row["place"])
        if found is None:
            cut_at: int | None = row["cut_at"]
            return cut_at
        scan.watermarks.raise_to(row["queue_no" if scan.is_by_queue else "route_no"], row["place"], appeared)
        return found

    async def scan_eligible_executions(self, *, lane_id: str, limit: int = 100) -> list[ExecutionId]:
        """List the claimable executions of a lane without a live grant, in claim order."""
        lane = check_lane_id(lane_id)
        limit = check_limit(limit, MAX_SCAN)
        rows = await self._store.fetch(SQL.list_eligible, lane_id=lane, limit=limit)
        return [format_execution_id(row["partition_key"], row["execution_id"]) for row in rows]

    async def issue_claim_grant(
        self,
        *,
        execution_id: str,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Sequence[str] = (),
        grant_ttl_ms: int = DEFAULT_GRANT_TTL_MS,
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> Granted:
        """Reserve one execution for a worker."""
        grantee = Grantee.of(
            worker_id, worker_instance_id, grant_ttl_ms, capability_hash, route_snapshot_json, admission_summary
        )
        parsed = check_named(self._store, execution_id)
        lane = check_lane_id(lane_id)

        async def issue(transaction: Transaction) -> Granted | EngineError:
            locked = await lock_with_grant(transaction, parsed, lane)
            if locked.lifecycle_phase != "runnable" or not locked.is_claimable:
                raise error("execution_not_eligible", f"it is {locked.lifecycle_phase}, {locked.eligibility_state}")
            if locked.has_live_grant:
                raise error("grant_already_exists", f"worker {locked.grant_worker_id!r} holds it")
            if not locked.is_on_open_lane:
                raise error("execution_not_in_eligible_set", f"lane {locked.lane_id} is {locked.lane_state}")
            offered = check_capabilities(worker_capabilities)
            if missing := locked.missing(offered):
                await note_mismatch(transaction, locked)
                return error("capability_mismatch", missing)
            return await self.issue(transaction, locked, GrantKind.CLAIM, grantee, offered)

        granted = await self._store.transact(issue, execution_id=parsed)
        if isinstance(granted, EngineError):
            raise granted
        return granted

    async def issue(
        self,
        transaction: Transaction,
        locked: LockedWithGrant,
        kind: GrantKind,
        grantee: Grantee,
        offered: tuple[str, ...],
        *,
        names_lane: bool = False,
        slot_keys: Sequence[int] | None = None,
    ) -> Granted:
        """Sign and store a grant for an execution that the transaction has locked.

        It takes the execution's slots without a test, unless admission has taken them already (`slot_keys`).
        """
        if slot_keys is None:
            slot_keys = await self._admissions.take_slots(
                transaction, locked.execution_id, locked.quota_key_nos, locked.slot_keys or ()
            )
        key = await self._keys.signing(transaction, locked.signing_kid, locked.signing_since)
        expires_at_ms = locked.now + grantee.grant_ttl_ms
        execution_id = locked.id
        grant_key = sign_grant(
            key,
            kind,
            execution_id,
            worker_id=grantee.worker_id,
            worker_instance_id=grantee.worker_instance_id,
            expires_at_ms=expires_at_ms,
        )
        await transaction.fetch(
            SQL.insert_grant,
            partition_key=locked.partition_key,
            execution_id=locked.execution_id,
            grant_id=grant_id(grant_key),
            kind=kind,
            worker_id=grantee.worker_id,
            worker_instance_id=grantee.worker_instance_id,
            lane_no=locked.lane_no,
            worker_capabilities=offered,
            capability_hash=grantee.capability_hash,
            route_snapshot=grantee.route_snapshot,
            admission_summary=grantee.admission_summary,
            slot_keys=slot_keys or None,
            now=locked.now,
            expires_at=expires_at_ms,
            **PROMOTED,
        )
        partition_key = partition_text(execution_id)
        if names_lane:
            return Granted(
                execution_id=execution_id,
                grant=ReclaimGrant(
                    execution_id=execution_id,
                    partition_key=partition_key,
                    grant_key=grant_key,
                    expires_at_ms=expires_at_ms,
                    lane_id=LaneId(locked.lane_id),
                ),
            )
        return Granted(
            execution_id=execution_id,
            grant=ClaimGrant(
                execution_id=execution_id,
                partition_key=partition_key,
                grant_key=grant_key,
                expires_at_ms=expires_at_ms,
            ),
        )


async def note_mismatch(transaction: Transaction, locked: LockedWithGrant) -> None:
    """Record on a locked execution that a worker without its required capabilities asked for it."""
    await transaction.fetch(
        SQL.set_capability_mismatch,
        partition_key=locked.partition_key,
        execution_id=locked.execution_id,
        now=locked.now,
    )


def check_json(text: object, field: str) -> str | None:
    """Return JSON text that Postgres can store; None for None and for empty text."""
    if text is None or text == "":
        return None
    try:
        return json_text(check_text(text, field))
    except ValueError as wrong:
        raise error("invalid_input", f"{field}: {wrong}") from None


def _optional_text(value: object, field: str) -> str | None:
    return None if value is None else check_text(value, field)


async def delete_grants(transaction: Transaction, ended: Sequence[EndedLease]) -> None:
    """Delete the grants of executions that ended or lost their lease."""
    await transaction.fetch(SQL.take_grants, **execution_keys(each.execution_id for each in ended))
