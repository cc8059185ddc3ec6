"""Operations on all executions that match a filter."""

from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from engine.counts import miscounts
from engine.flow.graphs import BuiltFlow
from engine.state import claim, items, new
from engine.waits import suspend_args
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.bulk import matching, replays
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow.replay import Replays
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read.listing import Listing
from flowfabric.model.errors import InvalidInputError, TransportError
from flowfabric.model.execution import BulkResult
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState

CALLS: dict[str, dict[str, Any]] = {
    "cancel_matching": {"reason": "not wanted"},
    "replay_matching": {},
    "change_priority_matching": {"new_priority": 7},
}


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of three executions."""
    monkeypatch.setattr(matching, "MAX_LIMIT", 3)


def result(matched: int, changed: int, *, is_dry_run: bool = False, **refused: int) -> BulkResult:
    """The result of a call."""
    return BulkResult(matched=matched, changed=changed, refused=refused, is_dry_run=is_dry_run)


async def states(engine: Engine) -> list[str]:
    """The public states of all executions, in the order of creation."""
    page = await engine.list_executions(order="oldest", limit=1000)
    return [one.public_state.value for one in page.executions]


async def test_every_operation_needs_a_filter_and_checks_its_arguments(
    engine: Engine, given: Given, rows: Rows
) -> None:
    await given.created()
    await given.failed(lane_id="other")
    async with rows.unchanged():
        for name, arguments in CALLS.items():
            call = getattr(engine, name)
            with pytest.raises(InvalidInputError, match="give at least one of namespace, lane_id"):
                await call(**arguments)
            with pytest.raises(InvalidInputError, match="give at least one of"):
                await call(**arguments, namespace=None)
            for wrong in (
                {"limit": -1},
                {"limit": "3"},
                {"dry_run": 1},
                {"all_executions": "yes"},
                {"public_state": "gone"},
                {"created_before": "now"},
                {"tag": "app.customer"},
            ):
                with pytest.raises(InvalidInputError):
                    await call(**arguments, **{"lane_id": "default", **wrong})
            with pytest.raises(TypeError, match="did you mean namespace"):
                await call(**arguments, namespaces="tests")
            assert await call(**arguments, lane_id="default", limit=0) == result(0, 0)


async def test_a_dry_run_counts_and_changes_nothing(
    engine: Engine, given: Given, rows: Rows, small_pages: None
) -> None:
    for _ in range(4):
        await given.created()
    for _ in range(5):
        await given.failed(lane_id="other")
    async with rows.unchanged():
        found = {
            name: await getattr(engine, name)(**arguments, namespace="tests", dry_run=True)
            for name, arguments in CALLS.items()
        }
    assert found == {
        "cancel_matching": result(4, 0, is_dry_run=True),
        "replay_matching": result(5, 0, is_dry_run=True),
        "change_priority_matching": result(4, 0, is_dry_run=True),
    }


async def test_what_matches_is_cancelled_whatever_it_does(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, small_pages: None
) -> None:
    await given.claimed()
    for _ in range(4):
        await given.created()
        await given.delayed()
    await given.completed(lane_id="done")
    await given.created(namespace="elsewhere", lane_id="elsewhere")
    assert await engine.cancel_matching(reason="wrong input", namespace="tests") == result(9, 9)
    assert sorted(await states(engine)) == ["cancelled"] * 9 + ["completed", "waiting"]
    assert await engine.cancel_matching(reason="wrong input", namespace="tests") == result(0, 0)
    assert await engine.cancel_matching(reason="all of them", all_executions=True) == result(1, 1)
    assert await engine.find_inconsistencies() == []
    assert await miscounts(engine, connection) == []


async def test_every_filter_of_lists_narrows_what_is_changed(engine: Engine, given: Given, clock: Clock) -> None:
    tagged = await given.created(tags={"app.customer": "acme"})
    other = await given.created(execution_kind="mail", lane_id="mails")
    between = await clock.advance(ms=10)
    late = await given.created()
    filters: list[tuple[dict[str, Any], list[ExecutionId]]] = [
        ({"tag": ("app.customer", "acme")}, [tagged]),
        ({"execution_kind": iter(["mail"])}, [other]),
        ({"lane_id": ["mails", "default"]}, [tagged, other, late]),
        ({"created_before": between}, [tagged, other]),
        ({"created_after": between}, [late]),
        ({"public_state": "delayed"}, []),
        ({"public_state": "failed"}, []),
    ]
    for nth, (given_filters, expected) in enumerate(filters):
        before = {one.execution_id: one.priority for one in (await engine.list_executions()).executions}
        answer = await engine.change_priority_matching(new_priority=nth + 1, **given_filters)
        assert answer == result(len(expected), len(expected)), given_filters
        after = {one.execution_id: one.priority for one in (await engine.list_executions()).executions}
        assert {each for each in after if after[each] != before[each]} == set(expected), given_filters


async def test_states_that_an_operation_does_not_change_match_nothing(engine: Engine, given: Given, rows: Rows) -> None:
    await given.completed()
    await given.failed()
    await given.claimed()
    await given.created()
    others = {
        "cancel_matching": ["completed", "failed"],
        "replay_matching": ["active", "waiting"],
        "change_priority_matching": ["active", "completed", "failed"],
    }
    async with rows.unchanged():
        for name, public_state in others.items():
            for dry_run in (False, True):
                call = getattr(engine, name)(**CALLS[name], public_state=public_state, dry_run=dry_run)
                assert await call == result(0, 0, is_dry_run=dry_run), name


async def test_a_limit_stops_a_call_and_the_next_one_continues(engine: Engine, given: Given, small_pages: None) -> None:
    for _ in range(8):
        await given.created()
    assert await engine.cancel_matching(reason="x", lane_id="default", limit=5) == result(5, 5)
    assert await states(engine) == ["cancelled"] * 5 + ["waiting"] * 3
    assert await engine.cancel_matching(reason="x", lane_id="default", limit=5) == result(3, 3)


async def test_failed_executions_are_replayed_and_successes_only_on_request(
    engine: Engine, given: Given, connection: asyncpg.Connection, small_pages: None
) -> None:
    for _ in range(4):
        await given.failed()
        await given.completed()
    await given.cancelled()
    spent = await given.failed(policy={"max_replay_count": 0})
    assert await engine.replay_matching(lane_id="default", public_state="failed") == result(
        5, 4, max_replays_exhausted=1
    )
    assert await engine.read_execution_state(spent) is PublicState.FAILED
    assert await engine.replay_matching(lane_id="default") == result(2, 1, max_replays_exhausted=1)
    assert await engine.replay_matching(lane_id="default", public_state="completed") == result(4, 4)
    assert len(await claim(engine)) == 9
    assert await engine.find_inconsistencies() == []
    assert await miscounts(engine, connection) == []


async def test_a_failed_flow_runs_again_as_a_whole(engine: Engine, given: Given, rows: Rows) -> None:
    flow = await BuiltFlow.create(given, rows)
    first, second, third = await flow.members(3)
    await flow.connect(first, second)
    await flow.connect(second, third)
    await engine.cancel_execution(execution_id=first, reason="wrong input")
    await flow.settle()
    assert await states(engine) == ["cancelled", "skipped", "skipped"]
    assert await engine.replay_matching(flow_id=flow.flow_id) == result(3, 3)
    for execution_id in (first, second, third):
        (run,) = await claim(engine)
        assert run.execution_id == execution_id
        await engine.complete(run.handle, b"1")
        await flow.settle()
    assert (await flow.row())["derived_state"] == "completed"
    assert await engine.find_inconsistencies() == []


@pytest.fixture
def reconciled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small transactions of replays, with a pass of the reconciler after each."""
    parts = parts_of(engine)
    together = parts.services[Replays].replay_together

    async def replay_and_reconcile(*arguments: Any, **named: Any) -> None:
        await together(*arguments, **named)
        await parts.blocked.reconcile()

    monkeypatch.setattr(replays, "REPLAY_LIMIT", 2)
    monkeypatch.setattr(parts.services[Replays], "replay_together", replay_and_reconcile)


