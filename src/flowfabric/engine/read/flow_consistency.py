"""The consistency check of flows: their counts, groups and edges, and what is queued for them."""

from collections.abc import Iterable, Mapping

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.execution import Inconsistency
from flowfabric.model.ids import FlowId, format_execution_id

SQL = statements_beside(__file__)

RANGE_SIZE = 10_000
"""About how many members and edges are checked in one statement."""
_START = -(2**15), "00000000-0000-0000-0000-000000000000"


async def check_members(store: Store, range_: Mapping[str, object], limit: int) -> list[Inconsistency]:
    """Check what the executions of a range have to do with flows."""
    return _inconsistencies(await store.fetch(SQL.list_broken_members, limit=limit, **range_))


async def check_flows(store: Store, limit: int) -> list[Inconsistency]:
    """Check every flow, and the rows that refer to flows, for up to `limit` inconsistencies."""
    found: list[Inconsistency] = []
    after: tuple[int, object] = _START
    while len(found) < limit:
        start = {"after_partition": after[0], "after_id": after[1]}
        ends = await store.fetch(SQL.read_flow_range_end, size=RANGE_SIZE, **start)
        if not ends:
            found += _inconsistencies(await store.fetch(SQL.list_flow_orphans, limit=limit - len(found)))
            break
        after = ends[0]["partition_key"], ends[0]["flow_id"]
        range_ = {**start, "last_partition": after[0], "last_id": after[1]}
        rows = await store.fetch(SQL.list_broken_flows, limit=limit - len(found), **range_)
        found += sorted(_inconsistencies(rows), key=lambda one: (str(one.flow_id), one.execution_id or ""))
    return found[:limit]


def _inconsistencies(rows: Iterable[Record]) -> list[Inconsistency]:
    return [
        Inconsistency(
            execution_id=None
            if row["execution_id"] is None
            else format_execution_id(row["partition_key"], row["execution_id"]),
            problem=row["problem"],
            flow_id=None if row["flow_id"] is None else FlowId(row["flow_id"]),
        )
        for row in rows
    ]
