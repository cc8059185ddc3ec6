"""Lock a flow's row: everything that changes a graph or resolves its edges locks it first, before any execution."""

from collections.abc import Sequence
from typing import cast
from uuid import UUID

import msgspec

from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.flow import CLOSED_FLOW_STATES
from flowfabric.model.ids import ExecutionId, FlowId, flow_partition, format_execution_id, parse_uuid

SQL = statements_beside(__file__)


class LockedFlow(msgspec.Struct, frozen=True, kw_only=True):
    """A flow whose row the transaction has locked."""

    partition_key: int
    flow_id: UUID
    public_flow_state: str
    graph_revision: int
    node_count: int
    ended_at: int | None
    cancel_reason: str | None
    cancellation_policy: str | None

    @property
    def is_closed(self) -> bool:
        """Whether the graph can no longer change."""
        return self.public_flow_state in CLOSED_FLOW_STATES

    def member(self, uuid: UUID | str) -> ExecutionId:
        """The id of an execution of this flow's partition."""
        return format_execution_id(self.partition_key, uuid)


def check_flow_id(store: Store, flow_id: object) -> tuple[int, FlowId]:
    """Return the partition and the id of a flow given as a UUID or as text."""
    parsed = FlowId(parse_uuid(flow_id, "flow_id"))
    return flow_partition(parsed, store.rules.partitions.flow), parsed


async def flow_exists(store: Store, partition_key: int, flow_id: FlowId) -> bool:
    """Whether there is a flow with this id, for the answer of a call that would create it."""
    rows = await store.fetch(SQL.read_flow_exists, partition_key=partition_key, flow_id=flow_id)
    return bool(rows[0]["is_present"])


async def lock_flows(
    transaction: Transaction, keys: Sequence[tuple[int, UUID]], *, waits: bool = True
) -> list[LockedFlow]:
    """Lock the rows of flows until the transaction ends, in ascending order.

    Those that do not exist are left out, and unless `waits`, those that another session has locked.
    """
    rows = await transaction.fetch(
        SQL.lock_flows if waits else SQL.lock_free_flows,
        partition_keys=[partition for partition, _ in keys],
        flow_ids=[flow_id for _, flow_id in keys],
    )
    return [LockedFlow(**row) for row in rows]


async def lock_flow_if_exists(transaction: Transaction, partition_key: int, flow_id: FlowId) -> LockedFlow | None:
    """Lock a flow's row until the transaction ends, waiting for it; return None if there is none."""
    locked = await lock_flows(transaction, [(partition_key, flow_id)])
    return locked[0] if locked else None


async def lock_flow(transaction: Transaction, partition_key: int, flow_id: FlowId) -> LockedFlow:
    """Lock a flow's row until the transaction ends, waiting for it."""
    locked = await lock_flow_if_exists(transaction, partition_key, flow_id)
    if locked is None:
        raise error("flow_not_found", str(flow_id))
    return locked


async def lock_open_flow(transaction: Transaction, partition_key: int, flow_id: FlowId) -> LockedFlow:
    """Lock the row of a flow whose graph may change; raise if the flow was cancelled."""
    locked = await lock_flow(transaction, partition_key, flow_id)
    if locked.is_closed:
        raise error("flow_already_terminal", f"flow {flow_id} is {locked.public_flow_state}")
    return locked


async def read_flow_of(transaction: Transaction, partition_key: int, execution_id: UUID | str) -> FlowId | None:
    """The flow of an execution, None outside of flows; it can become a member until its row is locked."""
    rows = await transaction.fetch(SQL.read_flow_of, partition_key=partition_key, execution_id=execution_id)
    return cast("FlowId", rows[0]["flow_id"]) if rows and rows[0]["flow_id"] is not None else None
