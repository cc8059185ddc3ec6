"""Cancelling a flow while others claim, end, suspend, resume and cancel, and while the engine closes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from engine.state import claim, refused, rounds
from engine.waits import suspend_args
from fixtures import Engines, Eventually, Given, Rows, uuid_of
from flowfabric.db import session as sessions
from flowfabric.db.database import Transaction
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.row import lock_execution, lock_with_grant
from flowfabric.engine.core.transition import Move
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.claim_named import Lease, NamedClaims
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.flow import (
    Added,
    CancellationPolicy,
    CancellationScheduled,
    FlowAlreadyTerminal,
    FlowCancelled,
    WaitIndefinite,
)
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId

from .conftest import NewFlow
from .flows import (
    LOCK_SUSPENSION,
    cancel_owed,
    drained,
    nothing_owed,
    owed,
    submitted_flow,
    suspended_among,
)

pytestmark = pytest.mark.usefixtures("consistent_rows")

ALL = CancellationPolicy.CANCEL_ALL


async def test_of_two_concurrent_cancels_one_cancels_and_the_other_finds_it_done(
    flows: NewFlow, rows: Rows, engine: Engine, engines: Engines
) -> None:
    other = await engines()
    for _ in rounds(5, whole=20):
        flow = await flows()
        members = await flow.members(4)
        arguments: dict[str, Any] = {"flow_id": flow.flow_id, "cancellation_policy": ALL}
        headers = await asyncio.gather(
            engine.cancel_flow_header(reason="first", **arguments),
            other.cancel_flow_header(reason="second", **arguments),
        )
        (late,) = [each for each in headers if isinstance(each, FlowAlreadyTerminal)]
        assert late.stored_cancel_reason == ("second" if isinstance(headers[0], FlowAlreadyTerminal) else "first")
        answers = await asyncio.gather(
            engine.cancel_flow(reason="third", **arguments), other.cancel_flow(reason="fourth", **arguments)
        )
        assert list(answers) == [FlowCancelled(cancellation_policy=ALL, member_execution_ids=members)] * 2
        assert len(await rows.events(str(flow.flow_id))) == 2
        both = asyncio.gather(*(cancel_owed(each, flow, members) for each in (engine, other)))
        assert await both == [[], []]
        assert set((await flow.states(rows)).values()) == {"cancelled"}
        ends = [event for each in members for event in await rows.events(each) if event["outcome"] is not None]
        assert len(ends) == len(members)
    await nothing_owed(rows)


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
                call(flow.flow_id, reason="x", cancellation_policy=ALL),
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


async def test_closing_the_engine_first_cancels_what_it_has_begun_to_cancel(given: Given, rows: Rows, url: str) -> None:
    flow = await submitted_flow(given, 600)
    async with Engine.connect(url) as closing:
        answer = await closing.cancel_flow(flow.flow_id, reason="x", cancellation_policy=ALL)
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
            arguments: dict[str, Any] = {"reason": "x", "cancellation_policy": ALL, "wait": WaitIndefinite()}
            first = asyncio.create_task(closing.cancel_flow(flow.flow_id, **arguments))
            await refused(closing.cancel_flow(flow.flow_id, **arguments, grace_ms=-1), "invalid_grace_ms")
            while not (await rows.of("flow", flow_id=flow.flow_id))[0]["cancelled_at"]:  # noqa: ASYNC110
                await asyncio.sleep(0)
            second = asyncio.create_task(closing.cancel_flow(flow.flow_id, **arguments))
            await refused(closing.shutdown_prepare(0), "timeout")
            for waiting in (first, second):
                await refused(waiting, "unavailable", "the flow is cancelled")
        await closing.shutdown_prepare(60_000)
    await nothing_owed(rows)


async def test_shutdown_prepare_waits_for_a_call_that_has_not_cancelled_its_flow_yet(
    given: Given, rows: Rows, url: str, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    flow = await submitted_flow(given, 3)
    async with Engine.connect(url) as closing:
        async with connection.transaction():
            await connection.execute("select from flow where flow_id = $1 for update", flow.flow_id)
            cancelling = asyncio.create_task(closing.cancel_flow(flow.flow_id, reason="x", cancellation_policy=ALL))
            await eventually(lambda: is_waiting(connection))
            await refused(closing.shutdown_prepare(0), "timeout")
        await closing.shutdown_prepare(60_000)
        await nothing_owed(rows)
        assert isinstance(await cancelling, CancellationScheduled)
    assert set((await flow.states(rows)).values()) == {"cancelled"}


async def test_a_flow_is_cancelled_with_its_members_although_the_caller_gives_up(
    given: Given, rows: Rows, engine: Engine, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    flow = await submitted_flow(given, 3)
    async with connection.transaction():
        await connection.execute("select from flow where flow_id = $1 for update", flow.flow_id)
        cancelling = asyncio.create_task(engine.cancel_flow(flow.flow_id, reason="x", cancellation_policy=ALL))
        await eventually(lambda: is_waiting(connection))
        cancelling.cancel()
        await asyncio.wait((cancelling,))
    await drained(engine)
    assert set((await flow.states(rows)).values()) == {"cancelled"}
    await nothing_owed(rows)


async def test_a_member_added_during_a_cancel_is_cancelled_with_it_or_refused(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, engines: Engines
) -> None:
    other = await engines()
    for _ in rounds(5, whole=30):
        flow = await flows()
        members = await flow.members(2)
        late = [await given.created(execution_id=flow.mint()) for _ in range(3)]
        answer, *added = await asyncio.gather(
            flow.cancel(wait=WaitIndefinite()),
            *(other.add_execution_to_flow(flow.flow_id, each) for each in late),
            return_exceptions=True,
        )
        assert isinstance(answer, FlowCancelled), answer
        joined = [each for each, one in zip(late, added, strict=True) if isinstance(one, Added)]
        codes = [one.code for one in added if isinstance(one, EngineError)]
        assert codes == ["flow_already_terminal"] * (len(late) - len(joined))
        assert answer.member_execution_ids == sorted([*members, *joined])
        for each in late:
            state = await engine.read_execution_state(each)
            assert state == ("cancelled" if each in joined else "waiting")
            await engine.cancel_execution(execution_id=each, reason="the next round follows")
    await nothing_owed(rows)
