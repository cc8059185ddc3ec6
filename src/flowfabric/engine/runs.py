"""Runs that a transaction holds, and their waitpoints, as suspends and waitpoints look at them."""

from collections.abc import Sequence
from uuid import UUID

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.model.ids import ExecutionId, split_execution_id

SQL = statements_beside(__file__)


class HeldRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a transaction holds, and what is needed to let it wait."""

    partition_key: int
    execution_id: UUID
    lifecycle_phase: str
    ownership_state: str
    terminal_outcome: str
    lease_epoch: int
    lease_id: UUID | None
    attempt_id: UUID | None
    attempt_count: int
    lease_expires_at: int | None
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
    now: int

    @property
    def attempt_index(self) -> int:
        """The index of the latest attempt."""
        return self.attempt_count - 1


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


async def read_waitpoint(transaction: Transaction, partition_key: int, waitpoint_id: UUID) -> Record | None:
    """Read a waitpoint of an execution that the transaction holds, if there is one."""
    rows = await transaction.fetch(SQL.read_waitpoint, partition_key=partition_key, waitpoint_id=waitpoint_id)
    return rows[0] if rows else None
