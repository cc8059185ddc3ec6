"""Hot statements touch few rows, whatever the tables hold and whatever the planner knows about them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from creates import new
from databases import Databases
from fixtures import Clock
from flowfabric.engine.core.payload import INLINE_PAYLOAD_BYTES
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.expire import CLAIM_LIMIT, SWEEP_LIMIT
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import FailureReason
from flowfabric.model.condition import Single
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Created
from flowfabric.model.grant import Granted
from flowfabric.model.ids import SuspensionId, WaitpointId
from flowfabric.model.lease import Renewed
from flowfabric.model.suspension import SuspendArgs, SuspensionReason
from flowfabric.model.waitpoint import Fresh
from flowfabric.reconcile.due import SAMPLE, read_due
from house.filled import STATISTICS, copied, filled
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

BACKLOG = 6_000
DELAYED = 3_000
LEASED = 2_000
ENDED = 1_000
LEASES = 200
ROUTED = {"routing_requirements": {"required_capabilities": ["gpu"]}}
HOUR = 3_600_000
DAY = 86_400_000


async def claim(engine: Engine, limit: int, **overrides: Any) -> list[Any]:
    return await engine.claim_many(
        **{"lanes": ("default",), "worker_id": "w", "worker_instance_id": "w-1", "limit": limit, **overrides}
    )


async def fill(engine: Engine) -> None:
    """Create ended, leased, delayed and waiting executions, in several lanes."""
    now = round(time.time() * 1000)
    await engine.create_many([new() for _ in range(ENDED)])
    for _ in range(ENDED // 100):
        runs = await claim(engine, 100, lease_ttl_ms=HOUR // 2)
        await engine.complete_many([(run.handle, b"1") for run in runs])
    for _ in range(LEASED // 1000):
        await engine.create_many([new(execution_deadline_at=now + DAY) for _ in range(1000)])
        for _ in range(10):
            await claim(engine, 100, lease_ttl_ms=4 * HOUR)
    for nth in range(DELAYED // 1000):
        await engine.create_many([new(delay_until=now + HOUR + (nth * 1000 + n) * 1000) for n in range(1000)])
    for nth in range(BACKLOG // 1000):
        await engine.create_many([new(lane_id=f"lane{nth % 4}" if nth % 2 else "default") for _ in range(1000)])


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many executions."""
    async with filled(databases, fill, VACUUM) as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many executions, with and without statistics."""
    async with copied(databases, store, *(["analyze"] if request.param == "statistics" else [])) as url:
        yield url


@pytest.fixture
def full(original: str, lasting_watermarks: None, engine: Engine) -> Engine:
    """An engine on a store with ended, leased, delayed and waiting executions in several lanes."""
    return engine


async def test_operations_on_few_executions_touch_few_rows(full: Engine, touched: Touched) -> None:
    await full.create_many([new() for _ in range(10)])
    assert touched["insert_alike"] == 0
    await full.create_many([new(idempotency_key=f"key{n}") for n in range(10)])
    assert touched["insert_executions"] <= 20
    runs = await claim(full, 10)
    assert touched["claim_by_route"] <= 2 * 10 + 8
    await full.renew_many([run.handle for run in runs])
    # Each execution and their one claim.
    assert touched["renew_leases"] <= 11
    await full.progress(runs[0].handle, percent=50)
    assert touched["set_progress"] <= 5
    await full.complete_many([(run.handle, b"1") for run in runs[:5]])
    assert touched["complete_leases"] <= 5
    await full.fail(runs[5].handle, reason="no luck")
    await full.cancel_execution(execution_id=runs[6].execution_id, reason="not wanted")
    assert touched["end_leases"] <= 5
    await full.read_execution_info(runs[0].execution_id)
    assert touched["read_info"] <= 5


async def test_only_a_failure_with_an_error_reads_or_writes_a_row_of_attempts(
    full: Engine, touched: Touched, clock: Clock
) -> None:
    raised = FailureReason("no luck", error_type="ValueError", traceback="Traceback")
    await full.create_many([new(lane_id="raised", policy={"retry_policy": {"max_retries": 1}}) for _ in range(40)])
    runs = await claim(full, 40, lanes=("raised",))
    await full.complete_many([(run.handle, b"1") for run in runs[:10]])
    await asyncio.gather(*(full.fail(r.handle, reason="no luck", classification="permanent") for r in runs[10:20]))
    await asyncio.gather(*(full.fail(r.handle, reason=raised, classification="permanent") for r in runs[20:30]))
    # The index lookup of an upsert finds no row with the same key.
    assert touched.readers_of("attempt") == set()
    await asyncio.gather(*(full.fail(r.handle, reason=raised) for r in runs[30:]))
    assert touched["end_leases"] <= 4 * 10
    await clock.advance(ms=HOUR)
    again = await claim(full, 10, lanes=("raised",))
    await full.fail(again[0].handle, reason=raised)
    await full.cancel_execution(execution_id=again[1].execution_id, reason="not wanted")
    # A retry has a row in `attempt` already.
    await full.complete_many([(again[2].handle, b"1")])
    for run, of_attempts in ((runs[0], 0), (runs[10], 0), (runs[20], 1), (again[0], 1), (again[2], 0)):
        touched.clear()
        await full.wait_for_ending(run.execution_id, timeout=60)
        assert touched.of("list_results", "attempt") == of_attempts
        assert touched["list_results"] <= 3
    for run in (*runs[::10], *again[:4]):
        touched.clear()
        assert await full.read_execution_status(run.execution_id) is not None
        # The execution, its lease and its result, its latest attempt and the previous one.
        assert touched["read_status"] <= 6
        await full.list_attempts(run.execution_id)
        assert touched["list_attempts"] <= 8


async def test_only_a_large_input_is_read_from_its_own_table(full: Engine, touched: Touched, clock: Clock) -> None:
    for lane, size, found in (("small", INLINE_PAYLOAD_BYTES, 0), ("large", INLINE_PAYLOAD_BYTES + 1, 10)):
        touched.clear()
        await full.create_many([new(lane_id=lane, input_payload=b"x" * size) for _ in range(5)])
        await full.create_many([new(lane_id=lane, input_payload=b"x" * size, idempotency_key=f"{n}") for n in range(5)])
        runs = await claim(full, 10, lanes=(lane,))
        assert touched.of("claim_by_route", "execution_input") == found
        await full.read_execution_context(runs[0].execution_id)
        assert touched.of("read_context", "execution_input") == found // 10
        await full.complete_many([(run.handle, b"1") for run in runs])
        assert touched.readers_of("execution_input") == ({"claim_by_route", "read_context"} if found else set())
    await clock.advance(ms=DAY + HOUR)
    touched.clear()
    assert (await parts_of(full).retention.trim_batch(limit=ENDED)).done == ENDED
    assert touched.of("take_retained", "execution_input") == 0
    assert (await parts_of(full).retention.trim_batch(limit=ENDED)).done == 20
    assert touched.of("take_retained", "execution_input") == 10


async def test_only_a_large_result_is_read_from_its_own_table(full: Engine, touched: Touched, clock: Clock) -> None:
    ended = {}
    for lane, size, found in (("small", INLINE_PAYLOAD_BYTES, 0), ("large", INLINE_PAYLOAD_BYTES + 1, 1)):
        touched.clear()
        await full.create_many([new(lane_id=lane) for _ in range(20)])
        runs = await claim(full, 20, lanes=(lane,))
        await full.complete_many([(run.handle, b"x" * size) for run in runs[:10]])
        # The index lookup of an upsert finds no row with the same key.
        assert touched.of("complete_leases", "execution_result") == 0
        await full.complete_execution(
            execution_id=runs[10].execution_id, payload=b"x" * size, source="operator_override"
        )
        assert touched.of("end_leases", "execution_result") == 0
        await full.get_execution_result(runs[0].execution_id)
        assert touched.of("read_result", "execution_result") == found
        await full.wait_for_ending(runs[0].execution_id, timeout=60)
        assert touched.of("list_results", "execution_result") == found
        await full.read_execution_info(runs[0].execution_id)
        assert touched.of("read_info", "execution_result") == 0
        for run in runs[11:]:
            await full.fail(run.handle, reason="no luck")
            await full.wait_for_ending(run.execution_id, timeout=60)
        ended[lane] = touched.of("list_results", "execution_result")
    assert ended == {"small": 0, "large": 1}
    await clock.advance(ms=DAY + HOUR)
    touched.clear()
    assert (await parts_of(full).retention.trim_batch(limit=ENDED)).done == ENDED
    assert touched.of("take_retained", "execution_result") == 0
    assert (await parts_of(full).retention.trim_batch(limit=ENDED)).done == 40
    assert touched.of("take_retained", "execution_result") == 11


async def test_ending_executions_with_timers_touches_few_rows(full: Engine, touched: Touched, clock: Clock) -> None:
    soon = await clock.now() + HOUR
    retry = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1000}}}
    timed = {**retry, "timeout_policy": {"attempt_timeout_ms": HOUR}}
    await full.create_many([new(policy=timed, execution_deadline_at=soon, priority=9) for _ in range(60)])
    runs = await claim(full, 60)
    assert touched["claim_by_route"] <= 2 * 60 + 8
    touched.clear()
    await full.complete_many([(run.handle, b"1") for run in runs[:20]])
    # The execution and its two timers.
    assert touched["complete_leases"] <= 3 * 20
    await asyncio.gather(*(full.fail(run.handle, reason="no luck") for run in runs[20:40]))
    await asyncio.gather(*(full.hand_back(run.handle) for run in runs[40:]))
    assert touched["end_leases"] <= 4 * 20
    touched.clear()
    # One call each, for executions that wait for a retry and for those that were handed back.
    for run in runs[20:60:8]:
        await full.cancel_execution(execution_id=run.execution_id, reason="not wanted")
    assert touched["end_leases"] <= 10


async def test_renewing_many_leases_touches_each_a_few_times(
    full: Engine, touched: Touched, connection: asyncpg.Connection
) -> None:
    for claims in (1, 20, LEASES):
        lane = f"renewed by {claims}"
        await full.create_many([new(lane_id=lane) for _ in range(LEASES)])
        runs: list[Any] = []
        for _ in range(claims):
            runs += await claim(full, LEASES // claims, lanes=(lane,), lease_ttl_ms=4 * HOUR)
        for _ in range(2):
            touched.clear()
            answers = await full.renew_many([run.handle for run in runs])
            assert all(isinstance(answer, Renewed) for answer in answers)
            # Each execution is read, and locked if it moves to another claim; each claim is locked once.
            assert touched.of("renew_leases", "execution") <= 2 * LEASES
            assert touched.of("renew_leases", "claim") <= 2 * claims
        # The first renewal has moved all of them to one claim.
        found = await connection.fetchval(
            "select count(distinct claim_no) from execution join lane using (lane_no) where lane_id = $1", lane
        )
        assert found == 1


async def test_an_explanation_stops_counting_at_the_number_that_it_reports(full: Engine, touched: Touched) -> None:
    await full.create_many([new(policy=ROUTED) for _ in range(1000)])
    (first,) = await full.create_many([new(priority=9)])
    (run,) = await claim(full, 1)
    (second,) = await full.create_many([new(priority=9)])
    *_, last = await full.create_many([new() for _ in range(1000)])
    assert isinstance(first, Created)
    assert isinstance(second, Created)
    assert isinstance(last, Created)
    assert run.execution_id == first.execution_id
    for execution_id in (first.execution_id, second.execution_id):
        await full.explain(execution_id)
        assert touched["read_reasons"] <= 10
    found = await full.explain(last.execution_id)
    assert [getattr(reason, "ahead", None) for reason in found.reasons][:1] == [1000]
    assert touched["read_reasons"] <= 1000 + 10


async def test_grants_and_named_claims_touch_few_rows(full: Engine, touched: Touched) -> None:
    planner: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    assert len(await full.scan_eligible_executions(lane_id="default", limit=10)) == 10
    assert touched["list_eligible"] <= 20
    granted = [await full.claim_for_worker(**planner) for _ in range(5)]
    assert touched["lock_best_of_routes"] <= 5 + 8 + 1
    assert touched["read_with_grant"] <= 5
    assert touched["insert_grant"] <= 5
    assert isinstance(granted[0], Granted)
    await full.claim_execution(execution_id=granted[0].execution_id, **planner)
    assert touched["lease_locked"] <= 10


def suspension() -> SuspendArgs:
    return SuspendArgs(
        suspension_id=SuspensionId(uuid4()),
        waitpoints=(Fresh(waitpoint_id=WaitpointId(uuid4()), waitpoint_key="wait"),),
        resume_condition=Single(waitpoint_key="wait"),
        reason_code=SuspensionReason.WAITING_FOR_SIGNAL,
    )


def signal(wait: Any) -> dict[str, Any]:
    return {
        "execution_id": wait.handle.execution_id,
        "waitpoint_id": wait.details.waitpoint_id,
        "waitpoint_token": wait.details.waitpoint_token,
        "signal_name": "ready",
    }


async def test_signals_touch_few_rows(full: Engine, touched: Touched) -> None:
    handles = [run.handle for run in await claim(full, 10)]
    waits = [await full.suspend(handle, suspension()) for handle in handles]
    await asyncio.gather(*(full.deliver_signal(**signal(wait)) for wait in waits[:5]))
    assert touched["lock_targets"] <= 20
    assert touched["read_deliveries"] <= 20
    assert touched["insert_deliveries"] <= 5
    assert touched["resume_locked"] <= 40
    with contextlib.suppress(EngineError):
        await full.deliver_signal(**{**signal(waits[5]), "waitpoint_token": "k1:" + "0" * 64})
    assert touched["insert_deliveries"] <= 10
    await full.resume_execution(execution_id=handles[6].execution_id)
    assert touched["resume_locked"] <= 40


async def test_a_sweep_touches_only_a_batch_of_what_is_due(
    full: Engine, touched: Touched, clock: Clock, connection: asyncpg.Connection
) -> None:
    due = await read_due(parts_of(full).store, ())
    assert (due.expired_claims, due.elapsed_delays, due.expiries) == (0, 0, 0)
    assert touched["read_due"] <= 10
    await clock.stop()
    first = await connection.fetchval("select min(delay_until) from execution")
    await clock.advance(ms=first + 10_000 - await clock.now())
    assert await parts_of(full).lease_expiry.sweep() == 0
    # The claims whose leases have all ended, and the row of each execution.
    assert touched["take_spent_claims"] <= ENDED // 100 + ENDED
    assert await parts_of(full).timeouts.expire_due() == 0
    assert touched["lock_expired"] <= 10
    assert await parts_of(full).delays.promote_due() == 11
    assert touched["promote_delayed"] <= 11 * 4
    await clock.advance(ms=DAY + HOUR)
    touched.clear()
    assert await parts_of(full).delays.promote_due() == SWEEP_LIMIT
    assert touched["promote_delayed"] <= 4 * SWEEP_LIMIT
    while await parts_of(full).delays.promote_due():
        pass
    await connection.execute(VACUUM)
    touched.clear()
    assert await parts_of(full).lease_expiry.sweep() == LEASED
    assert LEASED // 100 < CLAIM_LIMIT
    assert touched["take_spent_claims"] <= LEASED // 100 + LEASED
    # Each execution, locked and found again, and its claim if its lease seems to have expired.
    assert touched["end_leases"] <= 4 * LEASED
    assert await parts_of(full).timeouts.expire_due() == SWEEP_LIMIT
    assert touched["lock_expired"] <= 4 * SWEEP_LIMIT
    touched.clear()
    assert (await parts_of(full).retention.trim_batch(limit=100)).done == 100
    assert "take_retained" not in touched.readers_of("stream") | touched.readers_of("stream_frame")
    # Each execution is read, locked and deleted; it has no rows in other tables.
    assert touched["take_retained"] <= 1 + 4 * 100


async def test_the_check_for_due_work_costs_the_same_however_many_timers_run(
    full: Engine, touched: Touched, clock: Clock, connection: asyncpg.Connection
) -> None:
    await connection.execute(
        """insert into timer (partition_key, execution_id, kind, due_at)
           select 0, gen_random_uuid(), k.kind, ff_now() + 60000 + n
             from unnest(enum_range(null::timer_kind)) as k(kind) cross join generate_series(1, $1) n""",
        3 * SAMPLE,
    )
    assert (await read_due(parts_of(full).store, ())).elapsed_delays == 0
    assert touched["read_due"] <= 20
    await clock.advance(ms=120_000)
    assert (await read_due(parts_of(full).store, ())).elapsed_delays == SAMPLE
    # A sample of each of the four kinds, and one more timer of each.
    assert touched.of("read_due", "timer") <= 4 * SAMPLE + 4


async def test_a_page_of_a_list_touches_few_rows_with_any_filter(full: Engine, touched: Touched) -> None:
    # Executions created in the same millisecond are read together, and `fill` creates a thousand at a time.
    page = 5 * 1000 + 200
    for order in ("newest", "oldest"):
        for plenty in ({}, {"namespace": "tests"}, {"lane_id": "lane1"}, {"execution_kind": "job"}):
            touched.clear()
            found = await full.list_executions(order=order, limit=20, **plenty)  # type: ignore[arg-type]
            assert len(found.executions) == 20
            assert touched.of(f"list_{order}", "execution") <= page
            assert "list_candidates" not in touched
        for rare in (
            {"public_state": "failed"},
            {"public_state": ["cancelled", "expired"]},
            {"public_state": "rate_limited"},
        ):
            touched.clear()
            assert (await full.list_executions(order=order, **rare)).executions == []
            assert f"list_{order}" not in touched
            assert touched["list_candidates"] <= 10
        # Tagged executions are found by the tag, without a scan in creation order.
        touched.clear()
        assert (await full.list_executions(order=order, tag=("a.b", "c"))).executions == []
        assert touched["list_candidates"] <= 10
        assert f"list_{order}" not in touched
        # The few ended executions are found without reading the others.
        touched.clear()
        found = await full.list_executions(order=order, public_state="completed", limit=20)
        assert len(found.executions) == 20
        if "list_candidates" in touched:
            assert touched.by_table("list_candidates")["execution"] <= 2 * ENDED + 10
