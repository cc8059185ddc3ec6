"""Claims by route and by queue take the same executions in the same order."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import asyncpg
import pytest

from engine.cases import SWEEPS_WHOLE, in_turn
from engine.state import claim, ids, made, new
from fixtures import Clock, Engines, Rows
from flowfabric.db.database import Database
from flowfabric.db.statements import Statement
from flowfabric.engine.core.watermark import ScanWatermarks
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.scans import Scans
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError

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
    """The statement that restricted claims use."""
    monkeypatch.setattr(Scans, "MAX_QUEUES", 10**6 if request.param == "claim_by_queue" else 0)
    return str(request.param)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each claim statement ran."""
    counted: Counter[str] = Counter()
    fetch = Database.fetch

    async def count(database: Database, statement: Statement, values: Mapping[str, object], **others: Any) -> Any:
        if statement.name.startswith("claim_by_"):
            counted[statement.name] += 1
        return await fetch(database, statement, values, **others)

    monkeypatch.setattr(Database, "fetch", count)
    return counted


async def population(engine: Engine, draw: random.Random, clock: Clock) -> dict[str, dict[str, Any]]:
    """Create executions of every sort on many lanes, some with a lost lease; return their arguments by id."""
    arguments = [
        new(
            lane_id=draw.choice(LANES),
            execution_kind=draw.choice(KINDS),
            namespace=draw.choice(("tests", "tests", "others")),
            priority=draw.choice(range(24)),
            policy=draw.choice((None, None, GPU, {"max_reclaim_count": 0}, {"max_reclaim_count": 5})),
        )
        for _ in range(400 if SWEEPS_WHOLE else 120)
    ]
    created = await made(engine, *arguments)
    given = dict(zip(created, arguments, strict=True))
    lost = await claim(engine, *LANES, limit=len(arguments) // 6, lease_ttl_ms=1000)
    await clock.advance(seconds=1)
    assert await parts_of(engine).lease_expiry.sweep() == len(lost)
    for one in lost:
        if (given[one.execution_id]["policy"] or {}).get("max_reclaim_count") == 0:
            del given[one.execution_id]
    return given


@in_turn("asked", WANTED)
async def test_claims_by_route_and_by_queue_take_the_same_in_the_same_order(
    engine: Engine, rows: Rows, clock: Clock, searches: Counter[str], way: str, asked: str
) -> None:
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


async def test_more_executions_at_their_limit_than_spans_per_statement_do_not_stop_a_claim(
    engine: Engine, clock: Clock, searches: Counter[str], way: str
) -> None:
    await made(engine, new(execution_kind="other", priority=9000))
    policy = {"max_reclaim_count": 0}
    lost = await made(engine, *(new(execution_kind="lost", priority=at, policy=policy) for at in range(1, 21)))
    assert len(await claim(engine, limit=20, kinds=["lost"], lease_ttl_ms=1000)) == 20
    await clock.advance(seconds=1)
    assert await parts_of(engine).lease_expiry.sweep() == 20
    (behind,) = await made(engine, new(execution_kind="lost"))
    assert ids(await claim(engine, limit=1, kinds=["lost"])) == [behind]
    assert {str(await engine.read_execution_state(one)) for one in lost} == {"failed"}
    assert set(searches) == {way}


@in_turn("passed_over", ["of other kinds", "granted", "held"])
async def test_skipped_entries_at_the_head_of_many_routes_do_not_stop_a_claim(
    engine: Engine, connection: asyncpg.Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch, passed_over: str
) -> None:
    monkeypatch.setattr(Scans, "MAX_QUEUES", 0)
    heads = await made(engine, *(new(lane_id=lane, execution_kind="other", priority=9) for lane in LANES * 2))
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


@in_turn("is_there", [True, False])
async def test_claim_for_worker_finds_executions_behind_the_heads_of_many_routes(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(Scans, "MAX_QUEUES", 0)
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


async def test_an_execution_whose_grant_was_rolled_back_is_found_by_the_next_search(
    engine: Engine, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScanWatermarks, "FREE_SECONDS", -1)
    monkeypatch.setattr(ScanWatermarks, "SHARE", 10**9)
    (waiting,) = await made(engine, new())
    asked: dict[str, Any] = {"lane_id": "default", "worker_id": "pool", "worker_instance_id": "pool-1"}
    await connection.execute("delete from signing_key")
    with pytest.raises(EngineError, match="hmac_secret_not_initialized"):
        await engine.claim_for_worker(**asked)
    await engine.seed_waitpoint_hmac_secret(kid="second", secret_hex="ab" * 32)
    answer = await engine.claim_for_worker(**asked)
    assert getattr(answer, "execution_id", None) == waiting


async def test_the_order_does_not_depend_on_table_statistics(engines: Engines, connection: asyncpg.Connection) -> None:
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


async def test_executions_with_a_lower_sequence_that_commit_late_are_claimed_at_once(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    mixed = [new(priority=priority) for priority in (0, 0, 5, 5)]
    await made(engine, *mixed)
    assert len(await claim(engine, limit=10)) == 4
    # The next batch gets lower numbers, as if they had been drawn before those of the first.
    await connection.execute("select setval('execution_sequence', 1, false)")
    await made(engine, *mixed)
    assert len(await claim(engine, limit=10)) == 4


async def test_a_claim_that_finds_nothing_on_many_routes_returns(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scans, "MAX_QUEUES", 0)
    worker: dict[str, Any] = {"worker_id": "worker", "worker_instance_id": "worker-1"}
    tokens = [f"t{nth}" for nth in range(12)]
    policies = [{"routing_requirements": {"required_capabilities": [token]}} for token in tokens]
    await made(engine, *(new(policy=policy, execution_kind="other", priority=1) for policy in policies))
    # Claims that find something set watermarks; the next ones then search from them, and at last everything.
    for policy in policies:
        await made(engine, new(policy=policy), new(policy=policy))
    async with asyncio.timeout(20):
        assert len(await claim(engine, limit=12, capabilities=tokens, kinds=["job"])) == 12
        for _ in range(12):
            found = await engine.claim_for_worker(
                lane_id="default", **worker, worker_capabilities=tokens, kinds=["job"]
            )
            assert getattr(found, "execution_id", None) is not None
        assert await claim(engine, capabilities=tokens, kinds=["job"]) == []
        none = await engine.claim_for_worker(lane_id="default", **worker, worker_capabilities=tokens, kinds=["job"])
        assert getattr(none, "execution_id", None) is None
