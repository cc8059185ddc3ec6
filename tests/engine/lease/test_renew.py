"""Renew a lease and report progress under it."""

from typing import Any

from engine.state import ACTIVE, claim, event_texts, refused, vector
from fixtures import Clock, Engines, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.ids import mint_uuid_texts
from flowfabric.model.lease import Renewed


async def test_a_renewal_extends_the_lease_by_its_ttl_from_now(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed(lease_ttl_ms=1000)
    before = await rows.execution(handle.execution_id)
    now = await clock.advance(ms=999)
    assert await engine.renew(handle) == Renewed(expires_at_ms=now + 1000, lease_epoch=1)
    row = await rows.execution(handle.execution_id)
    changed = {name: row[name] for name in row if row[name] != before[name]}
    assert changed == {"lease_expires_at": now + 1000, "lease_renewed_at": now, "last_mutation_at": now}
    assert vector(row) == ACTIVE


async def test_a_lease_can_be_renewed_again_and_again(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(lease_ttl_ms=1000)
    for _ in range(3):
        await clock.advance(ms=900)
        await engine.renew(handle)
        assert await claim(engine) == []


async def test_a_lease_with_the_longest_ttl_can_be_renewed(engine: Engine, given: Given, clock: Clock) -> None:
    longest = await given.claimed(lease_ttl_ms=2**32 - 1)
    assert (await engine.renew(longest)).expires_at_ms == await clock.now() + 2**32 - 1


async def test_each_renewal_writes_an_event_unless_renewal_events_are_switched_off(
    engines: Engines, engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    await engine.renew(handle)
    now = await clock.advance(seconds=1)
    await engine.renew_many([handle])
    assert await event_texts(rows, handle.execution_id) == ["acquired", "renewed", "renewed"]
    event = (await rows.events(handle.execution_id))[2]
    assert (event["lease_id"], event["lease_epoch"], event["attempt_index"]) == (handle.lease_id, 1, 0)
    assert (event["at"], event["worker_no"]) == (now, (await rows.execution(handle.execution_id))["worker_no"])
    first, second = await engine.renew_many([handle, handle])
    assert isinstance(first, Renewed)
    assert first == second
    assert (await event_texts(rows, handle.execution_id))[3:] == ["renewed", "renewed"]
    without_events = await engines(lease_renewal_events=False)
    handle = await given.claimed()
    await without_events.renew(handle)
    assert await event_texts(rows, handle.execution_id) == ["acquired"]


async def test_renew_many_renews_each_by_its_own_ttl_and_answers_in_order(
    engine: Engine, given: Given, clock: Clock
) -> None:
    handles = [await given.claimed(lease_ttl_ms=ttl) for ttl in (5000, 1000, 3000)]
    now = await clock.advance(ms=10)
    expected = [Renewed(expires_at_ms=now + handle.lease_ttl_ms, lease_epoch=1) for handle in handles]
    assert await engine.renew_many(handles) == expected
    assert await engine.renew_many(handles[::-1]) == expected[::-1]


async def test_progress_stores_the_given_fields_and_keeps_the_others(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    before = await rows.execution(handle.execution_id)
    expected: dict[str, Any] = {"progress_pct": None, "progress_message": None}
    steps: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"percent": 10, "message": "begun"}, {"progress_pct": 10, "progress_message": "begun"}),
        ({"percent": 255}, {"progress_pct": 255}),
        ({"message": "größer ✓"}, {"progress_message": "größer ✓"}),
        ({"percent": 0, "message": ""}, {"progress_pct": 0, "progress_message": ""}),
        ({}, {}),
    ]
    for arguments, change in steps:
        now = await clock.advance(ms=5)
        await engine.progress(handle, **arguments)
        row = await rows.execution(handle.execution_id)
        expected |= {**change, "progress_updated_at": now, "last_mutation_at": now}
        assert {name: row[name] for name in row if row[name] != before[name]} == expected
    assert await event_texts(rows, handle.execution_id) == ["acquired"]


async def test_wrong_arguments_of_renewals_and_progress_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    async with rows.unchanged():
        await refused(engine.renew_many([]), "invalid_input", "must have 1 to 1000 items, got 0")
        await refused(engine.renew_many([handle] * 1001), "invalid_input", "must have 1 to 1000 items, got 1001")
        percents: tuple[Any, ...] = (-1, 256, 1.5, "5", True)
        for percent in percents:
            await refused(
                engine.progress(handle, percent=percent),
                "invalid_input",
                "percent: must be a whole number from 0 to 255, got ",
            )
        for message in ("\0", "\ud800", 5):
            await refused(engine.progress(handle, message=message), "invalid_input", "message")  # type: ignore[arg-type]


async def test_a_renewal_after_the_expiry_is_refused_and_marks_the_lease_as_expired(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    first, second = await given.claimed(lease_ttl_ms=1000), await given.claimed(lease_ttl_ms=1000)
    await clock.advance(ms=999)
    # Progress does not extend a lease.
    await engine.progress(first, percent=1)
    await clock.advance(ms=1)
    await refused(engine.renew(first), "lease_expired")
    (answer,) = await engine.renew_many([second])
    assert getattr(answer, "code", None) == "lease_expired"
    for handle in (first, second):
        assert await event_texts(rows, handle.execution_id) == ["acquired", "expired"]


async def test_every_event_of_a_lease_names_its_attempt(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    first = await given.run(lease_ttl_ms=1000)
    await engine.renew(first.handle)
    await engine.delay(first.handle, 0)
    resumed = await given.claim(lease_ttl_ms=1000)
    await engine.renew(resumed.handle)
    await engine.delay(resumed.handle, 0)
    last = await given.claim(lease_ttl_ms=1000)
    await clock.advance(ms=1000)
    reclaimed = await given.claim()
    await engine.complete(reclaimed.handle)
    assert last.attempt_id == resumed.attempt_id == first.attempt_id != reclaimed.attempt_id
    events = [
        # An attempt has the id of its first lease; events under that lease do not repeat it.
        (event["kind"], event["lease_id"], event["attempt_id"] or event["lease_id"])
        for event in await rows.events(first.execution_id)
    ]
    one, two = first.attempt_id, reclaimed.attempt_id
    assert events == [
        ("acquired", first.lease_id, one),
        ("renewed", first.lease_id, one),
        ("released", first.lease_id, one),
        ("acquired", resumed.lease_id, one),
        ("renewed", resumed.lease_id, one),
        ("released", resumed.lease_id, one),
        ("acquired", last.lease_id, one),
        ("expired", last.lease_id, one),
        ("reclaimed", reclaimed.lease_id, two),
        ("released", reclaimed.lease_id, two),
    ]


async def test_events_have_the_lease_and_attempt_ids_that_were_given_to_the_claim(
    engine: Engine, given: Given, rows: Rows
) -> None:
    waiting = await given.created()
    lease_id, attempt_id = mint_uuid_texts(2)
    await engine.issue_claim_grant(
        execution_id=waiting, lane_id="default", worker_id="pool", worker_instance_id="pool-1"
    )
    claimed = await engine.claim_execution(
        execution_id=waiting,
        lane_id="default",
        worker_id="pool",
        worker_instance_id="pool-1",
        lease_id=lease_id,
        attempt_id=attempt_id,
    )
    await engine.complete(claimed.handle)
    ids_of_events = {(str(event["lease_id"]), str(event["attempt_id"])) for event in await rows.events(waiting)}
    assert ids_of_events == {(lease_id, attempt_id)}
