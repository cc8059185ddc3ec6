"""The cascade: what the ends of members do to the executions behind their edges."""

from typing import Any

import asyncpg
import pytest

from engine.flow.driving import DrivenFlow
from engine.flow.submitting import edges, node
from engine.flows import stop_cascade
from engine.state import DELAYED, WAITING, claim, refused, vector
from engine.stream.writing import append
from engine.waits import suspend_args
from fixtures import Clock, Engines, Eventually, Rows, uuid_of
from flowfabric.engine.core.wakeups import CascadeKey
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import cascade
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import AllOfEdges, AnyOfEdges, OnSatisfied
from flowfabric.model.flow import FlowEdge
from flowfabric.reconcile.loop import Reconciler


async def test_a_child_runs_once_all_of_its_upstream_executions_have_succeeded(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d", "a>c b>c c>d")
    assert await flow.states() == {"a": "waiting", "b": "waiting", "c": "waiting_children", "d": "waiting_children"}
    await flow.succeed("a")
    assert (await flow.states())["c"] == "waiting_children"
    assert await flow.counts("c") == ("pending", 1, 0, 0)
    await flow.succeed("b")
    assert vector(await flow.row("c")).endswith(
        "runnable/unowned/eligible_now/waiting_for_worker/none/pending_first_attempt/waiting"
    )
    await flow.succeed("c")
    await flow.succeed("d")
    assert set((await flow.states()).values()) == {"completed"}
    assert [await flow.outcomes(name) for name in "abcd"] == [[("released", 1)]] * 4
    assert await rows.of("cascade_entry") == await rows.of("listed") == []
    assert await engine.find_inconsistencies() == []


async def test_the_end_of_a_continued_attempt_reaches_the_children(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d", "a>c b>d")
    for name in "ab":
        await engine.hand_back(await flow.claim(name))
        flow.handles[name] = await flow.claim(name)
    await flow.succeed("a")
    await flow.fail("b")
    assert await flow.states() == {"a": "completed", "b": "failed", "c": "waiting", "d": "skipped"}
    assert await engine.find_inconsistencies() == []


async def test_a_failure_skips_everything_behind_it_with_an_event_for_each(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d", "a>b b>c d>c")
    await flow.fail("a")
    assert await flow.states() == {"a": "failed", "b": "skipped", "c": "skipped", "d": "waiting"}
    assert await flow.outcomes("b") == await flow.outcomes("c") == [("ended", 5)]
    row = await flow.row("c")
    assert (row["attempt_state"], row["failure_reason"]) == ("none", "dependency_impossible")
    # c has another upstream execution, whose success comes too late.
    await flow.succeed("d")
    assert (await flow.states())["c"] == "skipped"
    assert await flow.counts("c") == ("impossible", 1, 0, 1)
    (stored,) = await rows.of("flow", flow_id=flow.flow_id)
    assert (stored["derived_state"], stored["live_count"], stored["failed_count"]) == ("failed", 0, 1)
    assert await engine.find_inconsistencies() == []


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "expired"])
async def test_every_end_without_success_makes_a_dependency_impossible(
    engine: Engine, rows: Rows, clock: Clock, outcome: str
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b", "a>b")
    if outcome == "failed":
        await flow.fail("a")
    elif outcome == "cancelled":
        await flow.cancel("a")
    else:
        deadline = await clock.now() + 1000
        flow = await DrivenFlow.submit(
            engine, rows, [node("a", execution_deadline_at=deadline), node("b")], edges("a>b")
        )
        await clock.advance(ms=1001)
        await engine.expire_execution(flow.id("a"), "execution_deadline")
        await flow.settle()
    assert await flow.states() == {"a": outcome, "b": "skipped"}
    assert await flow.counts("b") == ("impossible", 0, 1, 0)


async def test_a_child_that_runs_is_skipped_with_its_attempt_its_lease_and_its_stream(
    engine: Engine, rows: Rows
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b", "")
    handle = await flow.claim("b")
    await append(engine, handle)
    await flow.connect("a>b")
    assert (await flow.states())["b"] == "active"
    await flow.fail("a")
    assert vector(await flow.row("b")) == "terminal/unowned/not_applicable/none/skipped/attempt_terminal/skipped"
    await refused(engine.complete(handle, b""), "execution_not_active")
    assert [(row["kind"], row["reason"]) for row in await rows.events(flow.id("b"))] == [
        ("acquired", None),
        ("released", "dependency_impossible"),
    ]
    (attempt,) = await engine.list_attempts(flow.id("b"))
    assert (attempt.attempt_state, attempt.failure_reason) == ("ended_cancelled", "dependency_impossible")
    assert (await engine.read_stream(flow.id("b"), 0)).closed_reason == "dependency_impossible"
    assert await engine.find_inconsistencies() == []


async def test_a_suspended_child_is_skipped_with_its_waitpoints(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b", "")
    handle = await flow.claim("b")
    await engine.suspend(handle, suspend_args())
    await flow.connect("a>b")
    await flow.fail("a")
    assert (await flow.states())["b"] == "skipped"
    (suspension,) = await rows.of("suspension", execution_id=uuid_of(flow.id("b")))
    assert suspension["close_reason"] == "dependency_impossible"
    assert {row["state"] for row in await rows.of("waitpoint")} == {"closed"}
    assert await engine.find_inconsistencies() == []


async def test_a_promoted_child_keeps_a_delay_that_has_not_passed(engine: Engine, rows: Rows, clock: Clock) -> None:
    until = await clock.now() + 60_000
    nodes = [node("a"), node("b", delay_until=until)]
    flow = await DrivenFlow.submit(engine, rows, nodes, edges("a>b"))
    await clock.advance(ms=59_999)
    await flow.succeed("a")
    row = await flow.row("b")
    assert (vector(row), row["delay_until"]) == (DELAYED, until)
    assert row["blocking_detail"] == f"delayed until {until}"
    assert await rows.timers(flow.id("b")) == {"delay": until}
    assert await rows.of("ready", execution_id=uuid_of(flow.id("b"))) == []
    await clock.advance(ms=1)
    await Reconciler(engine).catch_up()
    assert (await flow.states())["b"] == "waiting"
    assert await engine.find_inconsistencies() == []


@pytest.mark.parametrize("since_ms", [0, 1, 3_600_000])
async def test_a_promoted_child_whose_delay_has_passed_can_be_claimed_at_once(
    engine: Engine, rows: Rows, clock: Clock, since_ms: int
) -> None:
    nodes = [node("a"), node("b", delay_ms=60_000)]
    flow = await DrivenFlow.submit(engine, rows, nodes, edges("a>b"))
    await clock.advance(ms=60_000 + since_ms)
    await flow.succeed("a")
    row = await flow.row("b")
    assert (vector(row), row["delay_until"], row["blocking_detail"]) == (WAITING, None, None)
    assert await rows.timers(flow.id("b")) == {}
    assert await engine.find_inconsistencies() == []
    assert [run.execution_id for run in await claim(engine)] == [flow.id("b")]


async def test_edges_of_one_end_are_settled_in_groups_and_the_entry_goes_with_the_last(
    engine: Engine, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "EDGE_LIMIT", 1000)
    names = [f"n{n}" for n in range(2_500)]
    flow = await DrivenFlow.submit(engine, rows, " ".join(["a", *names]), " ".join(f"a>{name}" for name in names))
    parts = parts_of(engine)
    stop_cascade(engine)
    await flow.succeed("a")
    (entry,) = await rows.of("cascade_entry")
    resolved = []
    while await rows.of("cascade_entry"):
        key = CascadeKey(entry["partition_key"], entry["event_id"])
        done, left, is_cut = await parts.cascade._settle([key])
        resolved.append((done.resolved, left, is_cut))
    assert resolved == [(1000, [key], True), (1000, [key], True), (500, [], False)]
    assert (await rows.of("flow", flow_id=flow.flow_id))[0]["live_count"] == 2_500
    assert len(await rows.of("ready")) == 2_500
    assert await engine.find_inconsistencies() == []


async def test_a_locked_child_does_not_keep_the_others_waiting(engine: Engine, rows: Rows) -> None:
    names = [f"n{n}" for n in range(100)]
    flow = await DrivenFlow.submit(engine, rows, " ".join(["a", *names]), " ".join(f"a>{name}" for name in names))
    connection = await parts_of(engine).store.database.connect()
    try:
        locked = connection.transaction()
        await locked.start()
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(flow.id("n50")))
        await flow.succeed("a")
        states = await flow.states()
        assert states.pop("n50") == "waiting_children"
        assert states.pop("a") == "completed"
        assert set(states.values()) == {"waiting"}
        assert len(await rows.of("cascade_entry")) == 1
        await locked.rollback()
    finally:
        await connection.close()
    await parts_of(engine).cascade.settle_flow(*await key_of(flow))
    assert (await flow.states())["n50"] == "waiting"
    assert await rows.of("cascade_entry") == []
    assert await engine.find_inconsistencies() == []


async def test_a_child_that_was_locked_for_a_moment_is_tried_again_without_a_sweep(
    engine: Engine,
    rows: Rows,
    connection: asyncpg.Connection,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cascade, "TRIES", 10**9)
    flow = await DrivenFlow.submit(engine, rows, "a b", "a>b")
    handle = await flow.claim("a")
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(flow.id("b")))
        await engine.complete(handle)
        await eventually(lambda: any(tries for _, tries in parts_of(engine).cascade._queue))
        assert (await flow.states())["b"] == "waiting_children"
    await parts_of(engine).cascade.drain()
    assert (await flow.states())["b"] == "waiting"
    assert await rows.of("cascade_entry") == []


async def key_of(flow: DrivenFlow) -> tuple[int, Any]:
    """The partition and the id of a flow."""
    (row,) = await flow.rows.of("flow", flow_id=flow.flow_id)
    return row["partition_key"], row["flow_id"]


async def test_what_a_dead_process_queued_is_settled_by_a_sweep_of_another(
    engine: Engine, rows: Rows, clock: Clock, engines: Engines
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c", "a>b b>c")
    stop_cascade(engine)
    await flow.fail("a")
    assert (await flow.states())["b"] == "waiting_children"
    other = await engines()
    await clock.advance(ms=1_001)
    await Reconciler(other).catch_up()
    await parts_of(other).cascade.drain()
    assert await flow.states() == {"a": "failed", "b": "skipped", "c": "skipped"}
    assert await engine.find_inconsistencies() == []


async def test_an_end_that_an_older_version_did_not_queue_is_found_by_the_safety_net(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d", "a>b c>d")
    stop_cascade(engine)
    await flow.succeed("a")
    await flow.fail("c")
    # An older version ends members without queueing an entry.
    await connection.execute("delete from cascade_entry")
    await parts_of(engine).blocked.reconcile()
    assert await flow.states() == {"a": "completed", "b": "waiting", "c": "failed", "d": "skipped"}
    await engine.project_flow_summary(flow.flow_id)
    (stored,) = await rows.of("flow", flow_id=flow.flow_id)
    assert (stored["live_count"], stored["failed_count"]) == (2, 1)


async def test_one_event_can_be_settled_by_hand_and_only_once(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c", "a>b a>c")
    stop_cascade(engine)
    await flow.succeed("a")
    (entry,) = await rows.of("cascade_entry")
    result = await engine.cascade_completion(entry["event_id"])
    assert (result.resolved, result.cascaded_children, result.synchronous) == (2, 0, False)
    async with rows.unchanged():
        assert (await engine.cascade_completion(entry["event_id"])).resolved == 0
    await refused(engine.cascade_completion(-1), "invalid_input")


async def test_one_event_with_thousands_of_edges_is_settled_by_one_call(engine: Engine, rows: Rows) -> None:
    names = [f"n{n}" for n in range(2_100)]
    flow = await DrivenFlow.submit(engine, rows, " ".join(["a", *names]), " ".join(f"a>{name}" for name in names))
    stop_cascade(engine)
    await flow.succeed("a")
    (entry,) = await rows.of("cascade_entry")
    assert (await engine.cascade_completion(entry["event_id"])).resolved == 2_100
    assert len(await rows.of("ready")) == 2_100
    assert await rows.of("cascade_entry") == []


async def test_an_ended_child_is_not_touched(engine: Engine, rows: Rows) -> None:
    passed = [FlowEdge(upstream=upstream, downstream="z", data_passing_ref="x") for upstream in "ab"]
    for outcome in ("success", "failed"):
        for policy in (AllOfEdges(), AnyOfEdges(OnSatisfied.LET_RUN)):
            flow = await DrivenFlow.submit(engine, rows, "a b z", passed, groups={"z": policy})
            await flow.cancel("z")
            before, events = await flow.row("z"), await rows.events(flow.id("z"))
            for name in "ab":
                await (flow.succeed(name) if outcome == "success" else flow.fail(name))
            assert await flow.row("z") == before
            assert await rows.events(flow.id("z")) == events
            assert (await flow.group("z"))["group_state"] == ("satisfied" if outcome == "success" else "impossible")
    assert await engine.find_inconsistencies() == []


async def test_entries_of_a_locked_flow_do_not_keep_those_of_others_waiting(
    engine: Engine, rows: Rows, clock: Clock, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_cascade(engine)
    locked = await DrivenFlow.submit(engine, rows, "a b c d e z", "a>z")
    other = await DrivenFlow.submit(engine, rows, "a b", "a>b")
    for name in "abcde":
        await locked.succeed(name)
    await clock.advance(ms=1)
    await other.succeed("a")
    await clock.advance(ms=1_001)
    settle = parts_of(engine).cascade.settle_left_over
    monkeypatch.setattr(cascade, "LOCKED_SECONDS", 600)
    async with connection.transaction():
        await connection.execute("select from flow where flow_id = $1 for update", locked.flow_id)
        assert [await settle(since=0, limit=2) for _ in range(4)] == [0, 0, 1, 0]
    assert (await other.states())["b"] == "waiting"
    monkeypatch.setattr(cascade, "LOCKED_SECONDS", 0)
    await settle(since=0, limit=2)
    # Entries that were set aside come back.
    await parts_of(engine).cascade.settle_flow(*await key_of(locked))
    assert (await locked.states())["z"] == "waiting"
    assert await rows.of("cascade_entry") == []


async def test_an_entry_that_cannot_be_settled_does_not_keep_those_behind_it_waiting(
    engine: Engine, rows: Rows, clock: Clock, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "SKIPPED_SECONDS", 3600.0)
    stop_cascade(engine)
    bad, good = [await DrivenFlow.submit(engine, rows, "a b", "a>b") for _ in range(2)]
    for flow in (bad, good):
        await flow.succeed("a")
        await clock.advance(ms=1_001)
    poison = f"check (execution_id <> '{uuid_of(bad.id('b'))}' or public_state <> 'waiting')"
    await connection.execute(f"alter table execution add constraint poison {poison} not valid")
    settle = parts_of(engine).cascade.settle_left_over
    assert [await settle(since=0, limit=1) for _ in range(3)] == [0, 1, 0]
    assert (await good.states())["b"] == "waiting"
    await connection.execute("alter table execution drop constraint poison")
    parts_of(engine).cascade._set_aside.clear()
    assert await settle(since=0, limit=1) == 1
    assert (await bad.states())["b"] == "waiting"


@pytest.mark.usefixtures("altered_rows")
async def test_an_entry_whose_flow_or_child_was_deleted_does_not_stay(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    stop_cascade(engine)
    childless = await DrivenFlow.submit(engine, rows, "a b c", "a>b a>c")
    gone = await DrivenFlow.submit(engine, rows, "a b", "a>b")
    for flow in (childless, gone):
        await flow.succeed("a")
    # No operation deletes a flow or a member while an end is queued.
    await connection.execute("delete from execution where execution_id = $1", uuid_of(childless.id("b")))
    await connection.execute("delete from flow where flow_id = $1", gone.flow_id)
    events = [row["event_id"] for row in sorted(await rows.of("cascade_entry"), key=lambda row: row["event_id"])]
    assert [(await engine.cascade_completion(event)).resolved for event in events] == [2, 1]
    assert await rows.of("cascade_entry") == []
    assert await childless.states() == {"a": "completed", "c": "waiting"}
    assert f"dropping events [{events[1]}] of the cascade: their flow was deleted" in caplog.text
