"""Counts of executions by lane, state, namespace and kind, without reading every row."""

from collections.abc import Iterable
from enum import StrEnum
from uuid import UUID

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import literal
from flowfabric.engine.read.filters import check_lanes, check_states, check_texts, several
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.execution import ExecutionCount
from flowfabric.model.ids import parse_uuid
from flowfabric.model.states import PublicState
from flowfabric.model.text import shown, word_of

SQL = statements_beside(__file__)


class CountBy(StrEnum):
    """A dimension that executions are counted by."""

    LANE = "lane"
    STATE = "state"
    NAMESPACE = "namespace"
    KIND = "kind"


class Counting:
    """The count operation."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def count_executions(
        self,
        *,
        by: str | Iterable[str] = ("lane", "state"),
        namespace: str | Iterable[str] | None = None,
        lane_id: str | Iterable[str] | None = None,
        public_state: PublicState | str | Iterable[PublicState | str] | None = None,
        execution_kind: str | Iterable[str] | None = None,
        flow_id: UUID | str | None = None,
    ) -> list[ExecutionCount]:
        """Count the executions that match every filter, grouped by lane, state, namespace or kind.

        All counts are of one snapshot; groups without executions are omitted.
        """
        groups = _check_groups(by)
        namespaces = check_texts(namespace, "namespace")
        lanes = check_lanes(lane_id)
        states = check_states(public_state)
        kinds = check_texts(execution_kind, "execution_kind")
        values = {
            "namespaces": namespaces,
            "lanes": lanes,
            "states": sorted(PublicState if states is None else states),
            "kinds": kinds,
            "by_lane": CountBy.LANE in groups,
            "by_state": CountBy.STATE in groups,
            "by_namespace": CountBy.NAMESPACE in groups,
            "by_kind": CountBy.KIND in groups,
        }
        if flow_id is None:
            rows = await self._store.fetch(SQL.count_executions, **values)
        else:
            rows = await self._store.fetch(
                SQL.count_executions_of_flow, flow_id=parse_uuid(flow_id, "flow_id"), **values
            )
        return sorted(map(_count, rows), key=_sort_key)


def _check_groups(by: object) -> frozenset[CountBy]:
    groups = frozenset(map(_check_group, several(by, "by")))
    if not groups:
        raise error("invalid_input", f"by: expected at least one of {', '.join(CountBy)}, got {shown(by)}")
    return groups


def _check_group(value: object) -> CountBy:
    if (group := word_of(CountBy, value)) is None:
        raise error("invalid_input", f"by: expected one or more of {', '.join(CountBy)}, got {shown(value)}")
    return group


def _count(row: Record) -> ExecutionCount:
    state = row["public_state"]
    return ExecutionCount(
        lane_id=row["lane_id"],
        public_state=None
        if state is None
        else literal(PublicState, state, context="count_executions", field="public_state"),
        namespace=row["namespace"],
        execution_kind=row["execution_kind"],
        count=row["executions"],
    )


def _sort_key(count: ExecutionCount) -> tuple[str, str, str, str]:
    return (count.lane_id or "", count.public_state or "", count.namespace or "", count.execution_kind or "")
