"""Counts of executions row by row, to compare with count_executions."""

from collections.abc import Mapping
from typing import Any

import asyncpg

from flowfabric.engine.engine import Engine
from flowfabric.model.execution import ExecutionCount
from flowfabric.model.states import PublicState

COLUMNS = {
    "lane": "lane_id",
    "state": "public_state",
    "namespace": "namespace",
    "kind": "execution_kind",
}
"""The field of a count for each word of `by`."""

_ROWS = """
select l.lane_id, e.public_state::text, n.namespace, k.execution_kind
  from execution e
  join lane l using (lane_no)
  join namespace n using (namespace_no)
  join queue q using (queue_no)
  join kind k using (kind_no)
"""


async def recount(
    connection: asyncpg.Connection, by: tuple[str, ...], filters: Mapping[str, Any]
) -> list[ExecutionCount]:
    """The counts that `count_executions` must return."""
    wanted = {name: {values} if isinstance(values, str) else set(values) for name, values in filters.items()}
    groups: dict[tuple[str | None, ...], int] = {}
    for row in await connection.fetch(_ROWS):
        if all(row[name] in values for name, values in wanted.items()):
            group = tuple(row[column] if word in by else None for word, column in COLUMNS.items())
            groups[group] = groups.get(group, 0) + 1
    return [
        ExecutionCount(
            lane_id=lane_id,  # type: ignore[arg-type]
            public_state=None if state is None else PublicState(state),
            namespace=namespace,  # type: ignore[arg-type]
            execution_kind=kind,
            count=count,
        )
        for (lane_id, state, namespace, kind), count in sorted(groups.items(), key=lambda item: str(item[0]))
    ]


async def miscounts(engine: Engine, connection: asyncpg.Connection, *by: str, **filters: Any) -> list[str]:
    """The differences between count_executions and the rows, by every word unless some are named."""
    by = by or tuple(COLUMNS)
    counted, rows = await engine.count_executions(by=by, **filters), await recount(connection, by, filters)
    missing = [f"counted {one} by {by} of {filters}, not in the rows" for one in counted if one not in rows]
    return missing + [f"not counted: {one} by {by} of {filters}" for one in rows if one not in counted]
