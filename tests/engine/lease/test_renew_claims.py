"""Leases of one claim: renewed together, split and merged, and expired if nobody renews them."""

import asyncio
from typing import Any

import asyncpg
import pytest

from engine.cases import Cases, in_turn
from engine.state import (
    EXPIRED_LEASE,
    FENCED_OPERATIONS,
    claim,
    claim_rows,
    event_texts,
    ids,
    items,
    new,
    refused,
    vector,
)
from engine.waits import suspend_run
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease import expire
from flowfabric.engine.parts import parts_of
from flowfabric.model.handle import Handle
from flowfabric.model.lease import AlreadySatisfied, Renewed
from flowfabric.model.states import PublicState
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS

TTL_MS = 10_000


async def claimed(engine: Engine, count: int, *, lease_ttl_ms: int = TTL_MS, **overrides: Any) -> list[Handle]:
    """The handles of new executions that one claim has leased."""
    await engine.create_many(items(*[new(**overrides)] * count))
    found = await claim(engine, overrides.get("lane_id", "default"), limit=count, lease_ttl_ms=lease_ttl_ms)
    assert len(found) == count
    return [one.handle for one in found]


async def versions(connection: asyncpg.Connection, table: str) -> list[Any]:
    """The version of each row of a table; any write changes it."""
    return [tuple(row) for row in await connection.fetch(f"select ctid, xmin, xmax from {table} order by 1")]


def named(handles: list[Handle]) -> list[str]:
    """The executions of some handles, sorted."""
    return sorted(handle.execution_id for handle in handles)


# Renewing.


async def test_renewing_a_whole_claim_writes_one_row(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, clock: Clock
) -> None:
    handles = await claimed(engine, 50)
    (before,) = (await claim_rows(rows)).values()
    untouched = await versions(connection, "execution")
    for _ in range(3):
        now = await clock.advance(ms=TTL_MS - 1)
        assert await engine.renew_many(handles) == [Renewed(expires_at_ms=now + TTL_MS, lease_epoch=1)] * 50
        assert await versions(connection, "execution") == untouched
        (after,) = (await claim_rows(rows)).values()
        assert after == {**before, "expires_at": now + TTL_MS, "renewed_at": now}
        for execution_id in named(handles)[:2]:
            snapshot = await engine.describe_execution(execution_id)
            assert snapshot.current_lease.expires_at == now + TTL_MS  # type: ignore[union-attr]
            assert snapshot.last_mutation_at == now  # type: ignore[union-attr]
    assert len(await event_texts(rows, handles[0].execution_id)) == 4


