"""Lock an execution's row, and check a fence against it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast
from uuid import UUID, uuid4

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.transition import LIMITED_STATES
from flowfabric.engine.core.wakeups import CascadeKey, Work
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.grant import GrantKind
from flowfabric.model.handle import Fence, Handle, check_handle
from flowfabric.model.ids import (
    AttemptId,
    ExecutionId,
    LeaseId,
    check_partition,
    check_storable,
    format_execution_id,
    parse_execution_id,
    parse_uuid,
    split_execution_id,
)
from flowfabric.model.policy import ExecutionPolicy, read_stored_policy
from flowfabric.model.states import BlockingReason, CancelSource, EligibilityState, HandleKind
from flowfabric.model.text import check_range, check_text

SQL = statements_beside(__file__)

_LOST = frozenset({"lease_expired_reclaimable", "lease_revoked"})


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a refused write found on the execution's row."""

    terminal_outcome: str
    lifecycle_phase: str
    lease_epoch: int
    attempt_id: UUID | None
    attempt_state: str = ""
    attempt_count: int = 0
    delay_until: int | None = None

    def is_run_of(self, handle: Handle) -> bool:
        """Whether the last run of the execution was the one this handle held."""
        return self.lease_epoch == handle.lease_epoch and self.attempt_id == handle.attempt_id


class Verdict(msgspec.Struct, frozen=True):
    """The result of a fenced write on one row: done or why not, and the delay or the claimable work it leads to."""

    code: str
    found: Found | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    work: Work | None = None
    """Where the execution can be claimed now."""
    lease_epoch: int | None = None
    attached: int = 0
    """The attachments of the execution when its lease or the execution ended."""
    slot_keys: tuple[int, ...] = ()
    """The quota keys of which it has returned a slot."""
    entry: CascadeKey | None = None
    """What the cascade has to settle, if a member of a flow has ended."""

    @property
    def is_done(self) -> bool:
        """Whether the write was done."""
        return self.code == "ok"

    def refusal(self, *, stale: str = "lease_conflict") -> EngineError:
        """The error for a write that was refused; `stale` is the code for a fence that is not the current one."""
        if self.found is not None:
            return not_active(self.found)
        return error(stale if self.code == "stale_fence" else self.code)


DONE = Verdict("ok")
_read_found = msgspec.json.Decoder(Found).decode


def verdict_of(row: Record) -> Verdict:
    """The verdict that a statement returned for a row it could lock."""
    found = row["found"]
    return Verdict(row["verdict"], None if found is None else _read_found(found))


def not_active(found: Found) -> EngineError:
    """The error for an execution that is not active.

    Its detail shows a caller that lost a reply whether its own call ended the execution.
    """
    return error(
        "execution_not_active",
        {
            "terminal_outcome": found.terminal_outcome,
            "lease_epoch": str(found.lease_epoch),
            "lifecycle_phase": found.lifecycle_phase,
            "attempt_id": str(found.attempt_id or ""),
        },
    )


class LockedExecution(msgspec.Struct, frozen=True, kw_only=True):
    """An execution whose row the transaction has locked: its state, its lease, and the time of the lock."""

    partition_key: int
    execution_id: UUID
    lifecycle_phase: str
    ownership_state: str
    eligibility_state: str
    terminal_outcome: str
    lease_epoch: int
    lease_id: UUID | None
    attempt_id: UUID | None
    attempt_count: int
    lease_expires_at: int | None
    now: int

    @property
    def id(self) -> ExecutionId:
        """The execution's id in its public form."""
        return format_execution_id(self.partition_key, self.execution_id)

    @property
    def attempt_index(self) -> int:
        """The index of the latest attempt."""
        return self.attempt_count - 1

    @property
    def is_lost(self) -> bool:
        """Whether the lease is marked as expired or revoked."""
        return self.ownership_state in _LOST

    @property
    def has_expired(self) -> bool:
        """Whether the lease has expired and is not yet marked as expired."""
        return self.ownership_state == "leased" and (self.lease_expires_at or 0) <= self.now

    @property
    def found(self) -> Found:
        """The fields for the error about an execution that is not active."""
        return Found(
            terminal_outcome=self.terminal_outcome,
            lifecycle_phase=self.lifecycle_phase,
            lease_epoch=self.lease_epoch,
            attempt_id=self.attempt_id,
        )


def execution_keys(execution_ids: Iterable[ExecutionId]) -> dict[str, object]:
    """The keys of executions, as parameters of a statement."""
    pairs = [split_execution_id(execution_id) for execution_id in execution_ids]
    return {"partition_keys": [partition for partition, _ in pairs], "execution_ids": [uuid for _, uuid in pairs]}


