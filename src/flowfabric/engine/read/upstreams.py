"""The results that the arguments of a member of a flow are filled from."""

from collections.abc import Sequence
from uuid import UUID

import msgspec

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import literal, required
from flowfabric.engine.store import Store
from flowfabric.model.edge import DependencyState
from flowfabric.model.ids import EdgeId, ExecutionId, format_execution_id, parse_execution_id, row_key
from flowfabric.model.states import PublicState

SQL = statements_beside(__file__)


class UpstreamResult(msgspec.Struct, frozen=True, kw_only=True):
    """An edge to a member of a flow, and the result of its upstream execution if that has satisfied it."""

    edge_id: EdgeId
    upstream_execution_id: ExecutionId
    upstream_id: UUID
    execution_kind: str
    public_state: PublicState
    dependency_state: DependencyState
    last_resolved_at: int | None
    result_payload: bytes | None
    result_encoding: str | None

    @property
    def has_result(self) -> bool:
        """Whether the upstream execution has satisfied the edge and has not been replayed since."""
        return self.dependency_state is DependencyState.SATISFIED and self.public_state is PublicState.COMPLETED


class Upstreams:
    """Reads the results of upstream executions, for the worker."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read_upstream_results(
        self, execution_id: ExecutionId | str, upstream_ids: Sequence[UUID]
    ) -> list[UpstreamResult]:
        """The edges from these executions to a member of a flow, with their results, in the order of resolution."""
        partition, uuid = row_key(parse_execution_id(execution_id))
        rows = await self._store.fetch(
            SQL.list_upstream_results, partition_key=partition, execution_id=uuid, upstream_ids=upstream_ids
        )
        found = []
        for row in rows:
            upstream = format_execution_id(partition, row["upstream_id"])
            context = f"upstream {upstream} of {execution_id}"
            found.append(
                UpstreamResult(
                    edge_id=EdgeId(row["edge_id"]),
                    upstream_execution_id=upstream,
                    upstream_id=row["upstream_id"],
                    execution_kind=required(row["execution_kind"], context=context, field="execution_kind"),
                    public_state=literal(PublicState, row["public_state"], context=context, field="public_state"),
                    dependency_state=literal(
                        DependencyState, row["dependency_state"], context=context, field="dependency_state"
                    ),
                    last_resolved_at=row["last_resolved_at"],
                    result_payload=row["result_payload"],
                    result_encoding=row["result_encoding"],
                )
            )
        # Not in SQL, where a sort would carry the payloads.
        return sorted(found, key=lambda each: (each.last_resolved_at or 0, each.edge_id))
