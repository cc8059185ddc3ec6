"""Grants: who gets one, what is stored, whom it keeps out, and how it expires."""

import hashlib
import hmac
import json
from typing import Any

import asyncpg
import pytest

from engine.cases import Cases, in_turn
from engine.grants import (
    KID,
    SECRET,
    claim_granted,
    claim_resumed,
    grant_for_worker,
    issue_grant,
    issue_reclaim_grant,
    register_workers,
    resumable,
    worker,
)
from engine.state import ACTIVE, FAILED, WAITING, claim, ids, refused, vector
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.engine.core.watermark import ScanWatermarks
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.retention import GRANT_MEMORY_MS
from flowfabric.engine.lease import grant as grant_family
from flowfabric.engine.lease.scans import Wanted
from flowfabric.engine.parts import parts_of
from flowfabric.model.grant import ClaimGrant, Granted, NoWork
from flowfabric.model.ids import mint_uuid_texts

GPU = {"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}}


@pytest.fixture
async def engine(engine: Engine) -> Engine:
    """An engine with a key to sign grants with, that knows the worker who searches."""
    await register_workers(engine)
    return engine


def expected_key(execution_id: str, expires_at: int, name: str = "pool", *, reclaim: bool = False) -> str:
    """The key of a grant, made without the engine."""
    tag, _, uuid = execution_id.partition("}:")
    ending = "|reclaim" if reclaim else ""
    message = f"{KID}:{tag}}}|{uuid}|{name}|{name}-1|{expires_at}{ending}"
    digest = hmac.new(bytes.fromhex(SECRET), message.encode(), hashlib.sha256).hexdigest()
    return f"pg:{'reclaim:' if reclaim else ''}{execution_id}:{expires_at}:{KID}:{digest}"


# Issuing for an execution id.


async def test_a_grant_is_signed_and_stored_and_keeps_the_state(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    waiting = await given.created()
    before = await rows.execution(waiting)
    now = await clock.advance(seconds=1)
    answer = await engine.issue_claim_grant(
        execution_id=waiting,
        **worker(),
        worker_capabilities=["b", "a", "b"],
        grant_ttl_ms=7000,
        capability_hash="hash",
        route_snapshot_json='{"route": 1}',
        admission_summary="fine",
    )
    expires_at = now + 7000
    key = expected_key(waiting, expires_at)
    assert answer == Granted(
        execution_id=waiting,
        grant=ClaimGrant(execution_id=waiting, partition_key="{fp:86}", grant_key=key, expires_at_ms=expires_at),
    )
    (stored,) = await rows.of("claim_grant")
    lane_no = stored.pop("lane_no")
    assert (await rows.of("lane", lane_id="default"))[0]["lane_no"] == lane_no
    assert json.loads(stored.pop("route_snapshot")) == {"route": 1}
    assert stored == {
        "partition_key": 86,
        "execution_id": before["execution_id"],
        "grant_id": hashlib.sha256(key.encode()).digest(),
        "kind": "claim",
        "has_slots": False,
        "worker_id": "pool",
        "worker_instance_id": "pool-1",
        "worker_capabilities": ["a", "b"],
        "capability_hash": "hash",
        "admission_summary": "fine",
        "issued_at": now,
        "expires_at": expires_at,
    }
    row = await rows.execution(waiting)
    assert vector(row) == WAITING
    changed = {name: row[name] for name in row if row[name] != before[name]}
    assert changed == {"granted_until": expires_at, "last_mutation_at": now, "attached": 1}
    assert [entry["granted_until"] for entry in await rows.of("ready")] == [expires_at]
    assert await rows.events(waiting) == []


async def test_a_grant_lives_one_millisecond_to_a_minute_by_default_five_seconds(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable(lane_id="lost")
    waiting = await given.created()
    with Cases() as cases:
        async with rows.unchanged():
            wrong: tuple[Any, ...] = (0, -1, 60_001, 1.5, None, "5", True)
            for ttl in wrong:
                for call in (
                    issue_grant(engine, waiting, grant_ttl_ms=ttl),
                    engine.claim_for_worker(**worker(), grant_ttl_ms=ttl),
                    issue_reclaim_grant(engine, lost.execution_id, lane_id="lost", grant_ttl_ms=ttl),
                ):
                    with cases(ttl):
                        await refused(call, "invalid_input", "grant_ttl_ms")
    for good in (1, 60_000):
        assert await issue_grant(engine, await given.created(), grant_ttl_ms=good)
    now = await clock.now()
    assert (await grant_for_worker(engine)).grant.expires_at_ms == now + 5000
    assert (await issue_grant(engine, await given.created())).grant.expires_at_ms == now + 5000


MALFORMED: list[dict[str, Any]] = [
    {"execution_id": "x"},
    {"execution_id": "{fp:256}:11111111-2222-4333-8444-555555555555"},
    {"execution_id": "{fp:40000}:11111111-2222-4333-8444-555555555555"},
    {"lane_id": ""},
    {"lane_id": "mail"},
    {"worker_id": "a b"},
    {"worker_instance_id": ""},
    {"capability_hash": "a\0"},
    {"admission_summary": 7},
    {"route_snapshot_json": "{"},
    {"route_snapshot_json": '"\\u0000"'},
    {"route_snapshot_json": {}},
]
MALFORMED_CAPABILITIES: list[Any] = [["a,b"], [""], ["a b"], [7], "gpu", ["y" * 5000], None, 7]


async def test_malformed_arguments_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    lost = await given.reclaimable(lane_id="lost")
    waiting = await given.created()
    with Cases() as cases:
        async with rows.unchanged():
            for wrong in MALFORMED:
                with cases(wrong):
                    named = engine.issue_claim_grant(**{"execution_id": waiting, **worker(), **wrong})
                    await refused(named, "invalid_input")
            for capabilities in MALFORMED_CAPABILITIES:
                for call in (
                    issue_grant(engine, waiting, worker_capabilities=capabilities),
                    engine.claim_for_worker(**worker(), worker_capabilities=capabilities),
                    issue_reclaim_grant(engine, lost.execution_id, lane_id="lost", worker_capabilities=capabilities),
                ):
                    with cases(capabilities):
                        await refused(call, "invalid_capabilities", "worker:")
    assert await issue_grant(engine, waiting)


async def test_an_unknown_execution_is_not_found(engine: Engine, rows: Rows) -> None:
    absent = f"{{fp:86}}:{mint_uuid_texts(1)[0]}"
    async with rows.unchanged():
        await refused(issue_grant(engine, absent), "execution_not_found")
        await refused(claim_granted(engine, absent), "execution_not_found")
        await refused(claim_resumed(engine, absent), "execution_not_found")


async def test_only_claimable_executions_are_granted(engine: Engine, given: Given, rows: Rows) -> None:
    states = ("reclaimable", "delayed", "backing_off", "claimed", "completed", "cancelled")
    made = {state: await getattr(given, state)(lane_id=state) for state in states}
    with Cases() as cases:
        async with rows.unchanged():
            for state, one in made.items():
                with cases(state):
                    call = issue_grant(engine, getattr(one, "execution_id", one), lane_id=state)
                    await refused(call, "execution_not_eligible")
    assert await issue_grant(engine, await resumable(given))


async def test_a_live_grant_keeps_all_others_out(engine: Engine, given: Given, rows: Rows) -> None:
    waiting = await given.created()
    await issue_grant(engine, waiting)
    async with rows.unchanged():
        for name in ("pool", "other"):
            await refused(issue_grant(engine, waiting, name), "grant_already_exists")
            assert await engine.claim_for_worker(**worker(name)) == NoWork()
        assert await claim(engine) == []
        assert await engine.scan_eligible_executions(lane_id="default") == []


@in_turn("state", ["paused", "disabled"])
async def test_a_paused_or_disabled_lane_grants_nothing(engine: Engine, given: Given, rows: Rows, state: str) -> None:
    waiting = await given.created()
    await engine.set_lane_state("default", state)
    async with rows.unchanged():
        await refused(issue_grant(engine, waiting), "execution_not_in_eligible_set", state)
        assert await engine.claim_for_worker(**worker()) == NoWork()
        assert await engine.scan_eligible_executions(lane_id="default") == []
    await engine.set_lane_state("default", "draining")
    assert await issue_grant(engine, waiting)


async def test_a_missing_capability_is_named_and_recorded(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    waiting = await given.created(policy=GPU)
    before = await rows.execution(waiting)
    now = await clock.advance(seconds=1)
    refusal = await refused(issue_grant(engine, waiting, worker_capabilities=["disk"]), "capability_mismatch")
    assert (refusal.detail, refusal.retryable) == ("cuda,gpu", True)
    row = await rows.execution(waiting)
    changed = {name: row[name] for name in row if row[name] != before[name]}
    assert changed == {"last_capability_mismatch_at": now, "last_mutation_at": now}
    assert await rows.of("claim_grant") == []
    refusal = await refused(issue_grant(engine, waiting, worker_capabilities=["gpu"]), "capability_mismatch")
    assert refusal.detail == "cuda"
    assert await issue_grant(engine, waiting, worker_capabilities=["gpu", "cuda", "disk"])


async def test_refusals_have_a_fixed_order(engine: Engine, given: Given, rows: Rows) -> None:
    waiting = await given.created(policy=GPU)
    bad: dict[str, Any] = {"worker_capabilities": ["a b"]}
    await engine.set_lane_state("default", "paused")
    async with rows.unchanged():
        await refused(issue_grant(engine, waiting, **bad), "execution_not_in_eligible_set")
    await engine.set_lane_state("default", "active")
    await issue_grant(engine, waiting, worker_capabilities=["gpu", "cuda"])
    await engine.set_lane_state("default", "paused")
    async with rows.unchanged():
        await refused(issue_grant(engine, waiting, **bad), "grant_already_exists")
    await engine.cancel_execution(execution_id=waiting, reason="x")
    async with rows.unchanged():
        await refused(issue_grant(engine, waiting, **bad), "execution_not_eligible")


async def test_without_a_signing_key_there_are_no_grants(
    engine: Engine, keyless: Engine, given: Given, rows: Rows
) -> None:
    waiting = await given.created()
    lost = await given.reclaimable(lane_id="lost")
    async with rows.unchanged(without=["claim"]):
        for one in (keyless, engine):
            await refused(issue_grant(one, waiting), "hmac_secret_not_initialized")
            await refused(one.claim_for_worker(**worker()), "hmac_secret_not_initialized")
            await refused(issue_reclaim_grant(one, lost.execution_id, lane_id="lost"), "hmac_secret_not_initialized")


async def test_the_next_grant_uses_a_key_rotated_by_another_process(
    engine: Engine, engines: Engines, given: Given
) -> None:
    other = await engines()
    await issue_grant(engine, await given.created())
    await other.rotate_waitpoint_hmac_secret_all(new_kid="k2", new_secret_hex="cd" * 32, grace_ms=0)
    key = (await issue_grant(engine, await given.created())).grant.grant_key
    assert key.split(":")[-2] == "k2"


async def test_a_pool_of_one_connection_is_enough(engine: Engine, engines: Engines, given: Given, clock: Clock) -> None:
    small = await engines(database_pool_size=1)
    waiting = await given.created()
    await issue_grant(small, waiting, "new")
    await claim_granted(small, waiting, "new", lease_ttl_ms=1)
    await clock.advance(ms=1)
    await issue_reclaim_grant(small, waiting, "newer")
    assert await small.reclaim_execution(execution_id=waiting, **worker("newer"))
    await given.created()
    assert await grant_for_worker(small, "newest")


# Ending.


async def test_an_expired_grant_no_longer_keeps_others_out(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    waiting = await given.created()
    await issue_grant(engine, waiting, grant_ttl_ms=1000)
    await clock.advance(ms=999)
    assert await claim(engine) == []
    await clock.advance(ms=1)
    async with rows.unchanged():
        assert await engine.scan_eligible_executions(lane_id="default") == [waiting]
    assert ids(await claim(engine)) == [waiting]
    row = await rows.execution(waiting)
    assert (vector(row), row["granted_until"]) == (ACTIVE, None)
    waiting = await given.created()
    await grant_for_worker(engine)
    await clock.advance(ms=5000)
    assert (await grant_for_worker(engine, "other")).execution_id == waiting


async def test_an_expired_grant_is_overwritten_by_the_next(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    waiting = await given.created()
    await issue_grant(engine, waiting, capability_hash="old", route_snapshot_json="1")
    now = await clock.advance(ms=5000)
    answer = await issue_grant(engine, waiting, "other")
    (stored,) = await rows.of("claim_grant")
    assert (stored["worker_id"], stored["capability_hash"], stored["route_snapshot"]) == ("other", None, None)
    assert stored["grant_id"] == hashlib.sha256(expected_key(waiting, now + 5000, "other").encode()).digest()
    assert answer.grant.grant_key == expected_key(waiting, now + 5000, "other")


async def test_a_sweep_deletes_only_grants_that_expired_long_ago(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    await issue_grant(engine, await given.created(), grant_ttl_ms=1000)
    live = await given.created()
    await issue_grant(engine, live, grant_ttl_ms=2000)
    await clock.advance(ms=1000 + GRANT_MEMORY_MS)
    assert await parts_of(engine).retention.purge_grants() == 1
    (left,) = await rows.of("claim_grant")
    assert str(left["execution_id"]) == uuid_of(live)


# Searching.


async def test_a_search_skips_executions_beyond_the_capabilities_of_the_worker_and_leaves_them_unchanged(
    engine: Engine, given: Given, rows: Rows
) -> None:
    needy = await given.created(policy=GPU, priority=9)
    before = await rows.execution(needy)
    plain = await given.created()
    assert (await grant_for_worker(engine)).execution_id == plain
    assert await engine.claim_for_worker(**worker(), worker_capabilities=["gpu"]) == NoWork()
    assert await rows.execution(needy) == before
    assert (await grant_for_worker(engine, worker_capabilities=["cuda", "gpu"])).execution_id == needy


async def test_a_search_grants_the_best_of_several_queues(engine: Engine, given: Given) -> None:
    low, _, high = [await given.created(lane_id="one", priority=priority) for priority in (1, 0, 9)]
    assert [(await grant_for_worker(engine, lane_id="one")).execution_id for _ in range(2)] == [high, low]
    made = [
        await given.created(priority=priority, policy=GPU if priority % 2 else None) for priority in (3, 8, 5, 6, 7)
    ]
    found = [(await grant_for_worker(engine, worker_capabilities=["cuda", "gpu"])).execution_id for _ in made]
    assert found == [made[at] for at in (1, 4, 3, 2, 0)]
    assert await engine.claim_for_worker(**worker(), worker_capabilities=["cuda", "gpu"]) == NoWork()


async def test_a_search_skips_locked_rows(engine: Engine, given: Given, connection: asyncpg.Connection) -> None:
    first, second = await given.created(priority=2), await given.created(priority=1)
    third = await given.created(policy=GPU)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(first))
        assert (await grant_for_worker(engine, worker_capabilities=["cuda", "gpu"])).execution_id == second
        assert (await grant_for_worker(engine, worker_capabilities=["cuda", "gpu"])).execution_id == third
        assert await engine.claim_for_worker(**worker()) == NoWork()
    assert (await grant_for_worker(engine)).execution_id == first


async def test_the_next_search_starts_after_the_last_grant(
    engine: Engine, given: Given, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScanWatermarks, "LIFE_SECONDS", 600.0)
    for _ in range(3):
        await given.created()
    last = [(await grant_for_worker(engine)).execution_id for _ in range(2)][-1]
    row = await rows.execution(last)
    (queue,) = await rows.of("queue", queue_no=row["queue_no"])
    watermarks = parts_of(engine).wakeups.watermarks.of_routes(Wanted.of(("default",), (), None, None))
    routes, firsts, lasts = watermarks.spans()
    assert (routes[-1], firsts[-1], lasts[-1]) == (queue["route_no"], row["place"] + 1, 2**63 - 1)


async def test_a_search_grants_nothing_on_other_lanes(engine: Engine, given: Given, rows: Rows) -> None:
    await given.created(lane_id="mail")
    async with rows.unchanged():
        assert await engine.claim_for_worker(**worker()) == NoWork()
        assert await engine.claim_for_worker(**worker(lane_id="unknown")) == NoWork()


async def test_a_search_grants_a_lost_lease_as_a_reclaim_grant(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.expired_lease(lease_ttl_ms=1000)
    now = await clock.now()
    answer = await grant_for_worker(engine)
    assert answer == Granted(
        execution_id=lost.execution_id,
        grant=ClaimGrant(
            execution_id=lost.execution_id,
            partition_key="{fp:86}",
            grant_key=expected_key(lost.execution_id, now + 5000, reclaim=True),
            expires_at_ms=now + 5000,
        ),
    )
    (stored,) = await rows.of("claim_grant")
    assert stored["kind"] == "reclaim"
    async with rows.unchanged(without=["claim"]):
        assert await claim(engine) == []
        assert await engine.claim_for_worker(**worker("other")) == NoWork()
    await clock.advance(ms=5000)
    assert ids(await claim(engine)) == [lost.execution_id]


async def test_a_search_ends_executions_at_their_reclaim_limit_and_continues(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    capped = [await given.claimed(policy={"max_reclaim_count": 0}, priority=5) for _ in range(3)]
    await clock.advance(seconds=31)
    await parts_of(engine).lease_expiry.sweep()
    behind = await given.created()
    assert (await grant_for_worker(engine)).execution_id == behind
    for handle in capped:
        row = await rows.execution(handle.execution_id)
        assert (vector(row), row["failure_reason"]) == (FAILED, "max_reclaims_exceeded")


async def test_a_search_grants_resumable_and_elapsed_executions(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    parked = await resumable(given)
    assert (await grant_for_worker(engine)).execution_id == parked
    (stored,) = await rows.of("claim_grant")
    assert stored["kind"] == "claim"
    delayed = await given.delayed(seconds=10, lane_id="later")
    assert await engine.claim_for_worker(**worker(lane_id="later")) == NoWork()
    await clock.advance(seconds=10)
    assert (await grant_for_worker(engine, lane_id="later")).execution_id == delayed


# Scanning.


async def test_a_scan_lists_claimable_executions_in_claim_order(engine: Engine, given: Given, rows: Rows) -> None:
    await given.reclaimable()
    parked = await resumable(given, priority=9)
    made = [await given.created(priority=priority, policy=GPU if priority else None) for priority in (0, 2, 1)]
    await given.created(lane_id="mail")
    await given.delayed()
    order = [parked, made[1], made[2], made[0]]
    async with rows.unchanged():
        assert await engine.scan_eligible_executions(lane_id="default") == order
        assert await engine.scan_eligible_executions(lane_id="default", limit=2) == order[:2]
        assert await engine.scan_eligible_executions(lane_id="default", limit=0) == []
        assert await engine.scan_eligible_executions(lane_id="unknown") == []


async def test_a_scan_takes_no_lock_and_cuts_its_limit(
    engine: Engine, given: Given, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: tuple[Any, ...] = (-1, None, "5")
    for limit in wrong:
        await refused(engine.scan_eligible_executions(lane_id="default", limit=limit), "invalid_input", "limit")
    made = [await given.created() for _ in range(3)]
    async with connection.transaction():
        await connection.execute("select from execution for update")
        assert await engine.scan_eligible_executions(lane_id="default", limit=50_000) == made
    monkeypatch.setattr(grant_family, "MAX_SCAN", 2)
    assert await engine.scan_eligible_executions(lane_id="default", limit=3) == made[:2]
