"""Claims along routes and along queues: the same executions in the same order, whatever a claim wants."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from engine.state import claim, ids, made, new
from flowfabric.db.database import Database
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.claim import Walks
from flowfabric.engine.parts import parts_of

LANES = [f"lane-{nth:02}" for nth in range(12)]
KINDS = [f"kind-{nth}" for nth in range(6)]
GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}

WANTED: dict[str, dict[str, Any]] = {
    "a few kinds": {"kinds": KINDS[:2]},
    "most kinds": {"kinds": KINDS[1:]},
    "a namespace": {"namespace": "others"},
    "kinds of a namespace": {"kinds": KINDS[::2], "namespace": "tests"},
    "unknown kinds too": {"kinds": [KINDS[3], "unknown"]},
}


@pytest.fixture(params=["claim_by_route", "claim_by_queue"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The statement of claims that want part of the queues."""
    monkeypatch.setattr(Walks, "MOST_QUEUES", 10**6 if request.param == "claim_by_queue" else 0)
    return str(request.param)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The searches that were made."""
    counted: Counter[str] = Counter()
    fetch = Database.fetch

    async def count(database: Database, statement: Statement, values: Mapping[str, object], **others: Any) -> Any:
        if statement.name.startswith("claim_by_"):
            counted[statement.name] += 1
        return await fetch(database, statement, values, **others)

    monkeypatch.setattr(Database, "fetch", count)
    return counted


async def population(engine: Engine, draw: random.Random, clock: Any) -> dict[str, dict[str, Any]]:
    """Work of every sort on many lanes, some of which was lost by its worker, by its id."""
    arguments = [
        new(
            lane_id=draw.choice(LANES),
            execution_kind=draw.choice(KINDS),
            namespace=draw.choice(("tests", "tests", "others")),
            priority=draw.choice(range(24)),
            policy=draw.choice((None, None, GPU, {"max_reclaim_count": 0}, {"max_reclaim_count": 5})),
        )
        for _ in range(400)
    ]
    created = await made(engine, *arguments)
    given = dict(zip(created, arguments, strict=True))
    lost = await claim(engine, *LANES, limit=60, lease_ttl_ms=1000)
    await clock.advance(seconds=1)
    assert await parts_of(engine).lease_expiry.sweep() == len(lost)
    for one in lost:
        if (given[one.execution_id]["policy"] or {}).get("max_reclaim_count") == 0:
            del given[one.execution_id]
    return given


@pytest.mark.parametrize("asked", WANTED)
async def test_both_walks_take_the_same_in_the_same_order(
    engines: Any, rows: Any, clock: Any, searches: Counter[str], way: str, asked: str
) -> None:
    engine = await engines()
    draw = random.Random(asked)
    given = await population(engine, draw, clock)
    searches.clear()
    places = {f"{{fp:{row['partition_key']}}}:{row['execution_id']}": row["place"] for row in await rows.of("ready")}
    wanted = WANTED[asked]
    for capabilities in ((), ("gpu",)):
        expected = [
            one
            for one in sorted(given, key=places.__getitem__)
            if given[one]["execution_kind"] in wanted.get("kinds", KINDS)
            and given[one]["namespace"] == wanted.get("namespace", given[one]["namespace"])
            and (capabilities or given[one]["policy"] is not GPU)
        ]
        taken: list[str] = []
        while True:
            limit = draw.choice((1, 3, 20, 90))
            found = ids(await claim(engine, *LANES, limit=limit, capabilities=capabilities, **wanted))
            assert found == expected[len(taken) : len(taken) + limit]
            if not found:
                break
            taken += found
        assert taken == expected
        for one in taken:
            del given[one]
    assert set(searches) == {way}
    assert await engine.find_inconsistencies() == []


async def test_more_refused_priorities_than_are_walked_at_once_do_not_stop_a_search(
    engine: Engine, clock: Any, searches: Counter[str], way: str
) -> None:
    await made(engine, new(execution_kind="other", priority=9000))
    policy = {"max_reclaim_count": 0}
    lost = await made(engine, *(new(execution_kind="lost", priority=at, policy=policy) for at in range(1, 41)))
    assert len(await claim(engine, limit=40, kinds=["lost"], lease_ttl_ms=1000)) == 40
    await clock.advance(seconds=1)
    assert await parts_of(engine).lease_expiry.sweep() == 40
    (behind,) = await made(engine, new(execution_kind="lost"))
    assert ids(await claim(engine, limit=1, kinds=["lost"])) == [behind]
    assert {str(await engine.read_execution_state(one)) for one in lost} == {"failed"}
    assert set(searches) == {way}


@pytest.mark.parametrize("passed_over", ["of other kinds", "granted", "held"])
async def test_what_is_passed_over_at_the_head_of_many_routes_does_not_stop_a_search(
    engine: Engine, connection: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, passed_over: str
) -> None:
    monkeypatch.setattr(Walks, "MOST_QUEUES", 0)
    heads = await made(engine, *(new(lane_id=lane, execution_kind="other", priority=9) for lane in LANES * 3))
    behind = await made(engine, *(new(lane_id=lane) for lane in LANES))
    wanted: dict[str, Any] = {}
    if passed_over == "of other kinds":
        wanted = {"kinds": ["job"]}
    elif passed_over == "granted":
        for at, execution_id in enumerate(heads):
            await engine.issue_claim_grant(
                execution_id=execution_id, lane_id=LANES[at % 12], worker_id="pool", worker_instance_id="pool-1"
            )
    async with connection.transaction(), asyncio.timeout(30):
        if passed_over == "held":
            await connection.execute("select from execution where place < (select max(place) from ready) for update")
            behind = behind[-1:]
        assert ids(await claim(engine, *LANES, limit=50, **wanted)) == behind
    await clock.advance(seconds=6)
    assert len(await claim(engine, *LANES, limit=100)) == len(heads) + (11 if passed_over == "held" else 0)


@pytest.mark.parametrize("is_there", [True, False], ids=["work", "no work"])
async def test_a_grant_is_found_behind_the_heads_of_many_routes(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(Walks, "MOST_QUEUES", 0)
    tokens = [f"t{nth}" for nth in range(12)]
    for token in tokens:
        policy = {"routing_requirements": {"required_capabilities": [token]}}
        await made(engine, new(policy=policy, execution_kind="other", priority=1))
        if is_there and token == tokens[-1]:
            (behind,) = await made(engine, new(policy=policy))
    asked: dict[str, Any] = {"lane_id": "default", "worker_id": "pool", "worker_instance_id": "pool-1"}
    async with asyncio.timeout(30):
        answer = await engine.claim_for_worker(**asked, worker_capabilities=tokens, kinds=["job"])
    assert getattr(answer, "execution_id", None) == (behind if is_there else None)


async def test_the_order_does_not_depend_on_what_the_planner_knows(engines: Any, connection: Any) -> None:
    draw = random.Random(7)
    first, second = await engines(), await engines()
    for count in (5, 200):
        priorities = [draw.randrange(100) for _ in range(count)]
        created = await made(first, *(new(priority=priority) for priority in priorities))
        await connection.execute("analyze")
        expected = [created[at] for at in sorted(range(count), key=lambda at: -priorities[at])]
        found: list[str] = []
        for engine, limit in ((first, 2), (second, 30), (first, 1000)):
            found += ids(await claim(engine, limit=limit))
        assert found == expected


async def test_work_of_every_priority_that_is_written_late_is_claimed_at_once(engine: Engine, connection: Any) -> None:
    mixed = [new(priority=priority) for priority in (0, 0, 5, 5)]
    await made(engine, *mixed)
    assert len(await claim(engine, limit=10)) == 4
    # As if the numbers of the next batch had been drawn before those.
    await connection.execute("select setval('execution_sequence', 1, false)")
    await made(engine, *mixed)
    assert len(await claim(engine, limit=10)) == 4
