"""Holding an execution's row, and judging a fence by what it holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, cast
from uuid import UUID, uuid4

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.wakeups import Work
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.grant import GrantKind
from flowfabric.model.handle import Fence, Handle, check_handle
from flowfabric.model.ids import (
    AttemptId,
    ExecutionId,
    LeaseId,
    check_partition,
    format_execution_id,
    parse_execution_id,
    parse_uuid,
    row_key,
    split_execution_id,
)
from flowfabric.model.policy import ExecutionPolicy, read_stored_policy
from flowfabric.model.states import CancelSource, HandleKind
from flowfabric.model.text import check_range, check_text

SQL = statements_beside(__file__)

_LOST = frozenset({"lease_expired_reclaimable", "lease_revoked"})


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The row a refused write met."""

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
    """What a fenced write came to on one row: done, or why not; and what waits for its time, or for a worker, now."""

    code: str
    found: Found | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    work: Work | None = None
    """What may be claimed now."""
    lease_epoch: int | None = None
    attached: int = 0
    """What hung on the execution, where its lease or it has ended."""

    @property
    def is_done(self) -> bool:
        """Whether the write took place."""
        return self.code == "ok"

    def refusal(self, *, stale: str = "lease_conflict") -> EngineError:
        """The error of a write that did not take place; stale is the word for a fence that is not the current one."""
        if self.found is not None:
            return not_active(self.found)
        return error(stale if self.code == "stale_fence" else self.code)


DONE = Verdict("ok")
_read_found = msgspec.json.Decoder(Found).decode


def verdict_of(row: Record) -> Verdict:
    """The verdict a statement gave on a row it could lock."""
    found = row["found"]
    return Verdict(row["verdict"], None if found is None else _read_found(found))


def not_active(found: Found) -> EngineError:
    """The error that lets a caller who lost a reply tell whether the execution ended by its own call."""
    return error(
        "execution_not_active",
        {
            "terminal_outcome": found.terminal_outcome,
            "lease_epoch": str(found.lease_epoch),
            "lifecycle_phase": found.lifecycle_phase,
            "attempt_id": str(found.attempt_id or ""),
        },
    )


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """An execution whose row a transaction holds: where it stands, whose it is, and the time it is judged by."""

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
        """The execution's id as callers write it."""
        return format_execution_id(self.partition_key, self.execution_id)

    @property
    def attempt_index(self) -> int:
        """The index of the latest attempt."""
        return self.attempt_count - 1

    @property
    def is_lost(self) -> bool:
        """Whether a lease was lost and marked so."""
        return self.ownership_state in _LOST

    @property
    def has_expired(self) -> bool:
        """Whether the lease is past its expiry, which nobody has marked yet."""
        return self.ownership_state == "leased" and (self.lease_expires_at or 0) <= self.now

    @property
    def found(self) -> Found:
        """What the error about an execution that is not active says of it."""
        return Found(
            terminal_outcome=self.terminal_outcome,
            lifecycle_phase=self.lifecycle_phase,
            lease_epoch=self.lease_epoch,
            attempt_id=self.attempt_id,
        )


async def hold_all(
    transaction: Transaction, execution_ids: Sequence[ExecutionId], *, waits: bool = True
) -> tuple[int, list[Held | None]]:
    """Hold executions until the transaction ends; returns the time before any wait and the rows in the order given.

    None stands for an execution that is absent or, without waiting, held by another session.
    """
    pairs = [split_execution_id(execution_id) for execution_id in execution_ids]
    rows = await transaction.fetch(
        SQL.lock_executions if waits else SQL.lock_free_executions,
        partition_keys=[partition for partition, _ in pairs],
        execution_ids=[uuid for _, uuid in pairs],
    )
    return rows[0]["began"], [None if row["execution_id"] is None else _held(row) for row in rows]


def _held(row: Record) -> Held:
    return Held(**{name: row[name] for name in Held.__struct_fields__})


async def hold_if_exists(transaction: Transaction, execution_id: ExecutionId) -> Held | None:
    """Wait for an execution's row and hold it; None where there is none."""
    _, (held,) = await hold_all(transaction, [execution_id])
    return held


async def hold(transaction: Transaction, execution_id: ExecutionId) -> Held:
    """Wait for an execution's row and hold it, so that the next statement decides from what it is now."""
    held = await hold_if_exists(transaction, execution_id)
    if held is None:
        raise error("execution_not_found")
    return held


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenFence:
    """What the caller of a service form says of the lease: the whole fence, or nothing; and maybe the attempt."""

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
        """Check what a caller says; a fence is given whole, and only who may override leases leaves it out."""
        if source is not None:
            check_text(source, "source")
        if attempt_index is not None:
            check_range(attempt_index, "attempt_index", 0, 2**31 - 1)
        if not lease_id and lease_epoch is None and not attempt_id:
            if source == CancelSource.OPERATOR_OVERRIDE:
                return cls(fence=None, attempt_index=attempt_index)
            raise error("invalid_input", "fence_required")
        if not lease_id or lease_epoch is None or not attempt_id:
            raise error("invalid_input", "partial_fence_triple")
        check_range(lease_epoch, "lease_epoch", 0, 2**63 - 1)
        fence = Fence(
            lease_id=LeaseId(parse_uuid(lease_id, "lease_id")),
            lease_epoch=lease_epoch,
            attempt_id=AttemptId(parse_uuid(attempt_id, "attempt_id")),
        )
        return cls(fence=fence, attempt_index=attempt_index)

    def against(self, held: Held) -> Fence:
        """The fence a held row is to be judged by: the given one, else the row's own."""
        fence = self.fence
        if fence is None:
            if held.lifecycle_phase != "active":
                raise not_active(held.found)
            # A row that is active without a lease has a null here, which the statement judges.
            fence = Fence(
                lease_id=cast("LeaseId", held.lease_id),
                lease_epoch=held.lease_epoch,
                attempt_id=cast("AttemptId", held.attempt_id),
            )
        if self.attempt_index is None or self.attempt_index == held.attempt_index:
            return fence
        # Judged where ids are, after everything else: the lease id of nobody makes the fence stale.
        return replace(fence, lease_id=LeaseId(uuid4()))


