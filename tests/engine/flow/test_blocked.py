"""The safety net for executions that wait for dependencies: it looks at all of them, page by page, and repairs them."""

import logging

import asyncpg
import pytest

from engine.flow.driving import DrivenFlow
from engine.flow.submitting import submitted
from engine.flows import stop_cascade
from fixtures import Engines, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import blocked
from flowfabric.engine.parts import parts_of
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """An engine that does not settle the ends of members."""
    stop_cascade(engine)
    return engine


async def forget_ends(connection: asyncpg.Connection) -> None:
    """Delete the entries of the cascade: an older version ends members without queueing them."""
    await connection.execute("delete from cascade_entry")


async def repair(engine: Engine) -> None:
    """Run the sweep until it has nothing more to do."""
    await Reconciler(engine, sweeps=[sweep for sweep in SWEEPS if sweep.name == "dependency_reconciler"]).catch_up()


async def delete(connection: asyncpg.Connection, flow: DrivenFlow, *names: str) -> None:
    """Delete ended members as the retention of an older version does, which knows no flows."""
    ids = [uuid_of(flow.id(name)) for name in names]
    await connection.execute("delete from execution where execution_id = any($1::uuid[])", ids)
    await connection.execute("delete from retained")


async def test_one_pass_looks_at_every_page_of_blocked_executions(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "PAGE_LIMIT", 2)
    for _ in range(3):
        await submitted(engine, "a b c", "a>b a>c")
    flow = await DrivenFlow.submit(engine, rows, "a b c", "a>b a>c")
    await flow.succeed("a")
    await forget_ends(connection)
    # The first page has nothing to repair, and the next ones follow it.
    await repair(engine)
    assert await flow.states() == {"a": "completed", "b": "waiting", "c": "waiting"}


async def test_a_pass_ends_after_a_number_of_pages_and_the_next_one_goes_on(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "PAGE_LIMIT", 2)
    monkeypatch.setattr(blocked, "PAGES_IN_A_ROW", 3)
    await submitted(engine, "a b c d e f g", "a>b a>c a>d a>e a>f a>g")
    flow = await DrivenFlow.submit(engine, rows, "a b", "a>b")
    await flow.succeed("a")
    await forget_ends(connection)
    reconcile = parts_of(engine).blocked.reconcile
    passes: list[list[tuple[int, bool]]] = [[]]
    while (await flow.states())["b"] != "waiting":
        done, is_full, _ = await reconcile()
        passes[-1].append((done, is_full))
        if not is_full:
            passes.append([])
    assert passes[0] == [(0, True), (0, True), (0, False)]
    assert len(passes) > 1


async def test_a_child_with_more_edges_than_a_page_is_looked_at_to_its_last_edge(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "PAGE_LIMIT", 3)
    names = [f"u{nth}" for nth in range(11)]
    pairs = " ".join([*(f"{name}>z" for name in names), "z>y"])
    groups = {"z": {"kind": "any_of", "on_satisfied": "let_run"}}
    flow = await DrivenFlow.submit(engine, rows, " ".join([*names, "z", "y"]), pairs, groups=groups)
    for ended, expected in (
        (names[-1:], ("pending", 0, 1, 0)),
        (names[1:-1], ("pending", 0, 10, 0)),
        (names[:1], ("impossible", 0, 11, 0)),
    ):
        for name in ended:
            await flow.fail(name)
        await forget_ends(connection)
        await repair(engine)
        assert await flow.counts("z") == expected
    assert (await flow.states())["z"] == "skipped"


@pytest.mark.parametrize("outcome", ["success", "failed"])
async def test_an_edge_from_a_deleted_execution_counts_as_skipped(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, outcome: str
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d", "a>b c>d")
    await (flow.succeed("a") if outcome == "success" else flow.fail("a"))
    await forget_ends(connection)
    await delete(connection, flow, "a")
    await repair(engine)
    assert await flow.states() == {"b": "skipped", "c": "waiting", "d": "waiting_children"}
    assert await flow.counts("b") == ("impossible", 0, 0, 1)
    assert await flow.counts("d") == ("pending", 0, 0, 0)


async def test_an_execution_outside_of_the_flow_with_the_id_of_a_deleted_one_satisfies_nothing(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d", "a>b c>d")
    for name in "ac":
        await flow.succeed(name)
    await forget_ends(connection)
    await delete(connection, flow, "a", "c")
    # One is live, the other has succeeded.
    await given.created(execution_id=flow.id("a"))
    await given.completed(execution_id=flow.id("c"), lane_id="again")
    await repair(engine)
    assert await flow.states() == {"b": "skipped", "d": "skipped"}
    assert await flow.counts("b") == await flow.counts("d") == ("impossible", 0, 0, 1)


async def test_an_execution_whose_other_upstream_was_deleted_is_decided_by_those_that_are_left(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    groups = {name: {"kind": "any_of", "on_satisfied": "let_run"} for name in "yz"}
    flow = await DrivenFlow.submit(engine, rows, "a b c y z", "a>y b>y a>z c>z", groups=groups)
    await flow.fail("a")
    await forget_ends(connection)
    await delete(connection, flow, "a")
    await repair(engine)
    assert (await flow.counts("y"), await flow.counts("z")) == (("pending", 0, 0, 1), ("pending", 0, 0, 1))
    await flow.succeed("b")
    await flow.fail("c")
    await forget_ends(connection)
    await repair(engine)
    assert (await flow.counts("y"), await flow.counts("z")) == (("satisfied", 1, 0, 1), ("impossible", 0, 1, 1))
    assert await flow.states() == {"b": "completed", "c": "failed", "y": "waiting", "z": "skipped"}


@pytest.mark.usefixtures("altered_rows")
async def test_an_execution_that_cannot_be_repaired_does_not_stop_the_others(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d", "a>b a>c a>d")
    await flow.succeed("a")
    await forget_ends(connection)
    await connection.execute(
        f"""alter table execution add constraint test_poison
            check (execution_id <> '{uuid_of(flow.id("c"))}' or public_state <> 'waiting') not valid"""
    )
    with caplog.at_level(logging.WARNING):
        await repair(engine)
    assert await flow.states() == {"a": "completed", "b": "waiting", "c": "waiting_children", "d": "waiting"}
    assert flow.id("c") in caplog.text


@pytest.mark.usefixtures("altered_rows")
async def test_pages_that_are_not_in_time_become_smaller(
    engine: Engine,
    engines: Engines,
    rows: Rows,
    connection: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocked, "PAGES_IN_A_ROW", 1000)
    names = [f"n{nth}" for nth in range(60)]
    await submitted(engine, " ".join(["a", *names]), " ".join(f"a>{name}" for name in names))
    flow = await DrivenFlow.submit(engine, rows, "a b", "a>b")
    await flow.succeed("a")
    await forget_ends(connection)
    # Sixty groups take longer than a statement may take, nine do not.
    await connection.execute("alter table edge_group rename to stored_edge_group")
    await connection.execute(
        """create view edge_group as select g.* from stored_edge_group g
            where (select true from pg_sleep(0.01 + 0 * g.staged_count))"""
    )
    slow = await engines(statement_timeout_ms=400)
    await repair(slow)
    assert (await flow.states())["b"] == "waiting"
    assert "was not in time, the next are smaller" in caplog.text
