"""Claims of one execution by its id: lock the row, check it, lease it."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.engine.core.admission import Admissions
from flowfabric.engine.core.keys import Keys
from flowfabric.engine.core.row import LockedWithGrant, check_named, lock_with_grant
from flowfabric.engine.core.transition import CLAIM_PARAMETERS
from flowfabric.engine.lease.claim import DEFAULT_LEASE_TTL_MS, SQL
from flowfabric.engine.lease.claimed import Queues, claimed_of
from flowfabric.engine.lease.finish import WARN_EVERY_RECLAIMS
from flowfabric.engine.lease.grant import check_json
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import AcquireReason, EventFamily
from flowfabric.model.grant import (
    GrantedClaim,
    GrantFailure,
    GrantKey,
    GrantKind,
    ResumeToken,
    grant_id,
    parse_grant_key,
)
from flowfabric.model.handle import MAX_LEASE_TTL_MS, Handle
from flowfabric.model.ids import (
    ExecutionId,
    WorkerInstanceId,
    check_lane_id,
    check_worker_id,
    mint_uuid_texts,
    parse_uuid,
)
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.policy import reclaim_cap
from flowfabric.model.text import check_range, shown

logger = logging.getLogger(__name__)
Claimed = TypeVar("Claimed")

OPERATOR = "operator"
"""The worker id of a lease that an operator takes."""
MAX_TIME = 2**62 - 1
MAX_INDEX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The lease a caller asks for, and the worker that gets it."""

    worker_id: str
    worker_instance_id: WorkerInstanceId
    lease_ttl_ms: int
    lease_id: UUID | str
    attempt_id: UUID | str
    attempt_policy: str | None = None
    timeout_ms: int | None = None
    """None: the timeout of the policy, or the time an interrupted attempt has left; 0: no timeout."""
    deadline_at: int | None = None

    @classmethod
    def of(
        cls,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        lease_id: UUID | str | None = None,
        attempt_id: UUID | str | None = None,
        attempt_policy_json: str | None = None,
        attempt_timeout_ms: int | None = None,
        execution_deadline_at: int | None = None,
        attempt_index: int | None = None,
    ) -> "Lease":
        """Check a caller's arguments; `attempt_index` is checked for its range only, the stored row decides."""
        check_range(lease_ttl_ms, "lease_ttl_ms", 1, MAX_LEASE_TTL_MS)
        for value, field, most in (
            (attempt_timeout_ms, "attempt_timeout_ms", MAX_TIME),
            (execution_deadline_at, "execution_deadline_at", MAX_TIME),
            (attempt_index, "attempt_index", MAX_INDEX),
        ):
            if value is not None:
                check_range(value, field, 0, most)
        instance = WorkerInstanceId(check_worker_id(worker_instance_id, "worker_instance_id"))
        wanted = mint_uuid_texts(1)[0] if lease_id is None else parse_uuid(lease_id, "lease_id")
        return cls(
            worker_id=check_worker_id(worker_id, "worker_id"),
            worker_instance_id=instance,
            lease_ttl_ms=lease_ttl_ms,
            lease_id=wanted,
            # The lease that begins an attempt gives the attempt its id.
            attempt_id=wanted if attempt_id is None else parse_uuid(attempt_id, "attempt_id"),
            attempt_policy=_attempt_policy(attempt_policy_json),
            timeout_ms=attempt_timeout_ms,
            deadline_at=execution_deadline_at or None,
        )