async def failed_flow(given: Given, rows: Rows, children: int) -> tuple[BuiltFlow, ExecutionId]:
    """A flow whose last member, on which all the others depend through two hops, has failed."""
    flow = await BuiltFlow.create(given, rows)
    *lasts, middle, first = await flow.members(children + 2)
    await flow.connect(first, middle)
    for last in lasts:
        await flow.connect(middle, last)
    await given.engine.cancel_execution(execution_id=first, reason="wrong input")
    await flow.settle()
    return flow, first


@pytest.mark.parametrize("page", [3, 1000])
async def test_no_member_is_skipped_again_although_it_is_listed_before_its_upstream(
    engine: Engine,
    given: Given,
    clock: Clock,
    rows: Rows,
    connection: asyncpg.Connection,
    reconciled: None,
    monkeypatch: pytest.MonkeyPatch,
    page: int,
) -> None:
    monkeypatch.setattr(matching, "MAX_LIMIT", page)
    monkeypatch.setattr(replays, "MAX_LIMIT", page)
    flow, _ = await failed_flow(given, rows, 6)
    await clock.advance(ms=1)
    await given.failed()
    await clock.advance(ms=1)
    other, _ = await failed_flow(given, rows, 3)
    assert await states(engine) == ["skipped"] * 7 + ["cancelled", "failed"] + ["skipped"] * 4 + ["cancelled"]
    assert await engine.replay_matching(namespace="tests") == result(14, 14)
    assert await states(engine) == (
        ["waiting_children"] * 7 + ["waiting", "waiting"] + ["waiting_children"] * 4 + ["waiting"]
    )
    assert [(await each.row())["live_count"] for each in (flow, other)] == [8, 5]
    assert await engine.find_inconsistencies() == []
    assert await miscounts(engine, connection) == []


