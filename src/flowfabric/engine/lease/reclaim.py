"""Supervised reclaim: hand a lost lease to a chosen worker through a reclaim grant."""

import logging
from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.batch import Locked
from flowfabric.db.database import Transaction
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.row import LockedWithGrant, Verdict, check_named, lock_with_grant
from flowfabric.engine.core.transition import Move
from flowfabric.engine.core.wakeups import LostLease, LostReason, Work
from flowfabric.engine.lease.claim import DEFAULT_LEASE_TTL_MS
from flowfabric.engine.lease.claim_named import Lease, NamedClaims
from flowfabric.engine.lease.finish import MAX_RECLAIMS_EXCEEDED
from flowfabric.engine.lease.grant import Grantee, Grants, note_mismatch
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.event import EventFamily
from flowfabric.model.grant import (
    DEFAULT_GRANT_TTL_MS,
    Granted,
    GrantKind,
    GrantNotFound,
    NotReclaimable,
    ReclaimCapExceeded,
)
from flowfabric.model.ids import ExecutionId, check_lane_id
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.policy import check_capabilities, reclaim_cap
from flowfabric.model.text import check_range

logger = logging.getLogger(__name__)

MAX_CAP = 2**31 - 1

Ended = tuple[LeaseEnd, list[Verdict | Locked]]