class NamedClaims:
    """The claims that name their execution."""

    def __init__(self, store: Store, keys: Keys, admissions: Admissions) -> None:
        self._store = store
        self._keys = keys
        self._admissions = admissions

    async def claim_execution(
        self,
        *,
        execution_id: str,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        lease_id: UUID | str | None = None,
        attempt_id: UUID | str | None = None,
        expected_attempt_index: int | None = None,
        attempt_policy_json: str | None = None,
        attempt_timeout_ms: int | None = None,
        execution_deadline_at: int | None = None,
    ) -> ClaimedExecution:
        """Lease an execution with the worker's grant, which is consumed."""
        lease = Lease.of(
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            lease_id=lease_id,
            attempt_id=attempt_id,
            attempt_policy_json=attempt_policy_json,
            attempt_timeout_ms=attempt_timeout_ms,
            execution_deadline_at=execution_deadline_at,
            attempt_index=expected_attempt_index,
        )
        parsed = check_named(self._store, execution_id)
        lane = check_lane_id(lane_id)

        async def claim(transaction: Transaction) -> ClaimedExecution:
            locked = await lock_with_grant(transaction, parsed, lane)
            if locked.is_held_for_cancel:
                raise error("execution_not_leaseable", "its flow is cancelled")
            if locked.is_lost and locked.is_granted_to(lease.worker_id, GrantKind.RECLAIM):
                if locked.reclaim_count >= reclaim_cap(locked.execution_policy):
                    raise error("execution_not_leaseable", "its lease was lost as often as its policy allows")
                return await self.take(transaction, locked, "reclaimed", lease)
            if refusal := _why_not_fresh(locked, lease.worker_id):
                raise refusal
            return await self.take(transaction, locked, "fresh", lease)

        return await self._transact(claim, parsed)

    async def claim_resumed_execution(
        self,
        *,
        execution_id: str,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        lease_id: UUID | str | None = None,
        current_attempt_index: int | None = None,
        remaining_attempt_timeout_ms: int | None = None,
    ) -> ClaimedExecution:
        """Lease an execution whose interrupted attempt may continue; no grant is needed."""
        lease = Lease.of(
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            lease_id=lease_id,
            attempt_timeout_ms=remaining_attempt_timeout_ms,
            attempt_index=current_attempt_index,
        )
        parsed = check_named(self._store, execution_id)
        lane = check_lane_id(lane_id)

        async def claim(transaction: Transaction) -> ClaimedExecution:
            locked = await lock_with_grant(transaction, parsed, lane)
            if locked.lifecycle_phase == "suspended":
                raise error("not_a_resumed_execution", _state_of(locked))
            if locked.lifecycle_phase != "runnable" or not locked.is_claimable:
                raise error("execution_not_leaseable", _state_of(locked))
            if locked.attempt_state != "attempt_interrupted":
                raise error("not_a_resumed_execution", _state_of(locked))
            if not locked.is_on_open_lane:
                raise error("execution_not_leaseable", f"lane {locked.lane_id} is {locked.lane_state}")
            if locked.has_live_grant and locked.grant_worker_id != lease.worker_id:
                raise error("invalid_claim_grant", "it is granted to another worker")
            return await self.take(transaction, locked, "resumed", lease, reason=AcquireReason.CLAIM_RESUMED)

        return await self._transact(claim, parsed)

    async def claim_from_resume_grant(self, token: ResumeToken) -> Handle | None:
        """Lease an execution with a grant to resume its attempt; None if the attempt can no longer be resumed."""
        if not isinstance(token, ResumeToken):
            raise error("invalid_input", f"token: expected a ResumeToken, got {shown(token)}")
        grant_key = token.grant.grant_key
        parsed = check_named(self._store, token.grant.execution_id)
        lane = check_lane_id(token.grant.lane_id)
        key = parse_grant_key(grant_key)
        lease = Lease.of(
            worker_id=token.worker_id,
            worker_instance_id=token.worker_instance_id,
            lease_ttl_ms=token.lease_ttl_ms,
        )

        async def claim(transaction: Transaction) -> ClaimedExecution | None:
            locked = await lock_with_grant(transaction, parsed, lane)
            is_resumable = locked.lifecycle_phase == "runnable" and locked.is_claimable
            if not is_resumable or locked.attempt_state != "attempt_interrupted" or not locked.is_on_open_lane:
                return None
            if failure := await self._grant_failure(transaction, locked, key, grant_key, lease.worker_id):
                raise failure.refusal()
            return await self.take(transaction, locked, "resumed", lease, reason=AcquireReason.CLAIM_RESUMED)

        claimed = await self._transact(claim, parsed)
        return None if claimed is None else claimed.handle

    async def issue_grant_and_claim(self, *, execution_id: str, lane_id: str, lease_duration_ms: int) -> GrantedClaim:
        """Lease one execution without a worker, for an operator."""
        parsed = check_named(self._store, execution_id)
        lane = check_lane_id(lane_id)
        lease = Lease.of(worker_id=OPERATOR, worker_instance_id=OPERATOR, lease_ttl_ms=lease_duration_ms)

        async def claim(transaction: Transaction) -> ClaimedExecution:
            locked = await lock_with_grant(transaction, parsed, lane)
            if refusal := _why_not_for_operator(locked):
                raise refusal
            if locked.attempt_state == "attempt_interrupted":
                reason = AcquireReason.ISSUE_GRANT_AND_CLAIM_RESUMED
                return await self.take(transaction, locked, "resumed", lease, reason=reason)
            return await self.take(transaction, locked, "fresh", lease, reason=AcquireReason.ISSUE_GRANT_AND_CLAIM)

        claimed = await self._transact(claim, parsed)
        return GrantedClaim(
            lease_id=claimed.lease_id, lease_epoch=claimed.lease_epoch, attempt_index=claimed.attempt_index
        )

    async def take(
        self,
        transaction: Transaction,
        locked: LockedWithGrant,
        branch: str,
        lease: Lease,
        *,
        reason: str | None = None,
    ) -> ClaimedExecution:
        """Lease an execution that the transaction has locked and checked; its grant is consumed."""
        if lease.timeout_ms is not None:
            timeout_ms = lease.timeout_ms or None
        else:
            timeout_ms = locked.remaining_attempt_timeout_ms if branch == "resumed" else locked.attempt_timeout_ms
        slot_keys = await self._admissions.take_slots(
            transaction, locked.execution_id, locked.quota_key_nos, locked.slot_keys or ()
        )
        (row,) = await transaction.fetch(
            SQL.lease_locked,
            partition_key=locked.partition_key,
            execution_id=locked.execution_id,
            branch=branch,
            worker_no=await self._store.worker_no_within(transaction, lease.worker_id, lease.worker_instance_id),
            lease_ttl_ms=lease.lease_ttl_ms,
            lease_ids=[lease.lease_id],
            attempt_id=lease.attempt_id,
            attempt_policy=lease.attempt_policy,
            timeout_ms=timeout_ms,
            deadline_at=lease.deadline_at,
            reason=reason,
            slot_keys=slot_keys or None,
            known_queues=(),
            knows_queues=False,
            slots=1,
            least_ahead_ms=0,
            **CLAIM_PARAMETERS,
        )
        if branch == "reclaimed" and (locked.reclaim_count + 1) % WARN_EVERY_RECLAIMS == 0:
            logger.warning("%s was reclaimed %d times", locked.id, locked.reclaim_count + 1)
        return claimed_of(row, lease.worker_instance_id, lease.lease_ttl_ms, Queues())

    async def _transact(self, claim: Callable[[Transaction], Awaitable[Claimed]], execution_id: ExecutionId) -> Claimed:
        claimed = await self._store.transact(claim, execution_id=execution_id)
        self._store.wakeups.events(EventFamily.LEASE)
        return claimed

    async def _grant_failure(
        self, transaction: Transaction, locked: LockedWithGrant, key: GrantKey, grant_key: str, worker_id: str
    ) -> GrantFailure | None:
        """Return why a grant key is not valid for this worker and execution, None if it is."""
        if key.execution_id != locked.id:
            return GrantFailure.UNKNOWN_GRANT
        if locked.has_forgotten_grant and key.expires_at_ms == locked.granted_until:
            return GrantFailure.EXPIRED
        if locked.grant_id != grant_id(grant_key) or locked.grant_worker_id != worker_id:
            return GrantFailure.UNKNOWN_GRANT
        signer = await self._keys.verifying(transaction, key.kid)
        if signer is None:
            return GrantFailure.UNKNOWN_KID
        if not key.is_signed_by(signer, worker_id, locked.grant_worker_instance_id or ""):
            return GrantFailure.SIGNATURE_MISMATCH
        return None if locked.has_live_grant else GrantFailure.EXPIRED


