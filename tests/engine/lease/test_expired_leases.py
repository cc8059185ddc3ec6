"""List expired leases: which ones, in which order, page by page."""

from typing import Any
from uuid import uuid4

from engine.cases import in_turn
from engine.state import claim, refused, revoke
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import ExpiredLease, ExpiredLeaseCursor, ExpiredLeases


async def listed(engine: Engine, **arguments: Any) -> list[str]:
    """The executions of one page."""
    return [entry.execution_id for entry in (await engine.list_expired_leases(**arguments)).entries]


async def test_an_expired_lease_is_listed_marked_or_not(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    # Timers that are due earlier must not hide the lease.
    handle = await given.claimed(
        worker="w",
        lease_ttl_ms=1000,
        execution_deadline_at=await clock.now() + 500,
        policy={"timeout_policy": {"attempt_timeout_ms": 400}},
    )
    expires_at = await clock.now() + 1000
    await clock.advance(ms=999)
    assert await engine.list_expired_leases() == ExpiredLeases(entries=(), cursor=None)
    await clock.advance(ms=1)
    entry = ExpiredLease(
        execution_id=handle.execution_id,
        lease_id=handle.lease_id,
        lease_epoch=1,
        worker_instance_id="w-1",  # type: ignore[arg-type]
        expires_at_ms=expires_at,
        attempt_index=0,
    )
    async with rows.unchanged():
        assert await engine.list_expired_leases() == ExpiredLeases(entries=(entry,), cursor=None)
    await engine.mark_lease_expired_if_due(handle.execution_id)
    async with rows.unchanged():
        assert await engine.list_expired_leases() == ExpiredLeases(entries=(entry,), cursor=None)


async def test_executions_without_an_expired_lease_are_not_listed(engine: Engine, given: Given, clock: Clock) -> None:
    revoked = await given.claimed(lease_ttl_ms=1000)
    await revoke(engine, revoked.execution_id)
    kept = await given.claimed(lease_ttl_ms=1000, lane_id="kept")
    await given.completed(lease_ttl_ms=1000, lane_id="a")
    await given.failed(lease_ttl_ms=1000, lane_id="b")
    await engine.cancel(await given.claimed(lease_ttl_ms=1000, lane_id="c"), "x")
    await engine.delay(await given.claimed(lease_ttl_ms=1000, lane_id="d"), 0)
    await engine.wait_children(await given.claimed(lease_ttl_ms=1000, lane_id="e"))
    await given.delayed(seconds=1, lane_id="f")
    await given.created(lane_id="g", execution_deadline_at=await clock.now() + 1000)
    await clock.advance(ms=900)
    await engine.renew(kept)
    await clock.advance(ms=900)
    assert await listed(engine) == []


async def test_a_lease_that_was_taken_over_is_not_listed(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.reclaimable(lease_ttl_ms=1000)
    assert await listed(engine) == [handle.execution_id]
    await claim(engine)
    assert await listed(engine) == []
    await clock.advance(seconds=31)
    (entry,) = (await engine.list_expired_leases()).entries
    assert (entry.lease_epoch, entry.attempt_index, entry.worker_instance_id) == (2, 1, "worker-1")


async def test_as_of_decides_which_leases_are_expired(engine: Engine, given: Given, clock: Clock) -> None:
    now = await clock.now()
    first, second = await given.claimed(lease_ttl_ms=1000), await given.claimed(lease_ttl_ms=2000)
    assert await listed(engine, as_of=now + 999) == []
    assert await listed(engine, as_of=now + 1000) == [first.execution_id]
    assert await listed(engine, as_of=now + 2000) == [first.execution_id, second.execution_id]
    await clock.advance(seconds=10)
    await engine.mark_lease_expired_if_due(first.execution_id)
    assert await listed(engine, as_of=now + 999) == []
    assert await listed(engine, as_of=now + 1999) == [first.execution_id]
    assert await listed(engine, as_of=0) == []


@in_turn("marked", ["none", "some", "all"])
async def test_leases_are_ordered_by_expiry_then_by_id_as_text(
    engine: Engine, given: Given, clock: Clock, marked: str
) -> None:
    made = []
    # As text, partition 10 sorts before partition 200, and both before 9.
    for ttl in (2000, 1000):
        for partition in (9, 10, 200, 86):
            execution_id = ExecutionId(f"{{fp:{partition}}}:{uuid4()}")
            await given.claimed(execution_id=execution_id, lease_ttl_ms=ttl)
            made.append((ttl, execution_id))
    await clock.advance(seconds=2)
    for nth, (_, execution_id) in enumerate(made):
        if marked == "all" or (marked == "some" and nth % 2):
            await engine.mark_lease_expired_if_due(execution_id)
    expected = [execution_id for _, execution_id in sorted(made)]
    assert await listed(engine) == expected
    for limit in (1, 3, 4, 8, 9):
        found: list[str] = []
        cursor = None
        pages = 0
        while True:
            page = await engine.list_expired_leases(limit=limit, after=cursor)
            found += [entry.execution_id for entry in page.entries]
            pages += 1
            assert (page.cursor is not None) == (len(page.entries) == limit)
            if page.cursor is None:
                break
            cursor = page.cursor
            assert cursor == (page.entries[-1].expires_at_ms, page.entries[-1].execution_id)
        assert found == expected
        assert pages == 8 // limit + 1


async def test_a_cursor_works_after_its_row_is_gone(engine: Engine, given: Given, clock: Clock) -> None:
    handles = [await given.claimed(lease_ttl_ms=1000 + nth) for nth in range(3)]
    await clock.advance(seconds=2)
    page = await engine.list_expired_leases(limit=1)
    assert page.cursor == ExpiredLeaseCursor(page.entries[0].expires_at_ms, handles[0].execution_id)
    await engine.cancel_execution(execution_id=handles[0].execution_id, reason="x")
    rest = await listed(engine, after=page.cursor)
    assert rest == [handle.execution_id for handle in handles[1:]]
    assert page.cursor is not None
    assert await listed(engine, after=tuple(page.cursor)) == rest


async def test_a_namespace_and_a_limit_restrict_the_list(engine: Engine, given: Given, clock: Clock) -> None:
    mine = await given.claimed(namespace="mine", lease_ttl_ms=1000)
    yours = await given.claimed(namespace="yours", lease_ttl_ms=1000)
    await clock.advance(seconds=1)
    await engine.mark_lease_expired_if_due(yours.execution_id)
    assert await listed(engine, namespace="mine") == [mine.execution_id]
    assert await listed(engine, namespace="yours") == [yours.execution_id]
    assert await listed(engine, namespace="min") == []
    assert len(await listed(engine, limit=2**31 - 1)) == 2
    assert await engine.list_expired_leases(limit=0) == ExpiredLeases(entries=(), cursor=None)


async def test_wrong_arguments_are_refused(engine: Engine, rows: Rows) -> None:
    wrong: list[dict[str, Any]] = [
        {"limit": -1},
        {"limit": "1"},
        {"limit": True},
        {"as_of": -1},
        {"as_of": 2**62},
        {"as_of": "now"},
        {"namespace": 7},
        {"namespace": "a\0b"},
        {"after": "cursor"},
        {"after": (1,)},
        {"after": (-1, f"{{fp:1}}:{uuid4()}")},
        {"after": ("1", f"{{fp:1}}:{uuid4()}")},
        {"after": (1, "nonsense")},
    ]
    async with rows.unchanged():
        for arguments in wrong:
            await refused(engine.list_expired_leases(**arguments), "invalid_input")
