"""Lane states: which of them allow submissions and claims."""

from engine.state import CREATES, claim, ids, items, new, refused
from fixtures import Clock, Engines, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.lease import Completed, Renewed, TerminalFailed


def own_id(nth: int) -> str:
    """An id of the caller's own."""
    return f"{{fp:7}}:{nth}1111111-2222-3333-4444-555555555555"


async def test_a_draining_or_disabled_lane_refuses_submissions(engine: Engine, given: Given, rows: Rows) -> None:
    await given.created()
    for state in ("draining", "disabled"):
        await engine.set_lane_state("default", state)
        async with rows.unchanged():
            for create in CREATES.values():
                for named in ({}, {"idempotency_key": "k"}, {"execution_id": own_id(0)}):
                    submitted = create(engine, **new(**named))
                    await refused(submitted, "invalid_input", f"lane 'default' accepts no submissions: it is {state};")
                both = new(execution_id=own_id(0), idempotency_key="k")
                await refused(create(engine, **both), "invalid_input", "lane_id")


async def test_a_lane_that_refuses_submissions_still_reports_duplicates(engine: Engine, rows: Rows) -> None:
    minted = {}
    for nth, (name, create) in enumerate(CREATES.items()):
        await create(engine, **new(execution_id=own_id(nth), idempotency_key=f"own {name}"))
        minted[name] = await create(engine, **new(idempotency_key=name))
    await engine.set_lane_state("default", "disabled")
    async with rows.unchanged():
        for nth, (name, create) in enumerate(CREATES.items()):
            assert isinstance(await create(engine, **new(execution_id=own_id(nth))), Duplicate)
            both = new(execution_id=own_id(nth), idempotency_key=f"own {name}")
            assert isinstance(await create(engine, **both), Duplicate)
            again = await create(engine, **new(idempotency_key=name))
            assert again == Duplicate(execution_id=minted[name].execution_id)


async def test_a_lane_that_refuses_submissions_does_not_affect_other_items_of_a_call(
    engine: Engine, rows: Rows
) -> None:
    await engine.create_many(items(new(lane_id="open"), new(lane_id="shut")))
    await engine.set_lane_state("shut", "draining")
    verdicts = await engine.create_many(items(*(new(lane_id=lane) for lane in ("open", "shut", "open"))))
    assert [type(verdict) for verdict in verdicts[::2]] == [Created, Created]
    assert isinstance(verdicts[1], EngineError)
    assert len(await rows.of("execution")) == 4


async def test_a_paused_or_disabled_lane_allows_no_claims(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    for lane in ("paused", "disabled"):
        await given.reclaimable(lane_id=lane)
        waiting, due = await given.created(lane_id=lane), await given.delayed(seconds=1, lane_id=lane)
        await engine.set_lane_state(lane, lane)
        await clock.advance(seconds=2)
        assert await claim(engine, lane) == []
        states = {row["ownership_state"] for row in await rows.of("execution") if row["terminal_outcome"] == "none"}
        assert states == {"unowned", "lease_expired_reclaimable"}
        await engine.set_lane_state(lane, "active")
        claimed = await claim(engine, lane)
        assert {waiting, due} < set(ids(claimed))
        await engine.complete_many([(one.handle, None) for one in claimed])


async def test_a_paused_lane_accepts_submissions_and_a_draining_one_allows_claims(engine: Engine) -> None:
    await engine.set_lane_state("default", "paused")
    waiting = await engine.create_execution(**new())
    assert isinstance(waiting, Created)
    await engine.set_lane_state("default", "draining")
    assert ids(await claim(engine)) == [waiting.execution_id]


async def test_no_lane_state_affects_a_run(engine: Engine, given: Given) -> None:
    for state in ("paused", "draining", "disabled"):
        one, other, third = [await given.claimed(lane_id=state) for _ in range(3)]
        await engine.set_lane_state(state, state)
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


async def test_a_lane_state_set_in_one_process_applies_in_all(engines: Engines, engine: Engine) -> None:
    other = await engines()
    await engine.create_execution(**new())
    await other.set_lane_state("default", "disabled")
    assert await claim(engine) == []
    await refused(engine.create_execution(**new()), "invalid_input")


async def test_an_unknown_state_or_lane_is_refused(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        await refused(engine.set_lane_state("default", "open"), "invalid_input", "state: must be one of active, paused")
        await refused(engine.set_lane_state("nowhere", "paused"), "invalid_input", "no lane 'nowhere'")
        await refused(engine.set_lane_state("", "paused"), "invalid_input", "lane_id: Empty")


async def test_configured_lanes_exist_from_the_start(engines: Engines, rows: Rows) -> None:
    await engines(lanes=("one", "two"))
    found = {row["lane_id"]: row["registered_by"] for row in await rows.of("lane")}
    assert found == {"one": "configuration", "two": "configuration"}
