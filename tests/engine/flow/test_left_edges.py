"""Edges that a transaction leaves because their children are locked elsewhere, while others wait behind its limit."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import asyncpg
import pytest

from engine.flow.driving import DrivenFlow
from engine.flows import stop_cascade
from fixtures import Rows, uuid_of
from flowfabric.engine.core.wakeups import CascadeKey
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import cascade
from flowfabric.engine.parts import parts_of

pytestmark = pytest.mark.usefixtures("consistent_rows")

LIMIT = 10
Pass = tuple[int, bool]
"""How many edges a transaction has resolved, and whether more can be settled at once."""


@pytest.fixture
def engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that settles at most LIMIT edges in a transaction, and only when a test tells it to."""
    monkeypatch.setattr(cascade, "EDGE_LIMIT", LIMIT)
    stop_cascade(engine)
    return engine


@asynccontextmanager
async def locked(connection: asyncpg.Connection, flow: DrivenFlow, numbers: Iterable[int]) -> AsyncIterator[None]:
    """Lock the children with these numbers."""
    async with connection.transaction():
        uuids = [uuid_of(flow.id(f"n{number}")) for number in numbers]
        await connection.execute("select from execution where execution_id = any($1::uuid[]) for update", uuids)
        yield


async def fan_out(engine: Engine, rows: Rows, count: int, upstreams: str = "a b") -> DrivenFlow:
    """A flow with so many children, numbered from 1, of each of these upstream executions."""
    names = [f"n{number}" for number in range(1, count + 1)]
    pairs = " ".join(f"{upstream}>{name}" for upstream in upstreams.split() for name in names)
    return await DrivenFlow.submit(engine, rows, f"{upstreams} {' '.join(names)}", pairs)


async def entry_keys(rows: Rows) -> list[CascadeKey]:
    """The queued entries, the oldest first."""
    return sorted(
        (CascadeKey(row["partition_key"], row["event_id"]) for row in await rows.of("cascade_entry")),
        key=lambda key: key.event_id,
    )


async def settle(engine: Engine, *keys: CascadeKey) -> Pass:
    """Settle entries in one transaction."""
    done, _, is_cut = await parts_of(engine).cascade._settle(keys)
    return done.resolved, is_cut


async def unresolved(flow: DrivenFlow, upstream: str = "a") -> set[int]:
    """The numbers of the children whose edge from this upstream execution is not resolved."""
    names = {uuid_of(each): name for name, each in flow.answer.execution_ids.items()}
    found = await flow.rows.of("edge", upstream_id=uuid_of(flow.id(upstream)), state="unsatisfied")
    return {int(names[str(edge["downstream_id"])][1:]) for edge in found}


async def successes(flow: DrivenFlow) -> set[int]:
    """The numbers of successes that the groups of the flow have counted."""
    return {row["succeeded_count"] for row in await flow.rows.of("edge_group", flow_id=flow.flow_id)}


async def live(flow: DrivenFlow) -> int:
    """How many members of the flow are not counted as ended."""
    (row,) = await flow.rows.of("flow", flow_id=flow.flow_id)
    count: int = row["live_count"]
    return count


