"""Lanes: what each state lets in and lets out."""

from typing import Any

import pytest

from engine.state import Creating, both_creates, claim, ids, items, new, refused
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.lease import Completed, Renewed, TerminalFailed

GIVEN = "{fp:7}:11111111-2222-3333-4444-555555555555"


@both_creates
@pytest.mark.parametrize("state", ["draining", "disabled"])
async def test_a_draining_or_disabled_lane_refuses_submissions(
    engine: Engine, create: Creating, given: Any, rows: Any, state: str
) -> None:
    await given.created()
    await engine.set_lane_state("default", state)
    async with rows.unchanged():
        for arguments in (new(), new(idempotency_key="k"), new(execution_id=GIVEN)):
            await refused(create(engine, **arguments), "invalid_input", "lane 'default' accepts no submissions")
        await refused(create(engine, **new(execution_id=GIVEN, idempotency_key="k")), "invalid_input", "lane_id")


@both_creates
async def test_a_lane_that_refuses_submissions_still_answers_duplicates(
    engine: Engine, create: Creating, rows: Any
) -> None:
    await create(engine, **new(execution_id=GIVEN, idempotency_key="k"))
    minted = await create(engine, **new(idempotency_key="minted"))
    await engine.set_lane_state("default", "disabled")
    async with rows.unchanged():
        assert isinstance(await create(engine, **new(execution_id=GIVEN)), Duplicate)
        assert isinstance(await create(engine, **new(execution_id=GIVEN, idempotency_key="k")), Duplicate)
        again = await create(engine, **new(idempotency_key="minted"))
        assert again == Duplicate(execution_id=minted.execution_id)


async def test_one_refusing_lane_does_not_touch_the_others_of_a_call(engine: Engine, rows: Any) -> None:
    await engine.create_many(items(new(lane_id="open"), new(lane_id="shut")))
    await engine.set_lane_state("shut", "draining")
    verdicts = await engine.create_many(items(*(new(lane_id=lane) for lane in ("open", "shut", "open"))))
    assert [type(verdict) for verdict in verdicts[::2]] == [Created, Created]
    assert isinstance(verdicts[1], EngineError)
    assert len(await rows.of("execution")) == 4


@pytest.mark.parametrize("state", ["paused", "disabled"])
async def test_a_paused_or_disabled_lane_gives_nothing_out(
    engine: Engine, given: Any, rows: Any, clock: Any, state: str
) -> None:
    await given.reclaimable()
    waiting, due = await given.created(), await given.delayed(seconds=1)
    await engine.set_lane_state("default", state)
    await clock.advance(seconds=2)
    assert await claim(engine) == []
    assert {row["ownership_state"] for row in await rows.of("execution")} == {"unowned", "lease_expired_reclaimable"}
    await engine.set_lane_state("default", "active")
    assert {waiting, due} < set(ids(await claim(engine)))


async def test_a_paused_lane_accepts_submissions(engine: Engine) -> None:
    await engine.set_lane_state("default", "paused")
    assert isinstance(await engine.create_execution(**new()), Created)


async def test_a_draining_lane_runs_what_it_holds(engine: Engine, given: Any, clock: Any) -> None:
    waiting = await given.created()
    await engine.set_lane_state("default", "draining")
    assert ids(await claim(engine)) == [waiting]


@pytest.mark.parametrize("state", ["paused", "draining", "disabled"])
async def test_no_state_of_a_lane_disturbs_a_run(engine: Engine, given: Any, state: str) -> None:
    one, other, third = await given.claimed(), await given.claimed(), await given.claimed()
    await engine.set_lane_state("default", state)
    assert isinstance(await engine.renew(one), Renewed)
    await engine.complete(one)
    assert isinstance((await engine.complete_many([(other, None)]))[0], Completed)
    assert await engine.fail(third, reason="no") == TerminalFailed()


async def test_a_claim_skips_the_paused_lane_among_several(engine: Engine) -> None:
    shut = await engine.create_execution(**new(lane_id="shut", priority=9))
    open_ = await engine.create_execution(**new(lane_id="open"))
    await engine.set_lane_state("shut", "paused")
    assert ids(await claim(engine, "open", "shut")) == [open_.execution_id]
    await engine.set_lane_state("shut", "active")
    assert ids(await claim(engine, "open", "shut")) == [shut.execution_id]


async def test_a_change_of_state_in_one_process_counts_in_all(engines: Any, engine: Engine) -> None:
    other = await engines()
    await engine.create_execution(**new())
    await other.set_lane_state("default", "disabled")
    assert await claim(engine) == []
    await refused(engine.create_execution(**new()), "invalid_input")


async def test_an_unknown_state_or_lane_is_refused(engine: Engine, rows: Any) -> None:
    async with rows.unchanged():
        await refused(engine.set_lane_state("default", "open"), "invalid_input", "state: must be one of active, paused")
        await refused(engine.set_lane_state("nowhere", "paused"), "invalid_input", "no lane 'nowhere'")
        await refused(engine.set_lane_state("", "paused"), "invalid_input", "lane_id: Empty")


async def test_configured_lanes_are_there_from_the_start(engines: Any, rows: Any) -> None:
    await engines(lanes=("one", "two"))
    found = {row["lane_id"]: row["registered_by"] for row in await rows.of("lane")}
    assert found == {"one": "configuration", "two": "configuration"}