class Reclaim:
    """The operations of supervised reclaim; ordinary claims reclaim lost leases without them."""

    def __init__(self, store: Store, grants: Grants, claims: NamedClaims, lease_ends: LeaseEnds) -> None:
        self._store = store
        self._grants = grants
        self._claims = claims
        self._lease_ends = lease_ends

    async def issue_reclaim_grant(
        self,
        *,
        execution_id: ExecutionId | str,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str,
        grant_ttl_ms: int = DEFAULT_GRANT_TTL_MS,
        worker_capabilities: Sequence[str] = (),
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> Granted | NotReclaimable | ReclaimCapExceeded:
        """Reserve an execution with a lost lease for a worker; ends it instead if it is at its reclaim limit."""
        grantee = Grantee.of(
            worker_id, worker_instance_id, grant_ttl_ms, capability_hash, route_snapshot_json, admission_summary
        )
        parsed = check_named(self._store, execution_id)
        lane = check_lane_id(lane_id)
        offered = check_capabilities(worker_capabilities)

        marked: list[tuple[LockedWithGrant, Work, Sequence[int]]] = []

        async def issue(transaction: Transaction) -> Granted | NotReclaimable | tuple[int, Ended]:
            marked.clear()
            locked = await lock_with_grant(transaction, parsed, lane)
            if not locked.has_expired and not locked.is_lost:
                return NotReclaimable(execution_id=parsed, detail=_state_of(locked))
            if locked.is_held_for_cancel:
                return NotReclaimable(execution_id=parsed, detail="its flow is cancelled")
            if not locked.is_on_open_lane:
                return NotReclaimable(execution_id=parsed, detail=f"lane {locked.lane_id} is {locked.lane_state}")
            if locked.has_expired:
                (verdict,) = await self._lease_ends.within(transaction, [LeaseEnd(parsed, Move.LEASE_EXPIRED)])
                if not isinstance(verdict, Verdict) or verdict.work is None:
                    return NotReclaimable(execution_id=parsed, detail=_state_of(locked))
                marked.append((locked, verdict.work, verdict.slot_keys))
                locked = await lock_with_grant(transaction, parsed, lane)
            cap = reclaim_cap(locked.execution_policy)
            if locked.reclaim_count >= cap:
                return cap, await self._end(transaction, locked)
            if locked.has_live_grant:
                raise error("grant_already_exists", f"worker {locked.grant_worker_id!r} holds it")
            if missing := locked.missing(offered):
                await note_mismatch(transaction, locked)
                return NotReclaimable(execution_id=parsed, detail=f"capability_mismatch: {missing}")
            return await self._grants.issue(transaction, locked, GrantKind.RECLAIM, grantee, offered, names_lane=True)

        answer = await self._store.transact(issue, execution_id=parsed)
        if marked:
            self._store.wakeups.lost([_lost(locked) for locked, _, _ in marked])
            self._store.wakeups.stream(locked.id for locked, _, _ in marked)
            self._store.wakeups.events(EventFamily.LEASE)
        if isinstance(answer, tuple):
            return await self._at_reclaim_limit(*answer)
        if isinstance(answer, NotReclaimable):
            self._store.wakeups.work(work for _, work, _ in marked)
            for _, _, freed in marked:
                self._store.wakeups.room(freed)
        return answer

    async def reclaim_execution(
        self,
        *,
        execution_id: ExecutionId | str,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        lease_id: UUID | str | None = None,
        attempt_id: UUID | str | None = None,
        capability_hash: str | None = None,
        attempt_policy_json: str | None = None,
        max_reclaim_count: int | None = None,
        old_worker_instance_id: str | None = None,
        current_attempt_index: int | None = None,
    ) -> ClaimedExecution | NotReclaimable | GrantNotFound | ReclaimCapExceeded:
        """Reclaim a lost lease with the worker's reclaim grant, as a new attempt.

        `capability_hash`, `old_worker_instance_id` and `current_attempt_index` are accepted but not compared: the
        stored row decides.
        """
        _ = capability_hash, old_worker_instance_id
        lease = Lease.of(
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            lease_id=lease_id,
            attempt_id=attempt_id,
            attempt_policy_json=attempt_policy_json,
            attempt_index=current_attempt_index,
        )
        parsed = check_named(self._store, execution_id)
        lane = check_lane_id(lane_id)
        if max_reclaim_count is not None:
            check_range(max_reclaim_count, "max_reclaim_count", 0, MAX_CAP)

        reclaimed: list[LockedWithGrant] = []

        async def reclaim(
            transaction: Transaction,
        ) -> ClaimedExecution | NotReclaimable | GrantNotFound | tuple[int, Ended]:
            reclaimed.clear()
            locked = await lock_with_grant(transaction, parsed, lane)
            if not locked.is_lost and not locked.has_expired:
                return NotReclaimable(execution_id=parsed, detail=_state_of(locked))
            if locked.is_held_for_cancel:
                return NotReclaimable(execution_id=parsed, detail="its flow is cancelled")
            if not locked.is_on_open_lane:
                return NotReclaimable(execution_id=parsed, detail=f"lane {locked.lane_id} is {locked.lane_state}")
            if not locked.has_live_grant or locked.grant_kind != GrantKind.RECLAIM:
                return GrantNotFound(execution_id=parsed)
            if locked.grant_worker_id != lease.worker_id:
                raise error("invalid_claim_grant", "its reclaim grant belongs to another worker")
            cap = reclaim_cap(locked.execution_policy, max_reclaim_count)
            if locked.reclaim_count >= cap:
                return cap, await self._end(transaction, locked)
            reclaimed.append(locked)
            return await self._claims.take(transaction, locked, "reclaimed", lease)

        answer = await self._store.transact(reclaim, execution_id=parsed)
        if reclaimed:
            self._store.wakeups.lost([_lost(locked) for locked in reclaimed])
            self._store.wakeups.stream(locked.id for locked in reclaimed)
            self._store.wakeups.events(EventFamily.LEASE)
        return await self._at_reclaim_limit(*answer) if isinstance(answer, tuple) else answer

    async def _end(self, transaction: Transaction, locked: LockedWithGrant) -> Ended:
        """End a locked execution at its reclaim limit, and delete its grant."""
        lease_end = LeaseEnd(locked.id, Move.RECLAIM_LIMIT, reason=MAX_RECLAIMS_EXCEEDED, lost_epoch=locked.lease_epoch)
        return lease_end, await self._lease_ends.within(transaction, [lease_end])

    async def _at_reclaim_limit(self, cap: int, ended: Ended) -> ReclaimCapExceeded:
        lease_end, verdicts = ended
        await self._lease_ends.after_commit([lease_end], verdicts)
        logger.error("%s failed: its lease was lost %d times, the most its policy allows", lease_end.execution_id, cap)
        return ReclaimCapExceeded(execution_id=lease_end.execution_id, reclaim_count=cap)


def _lost(locked: LockedWithGrant) -> LostLease:
    return LostLease(locked.id, locked.lease_epoch, LostReason.RECLAIMED)


def _state_of(locked: LockedWithGrant) -> str:
    return f"{locked.lifecycle_phase}, {locked.ownership_state}"