def _why_not_fresh(locked: LockedWithGrant, worker_id: str) -> EngineError | None:
    """Return why this worker's grant cannot begin a new attempt, None if it can."""
    state = _state_of(locked)
    if locked.lifecycle_phase != "runnable":
        return error("execution_not_leaseable", state)
    if locked.ownership_state != "unowned":
        return error("lease_conflict", state)
    if locked.eligibility_state != "eligible_now" or locked.terminal_outcome != "none":
        return error("execution_not_leaseable", state)
    if locked.attempt_state == "running_attempt":
        return error("active_attempt_exists", state)
    if locked.attempt_state == "attempt_interrupted":
        return error("use_claim_resumed_execution", state)
    if locked.grant_kind != GrantKind.CLAIM or locked.grant_worker_id != worker_id:
        return error("invalid_claim_grant", f"worker {worker_id!r} has no claim grant for it; issue one first")
    return None if locked.has_live_grant else error("claim_grant_expired", "issue a new grant")


def _why_not_for_operator(locked: LockedWithGrant) -> EngineError | None:
    """Return why an operator cannot lease an execution, None if it can."""
    state = _state_of(locked)
    if locked.lifecycle_phase != "runnable":
        return error("execution_not_eligible", state)
    if locked.ownership_state != "unowned":
        return error("lease_conflict", state)
    if locked.terminal_outcome != "none":
        return error("execution_not_eligible", state)
    if locked.attempt_state == "running_attempt":
        return error("active_attempt_exists", state)
    if locked.has_live_grant:
        return error("grant_already_exists", f"worker {locked.grant_worker_id!r} holds it")
    if locked.attempt_state == "attempt_interrupted":
        return None if locked.is_claimable else error("execution_not_eligible", state)
    if locked.is_claimable and locked.is_on_open_lane:
        return None
    return error("execution_not_in_eligible_set", f"{state}, on lane {locked.lane_id}, which is {locked.lane_state}")


def _state_of(locked: LockedWithGrant) -> str:
    return (
        f"it is {locked.lifecycle_phase}, {locked.ownership_state}, {locked.eligibility_state}, {locked.attempt_state}"
    )


def _attempt_policy(text: str | None) -> str | None:
    try:
        policy = check_json(text, "attempt_policy_json")
    except EngineError:
        raise error("invalid_policy_json", "malformed") from None
    if policy is not None and not policy.lstrip().startswith("{"):
        raise error("invalid_policy_json", "attempt_policy:not_object")
    return policy
