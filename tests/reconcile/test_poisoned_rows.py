"""An execution whose rows cannot be written blocks neither the others of its sweep nor any claim."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import uuid4

import asyncpg
import pytest

from engine.sending import running, waiting
from engine.waits import on_all
from fixtures import Clock, Given, Rows
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease import catch_up
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import ExecutionId, FlowId, mint_for_flow
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS

from .test_poisoned_flows import CASES as FLOW_CASES

MINUTE = 60_000
DAY = 24 * 60 * MINUTE
EVERY = 2.0


@dataclass
class Scene:
    """The fixtures of a case."""

    engine: Engine
    given: Given
    clock: Clock
    rows: Rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sweep that writes rows of executions."""

    make: Callable[[Scene], Awaitable[ExecutionId]]
    """Makes an execution that is due for the sweep a minute later, or a day later for retention."""
    is_done: Callable[[Scene, ExecutionId], Awaitable[bool]]
    owner: str
    """The part of the engine that holds the quarantine of the sweep."""
    quarantine: str = "quarantine"
    table: str = "execution"
    """The table whose rows cannot be written."""


async def _leased(scene: Scene) -> ExecutionId:
    run = await scene.given.run(lane_id=f"lane{uuid4().hex}", lease_ttl_ms=MINUTE)
    return run.execution_id


async def _delayed(scene: Scene) -> ExecutionId:
    return await scene.given.delayed(seconds=60, lane_id="delayed")


async def _late(scene: Scene) -> ExecutionId:
    deadline = await scene.clock.now() + MINUTE
    return await scene.given.created(lane_id="late", execution_deadline_at=deadline)


async def _suspended(scene: Scene) -> ExecutionId:
    asked = on_all("a", timeout_at=await scene.clock.now() + MINUTE, timeout_behavior="fail")
    return (await waiting(scene.engine, scene.given, asked)).execution_id


async def _with_waitpoint(scene: Scene) -> ExecutionId:
    return (await running(scene.engine, scene.given, expires_in_ms=MINUTE, lease_ttl_ms=20 * DAY)).execution_id


async def _ended(scene: Scene) -> ExecutionId:
    return await scene.given.cancelled(lane_id="ended")


async def _owed(scene: Scene) -> ExecutionId:
    flow_id = FlowId(uuid4())
    execution_id = mint_for_flow(flow_id, parts_of(scene.engine).store.rules.partitions)
    await scene.engine.create_flow(flow_id, flow_kind="dag", namespace="tests")
    await scene.given.created(execution_id=execution_id, lane_id="owed")
    await scene.engine.add_execution_to_flow(flow_id, execution_id)
    await scene.engine.cancel_flow_header(flow_id, reason="x", cancellation_policy="cancel_all", grace_ms=MINUTE)
    return execution_id


async def _blocked(scene: Scene) -> ExecutionId:
    execution_id = await scene.given.created(lane_id="blocked")
    await scene.engine.block_execution_for_admission(execution_id, "waiting_for_quota")
    return execution_id


def _shows(column: str, value: str) -> Callable[[Scene, ExecutionId], Awaitable[bool]]:
    async def is_done(scene: Scene, execution_id: ExecutionId) -> bool:
        return (await scene.rows.execution(execution_id))[column] == value  # type: ignore[no-any-return]

    return is_done


async def _is_closed(scene: Scene, execution_id: ExecutionId) -> bool:
    (waitpoint,) = await scene.rows.of("waitpoint", execution_id=execution_id[-36:])
    return waitpoint["state"] == "closed"  # type: ignore[no-any-return]


async def _is_gone(scene: Scene, execution_id: ExecutionId) -> bool:
    return await scene.rows.of("execution", execution_id=execution_id[-36:]) == []


CASES = {
    "lease_expiry": Case(
        make=_leased, is_done=_shows("ownership_state", "lease_expired_reclaimable"), owner="lease_expiry"
    ),
    "delayed_promoter": Case(make=_delayed, is_done=_shows("public_state", "waiting"), owner="delays"),
    "expiry": Case(make=_late, is_done=_shows("public_state", "expired"), owner="timeouts"),
    "suspension_timeout": Case(make=_suspended, is_done=_shows("public_state", "failed"), owner="suspension_timeouts"),
    "pending_wp_expiry": Case(
        make=_with_waitpoint,
        is_done=_is_closed,
        owner="suspension_timeouts",
        quarantine="waitpoint_quarantine",
        table="waitpoint",
    ),
    "cancel_reconciler": Case(make=_owed, is_done=_shows("public_state", "cancelled"), owner="cancel_backlog"),
    "unblock": Case(make=_blocked, is_done=_shows("eligibility_state", "eligible_now"), owner="unblocking"),
    "retention_trimmer": Case(make=_ended, is_done=_is_gone, owner="retention"),
}

UNPOISONED = {
    "silent_sessions",
    "dedup_sweep",
    "claim_grant_expiry",
    "grant_slots",
    "quota_guard_expiry",
    "quota_reconciler",
    "worker_registry_ttl_sweep",
    "worker_identity_trim",
    "stream_expiry",
    "flow_projector",
    "budget_reset",
    "budget_reconciler",
    "event_partitions",
    "outbox_trim",
    "worker_event_trim",
}
"""Sweeps that only free space: no execution waits for them, and every reader ignores the rows they delete. And
those of flows, budgets and quotas that write no executions; they have tests of their own."""