async def lock_executions(
    transaction: Transaction, execution_ids: Sequence[ExecutionId], *, waits: bool = True
) -> tuple[int, list[LockedExecution | None]]:
    """Lock executions until the transaction ends; return the time before any wait, and the rows in the order given.

    None stands for an execution that is absent or, unless `waits`, locked by another session.
    """
    statement = SQL.lock_executions if waits else SQL.lock_free_executions
    rows = await transaction.fetch(statement, **execution_keys(execution_ids))
    return rows[0]["began"], [None if row["execution_id"] is None else _locked(row) for row in rows]


def _locked(row: Record) -> LockedExecution:
    return LockedExecution(**{name: row[name] for name in LockedExecution.__struct_fields__})


async def lock_execution_if_exists(transaction: Transaction, execution_id: ExecutionId) -> LockedExecution | None:
    """Lock an execution's row, waiting for it; return None if there is none."""
    _, (locked,) = await lock_executions(transaction, [execution_id])
    return locked


async def lock_execution(transaction: Transaction, execution_id: ExecutionId) -> LockedExecution:
    """Lock an execution's row, waiting for it, so that the next statement decides from its latest version."""
    locked = await lock_execution_if_exists(transaction, execution_id)
    if locked is None:
        raise error("execution_not_found", execution_id)
    return locked


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenFence:
    """The fence that the caller of a service operation gave, complete or absent, and optionally the attempt index."""

    fence: Fence | None
    attempt_index: int | None

    @classmethod
    def read(
        cls,
        lease_id: UUID | str | None,
        lease_epoch: int | None,
        attempt_id: UUID | str | None,
        attempt_index: int | None,
        *,
        source: str | None = None,
    ) -> Self:
        """Check a caller's fence: it must be complete, and only an operator override may omit it."""
        if source is not None:
            check_text(source, "source")
        if attempt_index is not None:
            check_range(attempt_index, "attempt_index", 0, 2**31 - 1)
        if not lease_id and lease_epoch is None and not attempt_id:
            if source == CancelSource.OPERATOR_OVERRIDE:
                return cls(fence=None, attempt_index=attempt_index)
            raise error("invalid_input", "fence_required: give lease_id, lease_epoch and attempt_id of the lease")
        if not lease_id or lease_epoch is None or not attempt_id:
            parts = {"lease_id": not lease_id, "lease_epoch": lease_epoch is None, "attempt_id": not attempt_id}
            missing = " and ".join(name for name, is_missing in parts.items() if is_missing)
            raise error("invalid_input", f"partial_fence_triple: {missing} missing, give all three")
        check_range(lease_epoch, "lease_epoch", 0, 2**63 - 1)
        fence = Fence(
            lease_id=LeaseId(parse_uuid(lease_id, "lease_id")),
            lease_epoch=lease_epoch,
            attempt_id=AttemptId(parse_uuid(attempt_id, "attempt_id")),
        )
        return cls(fence=fence, attempt_index=attempt_index)

    def against(self, locked: LockedExecution) -> Fence:
        """The fence to check against a locked row: the given one, else the row's own."""
        fence = self.fence
        if fence is None:
            if locked.lifecycle_phase != "active":
                raise not_active(locked.found)
            # The ids are null on a row that is active without a lease; the statement refuses that.
            fence = Fence(
                lease_id=cast("LeaseId", locked.lease_id),
                lease_epoch=locked.lease_epoch,
                attempt_id=cast("AttemptId", locked.attempt_id),
            )
        if self.attempt_index is None or self.attempt_index == locked.attempt_index:
            return fence
        # A wrong attempt index is reported as a stale fence, after all other checks: an unknown lease id does that.
        return replace(fence, lease_id=LeaseId(uuid4()))


def check_fence(locked: LockedExecution, fence: Handle | Fence) -> None:
    """Raise if the fence is not the current one of a locked execution, in the order that every fenced write uses."""
    if locked.lease_epoch != fence.lease_epoch:
        raise error("lease_conflict")
    if locked.lifecycle_phase != "active":
        raise not_active(locked.found)
    if locked.ownership_state == "lease_revoked":
        raise error("lease_revoked")
    if locked.ownership_state != "leased" or locked.lease_expires_at is None or locked.lease_expires_at <= locked.now:
        raise error("lease_expired")
    if locked.lease_id != fence.lease_id or locked.attempt_id != fence.attempt_id:
        raise error("lease_conflict")


def check_lease_handle(handle: Handle) -> Handle:
    """Return the handle; raise if it cannot belong to a lease of this store."""
    handle = check_handle(handle)
    if handle.kind is HandleKind.SUSPENDED:
        raise error(
            "lease_conflict", "the handle is of a suspended run, whose lease has ended; claim it after it resumes"
        )
    check_storable(handle.execution_id)
    return handle