async def test_a_limit_takes_the_upstream_executions_of_a_flow_first(
    engine: Engine, given: Given, rows: Rows, reconciled: None
) -> None:
    flow, first = await failed_flow(given, rows, 4)
    assert await engine.replay_matching(flow_id=flow.flow_id, limit=1) == result(1, 1)
    assert await engine.read_execution_state(first) is PublicState.WAITING
    assert await engine.replay_matching(flow_id=flow.flow_id, limit=3) == result(3, 3)
    assert await engine.replay_matching(flow_id=flow.flow_id) == result(2, 2)
    assert await states(engine) == ["waiting_children"] * 5 + ["waiting"]
    assert await engine.find_inconsistencies() == []


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["failed"], "waiting_children"),
        (["success"], "waiting_children"),
        (["success", "success"], "waiting"),
    ],
)
async def test_a_quorum_of_more_than_its_edges_stops_no_other(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, outcomes: list[str], expected: str
) -> None:
    flow = await BuiltFlow.create(given, rows)
    first, second, child = await flow.members(3)
    await flow.policy(child, {"kind": "quorum", "k": 3, "on_satisfied": "let_run"})
    for upstream in (first, second):
        await flow.connect(upstream, child)
    for outcome in outcomes:
        (run,) = await claim(engine, limit=1)
        if outcome == "success":
            await engine.complete(run.handle, b"1")
        else:
            await engine.fail(run.handle, reason="no luck", classification="permanent")
        await flow.settle()
    assert await engine.read_execution_state(child) is PublicState.SKIPPED
    others = [await given.failed(lane_id="others") for _ in range(3)]
    matched = 3 + 1 + outcomes.count("failed")
    assert await engine.replay_matching(namespace="tests") == result(matched, matched)
    assert await engine.read_execution_state(child) is PublicState(expected)
    assert {await engine.read_execution_state(each) for each in others} == {PublicState.WAITING}
    assert await engine.find_inconsistencies() == []
    assert await miscounts(engine, connection) == []


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("cancel_matching", "lifecycle_phase = 'terminal' and replay_count > 0"),
        ("replay_matching", "lifecycle_phase = 'runnable' and replay_count > 1"),
        ("change_priority_matching", "place >> 48 = 9000 - 7 and replay_count > 0"),
    ],
)
async def test_what_the_database_refuses_stops_no_other(
    engine: Engine, given: Given, connection: asyncpg.Connection, name: str, broken: str
) -> None:
    execution_ids = [await given.failed() for _ in range(5)]
    for execution_id in execution_ids:
        await engine.replay_execution(execution_id)
        if name == "replay_matching":
            await engine.cancel_execution(execution_id=execution_id, reason="not wanted")
    poison = uuid_of(execution_ids[2])
    await connection.execute(
        f"alter table execution add constraint poison check (execution_id <> '{poison}' or not ({broken}))"
    )
    call = getattr(engine, name)
    assert await call(**CALLS[name], lane_id="default") == result(5, 4, other=1)
    await connection.execute("alter table execution drop constraint poison")
    again = await call(**CALLS[name], lane_id="default")
    assert (again.refused, again.matched) == ({}, 5 if name == "change_priority_matching" else 1)


