"""Claims: what they return and store, what they refuse, and how they wait."""

import asyncio
import time
from typing import Any
from uuid import UUID

import pytest

from engine.cases import SWEEPS_WHOLE, Cases, in_turn
from engine.state import ACTIVE, attempts, claim, claim_rows, event_texts, ids, new, refused, vector
from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease import claim as claim_family
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.states import AttemptType, HandleKind, PublicState
from flowfabric.settings import Settings


async def test_a_first_claim_leases_the_execution(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    execution_id = await given.created()
    now = await clock.advance(seconds=1)
    (claimed,) = await claim(engine, worker_id="pool", worker_instance_id="pool-7", lease_ttl_ms=5000)
    row = await rows.execution(execution_id)
    assert vector(row) == ACTIVE
    assert (row["lease_epoch"], row["attempt_count"], row["attempt_type"]) == (1, 1, "initial")
    assert (row["lease_id"], row["attempt_id"]) == (claimed.lease_id, claimed.attempt_id)
    assert {row[stamp] for stamp in ("started_at", "claimed_at", "last_transition_at", "last_mutation_at")} == {now}
    assert row["lease_expires_at"] == now + 5000
    unset = (
        "delay_until blocking_detail lease_renewed_at lease_expired_at attempt_timeout_at completed_at granted_until"
    )
    assert {name: row[name] for name in unset.split() if row[name] is not None} == {}
    assert (await rows.of("ready"), await rows.of("timer"), await rows.of("attempt")) == ([], [], [])
    (held,) = (await claim_rows(rows)).values()
    assert (held["claim_no"], held["worker_no"]) == (row["claim_no"], row["worker_no"])
    assert (held["expires_at"], held["renewed_at"], held["execution_ids"]) == (now + 5000, None, [execution_id])
    (worker,) = await rows.of("worker_identity", worker_no=row["worker_no"])
    assert (worker["worker_id"], worker["worker_instance_id"]) == ("pool", "pool-7")


async def test_a_claim_returns_all_that_a_worker_needs(engine: Engine, given: Given, clock: Clock) -> None:
    execution_id = await given.created(
        execution_kind="resize", input_payload=b"\x00\x01", payload_encoding="raw", tags={"app.a": "b"}, priority=7
    )
    (claimed,) = await claim(engine, lease_ttl_ms=5000)
    assert (claimed.execution_id, claimed.execution_kind, claimed.input_payload) == (
        execution_id,
        "resize",
        b"\x00\x01",
    )
    assert (claimed.payload_encoding, claimed.tags, claimed.lane_id) == ("raw", {"app.a": "b"}, "default")
    assert (claimed.priority, claimed.policy, claimed.retry_count) == (7, None, 0)
    assert (claimed.lease_epoch, claimed.attempt_index, claimed.attempt_type) == (1, 0, AttemptType.INITIAL)
    assert claimed.lease_expires_at == await clock.now() + 5000
    assert isinstance(claimed.lease_id, UUID)
    assert isinstance(claimed.attempt_id, UUID)
    handle = claimed.handle
    assert handle.kind is HandleKind.FRESH
    assert (handle.execution_id, handle.attempt_index, handle.lease_epoch) == (execution_id, 0, 1)
    assert (handle.lease_id, handle.attempt_id) == (claimed.lease_id, claimed.attempt_id)
    assert (handle.lease_ttl_ms, handle.lane_id, handle.worker_instance_id) == (5000, "default", "worker-1")


async def test_claim_returns_the_handle_of_the_best_execution_or_nothing(
    engine: Engine, given: Given, rows: Rows
) -> None:
    asked: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    async with rows.unchanged(without=["worker_identity"]):
        assert await engine.claim(**asked) is None
    await given.created()
    best = await given.created(priority=1)
    handle = await engine.claim(**asked)
    assert handle is not None
    assert (handle.execution_id, handle.kind, handle.lease_ttl_ms) == (best, HandleKind.FRESH, 30_000)
    # A handle may be stored as bytes and used again.
    await engine.complete(type(handle).decode(handle.opaque, HandleKind.FRESH), b"x")
    assert await engine.get_execution_result(handle.execution_id) == b"x"


async def test_a_claim_writes_one_acquired_event(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    claimed = await given.run(tags={"ff.instance_id": "i-1"}, namespace="tenant")
    assert await event_texts(rows, claimed.execution_id) == ["tag_attached", "acquired"]
    _, event = await rows.events(claimed.execution_id)
    row = await rows.execution(claimed.execution_id)
    assert (event["at"], event["lease_epoch"], event["lease_id"]) == (await clock.now(), 1, claimed.lease_id)
    assert (event["attempt_index"], event["worker_no"], event["outcome"]) == (0, row["worker_no"], None)
    assert (event["instance_tag"], event["namespace_no"]) == ("i-1", row["namespace_no"])
    assert event["partition_key"] == row["partition_key"]
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["attempt_type"], attempt["attempt_index"]) == ("started", "initial", 0)
    assert (attempt["attempt_id"], attempt["lease_id"], attempt["lease_epoch"]) == (
        claimed.attempt_id,
        claimed.lease_id,
        1,
    )
    assert (attempt["started_at"], attempt["ended_at"]) == (await clock.now(), None)


async def test_a_retry_is_a_new_attempt_of_the_same_execution(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    began = await clock.now()
    failed = await given.backing_off(delay_ms=1000)
    await clock.advance(seconds=1)
    claimed = await given.claim()
    assert (claimed.execution_id, claimed.handle.kind) == (failed.execution_id, HandleKind.FRESH)
    assert (claimed.attempt_index, claimed.attempt_type, claimed.lease_epoch) == (1, AttemptType.RETRY, 2)
    assert claimed.retry_count == 1
    assert claimed.attempt_id != failed.attempt_id
    row = await rows.execution(failed.execution_id)
    assert vector(row) == ACTIVE
    assert (row["attempt_count"], row["retry_count"], row["started_at"]) == (2, 1, began)
    assert (row["delay_until"], await rows.timers(failed.execution_id)) == (None, {})
    _, running = await engine.list_attempts(failed.execution_id)
    assert (running.attempt_state, running.retry_reason, running.previous_attempt_index) == ("started", "no luck", 0)
    await engine.complete(claimed.handle)
    first, second = await attempts(rows, failed.execution_id)
    assert (first["attempt_type"], first["attempt_state"]) == ("initial", "ended_failure")
    assert (second["attempt_type"], second["attempt_state"]) == ("retry", "ended_success")
    assert (second["retry_reason"], second["previous_attempt_index"]) == ("no luck", 0)
    assert await event_texts(rows, failed.execution_id) == [
        "acquired",
        "released failed_retry_scheduled",
        "acquired",
        "released completed>success",
    ]


async def test_a_claim_sets_the_attempt_timeout_of_the_policy(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    now = await clock.now()
    for timeout, armed in ((700, now + 700), (0, None), (None, None)):
        claimed = await given.run(policy={"timeout_policy": {"attempt_timeout_ms": timeout}})
        assert (await rows.execution(claimed.execution_id))["attempt_timeout_at"] == armed
        assert await rows.timers(claimed.execution_id) == ({} if armed is None else {"attempt_timeout": armed})


async def test_a_claim_returns_the_deadline_of_its_execution(engine: Engine, given: Given, clock: Clock) -> None:
    now = await clock.now()
    assert (await given.run()).execution_deadline_at is None
    by_policy = await given.run(policy={"timeout_policy": {"execution_deadline_ms": 90_000}})
    assert by_policy.execution_deadline_at == now + 90_000
    given_at = await given.run(execution_deadline_at=now + 80_000)
    assert given_at.execution_deadline_at == now + 80_000
    await engine.hand_back(given_at.handle)
    (resumed,) = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-2", limit=1)
    assert (resumed.execution_id, resumed.execution_deadline_at) == (given_at.execution_id, now + 80_000)


async def test_only_claimable_executions_are_claimed(engine: Engine, given: Given, rows: Rows) -> None:
    await given.claimed()
    await given.completed()
    await given.failed()
    await given.cancelled()
    await given.delayed()
    await given.backing_off()
    async with rows.unchanged(without=["worker_identity"]):
        assert await claim(engine, worker_id="other") == []


async def test_a_claim_on_a_busy_lane_processes_due_work_when_no_reconciler_runs(
    engine: Engine, given: Given, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = await given.claimed(lease_ttl_ms=1000)
    delayed = await given.delayed(seconds=1, priority=1)
    for _ in range(3):
        await given.created()
    await clock.advance(seconds=2)
    monkeypatch.setattr(claim_family, "CATCH_UP_SECONDS", 3600.0)
    assert {lost.execution_id, delayed}.isdisjoint(ids(await claim(engine, limit=1)))
    monkeypatch.setattr(claim_family, "CATCH_UP_SECONDS", 0.0)
    assert ids(await claim(engine, limit=1)) == [delayed]
    assert ids(await claim(engine, limit=1)) == [lost.execution_id]
    assert len(await claim(engine, limit=3)) == 2


WRONG: list[tuple[dict[str, Any], str, str]] = [
    *(({"lanes": wrong}, "invalid_input", "lanes: expected 1 to 64") for wrong in ((), [f"{n}" for n in range(65)])),
    *(
        ({"lanes": wrong}, "invalid_input", "lanes: expected a list or another collection")
        for wrong in ("default", b"default", 5, None)
    ),
    ({"lanes": ("",)}, "invalid_input", "lane_id: Empty"),
    ({"lanes": ("ok", "x" * 65)}, "invalid_input", "lane_id: TooLong(65)"),
    ({"lanes": (5,)}, "invalid_input", "lane_id"),
    *(
        ({field: wrong}, "invalid_input", field)
        for field in ("worker_id", "worker_instance_id")
        for wrong in ("", "a b", "a\tb", "a\0", "a\u00a0b", "a\x7f", "\ud800", "x" * 257, "ü" * 129, 5, None)
    ),
    *(({"lease_ttl_ms": wrong}, "invalid_input", "lease_ttl_ms") for wrong in (0, -1, 2**32, 1.5, "1", None, True)),
    *(({"limit": wrong}, "invalid_input", "limit") for wrong in (0, -1, 1001, 1.5, None)),
    *(({"max_wait_ms": wrong}, "invalid_input", "max_wait_ms") for wrong in (-1, 2**32, 0.5, None)),
    ({"capabilities": ["a,b"]}, "invalid_capabilities", "worker:comma_in_token"),
    ({"capabilities": [""]}, "invalid_capabilities", "worker:empty_token"),
    ({"capabilities": ["a\u00a0b"]}, "invalid_capabilities", "worker:control_or_whitespace"),
    ({"capabilities": ["a\x85"]}, "invalid_capabilities", "worker:control_or_whitespace"),
    ({"capabilities": [5]}, "invalid_capabilities", "worker:non_string_token"),
    ({"capabilities": [f"t{at}" for at in range(257)]}, "invalid_capabilities", "worker:too_many_tokens"),
    ({"capabilities": ["x" * 4097]}, "invalid_capabilities", "worker:too_many_bytes"),
]


async def test_wrong_arguments_are_refused_and_the_longest_are_accepted(
    engine: Engine, given: Given, rows: Rows
) -> None:
    await given.created()
    with Cases() as cases:
        async with rows.unchanged():
            for overrides, code, detail in WRONG:
                with cases(str(overrides)[:80]):
                    refusal = await refused(claim(engine, **overrides), code, detail)
                    assert isinstance(refusal, InvalidInputError)
    names = {"worker_id": "ü" * 128, "worker_instance_id": "x" * 256}
    many = [f"t{at}" for at in range(256)]
    (claimed,) = await claim(engine, lease_ttl_ms=2**32 - 1, capabilities=many, **names)
    assert claimed.handle.lease_ttl_ms == 2**32 - 1
    assert await claim(engine, capabilities=["x" * 4096], lease_ttl_ms=1) == []


@pytest.mark.usefixtures("hints_only")
async def test_a_claim_that_finds_nothing_returns_after_its_wait(engine: Engine) -> None:
    async with asyncio.timeout(30):
        assert await claim(engine, max_wait_ms=0) == []
    # Only a waiting claim listens for hints.
    assert not parts_of(engine).wakeups.hints.is_listening
    began = time.monotonic()
    async with asyncio.timeout(30):
        assert await claim(engine, max_wait_ms=100) == []
    assert time.monotonic() - began >= 0.1


@pytest.mark.usefixtures("hints_only")
@in_turn("submitters", ["same process", "other process"])
async def test_a_submit_at_any_time_wakes_a_waiting_claim(engines: Engines, engine: Engine, submitters: str) -> None:
    submitter = engine if submitters == "same process" else await engines()
    for at in range(0, 60, 1 if SWEEPS_WHOLE else 4):
        waiting = asyncio.create_task(claim(engine, max_wait_ms=60_000))
        # The submit comes before the first search, during it, or well into the wait.
        for _ in range(at * at):
            await asyncio.sleep(0)
        made = await submitter.create_execution(**new())
        async with asyncio.timeout(30):
            assert ids(await waiting) == [made.execution_id]


@pytest.mark.usefixtures("hints_only")
async def test_opening_a_lane_wakes_a_waiting_claim(
    engines: Engines, engine: Engine, given: Given, eventually: Eventually
) -> None:
    waiting_row = await given.created()
    await engine.set_lane_state("default", "paused")
    other = await engines()
    waiting = asyncio.create_task(claim(engine, max_wait_ms=60_000))
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    await other.set_lane_state("default", "active")
    async with asyncio.timeout(30):
        assert ids(await waiting) == [waiting_row]


async def test_an_engine_that_does_not_listen_polls(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_family, "POLL_SECONDS", 0.02)
    deaf, submitter = await engines(listen=False), await engines(listen=False)
    waiting = asyncio.create_task(claim(deaf, max_wait_ms=60_000))
    made = await submitter.create_execution(**new())
    assert ids(await waiting) == [made.execution_id]


@pytest.mark.usefixtures("hints_only")
async def test_one_of_several_waiting_claims_gets_a_new_execution(
    engines: Engines, engine: Engine, eventually: Eventually
) -> None:
    several = [engine, await engines(), await engines()]
    waiting = [asyncio.create_task(claim(one, max_wait_ms=60_000)) for one in several]
    await eventually(lambda: all(parts_of(one).wakeups._waiting.get("default") for one in several))
    made = await engine.create_execution(**new())
    (first,), others = await asyncio.wait(waiting, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    assert ids(await first) == [made.execution_id]
    assert await engine.read_execution_state(made.execution_id) is PublicState.ACTIVE
    # The others search again and wait until their engines shut down.
    for one in several:
        await one.shutdown_prepare(30_000)
    assert [await other for other in others] == [[], []]


async def test_a_waiting_claim_ends_when_its_engine_closes(url: str, eventually: Eventually) -> None:
    async with Engine.connect(settings=Settings(database_url=url)) as closing:
        waiting = asyncio.create_task(claim(closing, max_wait_ms=60_000))
        await eventually(lambda: parts_of(closing).wakeups.hints.is_listening)
    async with asyncio.timeout(30):
        assert await waiting == []
        await refused(closing.ping(), "transport", "closed")


async def test_a_cancelled_claim_leaves_the_engine_usable(engine: Engine, given: Given, eventually: Eventually) -> None:
    waiting = asyncio.create_task(claim(engine, max_wait_ms=60_000))
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    created = await given.created()
    assert ids(await claim(engine)) == [created]


@pytest.mark.usefixtures("hints_only")
async def test_wait_children_wakes_a_waiting_claim(engine: Engine, given: Given, eventually: Eventually) -> None:
    handle = await given.claimed(lane_id="busy")
    waiting = asyncio.create_task(claim(engine, "busy", max_wait_ms=60_000, limit=1))
    await eventually(lambda: parts_of(engine).wakeups._waiting.get("busy"))
    await engine.wait_children(handle)
    (claimed,) = await asyncio.wait_for(waiting, 30)
    assert claimed.execution_id == handle.execution_id
