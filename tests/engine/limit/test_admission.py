"""Admission within claims: exactly what the limits allow, in the order of the queue."""

from collections import Counter

from engine.limit.limits import limited, quota, used
from engine.state import claim, items, made, new
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.room import RoomWaits
from flowfabric.engine.parts import parts_of


async def test_a_claim_leases_as_many_as_there_are_slots(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    policy = limited(await quota(engine, running=3))
    ids = [await given.created(policy=policy) for _ in range(8)]
    runs = await claim(engine)
    assert [run.execution_id for run in runs] == ids[:3]
    assert await claim(engine) == []
    head, behind = await rows.execution(ids[3]), await rows.execution(ids[4])
    assert (head["public_state"], head["blocking_reason"]) == ("rate_limited", "waiting_for_quota")
    assert head["blocking_detail"] == f"quota {policy['quota_policy_id']}: concurrency cap 3"
    assert (behind["public_state"], behind["blocking_reason"]) == ("waiting", "waiting_for_worker")
    await engine.complete_many([(run.handle, b"") for run in runs[:2]])
    assert [run.execution_id for run in await claim(engine)] == ids[3:5]


async def test_work_without_limits_passes_blocked_work_and_keeps_its_order(
    engine: Engine, given: Given, clock: Clock
) -> None:
    policy = limited(await quota(engine, running=1))
    first = await given.created(policy=policy, priority=9)
    blocked = [await given.created(policy=policy, priority=8) for _ in range(20)]
    low = await given.created(priority=1)
    high = await given.created(priority=9)
    runs = await claim(engine)
    assert [run.execution_id for run in runs] == [first, high, low]
    await engine.complete(runs[0].handle, b"")
    assert [run.execution_id for run in await claim(engine)] == blocked[:1]


async def test_limited_work_behind_work_without_limits_keeps_its_place(
    engine: Engine, given: Given, clock: Clock
) -> None:
    policy = limited(await quota(engine, running=1))
    await given.cancelled(policy=policy)
    free = await made(engine, *[new() for _ in range(70)])
    place = await given.created(policy=policy)
    await given.created()
    assert [run.execution_id for run in await claim(engine)] == free[:10]
    assert [run.execution_id for run in await claim(engine, limit=60)] == free[10:]
    assert [run.execution_id for run in await claim(engine, limit=1)] == [place]


async def test_a_retry_that_needs_no_token_leaves_it_to_the_next_in_order(
    engine: Engine, given: Given, clock: Clock
) -> None:
    retries = {"retry_policy": {"max_retries": 9, "backoff": {"type": "fixed", "delay_ms": 0}}}
    policy = limited(await quota(engine, rate=2), **retries)
    first = await given.created(policy=policy)
    (run,) = await claim(engine)
    second = await given.created(policy=policy)
    await given.created()
    await engine.fail(run.handle, reason="x")
    assert [run.execution_id for run in await claim(engine, limit=2)] == [first, second]


async def test_a_retry_behind_work_without_room_is_claimed(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    retries = {"retry_policy": {"max_retries": 9, "backoff": {"type": "fixed", "delay_ms": 0}}}
    both = await quota(engine, running=5, rate=1)
    first = await given.created(policy=limited(both, **retries))
    (run,) = await claim(engine)
    for _ in range(3):
        await given.created(policy=limited(both), priority=9)
    await engine.fail(run.handle, reason="x")
    assert [run.execution_id for run in await claim(engine)] == [first]
    assert await used(rows, both) == 1


async def test_each_key_has_slots_of_its_own(engine: Engine, given: Given, clock: Clock) -> None:
    policy = limited(await quota(engine, running=2, key_from="tag:app.tenant"))
    await engine.create_many(items(*[new(policy=policy, tags={"app.tenant": f"t{n % 5}"}) for n in range(50)]))
    runs = await claim(engine, limit=100)
    assert Counter(run.tags["app.tenant"] for run in runs) == {f"t{n}": 2 for n in range(5)}


async def test_a_rate_lets_through_what_leaves_the_window(engine: Engine, given: Given, clock: Clock) -> None:
    policy = limited(await quota(engine, rate=3, window=10))
    ids = [await given.created(policy=policy) for _ in range(9)]
    assert [run.execution_id for run in await claim(engine)] == ids[:3]
    await clock.advance(seconds=9)
    assert await claim(engine) == []
    await clock.advance(seconds=1)
    assert [run.execution_id for run in await claim(engine)] == ids[3:6]


async def test_a_deep_backlog_without_room_does_not_hide_the_work_behind_it(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    policy = limited(await quota(engine, running=2, key_from="tag:app.tenant"))
    for _ in range(6):
        await engine.create_many(items(*[new(policy=policy, tags={"app.tenant": "noisy"}) for _ in range(1000)]))
    quiet = await given.created(policy=policy, tags={"app.tenant": "quiet"})
    free = await given.created()
    runs = await claim(engine, limit=100)
    assert Counter(run.tags.get("app.tenant") for run in runs) == {"noisy": 2, "quiet": 1, None: 1}
    assert {run.execution_id for run in runs} > {quiet, free}
    assert len(await rows.of("execution", public_state="rate_limited")) <= 1
    await engine.complete_many([(run.handle, b"") for run in runs])
    assert [run.tags.get("app.tenant") for run in await claim(engine, limit=100)] == ["noisy", "noisy"]


async def test_a_fair_lane_serves_namespaces_in_turn(engine: Engine, given: Given, clock: Clock) -> None:
    await given.created(namespace="quiet")
    await engine.set_lane_fairness(lane_id="default", fair_by="namespace", weights={"big": 3})
    await engine.create_many(items(*[new(namespace="noisy") for _ in range(500)]))
    await engine.create_many(items(*[new(namespace="big") for _ in range(500)]))
    runs = await claim(engine, limit=81)
    found = Counter([(await engine.get_execution_namespace(run.execution_id)) for run in runs])
    assert found == {"quiet": 1, "noisy": 20, "big": 60}
    await given.created(namespace="quiet")
    (run,) = await claim(engine, limit=1)
    assert await engine.get_execution_namespace(run.execution_id) == "quiet"


async def test_an_execution_of_low_priority_ages_on_a_lane_that_ages(
    engine: Engine, given: Given, clock: Clock
) -> None:
    low = await given.created(priority=0)
    await engine.set_lane_fairness(lane_id="default", ageing_ms=1000)
    await clock.advance(seconds=11)
    await engine.create_many(items(*[new(priority=10) for _ in range(100)]))
    runs = await claim(engine, limit=10)
    assert runs[0].execution_id == low


async def test_the_end_of_a_run_wakes_the_claims_that_have_taken_the_last_slots(
    engine: Engine, given: Given, clock: Clock
) -> None:
    policy = limited(await quota(engine, running=3))
    ids = [await given.created(policy=policy) for _ in range(4)]
    wakeups = parts_of(engine).wakeups
    runs = await claim(engine)
    before = wakeups.wakes(["default"])
    await engine.complete(runs[0].handle, b"")
    assert wakeups.wakes(["default"]) > before
    (last,) = await claim(engine)
    assert last.execution_id == ids[3]
    before = wakeups.wakes(["default"])
    await engine.complete(last.handle, b"")
    assert wakeups.wakes(["default"]) == before


async def test_room_that_appeared_while_a_claim_was_denied_wakes_it(engine: Engine) -> None:
    wakeups = parts_of(engine).wakeups
    waits = RoomWaits(wakeups)
    began, before = waits.now, wakeups.wakes(["default"])
    wakeups.room([7])
    waits.add(("default",), [(1, [8])], None, since=began)
    waits.add(("default",), [(1, [7])], None, since=waits.now)
    assert wakeups.wakes(["default"]) == before
    waits.add(("default",), [(1, [7])], None, since=began)
    assert wakeups.wakes(["default"]) == before + 1


async def test_the_first_work_with_limits_on_a_lane_is_found_at_once(engine: Engine, given: Given) -> None:
    plain = await given.created()
    assert [run.execution_id for run in await claim(engine)] == [plain]
    first = await given.created(policy=limited(await quota(engine, running=1)))
    assert [run.execution_id for run in await claim(engine)] == [first]