async def test_what_another_session_has_locked_is_refused_alone(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "PATIENCE_SECONDS", 0.0)
    flow, _ = await failed_flow(given, rows, 2)
    alone = [await given.failed() for _ in range(3)]
    async with connection.transaction():
        await connection.execute("select from flow where flow_id = $1 for update", flow.flow_id)
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(alone[1]))
        assert await engine.replay_matching(flow_id=flow.flow_id) == result(4, 0, retry_exhausted=4)
        assert await engine.replay_matching(namespace="tests") == result(7, 2, retry_exhausted=5)
    assert await engine.replay_matching(namespace="tests") == result(5, 5)
    assert await engine.find_inconsistencies() == []


async def test_the_priority_of_a_resumable_execution_is_changed(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    await engine.suspend(handle, suspend_args())
    await engine.resume_execution(execution_id=handle.execution_id)
    assert await states(engine) == ["resumable"]
    assert await engine.change_priority_matching(7, lane_id="default") == result(1, 1)
    assert [one.priority for one in (await engine.list_executions()).executions] == [7]
    assert await miscounts(engine, connection) == []


async def test_a_dry_run_counts_what_would_be_tried(engine: Engine, given: Given, rows: Rows) -> None:
    flow = await BuiltFlow.create(given, rows)
    await flow.members(2)
    await given.created()
    await engine.cancel_flow_header(flow_id=flow.flow_id, reason="not wanted", cancellation_policy="cancel_all")
    tried = await engine.change_priority_matching(7, namespace="tests", dry_run=True)
    assert tried == result(3, 0, is_dry_run=True)
    assert await engine.change_priority_matching(7, namespace="tests") == result(3, 1, execution_not_eligible=2)
    # One that has the priority already counts as changed.
    assert await engine.change_priority_matching(7, namespace="tests") == result(3, 1, execution_not_eligible=2)


async def test_what_changes_meanwhile_is_refused_alone(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution_ids = [await given.failed() for _ in range(5)]
    listing = parts_of(engine).services[Listing]
    list_executions = listing.list_executions

    async def race(**arguments: Any) -> Any:
        page = await list_executions(**arguments)
        await engine.replay_execution(execution_id=execution_ids[2])
        return page

    monkeypatch.setattr(listing, "list_executions", race)
    answer = await engine.replay_matching(lane_id="default")
    assert answer == result(5, 4, execution_not_terminal=1)


async def test_executions_created_after_the_start_are_left_alone(
    engine: Engine, given: Given, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "MAX_LIMIT", 1)
    for _ in range(2):
        await given.created()
    listing = parts_of(engine).services[Listing]
    list_executions = listing.list_executions
    late = []

    async def create_one(**arguments: Any) -> Any:
        page = await list_executions(**arguments)
        await clock.advance(ms=1)
        late.append(await given.created())
        return page

    monkeypatch.setattr(listing, "list_executions", create_one)
    assert await engine.cancel_matching(reason="x", lane_id="default") == result(2, 2)
    monkeypatch.undo()
    assert await states(engine) == ["cancelled"] * 2 + ["waiting"] * len(late)


@pytest.mark.parametrize("operation", ["cancel", "replay", "change the priority"])
async def test_a_lost_connection_ends_the_call(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, operation: str
) -> None:
    await engine.create_many(items(*(new() for _ in range(50))))
    if operation == "replay":
        await engine.cancel_matching(reason="x", lane_id="default")
    await connection.execute(
        """create sequence tries;
           create function cut() returns trigger language plpgsql as $$
           begin perform nextval('tries'); perform pg_terminate_backend(pg_backend_pid()); return new; end$$;
           create trigger cut before update on execution for each statement execute function cut()"""
    )
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "cancel": lambda: engine.cancel_matching("y", lane_id="default"),
        "replay": lambda: engine.replay_matching(lane_id="default"),
        "change the priority": lambda: engine.change_priority_matching(3, lane_id="default"),
    }
    async with rows.unchanged():
        with pytest.raises(TransportError):
            await calls[operation]()
    # The calls that were in progress end, and no other begins.
    assert await connection.fetchval("select last_value from tries") <= matching.CONCURRENCY


async def test_thousands_are_changed_by_one_call(engine: Engine, connection: asyncpg.Connection) -> None:
    for _ in range(2):
        await engine.create_many(items(*(new() for _ in range(600))))
    assert await engine.change_priority_matching(new_priority=5, lane_id="default") == result(1200, 1200)
    assert await engine.cancel_matching(reason="x", lane_id="default") == result(1200, 1200)
    assert await engine.replay_matching(lane_id="default", limit=1100) == result(1100, 1100)
    assert await engine.find_inconsistencies() == []
    assert await miscounts(engine, connection) == []
