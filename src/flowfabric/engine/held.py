"""An execution that a transaction holds, as grants and named claims look at it."""

from uuid import UUID

import msgspec

from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.fence import lock_execution
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.grants import GrantKind
from flowfabric.model.ids import (
    ExecutionId,
    check_partition,
    format_execution_id,
    parse_execution_id,
    split_execution_id,
)
from flowfabric.model.policy import ExecutionPolicy, read_stored_policy

SQL = statements_beside(__file__)

_LOST = frozenset({"lease_expired_reclaimable", "lease_revoked"})


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a held row, its grant, and what both are judged by."""

    partition_key: int
    execution_id: UUID
    lifecycle_phase: str
    ownership_state: str
    eligibility_state: str
    terminal_outcome: str
    attempt_state: str
    queue_no: int
    place: int
    reclaim_count: int
    lease_epoch: int
    lease_expires_at: int | None
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
    now: int

    @property
    def id(self) -> ExecutionId:
        """The execution's id as callers write it."""
        return format_execution_id(self.partition_key, self.execution_id)

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
    def is_lost(self) -> bool:
        """Whether a lease was lost and marked so."""
        return self.ownership_state in _LOST

    @property
    def has_lapsed(self) -> bool:
        """Whether the lease is past its expiry, which nobody has marked yet."""
        return self.ownership_state == "leased" and (self.lease_expires_at or 0) <= self.now

    @property
    def has_live_grant(self) -> bool:
        """Whether a worker has it reserved."""
        return self.grant_expires_at is not None and self.grant_expires_at > self.now

    @property
    def has_forgotten_grant(self) -> bool:
        """Whether its last grant lapsed so long ago that it is deleted: only when it ran out is still known."""
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
    """Give the id of an execution of this deployment that a caller names."""
    parsed = parse_execution_id(execution_id)
    check_partition(parsed, store.rules.partitions.flow)
    return parsed


async def hold(transaction: Transaction, execution_id: ExecutionId, lane_id: str) -> Held:
    """Wait for an execution's row, hold it, and read what it is now."""
    await lock_execution(transaction, execution_id)
    held = await read(transaction, *split_execution_id(execution_id))
    if held.lane_id != lane_id:
        raise error("invalid_input", f"lane_id: the execution is on {held.lane_id!r}")
    return held


async def read(transaction: Transaction, partition_key: int, execution_id: UUID | str) -> Held:
    """Read an execution that the transaction holds already."""
    (row,) = await transaction.fetch(SQL.read_held, partition_key=partition_key, execution_id=execution_id)
    return Held(**row)
