"""The readers of feeds are woken after each commit that wrote events: in this process, and by a hint in others."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import asyncpg

from creates import new
from engine.ends import WAYS, Scene
from engine.flow.submitting import node, submitted
from engine.grants import issue_reclaim_grant, reclaim
from engine.sending import waiting
from engine.state import all_cases, claim
from engine.waits import suspend_run
from fixtures import Clock, Engines, Eventually, Given
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.event import FAMILY_KINDS, EventFamily
from flowfabric.model.ids import mint_for_flow

COMPLETION, LEASE, SIGNAL = EventFamily.COMPLETION, EventFamily.LEASE, EventFamily.SIGNAL
OPERATOR, INSTANCE_TAG = EventFamily.OPERATOR, EventFamily.INSTANCE_TAG


class Woken:
    """The families whose readers an engine has woken since the last question."""

    def __init__(self, engine: Engine, stack: ExitStack) -> None:
        feeds = parts_of(engine).store.wakeups.feeds
        self._events = {family: stack.enter_context(feeds.watch(family)) for family in EventFamily}

    def since(self) -> set[EventFamily]:
        """The families woken since the last call."""
        woken = {family for family, event in self._events.items() if event.is_set()}
        for event in self._events.values():
            event.clear()
        return woken

    async def after(self, operation: Awaitable[Any]) -> tuple[Any, set[EventFamily]]:
        """The answer of an operation, and the families it has woken."""
        self.since()
        return await operation, self.since()


async def test_each_writer_wakes_the_families_of_its_events(engine: Engine, given: Given, clock: Clock) -> None:
    with ExitStack() as stack:
        woken = Woken(engine, stack)
        assert (await woken.after(given.created()))[1] == set()
        assert (await woken.after(given.created(tags={"app.customer": "a"})))[1] == set()
        execution_id, families = await woken.after(given.created(tags={"ff.instance_id": "a"}))
        assert families == {INSTANCE_TAG}
        assert (await woken.after(given.created(tags={"ff.instance_id": "a"}, delay_ms=60_000)))[1] == {INSTANCE_TAG}
        assert (await woken.after(engine.create_many([new(tags={"ff.instance_id": "a"})])))[1] == {INSTANCE_TAG}
        assert (await woken.after(engine.set_execution_tag(execution_id, "ff.instance_id", "a")))[1] == set()
        assert (await woken.after(engine.set_execution_tag(execution_id, "ff.instance_id", "b")))[1] == {INSTANCE_TAG}
        runs, families = await woken.after(claim(engine))
        assert families == {LEASE}
        assert (await woken.after(claim(engine)))[1] == set()
        assert (await woken.after(engine.renew(runs[0].handle)))[1] == {LEASE}
        assert (await woken.after(engine.complete(runs[0].handle)))[1] == {LEASE, COMPLETION}
        assert (await woken.after(engine.fail(runs[1].handle, reason="x")))[1] == {LEASE, COMPLETION}
        assert (await woken.after(engine.delay(runs[2].handle, 0)))[1] == {LEASE}
        await clock.advance(seconds=31)
        assert (await woken.after(parts_of(engine).lease_expiry.sweep())) == (1, {LEASE})

        wait = await waiting(engine, given, lane_id="waits")
        assert (await woken.after(wait.send("other", idempotency_key="k")))[1] == {SIGNAL}
        assert (await woken.after(wait.send("other", idempotency_key="k")))[1] == {SIGNAL}
        assert (await woken.after(wait.send("ready")))[1] == {SIGNAL, COMPLETION}
        (resumed,) = await claim(engine, "waits")
        assert (await woken.after(suspend_run(engine, resumed.handle)))[1] == {LEASE}
        assert (await woken.after(engine.resume_execution(execution_id=wait.execution_id)))[1] == {OPERATOR}

        named = await given.created(lane_id="named")
        call = engine.issue_grant_and_claim(execution_id=named, lane_id="named", lease_duration_ms=1000)
        assert (await woken.after(call))[1] == {LEASE}


async def test_operators_and_flows_wake_the_families_of_their_events(engine: Engine, given: Given) -> None:
    with ExitStack() as stack:
        woken = Woken(engine, stack)
        waiting_one = await given.created(lane_id="priority")
        assert (await woken.after(engine.change_priority(waiting_one, 5)))[1] == {OPERATOR}
        assert (await woken.after(engine.change_priority(waiting_one, 5)))[1] == set()
        completed = await given.completed(lane_id="done")
        assert (await woken.after(engine.replay_execution(completed)))[1] == {LEASE, OPERATOR}
        handle = await given.claimed(lane_id="revoked")
        assert (await woken.after(engine.revoke_lease(handle.execution_id)))[1] == {LEASE}

        tagged = node("a", lane_id="flow", tags={"ff.instance_id": "a"})
        assert (await woken.after(submitted(engine, "b")))[1] == set()
        flow, families = await woken.after(submitted(engine, [tagged]))
        assert families == {INSTANCE_TAG}
        (run,) = await claim(engine, "flow")
        cascade = parts_of(engine).cascade
        _, families = await woken.after(_all(engine.complete(run.handle), cascade.drain()))
        # The flow has ended with it.
        assert families == {LEASE, COMPLETION, OPERATOR}
        other = await given.created(execution_id=mint_for_flow(flow.flow_id, parts_of(engine).store.rules.partitions))
        assert (await woken.after(engine.add_execution_to_flow(flow.flow_id, other)))[1] == {OPERATOR}
        cancelling: dict[str, Any] = {"reason": "x", "cancellation_policy": "cancel_all"}
        assert (await woken.after(engine.cancel_flow_header(flow.flow_id, **cancelling)))[1] == {OPERATOR}
        assert (await woken.after(engine.cancel_flow_header(flow.flow_id, **cancelling)))[1] == set()


async def _all(*calls: Awaitable[Any]) -> None:
    for call in calls:
        await call


async def test_every_way_to_end_a_lease_wakes_the_families_of_its_events(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    with ExitStack() as stack, all_cases() as case:
        woken = Woken(engine, stack)
        for name, (_, way) in WAYS.items():
            with case(name):
                steps = way(Scene(given, clock, connection, lane=name))
                await anext(steps)
                newest = await connection.fetchval("select coalesce(max(event_id), 0) from event")
                _, families = await woken.after(anext(steps, None))
                written = await written_since(connection, newest)
                assert written
                assert families >= written


async def test_a_reclaim_wakes_the_history_of_leases(engine: Engine, given: Given, clock: Clock) -> None:
    with ExitStack() as stack:
        woken = Woken(engine, stack)
        lost = await given.expired_lease()
        # Marks the lease as expired.
        assert (await woken.after(issue_reclaim_grant(engine, lost.execution_id)))[1] == {LEASE}
        assert (await woken.after(reclaim(engine, lost.execution_id)))[1] == {LEASE}


async def written_since(connection: asyncpg.Connection, event_id: int) -> set[EventFamily]:
    """The families of the events behind an id."""
    rows = await connection.fetch("select kind, outcome from event where event_id > $1", event_id)
    return {
        family
        for family, kinds in FAMILY_KINDS.items()
        for row in rows
        if row["kind"] in kinds and (family is not COMPLETION or row["outcome"] is not None)
    }


async def test_only_the_hints_of_leases_wait_for_others(engine: Engine, eventually: Eventually) -> None:
    wakeups = parts_of(engine).wakeups
    hints = wakeups.hints
    await eventually(lambda: not hints._is_sending and hints._waiting is None)
    wakeups.events(LEASE)
    assert not hints._is_sending
    for family in (SIGNAL, OPERATOR, INSTANCE_TAG, COMPLETION):
        await eventually(lambda: not hints._is_sending)
        wakeups.events(family)
        assert hints._is_sending


async def test_a_refused_or_missing_target_wakes_no_feed(engine: Engine, given: Given) -> None:
    wait = await waiting(engine, given)
    with ExitStack() as stack:
        woken = Woken(engine, stack)
        answers = await asyncio.gather(
            wait.send(waitpoint_token="k1:" + "0" * 64),
            engine.renew(wait.handle),
            engine.complete(wait.handle),
            return_exceptions=True,
        )
        assert all(isinstance(answer, Exception) for answer in answers)
        assert woken.since() == set()


async def test_the_feeds_of_other_processes_are_woken_by_hints(
    engine: Engine, engines: Engines, given: Given, eventually: Eventually
) -> None:
    other = await engines()
    await parts_of(other).store.wakeups.hints.listen()
    wait = await waiting(engine, given, lane_id="waits")
    operations: dict[EventFamily, Callable[[], Awaitable[Any]]] = {
        INSTANCE_TAG: lambda: given.created(tags={"ff.instance_id": "a"}),
        LEASE: lambda: claim(engine),
        SIGNAL: lambda: wait.send("other"),
        OPERATOR: lambda: engine.resume_execution(execution_id=wait.execution_id),
    }
    for family, operate in operations.items():
        with parts_of(other).store.wakeups.feeds.watch(family) as woken:
            await operate()
            await eventually(woken.is_set)


async def test_renewals_of_a_second_engine_wake_the_feeds_through_the_first(
    engine: Engine, given: Given, eventually: Eventually
) -> None:
    """The heartbeat of a worker renews on an engine of its own, which then needs no connection for hints."""
    handle = await given.claimed()
    async with second_engine(engine) as second:
        with parts_of(engine).store.wakeups.feeds.watch(LEASE) as woken:
            await second.renew(handle)
            await eventually(woken.is_set)
        assert parts_of(second).store.wakeups.hints._sending is None
