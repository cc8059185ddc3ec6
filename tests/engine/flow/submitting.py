"""Flows to submit: nodes and edges with defaults, and other sessions that a submission waits for."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg

from fixtures import Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.flow import FlowEdge, FlowNode, FlowSubmitted
from flowfabric.model.ids import FlowId, Partitions, flow_partition


def node(name: str, **overrides: Any) -> FlowNode:
    """A node; fields that are not given have defaults."""
    defaults: dict[str, Any] = {
        "lane_id": "default",
        "execution_kind": "job",
        "input_payload": b'{"a": 1}',
        "creator_identity": "test",
    }
    return FlowNode(**{"name": name, **defaults, **overrides})


def nodes(names: str) -> list[FlowNode]:
    """Nodes with these names, separated by spaces."""
    return [node(name) for name in names.split()]


def edges(pairs: str) -> list[FlowEdge]:
    """Edges written as `a>b b>c`."""
    found = [pair.split(">") for pair in pairs.split()]
    return [FlowEdge(upstream=upstream, downstream=downstream) for upstream, downstream in found]


def flow(names: str | Sequence[Any] = "", pairs: str | Sequence[Any] = "", **overrides: Any) -> dict[str, Any]:
    """The arguments of submit_flow."""
    return {
        "flow_kind": "dag",
        "namespace": "tests",
        "nodes": nodes(names) if isinstance(names, str) else names,
        "edges": edges(pairs) if isinstance(pairs, str) else pairs,
        **overrides,
    }


async def submitted(engine: Engine, *args: Any, **overrides: Any) -> FlowSubmitted:
    """Submit a new flow."""
    answer = await engine.submit_flow(**flow(*args, **overrides))
    assert isinstance(answer, FlowSubmitted)
    return answer


def names_of(answer: FlowSubmitted) -> Mapping[str, str]:
    """The names of the nodes by the ids of their executions."""
    return {execution_id: name for name, execution_id in answer.execution_ids.items()}


async def begin(connection: asyncpg.Connection, flow_id: UUID) -> None:
    """Insert a flow within a transaction that has not ended, as another session that is submitting it."""
    await connection.execute(
        """insert into flow (partition_key, flow_id, namespace_no, flow_kind, created_at, last_mutation_at)
           values ($1, $2, 1, 'dag', 1, 1)""",
        flow_partition(FlowId(flow_id), Partitions().flow),
        flow_id,
    )


async def is_awaited(rows: Rows, holder: asyncpg.Connection) -> bool:
    """Whether a session waits for a lock of this one."""
    query = "select exists (select from pg_stat_activity where $1 = any(pg_blocking_pids(pid)))"
    return bool(await rows._connection.fetchval(query, holder.get_server_pid()))


async def are_waiting(rows: Rows, count: int) -> bool:
    """Whether so many sessions of this database wait for a lock."""
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    return bool(await rows._connection.fetchval(query) == count)