def judge(held: Held, fence: Handle | Fence) -> None:
    """Refuse a fence that a held execution is not under, in the order in which every fenced write judges it."""
    if held.lease_epoch != fence.lease_epoch:
        raise error("lease_conflict")
    if held.lifecycle_phase != "active":
        raise not_active(held.found)
    if held.ownership_state == "lease_revoked":
        raise error("lease_revoked")
    if held.ownership_state != "leased" or held.lease_expires_at is None or held.lease_expires_at <= held.now:
        raise error("lease_expired")
    if held.lease_id != fence.lease_id or held.attempt_id != fence.attempt_id:
        raise error("lease_conflict")


def usable(handle: Handle) -> Handle:
    """The handle itself, where it stands for a lease this store can hold."""
    handle = check_handle(handle)
    if handle.kind is HandleKind.SUSPENDED:
        raise error("lease_conflict", "the lease ended with the suspension")
    row_key(handle.execution_id)
    return handle


class HeldWithGrant(Held, frozen=True, kw_only=True):
    """A held execution with its queue, its lane and its grant, as grants and named claims judge it."""

    attempt_state: str
    queue_no: int
    place: int
    reclaim_count: int
    remaining_attempt_timeout_ms: int | None
    granted_until: int | None
    lane_no: int
    lane_id: str
    lane_state: str
    required: list[str]
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
        """How long a new attempt may take by the policy."""
        policy = self.execution_policy
        timeouts = policy.timeout_policy if policy is not None else None
        return (timeouts.attempt_timeout_ms or None) if timeouts is not None else None

    @property
    def has_live_grant(self) -> bool:
        """Whether a worker has it reserved."""
        return self.grant_expires_at is not None and self.grant_expires_at > self.now

    @property
    def has_forgotten_grant(self) -> bool:
        """Whether its last grant is deleted; when it expired is still known."""
        return self.grant_id is None and self.granted_until is not None and self.granted_until <= self.now

    @property
    def is_on_open_lane(self) -> bool:
        """Whether its lane lets work be claimed."""
        return self.lane_state in ("active", "draining")

    def is_granted_to(self, worker_id: str, kind: GrantKind) -> bool:
        """Whether a live grant of a kind is this worker's."""
        return self.has_live_grant and self.grant_kind == kind and self.grant_worker_id == worker_id

    def missing(self, offered: tuple[str, ...]) -> str:
        """The required capabilities that are not offered, sorted and joined by commas."""
        return ",".join(sorted(set(self.required) - set(offered)))


def check_named(store: Store, execution_id: object) -> ExecutionId:
    """Return the id of an execution of this deployment that a caller names."""
    parsed = parse_execution_id(execution_id)
    check_partition(parsed, store.rules.partitions.flow)
    return parsed


async def hold_with_grant(transaction: Transaction, execution_id: ExecutionId, lane_id: str) -> HeldWithGrant:
    """Wait for an execution's row, hold it, and read it with its queue, its lane and its grant."""
    await hold(transaction, execution_id)
    held = await read_with_grant(transaction, *split_execution_id(execution_id))
    if held.lane_id != lane_id:
        raise error("invalid_input", f"lane_id: the execution is on {held.lane_id!r}")
    return held


async def read_with_grant(transaction: Transaction, partition_key: int, execution_id: UUID | str) -> HeldWithGrant:
    """Read an execution that the transaction holds already."""
    (row,) = await transaction.fetch(SQL.read_with_grant, partition_key=partition_key, execution_id=execution_id)
    return HeldWithGrant(**row)


class HeldRun(Held, frozen=True, kw_only=True):
    """A held run, and what is needed to let it wait."""

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


async def read_runs(transaction: Transaction, runs: Sequence[tuple[ExecutionId, str | None]]) -> list[HeldRun]:
    """Read runs that the transaction holds already, each with what its idempotency key has come to before."""
    pairs = [split_execution_id(execution_id) for execution_id, _ in runs]
    rows = await transaction.fetch(
        SQL.read_runs,
        partition_keys=[partition for partition, _ in pairs],
        execution_ids=[uuid for _, uuid in pairs],
        idempotency_keys=[key for _, key in runs],
    )
    return [HeldRun(**row) for row in rows]
