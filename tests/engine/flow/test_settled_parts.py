"""How much one transaction of the cascade settles: a limited number of executions, and of bytes that it copies."""

from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from engine.flow.driving import DrivenFlow
from engine.flows import stop_cascade
from fixtures import Rows, uuid_of
from flowfabric.db.database import Transaction
from flowfabric.db.statements import Statement
from flowfabric.engine.core.wakeups import CascadeKey
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import cascade, resolve
from flowfabric.engine.parts import parts_of
from flowfabric.model.flow import FlowEdge, FlowNode, FlowSubmitted

pytestmark = pytest.mark.usefixtures("consistent_rows")

COMMON: dict[str, Any] = {"lane_id": "default", "execution_kind": "job", "creator_identity": "test"}


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """An engine that settles entries when a test tells it to."""
    stop_cascade(engine)
    return engine


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many results each statement has copied."""
    found: list[int] = []
    fetch = Transaction.fetch

    async def count(transaction: Transaction, statement: Statement, **values: Any) -> Any:
        if statement is resolve.SQL.copy_results:
            found.append(len(values["execution_ids"]))
        return await fetch(transaction, statement, **values)

    monkeypatch.setattr(Transaction, "fetch", count)
    return found


async def pass_result(engine: Engine, result: bytes, children: Sequence[str]) -> FlowSubmitted:
    """End an execution whose result is the input of these children."""
    flow = await engine.submit_flow(
        flow_kind="dag",
        namespace="tests",
        nodes=[FlowNode(name=name, input_payload=b"", **COMMON) for name in ("first", *children)],
        edges=[FlowEdge(upstream="first", downstream=name, data_passing_ref="input") for name in children],
    )
    assert isinstance(flow, FlowSubmitted)
    (run,) = await engine.claim_many(
        lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=1, lease_ttl_ms=60_000
    )
    await engine.complete(run.handle, result)
    return flow


@pytest.mark.parametrize(
    ("size", "expected"), [(100, [5]), (400, [2, 2, 1]), (1_000, [1] * 5), (2_000, [1] * 5)], ids=str
)
async def test_a_transaction_copies_a_limited_number_of_bytes(
    engine: Engine, rows: Rows, monkeypatch: pytest.MonkeyPatch, copied: list[int], size: int, expected: list[int]
) -> None:
    monkeypatch.setattr(resolve, "BYTE_LIMIT", 1_000)
    result, children = b"r" * size, [f"n{number}" for number in range(5)]
    flow = await pass_result(engine, result, children)
    (entry,) = await rows.of("cascade_entry")
    answer = await engine.cascade_completion(entry["event_id"])
    assert (answer.resolved, copied) == (5, expected)
    for name in children:
        (row,) = await rows.of("execution", execution_id=uuid_of(flow.execution_ids[name]))
        large = await rows.of("execution_input", execution_id=row["execution_id"])
        assert (row["input_payload"] or large[0]["input_payload"]) == result
    assert await rows.of("cascade_entry") == []


async def test_entries_behind_the_first_executions_are_not_written(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "EDGE_LIMIT", 5)
    names = [f"n{number}" for number in range(12)]
    pairs = " ".join(f"{name}>last" for name in names)
    flow = await DrivenFlow.submit(engine, rows, f"{' '.join(names)} last", pairs)
    for _ in range(4):
        runs = await engine.claim_many(
            lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=3, lease_ttl_ms=60_000
        )
        await engine.complete_many([(run.handle, b"{}") for run in runs])
    entries = sorted(await rows.of("cascade_entry"), key=lambda entry: entry["event_id"])
    assert [len(entry["execution_ids"]) for entry in entries] == [3, 3, 3, 3]
    keys = [CascadeKey(entry["partition_key"], entry["event_id"]) for entry in entries]
    versions = "select ctid, xmin from cascade_entry where event_id = any($1) order by event_id"
    behind = [key.event_id for key in keys[2:]]
    before = await connection.fetch(versions, behind)
    done, left, is_cut = await parts_of(engine).cascade._settle(keys)
    assert (done.resolved, left, is_cut) == (5, keys[1:], True)
    assert await connection.fetch(versions, behind) == before
    while is_cut:
        _, _, is_cut = await parts_of(engine).cascade._settle(keys)
    assert await rows.of("cascade_entry") == []
    assert (await flow.states())["last"] == "waiting"
