"""Changed priorities: where a waiting execution is claimed, and what is refused."""

import asyncio
from typing import Any

import pytest

from engine.event.following import take
from engine.state import claim, event_texts, ids, refused, rounds, vector
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.feeds import OperatorEvent, OperatorEventType
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Changed
from flowfabric.model.grant import Granted

ABSENT = "{fp:3}:11111111-1111-4111-8111-111111111111"


async def test_executions_are_claimed_by_their_new_priorities_and_then_in_the_order_of_creation(
    engine: Engine, given: Given
) -> None:
    first, second, third, fourth = [await given.created(priority=priority) for priority in (5, 5, 5, 0)]
    assert await engine.change_priority(third, 9) == Changed(execution_id=third)
    await engine.change_priority(first, 3)
    await engine.change_priority(fourth, 5)
    assert ids(await claim(engine)) == [third, second, fourth, first]
    again = [await given.created(priority=priority) for priority in (0, 1, 2)]
    for execution_id in reversed(again):
        await engine.change_priority(execution_id, 7)
    assert ids(await claim(engine)) == again


async def test_a_change_is_stored_with_one_event(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    execution_id = await given.created(priority=2, tags={"app.key": "value", "ff.instance_id": "one"})
    before = await rows.execution(execution_id)
    async with engine.subscribe_operator_events() as events:
        now = await clock.advance(seconds=1)
        await engine.change_priority(execution_id, 20_000)
        row = await rows.execution(execution_id)
        assert vector(row) == vector(before)
        assert (row["priority"], row["last_mutation_at"], row["last_transition_at"]) == (
            9000,
            now,
            before["last_transition_at"],
        )
        assert [each["place"] for each in await rows.of("ready")] == [row["place"]]
        assert row["place"] & (2**48 - 1) == before["place"] & (2**48 - 1)
        await engine.change_priority(execution_id, -5)
        assert (await rows.execution(execution_id))["priority"] == 0
        info = await engine.read_execution_info(execution_id)
        assert info is not None
        assert info.priority == 0
        async with rows.unchanged():
            # The priority it has already.
            for same in (0, -1):
                assert await engine.change_priority(execution_id, same) == Changed(execution_id=execution_id)
        found = await take(events, 2)
    assert await event_texts(rows, execution_id) == ["tag_attached", *["operator_action priority_changed"] * 2]
    assert [(each.execution_id, each.event_type, each.details) for each in found] == [
        (execution_id, OperatorEventType.PRIORITY_CHANGED, {"old_priority": old, "new_priority": new})
        for old, new in ((2, 9000), (9000, 0))
    ]
    assert all(isinstance(each, OperatorEvent) for each in found)
    (stored, _) = await rows.of("event", kind="operator_action")
    assert (stored["instance_tag"], stored["flow_id"]) == ("one", None)


async def test_only_the_priority_of_a_claimable_execution_can_be_changed(
    engine: Engine, given: Given, rows: Rows
) -> None:
    others = [
        await given.delayed(lane_id="delayed"),
        (await given.claimed(lane_id="active")).execution_id,
        (await given.reclaimable(lane_id="lost")).execution_id,
        (await given.backing_off(lane_id="backing off")).execution_id,
        await given.completed(lane_id="completed"),
    ]
    waiting = await given.created()
    async with rows.unchanged():
        for execution_id in others:
            await refused(engine.change_priority(execution_id, 5), "execution_not_eligible")
        await refused(engine.change_priority(ABSENT, 5), "execution_not_found")
        wrong: list[Any] = ["5", 5.0, True, None]
        for priority in wrong:
            refusal = await refused(engine.change_priority(waiting, priority), "invalid_input")
            assert "new_priority" in str(refusal)
        with pytest.raises(EngineError):
            await engine.change_priority("nonsense", 5)


async def test_a_resumable_execution_and_a_retry_keep_the_priority_they_are_given(
    engine: Engine, given: Given, clock: Clock
) -> None:
    handle = await given.claimed(priority=1, policy={"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 0}}})
    await engine.wait_children(handle)
    await engine.change_priority(handle.execution_id, 8)
    (resumed,) = await claim(engine)
    assert resumed.priority == 8
    await engine.fail(resumed.handle, reason="again")
    await engine.change_priority(handle.execution_id, 6)
    (retried,) = await claim(engine)
    assert (retried.priority, retried.attempt_index) == (6, 1)
    await clock.advance(seconds=60)
    (reclaimed,) = await claim(engine)
    assert reclaimed.priority == 6


async def test_a_grant_stays_with_the_execution(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    named: dict[str, Any] = {"execution_id": await given.created(), "lane_id": "default"}
    worker: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
    grant = await engine.issue_claim_grant(**named, **worker, grant_ttl_ms=5_000)
    assert isinstance(grant, Granted)
    await engine.change_priority(named["execution_id"], 9)
    (entry,) = await rows.of("ready")
    assert entry["granted_until"] == await clock.now() + 5_000
    assert await claim(engine) == []
    assert (await engine.claim_execution(**named, **worker)).priority == 9


async def test_processes_that_have_searched_beyond_the_new_place_find_the_execution(
    engines: Engines, given: Given, eventually: Eventually
) -> None:
    engine, other = given.engine, await engines()
    parts_of(other).wakeups.hints.start_listening()
    await eventually(lambda: parts_of(other).wakeups.hints.is_listening)
    old = [await given.created(priority=0) for _ in range(2)]
    for _ in range(4):
        await given.created(priority=5)
    # Both engines remember where the last claim of this priority ended.
    for each in (engine, other, engine, other):
        assert len(await claim(each, limit=1)) == 1
    later = [await given.created(priority=5) for _ in range(2)]
    for execution_id in old:
        await engine.change_priority(execution_id, 5)
    # Hints arrive in the order in which they are sent.
    wakes = parts_of(other).wakeups.wakes(["beacon"])
    parts_of(engine).wakeups.lane("beacon")
    await eventually(lambda: parts_of(other).wakeups.wakes(["beacon"]) > wakes)
    assert ids(await claim(engine, limit=1)) == old[:1]
    assert ids(await claim(other, limit=1)) == old[1:]
    assert ids(await claim(engine)) == later


@pytest.mark.usefixtures("hints_only")
async def test_a_changed_priority_wakes_waiting_claims(engines: Engines, given: Given, eventually: Eventually) -> None:
    other = await engines()
    # A grant reserves it for another worker, and expires without anybody being told.
    execution_id = await given.created(priority=0)
    named: dict[str, Any] = {"worker_id": "other", "worker_instance_id": "other-1"}
    await given.engine.issue_claim_grant(execution_id=execution_id, lane_id="default", **named, grant_ttl_ms=1_000)
    searching = [
        asyncio.create_task(each.claim(lane_id="default", worker_id="w", worker_instance_id="w-1", max_wait_ms=60_000))
        for each in (given.engine, other)
    ]
    for each in (given.engine, other):
        await eventually(lambda each=each: parts_of(each).wakeups._waiting.get("default"))
        await eventually(lambda each=each: parts_of(each).wakeups.hints.is_listening)
    await given.clock.advance(ms=1_000)
    await given.engine.change_priority(execution_id, 3)
    done, _ = await asyncio.wait(searching, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    (taken,) = [task.result() for task in done]
    assert taken is not None
    assert taken.execution_id == execution_id
    for task in searching:
        task.cancel()
    await asyncio.gather(*searching, return_exceptions=True)


async def test_concurrent_changes_and_claims_leave_consistent_rows(engines: Engines, given: Given, rows: Rows) -> None:
    first, second = given.engine, await engines()
    for _ in rounds(15, whole=100):
        execution_id = await given.created(priority=3)

        async def change(engine: Engine, priority: int, execution_id: str = execution_id) -> object:
            try:
                return await engine.change_priority(execution_id, priority)
            except EngineError as refusal:
                return refusal.code

        *changed, claimed = await asyncio.gather(change(first, 8), change(second, 1), claim(second, limit=1))
        taken = [*claimed, *await claim(first, limit=1)]
        assert ids(taken) == [execution_id]
        events = await rows.of("event", kind="operator_action", execution_id=uuid_of(execution_id))
        assert set(changed) <= {Changed(execution_id=execution_id), "execution_not_eligible"}
        assert len(events) == sum(isinstance(each, Changed) for each in changed)
        await first.complete(taken[0].handle)
    assert await first.find_inconsistencies() == []