async def test_edges_left_in_any_part_are_resolved_by_a_second_pass_and_count_once(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await fan_out(engine, rows, 25)
    await flow.succeed("a")
    (key,) = await entry_keys(rows)
    async with locked(connection, flow, (1, 10, 14, 25)):
        assert [await settle(engine, key) for _ in range(3)] == [(8, True), (9, True), (4, False)]
        assert await unresolved(flow) == {1, 10, 14, 25}
        # They are locked still. The member ends with its last edge.
        assert await settle(engine, key) == (0, False)
        assert await live(flow) == 27
    assert await settle(engine, key) == (4, False)
    assert await entry_keys(rows) == []
    assert (await unresolved(flow), await successes(flow), await live(flow)) == (set(), {1}, 26)
    await flow.succeed("b")
    (key,) = await entry_keys(rows)
    assert [await settle(engine, key) for _ in range(3)] == [(10, True), (10, True), (5, False)]
    assert (await successes(flow), await live(flow)) == ({2}, 25)
    assert set((await flow.states()).values()) == {"completed", "waiting"}


@pytest.mark.parametrize("part", ["first", "second", "last"])
async def test_an_edge_left_in_one_part_is_found_after_the_others(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, part: str
) -> None:
    flow = await fan_out(engine, rows, 30)
    await flow.succeed("a")
    (key,) = await entry_keys(rows)
    number = {"first": 5, "second": 15, "last": 30}[part]
    passes: list[Pass] = []
    for at in ("first", "second", "last"):
        async with locked(connection, flow, (number,) if at == part else ()):
            passes.append(await settle(engine, key))
    expected = {"first": (10, True), "second": (10, True), "last": (10, False)}
    assert passes == list((expected | {part: (9, part != "last")}).values())
    assert await unresolved(flow) == {number}
    assert await settle(engine, key) == (1, False)
    assert (await entry_keys(rows), await successes(flow), await live(flow)) == ([], {1}, 31)


async def test_more_left_edges_than_the_limit_take_several_passes(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await fan_out(engine, rows, 25)
    await flow.succeed("a")
    (key,) = await entry_keys(rows)
    async with locked(connection, flow, range(1, 26)):
        assert [await settle(engine, key) for _ in range(3)] == [(0, True), (0, True), (0, False)]
    async with locked(connection, flow, (3,)):
        assert [await settle(engine, key) for _ in range(3)] == [(9, True), (10, True), (5, False)]
    assert await unresolved(flow) == {3}
    assert await settle(engine, key) == (1, False)
    assert (await entry_keys(rows), await successes(flow), await live(flow)) == ([], {1}, 26)


async def test_a_part_that_ends_with_an_execution_says_nothing_about_the_edges_of_the_next(
    engine: Engine, rows: Rows
) -> None:
    # The edges of b have higher numbers than those of a, but b ends first.
    flow = await fan_out(engine, rows, LIMIT)
    for name in "ba":
        await flow.succeed(name)
    keys = await entry_keys(rows)
    assert [await settle(engine, *keys) for _ in range(2)] == [(10, True), (10, False)]
    assert (await entry_keys(rows), await successes(flow), await live(flow)) == ([], {2}, 10)


async def test_an_entry_that_gets_no_turn_keeps_its_place_and_its_left_edges(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    names = " ".join(f"n{number}" for number in range(1, 26))
    pairs = " ".join([*(f"a>{name}" for name in names.split()), *(f"b>n{number}" for number in range(1, LIMIT + 1))])
    flow = await DrivenFlow.submit(engine, rows, f"a b {names}", pairs)
    for name in "ba":
        await flow.succeed(name)
    of_b, of_a = await entry_keys(rows)
    async with locked(connection, flow, (7,)):
        assert await settle(engine, of_a) == (9, True)
    # The edges of b fill the next transaction.
    assert await settle(engine, of_b, of_a) == (10, True)
    assert await entry_keys(rows) == [of_a]
    assert [await settle(engine, of_a) for _ in range(2)] == [(10, True), (5, False)]
    assert await unresolved(flow) == {7}
    assert await settle(engine, of_a) == (1, False)
    assert (await entry_keys(rows), await unresolved(flow), await live(flow)) == ([], set(), 25)
    assert set((await flow.states()).values()) == {"completed", "waiting"}


async def test_left_edges_of_one_of_several_executions_that_ended_together_are_resolved(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await fan_out(engine, rows, 8)
    handles = [await flow.claim(name) for name in "ab"]
    await engine.complete_many([(handle, b"") for handle in handles])
    (key,) = await entry_keys(rows)
    async with locked(connection, flow, (3,)):
        # Eight edges of the first and two of the second, then those of the first that are left and the rest.
        assert [await settle(engine, key) for _ in range(2)] == [(9, True), (5, False)]
        assert (await unresolved(flow, "a"), await unresolved(flow, "b"), await live(flow)) == ({3}, {3}, 10)
    assert await settle(engine, key) == (2, False)
    assert (await entry_keys(rows), await successes(flow), await live(flow)) == ([], {2}, 8)


async def test_the_place_in_the_edges_of_an_execution_does_not_count_for_others_that_ended_with_it(
    engine: Engine, rows: Rows
) -> None:
    # The edges of b have lower numbers than those of a, which comes first in the entry.
    flow = await fan_out(engine, rows, 15, "b a")
    handles = [await flow.claim(name) for name in "ab"]
    await engine.complete_many([(handle, b"") for handle in handles])
    (entry,) = await rows.of("cascade_entry")
    assert [str(each) for each in entry["execution_ids"]] == [uuid_of(flow.id(name)) for name in "ab"]
    (key,) = await entry_keys(rows)
    assert [await settle(engine, key) for _ in range(3)] == [(10, True), (10, True), (10, False)]
    assert (await entry_keys(rows), await successes(flow), await live(flow)) == ([], {2}, 15)


async def test_one_call_settles_an_event_with_its_left_edges(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await fan_out(engine, rows, 35)
    await flow.succeed("a")
    (key,) = await entry_keys(rows)
    async with locked(connection, flow, (2,)):
        assert await settle(engine, key) == (9, True)
    async with locked(connection, flow, range(31, 36)):
        # What is locked during the whole call is left.
        assert (await engine.cascade_completion(key.event_id)).resolved == 21
    assert await unresolved(flow) == {31, 32, 33, 34, 35}
    assert (await engine.cascade_completion(key.event_id)).resolved == 5
    assert (await entry_keys(rows), await successes(flow), await live(flow)) == ([], {1}, 36)