class LockedWithGrant(LockedExecution, frozen=True, kw_only=True):
    """A locked execution with its queue, lane and grant, as grants and claims by id need it."""

    attempt_state: str
    blocking_reason: str
    queue_no: int
    place: int
    reclaim_count: int
    remaining_attempt_timeout_ms: int | None
    granted_until: int | None
    lane_no: int
    lane_id: str
    lane_state: str
    required: list[str]
    quota_key_nos: list[int]
    """The keys of the quotas that limit it."""
    slot_keys: list[int] | None
    """The quota keys of which it holds a slot."""
    policy: str | None
    grant_kind: str | None
    grant_worker_id: str | None
    grant_worker_instance_id: str | None
    grant_id: bytes | None
    grant_expires_at: int | None
    signing_kid: str | None
    signing_since: int

    @property
    def execution_policy(self) -> ExecutionPolicy | None:
        """The policy frozen at creation."""
        return read_stored_policy(self.policy)

    @property
    def attempt_timeout_ms(self) -> int | None:
        """The attempt timeout of the policy."""
        policy = self.execution_policy
        timeouts = policy.timeout_policy if policy is not None else None
        return (timeouts.attempt_timeout_ms or None) if timeouts is not None else None

    @property
    def has_live_grant(self) -> bool:
        """Whether an unexpired grant reserves it for a worker."""
        return self.grant_expires_at is not None and self.grant_expires_at > self.now

    @property
    def has_forgotten_grant(self) -> bool:
        """Whether its last grant has expired and its row is deleted."""
        return self.grant_id is None and self.granted_until is not None and self.granted_until <= self.now

    @property
    def is_claimable(self) -> bool:
        """Whether a claim that names it may lease it: limits do not refuse it."""
        return self.eligibility_state == EligibilityState.ELIGIBLE_NOW or self.eligibility_state in LIMITED_STATES

    @property
    def is_held_for_cancel(self) -> bool:
        """Whether its cancelled flow holds it back until it is cancelled."""
        return self.blocking_reason == BlockingReason.PAUSED_BY_FLOW_CANCEL

    @property
    def is_on_open_lane(self) -> bool:
        """Whether its lane allows claims."""
        return self.lane_state in ("active", "draining")

    def is_granted_to(self, worker_id: str, kind: GrantKind) -> bool:
        """Whether this worker has an unexpired grant of this kind."""
        return self.has_live_grant and self.grant_kind == kind and self.grant_worker_id == worker_id

    def missing(self, offered: tuple[str, ...]) -> str:
        """The required capabilities that are not offered, sorted and joined by commas."""
        return ",".join(sorted(set(self.required) - set(offered)))


def check_named(store: Store, execution_id: object) -> ExecutionId:
    """Return a caller's execution id, checked against the partitions of this deployment."""
    parsed = parse_execution_id(execution_id)
    check_partition(parsed, store.rules.partitions.flow)
    return parsed


async def lock_with_grant(transaction: Transaction, execution_id: ExecutionId, lane_id: str) -> LockedWithGrant:
    """Lock an execution's row, waiting for it, and read it with its queue, lane and grant."""
    await lock_execution(transaction, execution_id)
    locked = await read_with_grant(transaction, *split_execution_id(execution_id))
    if locked.lane_id != lane_id:
        raise error("invalid_input", f"lane_id: the execution is on lane {locked.lane_id!r}, got {lane_id!r}")
    return locked


async def read_with_grant(transaction: Transaction, partition_key: int, execution_id: UUID | str) -> LockedWithGrant:
    """Read an execution that the transaction has already locked."""
    (row,) = await transaction.fetch(SQL.read_with_grant, partition_key=partition_key, execution_id=execution_id)
    return LockedWithGrant(**row)


class LockedRun(LockedExecution, frozen=True, kw_only=True):
    """A locked run, with what suspending it needs."""

    lease_ttl_ms: int | None
    namespace_no: int
    lane_no: int
    lane_id: str
    worker_instance_id: str | None
    policy: str | None
    signing_kid: str | None
    signing_since: int
    has_open_suspension: bool
    outcome: str | None
    outcome_attempt_index: int | None


async def read_runs(transaction: Transaction, runs: Sequence[tuple[ExecutionId, str | None]]) -> list[LockedRun]:
    """Read runs that the transaction has already locked, each with the earlier outcome of its idempotency key."""
    rows = await transaction.fetch(
        SQL.read_runs,
        **execution_keys(execution_id for execution_id, _ in runs),
        idempotency_keys=[key for _, key in runs],
    )
    return [LockedRun(**row) for row in rows]
