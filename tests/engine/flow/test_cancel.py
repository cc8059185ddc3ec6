"""Cancelling a flow with its members: in the background, with a wait, again, and what is left to the sweep."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from engine.state import ACTIVE, CANCELLED, claim, refused, rounds, vector
from engine.waits import suspend_args
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric import Context, Worker
from flowfabric.db import session as sessions
from flowfabric.db.database import Transaction
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.row import lock_execution, lock_with_grant
from flowfabric.engine.core.transition import Move
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.cancel_many import CancelDisposition, CancelResult
from flowfabric.engine.flow import backlog, cancel
from flowfabric.engine.lease.claim_named import Lease, NamedClaims
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import CompletionOutcome
from flowfabric.model.flow import (
    CancellationPolicy,
    CancellationScheduled,
    FlowAlreadyTerminal,
    FlowCancelled,
    NoWait,
    PartiallyCancelled,
    WaitIndefinite,
    WaitTimeout,
)
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId

from .conftest import NewFlow
from .flows import Flow, owed

pytestmark = pytest.mark.usefixtures("consistent_rows")

ALL = CancellationPolicy.CANCEL_ALL
WAITS = (NoWait(), WaitTimeout(60_000), WaitIndefinite())


async def drained(engine: Engine) -> None:
    """Wait until the members of all flows that the engine has cancelled are cancelled."""
    await parts_of(engine).flow_cancel.drain()


async def nothing_owed(rows: Rows) -> None:
    assert await rows.of("cancel_backlog") == []
    assert await rows.of("cancel_backlog_member") == []


async def test_cancel_all_ends_every_member_as_a_cancel_of_its_own_would(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    for wait in WAITS:
        flow = await flows()
        waiting = await flow.member()
        handle = await flow.member(given.claimed, lane_id="active")
        suspended = await flow.member(given.claimed, lane_id="active")
        await engine.suspend(suspended, suspend_args())
        completed = await flow.member(given.completed, lane_id="active")
        members = sorted([waiting, handle.execution_id, suspended.execution_id, completed])
        answer = await flow.cancel(wait=wait)
        if isinstance(wait, NoWait):
            assert answer == CancellationScheduled(
                cancellation_policy=ALL, member_count=3, member_execution_ids=members
            )
            await drained(engine)
        else:
            assert answer == FlowCancelled(cancellation_policy=ALL, member_execution_ids=members)
        states = await flow.states(rows)
        assert states.pop(completed) == "completed"
        assert set(states.values()) == {"cancelled"}
        await nothing_owed(rows)
        row = await rows.execution(handle.execution_id)
        assert vector(row) == CANCELLED
        assert (row["cancellation_reason"], row["cancelled_by"]) == ("not wanted", "operator_override")
        events = [(event["kind"], event["reason"], event["outcome"]) for event in await rows.events(waiting)]
        assert events == [("ended", "cancelled", CompletionOutcome.CANCELLED)]
        (released,) = [event for event in await rows.events(handle.execution_id) if event["kind"] == "released"]
        assert (released["reason"], released["outcome"]) == ("cancelled", CompletionOutcome.CANCELLED)
        (waitpoint,) = await rows.of("waitpoint", execution_id=uuid_of(suspended.execution_id))
        assert waitpoint["state"] == "closed"
        await refused(engine.renew(handle), "execution_not_active")
        await refused(engine.complete(handle, b"late"), "execution_not_active")
        entries = await rows.of("cascade_entry", flow_id=flow.flow_id)
        ended = {
            str(uuid)
            for entry in entries
            if entry["outcome"] == CompletionOutcome.CANCELLED
            for uuid in entry["execution_ids"]
        }
        assert ended == {uuid_of(each) for each in members} - {uuid_of(completed)}


async def test_cancel_pending_lets_active_and_suspended_members_end_by_themselves(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    flow = await flows()
    pending = [await flow.member(), await flow.member(given.delayed), await flow.member()]
    handle = await flow.member(given.claimed, lane_id="other")
    waiting = await flow.member(given.claimed, lane_id="other")
    await engine.suspend(waiting, suspend_args())
    answer = await flow.cancel("cancel_pending", wait=WaitIndefinite())
    assert isinstance(answer, FlowCancelled)
    assert vector(await rows.execution(handle.execution_id)) == ACTIVE
    await engine.complete(handle, b"done")
    assert await flow.states(rows) == {
        **dict.fromkeys(pending, "cancelled"),
        handle.execution_id: "completed",
        waiting.execution_id: "suspended",
    }
    await nothing_owed(rows)


async def test_a_flow_that_owes_nothing_is_cancelled_at_once(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    for wait in WAITS:
        empty, ended, kept = await flows(), await flows(), await flows()
        await ended.member(given.completed, lane_id="active")
        await kept.members(2)
        for flow, policy in ((empty, "cancel_all"), (ended, "cancel_all"), (kept, "flow_only")):
            answer = await flow.cancel(policy, wait=wait)
            assert answer == FlowCancelled(
                cancellation_policy=CancellationPolicy(policy), member_execution_ids=sorted(await flow.states(rows))
            )
            # Again, by another policy: what is stored counts.
            async with rows.unchanged():
                assert await flow.cancel("cancel_pending", wait=wait) == answer
        assert set((await kept.states(rows)).values()) == {"waiting"}
    await nothing_owed(rows)


async def test_a_repeated_cancel_returns_at_most_a_thousand_members(
    flows: NewFlow, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel, "REPLAYED_MEMBERS", 2)
    flow = await flows()
    members = await flow.members(3)
    assert (await flow.cancel(wait=WaitIndefinite())).member_execution_ids == members
    assert (await flow.cancel()).member_execution_ids == members[:2]
    assert (await flow.cancel_header()).member_execution_ids == members


async def suspended_among(flow: Flow, given: Given, count: int) -> tuple[ExecutionId, list[ExecutionId]]:
    """A suspended member, and all members of a flow: it and this many others."""
    handle = await flow.member(given.claimed, lane_id="suspended")
    await given.engine.suspend(handle, suspend_args())
    others = await flow.members(count)
    return handle.execution_id, sorted([handle.execution_id, *others])


LOCK_SUSPENSION = "select from suspension where execution_id = $1 for update"
"""A cancel needs this row, the header does not."""


async def test_a_member_that_stays_locked_is_named_delays_no_other_and_is_left_to_the_sweep(
    flows: NewFlow,
    given: Given,
    rows: Rows,
    engine: Engine,
    connection: asyncpg.Connection,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "PATIENCE_SECONDS", 0.2)
    flow = await flows()
    locked, members = await suspended_among(flow, given, 4)
    async with connection.transaction():
        await connection.execute(LOCK_SUSPENSION, uuid_of(locked))
        answer = await flow.cancel(wait=WaitIndefinite())
        assert answer == PartiallyCancelled(
            cancellation_policy=ALL, member_execution_ids=members, failed_member_execution_ids=[locked]
        )
        states = await flow.states(rows)
        assert states.pop(locked) == "suspended"
        assert set(states.values()) == {"cancelled"}
        assert await owed(rows, flow.flow_id) == [uuid_of(locked)]
        # It is past its grace, but still locked: the sweep leaves it.
        await clock.advance(seconds=31)
        assert await parts_of(engine).cancel_backlog.reconcile_due() == (0, False, ())
        assert await owed(rows, flow.flow_id) == [uuid_of(locked)]
    parts_of(engine).cancel_backlog.quarantine._failures.clear()
    assert (await parts_of(engine).cancel_backlog.reconcile_due()).done == 1
    assert (await flow.states(rows))[locked] == "cancelled"
    await nothing_owed(rows)


async def test_a_wait_that_expires_leaves_the_cancel_in_effect(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, connection: asyncpg.Connection
) -> None:
    flow = await flows()
    locked, members = await suspended_among(flow, given, 2)
    async with connection.transaction():
        await connection.execute(LOCK_SUSPENSION, uuid_of(locked))
        timeout = await refused(flow.cancel(wait=WaitTimeout(100)), "timeout")
        assert timeout.detail == {"op": "cancel_flow", "elapsed_ms": 100}
        # A repeated call waits for the members too, and a short one reads once.
        for ms in (0, 50):
            timeout = await refused(flow.cancel(wait=WaitTimeout(ms)), "timeout")
            assert timeout.detail == {"op": "cancel_flow", "elapsed_ms": ms}
    assert await flow.cancel(wait=WaitIndefinite()) == FlowCancelled(
        cancellation_policy=ALL, member_execution_ids=members
    )
    assert set((await flow.states(rows)).values()) == {"cancelled"}
    await drained(engine)
    await nothing_owed(rows)


async def test_a_repeated_call_waits_only_for_what_the_stored_policy_covers(
    flows: NewFlow, given: Given, engine: Engine
) -> None:
    flow = await flows()
    await flow.members(2)
    await flow.member(given.claimed, lane_id="other")
    await flow.cancel("cancel_pending", wait=WaitIndefinite())
    answer = await flow.cancel("cancel_all", wait=WaitTimeout(0))
    assert answer.cancellation_policy is CancellationPolicy.CANCEL_PENDING
    await refused(flow.cancel(wait=WaitTimeout(300_001)), "invalid_input")
    await refused(flow.cancel(wait=True), "invalid_input", "NoWait, WaitTimeout or WaitIndefinite")


async def test_a_flow_that_is_gone_ends_the_wait(
    flows: NewFlow, given: Given, engine: Engine, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    flow = await flows()
    await flow.members(1)
    await flow.cancel_header()
    waiting = asyncio.create_task(flow.cancel(wait=WaitIndefinite()))
    await asyncio.sleep(0)
    # No operation deletes flows yet.
    await connection.execute("delete from flow where flow_id = $1", flow.flow_id)
    await connection.execute("update execution set flow_id = null where flow_id = $1", flow.flow_id)
    assert isinstance(await waiting, FlowCancelled)
    await connection.execute("update cancel_backlog set grace_until = 0")
    assert (await parts_of(engine).cancel_backlog.reconcile_due()).done == 1


async def test_of_two_concurrent_cancels_one_cancels_and_the_other_finds_it_done(
    flows: NewFlow, rows: Rows, engine: Engine, engines: Engines
) -> None:
    other = await engines()
    for _ in rounds(5, whole=20):
        flow = await flows()
        members = await flow.members(4)
        arguments = {"flow_id": flow.flow_id, "cancellation_policy": ALL}
        headers = await asyncio.gather(
            engine.cancel_flow_header(reason="first", **arguments),
            other.cancel_flow_header(reason="second", **arguments),
        )
        (late,) = [each for each in headers if isinstance(each, FlowAlreadyTerminal)]
        assert late.stored_cancel_reason == ("second" if isinstance(headers[0], FlowAlreadyTerminal) else "first")
        answers = await asyncio.gather(
            engine.cancel_flow(reason="third", **arguments), other.cancel_flow(reason="fourth", **arguments)
        )
        assert answers == [FlowCancelled(cancellation_policy=ALL, member_execution_ids=members)] * 2
        assert len(await rows.events(str(flow.flow_id))) == 2
        both = asyncio.gather(*(cancel_owed(each, flow, members) for each in (engine, other)))
        assert await both == [[], []]
        assert set((await flow.states(rows)).values()) == {"cancelled"}
        ends = [event for each in members for event in await rows.events(each) if event["outcome"] is not None]
        assert len(ends) == len(members)
    await nothing_owed(rows)


async def cancel_owed(engine: Engine, flow: Flow, members: list[ExecutionId]) -> list[ExecutionId]:
    """Cancel members as a dispatch does; return those that failed."""
    return await parts_of(engine).cancel_backlog.dispatch(flow.partition, flow.flow_id, members, "not wanted")


async def test_acknowledging_the_last_members_at_the_same_time_leaves_no_header(
    flows: NewFlow, rows: Rows, engine: Engine, engines: Engines
) -> None:
    other = await engines()
    for _ in rounds(5, whole=30):
        flow = await flows()
        first, second = await flow.members(2)
        await flow.cancel_header()
        await asyncio.gather(
            engine.ack_cancel_member(flow_id=flow.flow_id, execution_id=first),
            other.ack_cancel_member(flow_id=flow.flow_id, execution_id=second),
        )
        await nothing_owed(rows)
        async with rows.unchanged():
            await engine.ack_cancel_member(flow_id=flow.flow_id, execution_id=first)
        for each in (first, second):
            await engine.cancel_execution(execution_id=each, reason="the next round follows")


async def test_the_sweep_waits_for_the_grace_and_cancels_with_the_stored_reason(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, clock: Clock
) -> None:
    flow, unnamed = await flows(), await flows()
    members = [*await flow.members(3), (await flow.member(given.claimed, lane_id="other")).execution_id]
    (nameless,) = await unnamed.members(1)
    await flow.cancel_header()
    await engine.cancel_flow_header(flow_id=unnamed.flow_id, reason="", cancellation_policy=ALL)
    sweep = parts_of(engine).cancel_backlog
    async with rows.unchanged():
        assert (await sweep.reconcile_due()).done == 0
    await clock.advance(seconds=30)
    assert await sweep.reconcile_due() == (5, False, ())
    assert set((await flow.states(rows)).values()) == {"cancelled"}
    for each in members:
        assert (await rows.execution(each))["cancellation_reason"] == "not wanted"
    assert (await rows.execution(nameless))["cancellation_reason"] == "flow_cancelled"
    await nothing_owed(rows)


async def test_the_sweep_works_in_batches_and_passes_over_members_that_it_failed_to_cancel(
    flows: NewFlow,
    given: Given,
    rows: Rows,
    engine: Engine,
    connection: asyncpg.Connection,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "FLOW_LIMIT", 1)
    monkeypatch.setattr(backlog, "MEMBER_LIMIT", 2)
    stuck, other = await flows(), await flows()
    locked, _ = await suspended_among(stuck, given, 3)
    await stuck.cancel_header()
    await clock.advance(ms=1)
    await other.members(3)
    await other.cancel_header()
    await clock.advance(seconds=31)
    sweep = parts_of(engine).cancel_backlog
    async with connection.transaction():
        await connection.execute(LOCK_SUSPENSION, uuid_of(locked))
        results = [await sweep.reconcile_due() for _ in range(6)]
        assert sum(result.done for result in results) == 6
        assert [result.is_full for result in results][-1:] == [False]
        assert await owed(rows, stuck.flow_id) == [uuid_of(locked)]
        assert await owed(rows, other.flow_id) == []
    await engine.cancel_execution(execution_id=locked, reason="by hand")
    sweep.quarantine._failures.clear()
    assert (await sweep.reconcile_due()).done == 1
    await nothing_owed(rows)


async def test_the_sweep_gives_up_what_can_never_be_cancelled(
    flows: NewFlow,
    rows: Rows,
    engine: Engine,
    clock: Clock,
    connection: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = await flows()
    gone, left = await flow.members(2)
    await flow.cancel_header(grace_ms=0)
    # No operation deletes a member that has not ended.
    for table in ("listed", "execution_input", "execution"):
        await connection.execute(f"delete from {table} where execution_id = $1", uuid_of(gone))
    sweep = parts_of(engine).cancel_backlog
    answers = {gone: CancelDisposition.NOT_FOUND, left: error("internal", "a test")}
    cancelled = await sweep._cancel_many.cancel([gone], reason="x")
    assert cancelled == [answers[gone]]

    async def cancel_many(execution_ids: Sequence[ExecutionId], **_: object) -> list[CancelResult]:
        return [answers[each] for each in execution_ids]

    sweep._cancel_many.cancel = cancel_many  # type: ignore[method-assign,assignment]
    assert (await sweep.reconcile_due()).done == 2
    assert "cannot be cancelled, giving it up" in caplog.text
    await nothing_owed(rows)
    await engine.cancel_execution(execution_id=left, reason="by hand")


async def test_a_cancel_racing_claims_and_completions_ends_every_member_once(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, engines: Engines
) -> None:
    other = await engines()
    for _ in rounds(4, whole=30):
        flow = await flows()
        await flow.members(12)
        claimed = await claim(other, limit=4)

        async def work(held: list[Any] = claimed) -> None:
            for run in held:
                with contextlib.suppress(EngineError):
                    await other.complete(run.handle, b"done")
            for _ in range(3):
                for run in await claim(other, limit=4):
                    with contextlib.suppress(EngineError):
                        await other.complete(run.handle, b"done")

        _, answer = await asyncio.gather(work(), flow.cancel(wait=WaitIndefinite()))
        assert isinstance(answer, FlowCancelled), answer
        states = await flow.states(rows)
        assert set(states.values()) <= {"cancelled", "completed"}
        for execution_id in states:
            ends = [event for event in await rows.events(execution_id) if event["outcome"] is not None]
            assert len(ends) == 1, ends
        assert await claim(other, limit=20) == []
    await nothing_owed(rows)


async def test_nothing_is_claimed_after_the_header_has_committed(
    flows: NewFlow, rows: Rows, engine: Engine, engines: Engines
) -> None:
    other = await engines()
    for _ in rounds(4, whole=30):
        flow = await flows()
        await flow.members(20)
        claims = [asyncio.create_task(claim(other, limit=3)) for _ in range(3)]
        await flow.cancel_header()
        held = {each for each, state in (await flow.states(rows)).items() if state == "waiting"}
        taken = {run.execution_id for task in claims for run in await task}
        assert held.isdisjoint(taken)
        assert len(held) + len(taken) == 20
        assert await claim(other, limit=20) == []
        await cancel_owed(engine, flow, sorted(await flow.states(rows)))


async def test_a_cancel_racing_suspends_and_resumes_ends_every_member_once(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, engines: Engines
) -> None:
    other = await engines()
    for _ in rounds(4, whole=30):
        flow = await flows()
        runs = [await flow.member(given.claimed, lane_id="raced") for _ in range(4)]
        waiting = [await flow.member(given.claimed, lane_id="raced") for _ in range(4)]
        for handle in waiting:
            await engine.suspend(handle, suspend_args())

        async def work(runs: list[Handle] = runs, waiting: list[Handle] = waiting) -> None:
            for run, wait in zip(runs, waiting, strict=True):
                with contextlib.suppress(EngineError):
                    await other.suspend(run, suspend_args())
                with contextlib.suppress(EngineError):
                    await other.resume_execution(execution_id=wait.execution_id)
                with contextlib.suppress(EngineError):
                    await claim(other, "raced", limit=1)

        _, answer = await asyncio.gather(work(), flow.cancel(wait=WaitIndefinite()))
        assert isinstance(answer, FlowCancelled), answer
        assert set((await flow.states(rows)).values()) == {"cancelled"}
    await nothing_owed(rows)


async def test_a_foreign_lock_on_a_member_ends_in_retry_exhausted_and_changes_nothing(
    flows: NewFlow, rows: Rows, connection: asyncpg.Connection, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "10ms")
    engine = await engines()
    flow = await flows()
    members = await flow.members(3)
    async with connection.transaction(), rows.unchanged():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(members[1]))
        for call in (engine.cancel_flow_header, engine.cancel_flow):
            failure = await refused(
                call(flow_id=flow.flow_id, reason="x", cancellation_policy=ALL),
                "retry_exhausted",
                f"flow {flow.flow_id} or one of its members is locked by another session",
            )
            assert failure.retryable


async def test_a_member_that_ends_or_starts_while_the_header_waits_for_it_is_judged_by_its_locked_row(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    for policy, expected in (("cancel_all", 1), ("cancel_pending", 0)):
        flow = await flows()
        ending, starting = await flow.members(2, lane_id=policy)
        async with moving(engine, ending, starting, policy):
            cancelling = asyncio.create_task(flow.cancel_header(policy))
            await eventually(lambda: is_waiting(connection))
            assert not cancelling.done()
        answer = await cancelling
        assert answer.member_execution_ids == [ending, starting]
        assert await owed(rows, flow.flow_id) == [uuid_of(starting)][:expected]
        assert await flow.states(rows) == {ending: "cancelled", starting: "active"}


@asynccontextmanager
async def moving(engine: Engine, ending: ExecutionId, starting: ExecutionId, lane_id: str) -> AsyncIterator[None]:
    """Cancel one execution and claim another in a transaction that commits at the end of the block."""
    parts = parts_of(engine)
    moved, released = asyncio.Event(), asyncio.Event()

    async def move(transaction: Transaction) -> None:
        await lock_execution(transaction, ending)
        await parts.services[LeaseEnds].within(transaction, [LeaseEnd(ending, Move.CANCELLED, reason="before")])
        locked = await lock_with_grant(transaction, starting, lane_id)
        lease = Lease.of(worker_id="worker", worker_instance_id="worker-1", lease_ttl_ms=60_000)
        await parts.services[NamedClaims].take(transaction, locked, "fresh", lease)
        moved.set()
        await released.wait()

    working = asyncio.create_task(parts.store.transact(move))
    await moved.wait()
    yield
    released.set()
    await working


async def is_waiting(connection: asyncpg.Connection) -> bool:
    """Whether a session of this database waits for a lock."""
    found: bool = await connection.fetchval(
        "select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')"
    )
    return found


async def test_closing_the_engine_first_cancels_what_it_has_begun_to_cancel(
    flows: NewFlow, rows: Rows, url: str
) -> None:
    flow = await flows()
    await flow.members(600)
    async with Engine.connect(url) as closing:
        answer = await closing.cancel_flow(flow_id=flow.flow_id, reason="x", cancellation_policy=ALL)
        assert isinstance(answer, CancellationScheduled)
    assert set((await flow.states(rows)).values()) == {"cancelled"}
    await nothing_owed(rows)


async def test_shutdown_prepare_ends_waits_for_members(
    flows: NewFlow, given: Given, rows: Rows, url: str, connection: asyncpg.Connection
) -> None:
    flow = await flows()
    locked, _ = await suspended_among(flow, given, 1)
    async with Engine.connect(url) as closing:
        async with connection.transaction():
            await connection.execute(LOCK_SUSPENSION, uuid_of(locked))
            arguments = {"flow_id": flow.flow_id, "reason": "x", "cancellation_policy": ALL, "wait": WaitIndefinite()}
            first = asyncio.create_task(closing.cancel_flow(**arguments))
            await refused(closing.cancel_flow(**arguments, grace_ms=-1), "invalid_grace_ms")
            while not (await rows.of("flow", flow_id=flow.flow_id))[0]["cancelled_at"]:  # noqa: ASYNC110
                await asyncio.sleep(0)
            second = asyncio.create_task(closing.cancel_flow(**arguments))
            await refused(closing.shutdown_prepare(0), "timeout")
            for waiting in (first, second):
                await refused(waiting, "unavailable", "the flow is cancelled")
        await closing.shutdown_prepare(60_000)
    await nothing_owed(rows)


async def test_a_worker_stops_a_handler_whose_flow_is_cancelled(
    flows: NewFlow, rows: Rows, engine: Engine, eventually: Eventually
) -> None:
    stopped: list[str] = []
    started = asyncio.Event()

    async def job(ctx: Context, a: int) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append(ctx.execution_id)
            raise

    flow = await flows()
    execution_id = await flow.member()
    async with Worker(engine, handlers={"job": job}, lanes=["default"], namespace="tests"):
        await started.wait()
        # Its heartbeat would find out only after ten seconds.
        await flow.cancel()
        await eventually(lambda: stopped == [execution_id], timeout=5)
    await drained(engine)
    await nothing_owed(rows)


async def test_a_flow_of_five_thousand_members_is_cancelled_in_seconds(
    flows: NewFlow, rows: Rows, engine: Engine
) -> None:
    flow = await flows()
    await flow.add_many(5000)
    began = time.monotonic()
    answer = await flow.cancel(wait=WaitIndefinite())
    seconds = time.monotonic() - began
    assert isinstance(answer, FlowCancelled)
    assert len(answer.member_execution_ids) == 5000
    assert set((await flow.states(rows)).values()) == {"cancelled"}
    await nothing_owed(rows)
    assert seconds < 30