def test_every_sweep_has_a_case_or_needs_none() -> None:
    of_flows = {case.sweep for case in FLOW_CASES.values()}
    assert CASES.keys() | of_flows | UNPOISONED == {sweep.name for sweep in SWEEPS}
    assert not (CASES.keys() | of_flows) & UNPOISONED


async def poison(connection: asyncpg.Connection, table: str, execution_id: ExecutionId) -> None:
    """Make the store reject every change of the rows of an execution in a table."""
    await connection.execute(
        """create or replace function refuse() returns trigger language plpgsql as
           $$begin raise check_violation using message = 'poisoned'; end$$"""
    )
    await connection.execute(
        f"create or replace trigger poison before update or delete on {table} for each row "
        f"when (old.execution_id = '{execution_id[-36:]}') execute function refuse()"
    )


async def test_an_execution_that_cannot_be_written_does_not_block_the_others(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection, subtests: pytest.Subtests
) -> None:
    scene = Scene(engine, given, clock, rows)
    for name in CASES:
        for bad_at in (0, 2):
            with subtests.test(f"{name}, the bad one at {bad_at}"):
                await check_poisoned(scene, connection, name, bad_at)


async def check_poisoned(scene: Scene, connection: asyncpg.Connection, name: str, bad_at: int) -> None:
    """Assert that the sweep processes all but the bad execution, and that one once it can be written."""
    case, engine, given, clock = CASES[name], scene.engine, scene.given, scene.clock
    (sweep,) = (sweep for sweep in SWEEPS if sweep.name == name)
    now = 0.0
    quarantine = Quarantine(EVERY, clock=lambda: now)
    setattr(getattr(parts_of(engine), case.owner), case.quarantine, quarantine)
    await Reconciler(engine).catch_up()
    made = []
    for _ in range(3):
        made.append(await case.make(scene))
        await clock.advance(ms=1)
    bad = made[bad_at]
    good = [execution_id for execution_id in made if execution_id != bad]
    await poison(connection, case.table, bad)

    async def claims_work() -> None:
        assert (await given.run(lane_id="claims", lease_ttl_ms=20 * DAY)).lease_epoch == 1

    await clock.advance(ms=DAY + MINUTE if name == "retention_trimmer" else MINUTE)
    await claims_work()
    reconciler = Reconciler(engine, sweeps=[sweep])
    await reconciler.catch_up()
    assert [await case.is_done(scene, execution_id) for execution_id in good] == [True, True]
    assert not await case.is_done(scene, bad)
    assert [str(each) for each in quarantine.skipped()] == [bad[-36:]]
    await claims_work()

    # A later execution is not blocked either, and the bad one is not retried within its pause.
    await connection.execute(f"alter table {case.table} disable trigger poison")
    later = await case.make(scene)
    await clock.advance(ms=DAY + MINUTE if name == "retention_trimmer" else MINUTE)
    await claims_work()
    await reconciler.catch_up()
    assert (await case.is_done(scene, later), await case.is_done(scene, bad)) == (True, False)

    now = EVERY
    await reconciler.catch_up()
    assert await case.is_done(scene, bad)
    await claims_work()


async def test_a_failing_batch_is_halved_and_not_retried_item_by_item(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    made = [await given.delayed(seconds=60) for _ in range(64)]
    await connection.execute("create sequence tries")
    await poison(connection, "execution", made[40])
    await connection.execute(
        """create function count_tries() returns trigger language plpgsql as
           $$begin perform nextval('tries'); return null; end$$"""
    )
    await connection.execute(
        "create trigger counted before update on execution for each statement execute function count_tries()"
    )
    await clock.advance(seconds=60)
    assert await parts_of(engine).delays.promote_due() == 63
    states = [row["public_state"] for row in await rows.of("execution")]
    assert (states.count("waiting"), states.count("delayed")) == (63, 1)
    # The batch, the whole again, and two halves at each of six sizes.
    assert await connection.fetchval("select last_value from tries") == 2 + 2 * 6


@pytest.mark.parametrize("seconds", [3600.0, 0.0])
async def test_a_fault_of_the_catch_up_fails_no_claim_and_is_retried_after_a_pause(
    engine: Engine,
    given: Given,
    clock: Clock,
    rows: Rows,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
) -> None:
    monkeypatch.setattr(catch_up, "FAULT_SECONDS", seconds)
    await given.completed(lease_ttl_ms=1000)
    due = await given.delayed(seconds=60)
    await connection.execute("create sequence tries")
    await connection.execute(
        """create function refuse() returns trigger language plpgsql as
           $$begin perform nextval('tries'); raise check_violation using message = 'no deletes'; end$$"""
    )
    await connection.execute("create trigger none before delete on claim for each statement execute function refuse()")
    await clock.advance(seconds=60)
    # Leases cannot be marked, but delayed work is claimed.
    assert (await given.claim()).execution_id == due
    for _ in range(4):
        await given.run(lease_ttl_ms=DAY)
        assert await engine.claim_many(lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=1) == []
    tries = await connection.fetchval("select last_value from tries")
    assert tries == 1 if seconds else tries >= 5
    assert "no deletes" in caplog.text
    await connection.execute("drop trigger none on claim")
    if not seconds:
        await engine.claim_many(lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=1)
        now = await clock.now()
        assert [row for row in await rows.of("claim") if row["expires_at"] <= now] == []