async def test_leases_renewed_without_the_rest_of_their_claim_get_a_new_claim(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    handles = await claimed(engine, 5)
    began = await clock.now()
    now = await clock.advance(ms=TTL_MS - 1)
    kept, left = handles[1:3], [handles[0], *handles[3:]]
    assert await engine.renew_many(kept) == [Renewed(expires_at_ms=now + TTL_MS, lease_epoch=1)] * 2
    old, own = (await claim_rows(rows)).values()
    assert (old["expires_at"], old["renewed_at"], old["execution_ids"]) == (began + TTL_MS, None, named(handles))
    assert (own["expires_at"], own["renewed_at"], own["execution_ids"]) == (now + TTL_MS, now, named(kept))
    expired_at = await clock.advance(ms=1)
    assert await parts_of(engine).lease_expiry.sweep() == 3
    assert list(await claim_rows(rows)) == [own["claim_no"]]
    for handle in left:
        row = await rows.execution(handle.execution_id)
        assert (vector(row), row["lease_expires_at"]) == (EXPIRED_LEASE, expired_at)
        await refused(engine.complete(handle), "lease_expired")
    assert {one.execution_id for one in await claim(engine)} == set(named(left))
    await clock.advance(ms=TTL_MS - 2)
    for handle in kept:
        await engine.complete(handle, b"x")


async def test_a_renewal_merges_many_small_claims(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, clock: Clock
) -> None:
    handles = [handle for _ in range(6) for handle in await claimed(engine, 1)]
    small = await claim_rows(rows)
    assert len(small) == 6
    now = await clock.advance(ms=1)
    assert await engine.renew_many(handles) == [Renewed(expires_at_ms=now + TTL_MS, lease_epoch=1)] * 6
    (merged,) = (value for number, value in (await claim_rows(rows)).items() if number not in small)
    assert (merged["expires_at"], merged["execution_ids"]) == (now + TTL_MS, named(handles))
    untouched = await versions(connection, "execution")
    now = await clock.advance(ms=TTL_MS - 1)
    assert await engine.renew_many(handles) == [Renewed(expires_at_ms=now + TTL_MS, lease_epoch=1)] * 6
    assert await versions(connection, "execution") == untouched
    # The executions of the small claims are leased under the merged one.
    await clock.advance(ms=TTL_MS - 1)
    assert await parts_of(engine).lease_expiry.sweep() == 0
    assert list(await claim_rows(rows)) == [merged["claim_no"]]
    assert len(await engine.complete_many([(handle, None) for handle in handles])) == 6
    assert {str(await engine.read_execution_state(one)) for one in named(handles)} == {"completed"}


async def test_leases_of_one_claim_renewed_for_different_durations_each_expire_in_time(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    handles = await claimed(engine, 4)
    # Another process renews two of them for longer.
    mixed = [*handles[:2], *(with_ttl(handle, 3 * TTL_MS) for handle in handles[2:])]
    now = await clock.advance(ms=5)
    assert [one.expires_at_ms - now for one in await engine.renew_many(mixed)] == [  # type: ignore[union-attr]
        TTL_MS,
        TTL_MS,
        3 * TTL_MS,
        3 * TTL_MS,
    ]
    held = {each["expires_at"] - now: each["execution_ids"] for each in (await claim_rows(rows)).values()}
    assert (held[TTL_MS], held[3 * TTL_MS]) == (named(handles[:2]), named(handles[2:]))
    await clock.advance(ms=TTL_MS)
    assert await parts_of(engine).lease_expiry.sweep() == 2
    await refused(engine.complete(handles[0]), "lease_expired")
    await engine.complete(handles[3])


def with_ttl(handle: Handle, lease_ttl_ms: int) -> Handle:
    """The same run, renewed for another time."""
    fields = ("kind", "execution_id", "attempt_index", "attempt_id", "lease_id", "lease_epoch", "lane_id")
    given: dict[str, Any] = {name: getattr(handle, name) for name in (*fields, "worker_instance_id")}
    return Handle(**given, lease_ttl_ms=lease_ttl_ms)


async def test_a_lease_may_be_renewed_to_expire_sooner(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed(lease_ttl_ms=TTL_MS)
    now = await clock.advance(ms=1)
    short = with_ttl(handle, 1000)
    assert await engine.renew(short) == Renewed(expires_at_ms=now + 1000, lease_epoch=1)
    assert (await rows.execution(handle.execution_id))["lease_expires_at"] == now + 1000
    await clock.advance(ms=1000)
    await refused(engine.renew(handle), "lease_expired")
    assert vector(await rows.execution(handle.execution_id)) == EXPIRED_LEASE


@in_turn("ended", ["absent", "asked for"])
async def test_a_finished_execution_does_not_split_its_claim(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, clock: Clock, ended: str
) -> None:
    handles = await claimed(engine, 4)
    await engine.complete(handles[0])
    await engine.delay(handles[1], await clock.now() + 60_000)
    untouched = await versions(connection, "execution")
    now = await clock.advance(ms=1)
    renewed = [Renewed(expires_at_ms=now + TTL_MS, lease_epoch=1)] * 2
    if ended == "absent":
        assert await engine.renew_many(handles[2:]) == renewed
    else:
        gone, parked, *others = await engine.renew_many(handles)
        assert [getattr(one, "code", None) for one in (gone, parked)] == ["execution_not_active"] * 2
        assert others == renewed
    assert await versions(connection, "execution") == untouched
    (held,) = (await claim_rows(rows)).values()
    assert (held["expires_at"], held["execution_ids"]) == (now + TTL_MS, named(handles[2:]))


async def test_a_run_claimed_again_is_not_renewed_with_its_first_claim(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    first, other = await claimed(engine, 2)
    await engine.hand_back(first)
    (again,) = await claim(engine, lease_ttl_ms=TTL_MS)
    now = await clock.advance(ms=TTL_MS - 1)
    assert isinstance(await engine.renew(other), Renewed)
    await refused(engine.renew(first), "lease_conflict")
    await clock.advance(ms=1)
    assert await parts_of(engine).lease_expiry.sweep() == 1
    assert vector(await rows.execution(again.execution_id)) == EXPIRED_LEASE
    assert (await rows.execution(other.execution_id))["lease_expires_at"] == now + TTL_MS


async def test_every_operation_is_allowed_under_a_renewed_lease(engine: Engine, clock: Clock) -> None:
    pairs = {
        (operation, is_whole): await claimed(engine, 2, lane_id=f"{operation}-{is_whole}")
        for operation in (*FENCED_OPERATIONS, "suspend")
        for is_whole in (True, False)
    }
    await clock.advance(ms=TTL_MS - 1)
    for (_, is_whole), pair in pairs.items():
        await engine.renew_many(pair if is_whole else pair[:1])
    await clock.advance(ms=TTL_MS - 1)
    assert await parts_of(engine).lease_expiry.sweep() == len(pairs) / 2
    with Cases() as cases:
        for case, (handle, other) in pairs.items():
            operation, is_whole = case
            with cases(case):
                if operation == "suspend":
                    outcome = await suspend_run(engine, handle)
                    state = await engine.read_execution_state(outcome.handle.execution_id)
                    assert state is PublicState.SUSPENDED
                else:
                    await FENCED_OPERATIONS[operation](engine, handle)
                if is_whole:
                    assert isinstance(await engine.renew(other), Renewed)


# Concurrent calls.


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_renewal_that_waits_past_the_expiry_is_refused(
    engines: Engines, given: Given, rows: Rows, connection: asyncpg.Connection, clock: Clock, eventually: Eventually
) -> None:
    slow = await engines()
    handle = await given.claimed(lease_ttl_ms=TTL_MS)
    await clock.advance(ms=TTL_MS - 1)
    async with connection.transaction():
        # Marking or renewing another lease of the claim locks it like this.
        await connection.execute("select from claim for share")
        renewing = asyncio.create_task(slow.renew(handle))
        await eventually(lambda: waits_for_lock(connection))
        await clock.advance(ms=1)
    await refused(renewing, "lease_expired")
    assert await event_texts(rows, handle.execution_id) == ["acquired", "expired"]


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_concurrent_renewal_prevents_marking_the_lease(
    engines: Engines,
    engine: Engine,
    given: Given,
    rows: Rows,
    connection: asyncpg.Connection,
    clock: Clock,
    eventually: Eventually,
) -> None:
    handle = await given.claimed(lease_ttl_ms=TTL_MS)
    now = await clock.advance(ms=TTL_MS)
    async with connection.transaction():
        # A renewal that began before now writes this.
        await connection.execute("update claim set expires_at = $1, renewed_at = $2", now + TTL_MS - 1, now - 1)
        marking = asyncio.create_task((await engines()).mark_lease_expired_if_due(handle.execution_id))
        completing = asyncio.create_task((await engines()).complete(handle, b"x"))
        await eventually(lambda: waits_for_lock(connection))
    assert await marking == AlreadySatisfied(reason="not_yet_expired")
    await completing
    assert await engine.get_execution_result(handle.execution_id) == b"x"
    assert await event_texts(rows, handle.execution_id) == ["acquired", "released completed>success"]


async def waits_for_lock(connection: asyncpg.Connection) -> bool:
    """Whether a session of an engine waits for a lock."""
    found: bool = await connection.fetchval(
        "select exists (select from pg_stat_activity where datname = current_database()"
        " and application_name = 'flowfabric' and wait_event_type = 'Lock')"
    )
    return found


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_run_that_changes_during_its_renewal_is_still_renewed(
    engines: Engines, engine: Engine, rows: Rows, connection: asyncpg.Connection, clock: Clock, eventually: Eventually
) -> None:
    slow = await engines()
    handle, _ = await claimed(engine, 2)
    now = await clock.advance(ms=TTL_MS - 1)
    async with connection.transaction():
        await connection.execute("select from claim for update")
        renewing = asyncio.create_task(slow.renew(handle))
        await eventually(lambda: waits_for_lock(connection))
        reporting = asyncio.create_task(engine.progress(handle, percent=50))
    await reporting
    assert (await renewing).expires_at_ms == now + TTL_MS
    row = await rows.execution(handle.execution_id)
    assert (row["lease_expires_at"], row["progress_pct"]) == (now + TTL_MS, 50)
    await clock.advance(ms=TTL_MS - 1)
    await engine.complete(handle)


async def test_a_locked_row_is_renewed_with_its_claim_and_waited_for_alone(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, clock: Clock, eventually: Eventually
) -> None:
    handle, other = await claimed(engine, 2)
    now = await clock.advance(ms=1)
    async with connection.transaction():
        await connection.execute("select from execution for update")
        assert await engine.renew_many([handle, other]) == [Renewed(expires_at_ms=now + TTL_MS, lease_epoch=1)] * 2
        apart = asyncio.create_task(engine.renew(handle))
        await eventually(lambda: waits_for_lock(connection))
    assert (await apart).expires_at_ms == now + TTL_MS
    assert await event_texts(rows, handle.execution_id) == ["acquired", "renewed", "renewed"]


async def test_processes_that_renew_parts_of_one_claim_all_keep_their_leases(
    engines: Engines, engine: Engine, rows: Rows, clock: Clock
) -> None:
    rivals = [await engines() for _ in range(3)]
    handles = await claimed(engine, 60)
    now = await clock.advance(ms=TTL_MS - 1)
    parts = [handles[at::3] for at in range(3)] + [handles[:30], handles[30:], handles]
    answers = await asyncio.gather(*(rivals[at % 3].renew_many(part) for at, part in enumerate(parts)))
    renewed = [answer for given in answers for answer in given if isinstance(answer, Renewed)]
    assert len(renewed) == sum(map(len, parts))
    assert {answer.expires_at_ms for answer in renewed} == {now + TTL_MS}
    await clock.advance(ms=TTL_MS - 1)
    await parts_of(engine).lease_expiry.sweep()
    states = {(await rows.execution(handle.execution_id))["ownership_state"] for handle in handles}
    assert states == {"leased"}
    assert await engine.find_inconsistencies() == []
    completed = await engine.complete_many([(handle, None) for handle in handles])
    assert not [one for one in completed if isinstance(one, Exception)]


# Expiring.


async def test_a_spent_claim_is_deleted_at_its_expiry(engine: Engine, rows: Rows, clock: Clock) -> None:
    handles = await claimed(engine, 3)
    await engine.complete_many([(handle, None) for handle in handles])
    await clock.advance(ms=TTL_MS - 1)
    async with rows.unchanged():
        assert await parts_of(engine).lease_expiry.sweep() == 0
    await clock.advance(ms=1)
    async with rows.unchanged(without=["claim"]):
        assert await parts_of(engine).lease_expiry.sweep() == 0
    assert await rows.of("claim") == []


async def test_a_sweep_continues_after_a_full_batch_of_spent_claims(
    engine: Engine, rows: Rows, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expire, "CLAIM_LIMIT", 2)
    for _ in range(5):
        (handle,) = await claimed(engine, 1)
        await engine.complete(handle)
    await clock.advance(ms=TTL_MS)
    assert await parts_of(engine).lease_expiry.sweep_batch() == (0, True, [])
    assert len(await rows.of("claim")) == 3
    assert await Reconciler(engine, sweeps=[each for each in SWEEPS if each.name == "lease_expiry"]).catch_up() == 0
    assert await rows.of("claim") == []


async def test_only_executions_still_leased_under_a_claim_are_marked(engine: Engine, rows: Rows, clock: Clock) -> None:
    done, parked, lost, cancelled = await claimed(engine, 4)
    await engine.complete(done)
    await engine.wait_children(parked)
    await engine.cancel_execution(execution_id=cancelled.execution_id, reason="x")
    await clock.advance(ms=TTL_MS)
    others = [done.execution_id, parked.execution_id, cancelled.execution_id]
    before = [await rows.execution(one) for one in others]
    assert await parts_of(engine).lease_expiry.sweep() == 1
    assert [await rows.execution(one) for one in others] == before
    assert vector(await rows.execution(lost.execution_id)) == EXPIRED_LEASE
    assert await rows.of("claim") == []


async def test_an_expired_lease_shows_its_renewed_expiry(engine: Engine, rows: Rows, clock: Clock) -> None:
    handles = await claimed(engine, 2)
    renewed_at = await clock.advance(ms=TTL_MS - 1)
    await engine.renew_many(handles)
    expires_at = renewed_at + TTL_MS
    await clock.set(expires_at)
    shown = [(entry.execution_id, entry.expires_at_ms) for entry in (await engine.list_expired_leases()).entries]
    assert shown == [(one, expires_at) for one in named(handles)]
    await clock.advance(ms=500)
    assert await parts_of(engine).lease_expiry.sweep() == 2
    again = [(entry.execution_id, entry.expires_at_ms) for entry in (await engine.list_expired_leases()).entries]
    assert again == shown
    for handle in handles:
        row = await rows.execution(handle.execution_id)
        assert (row["lease_expires_at"], row["lease_expired_at"]) == (expires_at, expires_at + 500)
        snapshot = await engine.describe_execution(handle.execution_id)
        assert snapshot.current_lease.expires_at == expires_at  # type: ignore[union-attr]


async def test_a_lease_with_a_locked_row_is_marked_by_a_later_sweep(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, clock: Clock
) -> None:
    handles = await claimed(engine, 3)
    await clock.advance(ms=TTL_MS - 1)
    await Reconciler(engine).catch_up()
    await clock.advance(ms=1)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(named(handles)[0]))
        assert await parts_of(engine).lease_expiry.sweep() == 2
        assert len(await claim_rows(rows)) == 1
        async with rows.unchanged(), asyncio.timeout(30):
            assert await parts_of(engine).lease_expiry.sweep() == 0
            assert await Reconciler(engine).catch_up() == 0
    assert await parts_of(engine).lease_expiry.sweep() == 1
    assert await rows.of("claim") == []
    assert sorted(ids(await claim(engine))) == named(handles)


async def test_claims_with_locked_rows_do_not_block_the_sweep(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expire, "CLAIM_LIMIT", 2)
    held = []
    for _ in range(5):
        held += await claimed(engine, 1)
        await clock.advance(ms=1)
    (free,) = await claimed(engine, 1)
    await clock.advance(ms=TTL_MS)
    async with connection.transaction():
        await connection.execute(
            "select from execution where execution_id = any($1::uuid[]) for update",
            [uuid_of(handle.execution_id) for handle in held],
        )
        assert await parts_of(engine).lease_expiry.sweep() == 1
        assert vector(await rows.execution(free.execution_id)) == EXPIRED_LEASE
        assert ids(await claim(engine)) == [free.execution_id]


async def test_leases_that_cannot_be_marked_do_not_block_the_sweep(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expire, "CLAIM_LIMIT", 2)
    stuck = [handle for _ in range(5) for handle in await claimed(engine, 1, priority=1)]
    mixed = await claimed(engine, 3, priority=1)
    stuck.append(mixed[1])
    (free,) = await claimed(engine, 1)
    texts = ", ".join(f"'{uuid_of(handle.execution_id)}'" for handle in stuck)
    rule = f"ownership_state <> 'lease_expired_reclaimable' or execution_id not in ({texts})"
    await connection.execute(f"alter table execution add constraint none check ({rule})")
    await Reconciler(engine).catch_up()
    await clock.advance(ms=TTL_MS)
    async with asyncio.timeout(60):
        for _ in range(6):
            await parts_of(engine).lease_expiry.sweep()
        async with rows.unchanged():
            assert await Reconciler(engine).catch_up() == 0
    marked = [free, mixed[0], mixed[2]]
    assert {vector(await rows.execution(handle.execution_id)) for handle in marked} == {EXPIRED_LEASE}
    assert len(await claim_rows(rows)) == 6
    assert sorted(ids(await claim(engine))) == named(marked)


async def test_expired_claims_of_other_lanes_do_not_hide_those_of_the_claimed_lane(
    engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expire, "CLAIM_LIMIT", 2)
    for _ in range(7):
        await claimed(engine, 1, lane_id="others")
        await clock.advance(ms=1)
    (lost,) = await claimed(engine, 1)
    await clock.advance(ms=TTL_MS)
    assert ids(await claim(engine)) == [lost.execution_id]
