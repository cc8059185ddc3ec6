"""Feeds deliver the events of all executions in order, from now, from a cursor, or from the oldest event on."""

import asyncio
from typing import Any

import asyncpg
import pytest

from engine.sending import waiting
from engine.state import claim
from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.feeds import (
    OLDEST,
    InstanceTagAttached,
    InstanceTagCleared,
    LeaseAcquired,
    LeaseExpired,
    LeaseReclaimed,
    LeaseReleased,
    LeaseRenewed,
    ReportedOutcome,
    ScannerFilter,
)

from .following import complete_together, ids, is_quiet, take

FEEDS = (
    "subscribe_completion",
    "subscribe_lease_history",
    "subscribe_signal_delivery",
    "subscribe_operator_events",
    "subscribe_instance_tags",
)


async def test_a_completion_has_its_outcome(engine: Engine, given: Given, clock: Clock) -> None:
    async with engine.subscribe_completion() as events:
        expected = [
            (await given.completed(), "success"),
            (await given.failed(), "failed"),
            (await given.cancelled(), "cancelled"),
        ]
        found = await take(events, 3)
    assert [(event.execution_id, event.outcome) for event in found] == expected
    assert all(isinstance(event.outcome, ReportedOutcome) for event in found)
    assert {(event.at, event.flow_id) for event in found} == {(await clock.now(), None)}


@pytest.mark.parametrize("cursor", [None, b""])
async def test_a_subscription_without_a_cursor_starts_now(engine: Engine, given: Given, cursor: bytes | None) -> None:
    await given.completed()
    async with engine.subscribe_completion(cursor) as events:
        later = await given.completed()
        assert ids(await take(events, 1)) == [later]


async def test_a_satisfied_wait_is_resumable_and_not_an_end(engine: Engine, given: Given) -> None:
    wait = await waiting(engine, given)
    async with engine.subscribe_completion() as events:
        await wait.send("other")
        await wait.send("ready")
        await engine.cancel_execution(execution_id=wait.execution_id, reason="x")
        found = await take(events, 2)
    assert [(event.execution_id, event.outcome) for event in found] == [
        (wait.execution_id, "resumable"),
        (wait.execution_id, "cancelled"),
    ]


async def test_the_history_of_leases_has_their_ids_and_workers(engine: Engine, given: Given, clock: Clock) -> None:
    async with engine.subscribe_lease_history() as events:
        run = await given.run(lease_ttl_ms=1000)
        await engine.renew(run.handle)
        await clock.advance(seconds=61)
        await parts_of(engine).lease_expiry.sweep()
        (again,) = await claim(engine, worker_instance_id="worker-2")
        await engine.complete(again.handle)
        acquired, renewed, expired, reclaimed, released = await take(events, 5)
    assert {event.execution_id for event in (acquired, renewed, expired, reclaimed, released)} == {run.execution_id}
    assert isinstance(acquired, LeaseAcquired)
    assert (acquired.lease_id, acquired.worker_instance_id, acquired.reason) == (run.lease_id, "worker-1", None)
    assert (acquired.lease_epoch, acquired.attempt_index) == (1, 0)
    assert isinstance(renewed, LeaseRenewed)
    assert (renewed.lease_id, renewed.worker_instance_id) == (run.lease_id, "worker-1")
    assert isinstance(expired, LeaseExpired)
    assert (expired.lease_id, expired.prev_owner) == (run.lease_id, "worker-1")
    assert isinstance(reclaimed, LeaseReclaimed)
    assert (reclaimed.new_lease_id, reclaimed.new_owner) == (again.lease_id, "worker-2")
    assert isinstance(released, LeaseReleased)
    assert (released.lease_id, released.worker_instance_id, released.reason) == (
        again.lease_id,
        "worker-2",
        "completed",
    )


async def test_a_delivery_has_its_effect_and_the_reason(engine: Engine, given: Given) -> None:
    wait = await waiting(engine, given)
    async with engine.subscribe_signal_delivery() as events:
        first = await wait.send("other", source_identity="ann", idempotency_key="k")
        await wait.send("other", idempotency_key="k")
        last = await wait.send("ready")
        found = await take(events, 3)
    waitpoint = wait.points["wait"].waitpoint_id
    assert [(e.execution_id, e.waitpoint_id) for e in found] == [(wait.execution_id, waitpoint)] * 3
    assert [(e.signal_id, e.effect, e.disposition, e.source_identity) for e in found] == [
        (first.signal_id, "appended_to_waitpoint", first.disposition, "ann"),
        (first.signal_id, "deduped", "deduped", None),
        (last.signal_id, "satisfied", "resume_condition_satisfied", None),
    ]


async def test_a_resume_by_an_operator_is_an_operator_event(engine: Engine, given: Given) -> None:
    wait = await waiting(engine, given)
    async with engine.subscribe_operator_events() as events:
        await engine.resume_execution(execution_id=wait.execution_id, trigger_type="operator", resume_delay_ms=5)
        (event,) = await take(events, 1)
    assert (event.execution_id, event.event_type) == (wait.execution_id, "resumed")
    assert event.details == {"trigger_type": "operator", "resume_delay_ms": 5}


async def test_the_values_of_the_instance_tag_are_attached_and_cleared(engine: Engine, given: Given) -> None:
    async with engine.subscribe_instance_tags() as events:
        one = await given.created(tags={"ff.instance_id": "a", "app.other": "x"})
        await engine.set_execution_tag(one, "ff.instance_id", "a")
        await engine.set_execution_tag(one, "app.other", "y")
        await engine.set_execution_tag(one, "ff.instance_id", "b")
        found = await take(events, 3)
    assert [(type(event), event.tag) for event in found] == [
        (InstanceTagAttached, "a"),
        (InstanceTagCleared, "a"),
        (InstanceTagAttached, "b"),
    ]


async def test_an_empty_cursor_starts_when_the_subscription_is_awaited(engine: Engine, given: Given) -> None:
    await given.completed()
    events = await engine.subscribe_completion()
    one = await given.completed()
    assert ids(await take(events, 1)) == [one]
    unstarted = engine.subscribe_completion()
    await given.completed()
    assert await is_quiet(unstarted)
    two = await given.completed()
    assert ids(await take(unstarted, 1)) == [two]
    await events.aclose()
    await unstarted.aclose()


async def test_the_oldest_cursor_reads_every_stored_event(engine: Engine, given: Given) -> None:
    made = [await given.completed() for _ in range(3)]
    async with engine.subscribe_completion(OLDEST) as events:
        assert ids(await take(events, 3)) == made
        made.append(await given.completed())
        assert ids(await take(events, 1)) == made[3:]


async def test_a_cursor_continues_after_its_event_in_any_engine(engine: Engine, engines: Engines, given: Given) -> None:
    made = [await given.completed() for _ in range(5)]
    async with engine.subscribe_completion(OLDEST) as events:
        found = await take(events, 5)
    other = await engines()
    for nth, event in enumerate(found):
        async with other.subscribe_completion(event.cursor) as resumed:
            assert ids(await take(resumed, 4 - nth)) == made[nth + 1 :]
            assert await is_quiet(resumed, seconds=0.02)


async def test_the_executions_of_a_shared_event_have_cursors_of_their_own(engine: Engine, rows: Rows) -> None:
    made = await complete_together(engine, 100)
    assert len(await rows.of("event", kind="released")) == 1
    async with engine.subscribe_completion(OLDEST) as events:
        found = await take(events, 100)
    assert ids(found) == made
    assert len({event.cursor for event in found}) == 100
    (later,) = await complete_together(engine, 1)
    for nth in (0, 1, 57, 98, 99):
        async with engine.subscribe_completion(found[nth].cursor) as resumed:
            assert ids(await take(resumed, 100 - nth)) == [*made[nth + 1 :], later]


async def test_a_filter_takes_the_events_of_a_namespace(engine: Engine, given: Given) -> None:
    async with (
        engine.subscribe_completion(filter=ScannerFilter(namespace="tests")) as tests,
        engine.subscribe_completion(filter=ScannerFilter(namespace="later")) as later,
        engine.subscribe_lease_history(filter=ScannerFilter(namespace="later")) as leases,
    ):
        one = await given.completed()
        two = await given.completed(namespace="later")
        assert ids(await take(tests, 1)) == [one]
        assert ids(await take(later, 1)) == [two]
        assert ids(await take(leases, 2)) == [two, two]
        assert await is_quiet(tests)


async def test_filters_with_different_tags_take_different_events(engine: Engine, given: Given) -> None:
    def of(key: str, value: str, **others: Any) -> ScannerFilter:
        return ScannerFilter(instance_tag=(key, value), **others)

    async with (
        engine.subscribe_completion(filter=of("app.tenant", "a")) as first,
        engine.subscribe_completion(filter=of("app.tenant", "b")) as second,
        engine.subscribe_completion(filter=of("app.tenant", "a", namespace="other")) as both,
        engine.subscribe_completion(filter=of("app.absent", "a")) as absent,
        engine.subscribe_completion(filter=of("ff.instance_id", "i")) as instance,
    ):
        made = {name: await given.completed(tags={"app.tenant": name}) for name in "ab"}
        await given.completed()
        other = await given.completed(tags={"app.tenant": "a", "ff.instance_id": "i"}, namespace="other")
        assert ids(await take(first, 2)) == [made["a"], other]
        assert ids(await take(second, 1)) == [made["b"]]
        assert ids(await take(both, 1)) == [other]
        assert ids(await take(instance, 1)) == [other]
        assert await is_quiet(second)
        assert await is_quiet(absent)


async def test_a_tag_is_compared_with_its_value_when_the_event_was_written(engine: Engine, given: Given) -> None:
    handle = await given.claimed(tags={"app.tenant": "a"})
    await engine.set_execution_tag(handle.execution_id, "app.tenant", "b")
    await engine.complete(handle)
    async with engine.subscribe_lease_history(OLDEST, ScannerFilter(instance_tag=("app.tenant", "a"))) as events:
        assert [type(event) for event in await take(events, 1)] == [LeaseAcquired]
        assert await is_quiet(events)
    async with engine.subscribe_lease_history(OLDEST, ScannerFilter(instance_tag=("app.tenant", "b"))) as events:
        assert [type(event) for event in await take(events, 1)] == [LeaseReleased]


async def test_an_event_about_the_instance_tag_is_filtered_by_its_own_value(engine: Engine, given: Given) -> None:
    one = await given.created(tags={"ff.instance_id": "a", "app.tenant": "t"})
    await engine.set_execution_tag(one, "ff.instance_id", "b")

    async def found(key: str, value: str, count: int) -> list[tuple[str, str]]:
        given = ScannerFilter(instance_tag=(key, value))
        async with engine.subscribe_instance_tags(OLDEST, given) as events:
            return [(type(event).__name__, event.tag) for event in await take(events, count)]

    assert await found("ff.instance_id", "a", 2) == [("InstanceTagAttached", "a"), ("InstanceTagCleared", "a")]
    assert await found("ff.instance_id", "b", 1) == [("InstanceTagAttached", "b")]
    assert len(await found("app.tenant", "t", 3)) == 3


async def test_an_event_of_the_previous_version_is_filtered_by_its_instance_tag(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    one = await given.completed(tags={"ff.instance_id": "a"})
    # The previous version writes no tags.
    await connection.execute("update event set tags = null")
    async with engine.subscribe_completion(OLDEST, ScannerFilter(instance_tag=("ff.instance_id", "a"))) as events:
        assert ids(await take(events, 1)) == [one]
    async with engine.subscribe_completion(OLDEST, ScannerFilter(instance_tag=("app.tenant", "a"))) as events:
        assert await is_quiet(events)


async def test_events_that_do_not_match_move_the_cursor(
    engine: Engine, given: Given, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.event.reader.Reader.SCANNED", 2)
    async with engine.subscribe_completion(filter=ScannerFilter(namespace="rare")) as events:
        before = events.cursor
        for _ in range(4):
            await given.completed()
        asking = asyncio.create_task(take(events, 1))
        await eventually(lambda: events.cursor != before)
        assert before != b""
        rare = await given.completed(namespace="rare")
        assert ids(await asking) == [rare]
    async with engine.subscribe_completion(before, ScannerFilter(namespace="rare")) as events:
        assert ids(await take(events, 1)) == [rare]


async def test_a_saved_position_is_never_after_an_event_that_was_not_taken(engine: Engine) -> None:
    made = await complete_together(engine, 5)
    async with engine.subscribe_completion(OLDEST) as events:
        for nth in range(6):
            async with engine.subscribe_completion(events.cursor) as resumed:
                assert ids(await take(resumed, 5 - nth)) == made[nth:]
            if nth < 5:
                await take(events, 1)


@pytest.mark.parametrize("name", FEEDS)
async def test_a_wrong_argument_is_refused_by_the_call(engine: Engine, name: str, rows: Rows) -> None:
    subscribe = getattr(engine, name)
    async with subscribe(OLDEST) as events:
        cursor = events.cursor
    others = [other for other in FEEDS if other != name]
    async with getattr(engine, others[0])(OLDEST) as events:
        foreign = events.cursor
    wrong: dict[bytes, str] = {
        b"\x01" + bytes(16): "cursor: not a cursor of a feed",
        b"\x01": "cursor: not a cursor of a feed",
        b"garbage": "cursor: not a cursor of a feed",
        b"\x02": "incomplete",
        cursor[:-1]: "incomplete",
        cursor[:-1] + bytes([cursor[-1] ^ 1]): "damaged",
        cursor + b"!": "damaged",
        foreign: "another feed",
    }
    async with rows.unchanged():
        for given, why in wrong.items():
            with pytest.raises(Exception, match=why) as caught:
                subscribe(given)
            assert getattr(caught.value, "code", None) == "invalid_input"
            assert name in str(caught.value)
        with pytest.raises(Exception, match=r"cursor: must be bytes or None, got 5$"):
            subscribe(5)
        with pytest.raises(Exception, match=r"cursor: must be bytes or None, got .*; turn text .* bytes.fromhex"):
            subscribe(cursor.hex())
        with pytest.raises(Exception, match="filter: must be a ScannerFilter"):
            subscribe(b"", {"namespace": "x"})


async def test_an_unknown_kind_of_event_is_skipped_with_one_warning(
    engine: Engine, given: Given, url: str, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    first = await given.completed()
    # A newer version writes kinds and values that this one does not know, or cannot decode.
    await connection.execute("alter type event_kind add value 'teleported'")
    await connection.execute(
        """insert into event (at, partition_key, kind, namespace_no, execution_id, outcome, reason, details)
           select 1, 1, kind::event_kind, 1, gen_random_uuid(), outcome, reason, details::jsonb
             from (values ('teleported', null, null, null), ('teleported', null, null, null), ('ended', 99, null, null),
                          ('operator_action', null, 'shouted', null), ('operator_action', null, 'replayed', '[]'),
                          ('operator_action', null, 'replayed', '{"x": ' || repeat('1', 5000) || '}'),
                          ('signal', null, null, '{"signal_id": "?"}'), ('tag_attached', null, null, null))
                  as e(kind, outcome, reason, details)"""
    )
    last = await given.completed(tags={"ff.instance_id": "a"})
    async with engine.subscribe_lease_history(OLDEST) as leases, engine.subscribe_completion(OLDEST) as completions:
        assert ids(await take(leases, 4)) == [first, first, last, last]
        assert ids(await take(completions, 2)) == [first, last]
    async with engine.subscribe_instance_tags(OLDEST) as tags:
        assert ids(await take(tags, 1)) == [last]
    wait = await waiting(engine, given)
    async with engine.subscribe_signal_delivery(OLDEST) as signals, engine.subscribe_operator_events(OLDEST) as actions:
        await wait.send("other")
        await engine.resume_execution(execution_id=wait.execution_id)
        assert ids(await take(signals, 1)) == ids(await take(actions, 1)) == [wait.execution_id]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(text.partition(";")[0].partition("('Exceeds")[0] for text in warned) == [
        "subscribe_completion skips event 5: the outcome 99 is unknown",
        "subscribe_instance_tags skips event 10: the value of the tag is missing",
        "subscribe_lease_history skips event 3: the kind 'teleported' is unknown",
        "subscribe_operator_events skips event 6: the event type 'shouted' is unknown",
        "subscribe_operator_events skips event 7: the details are not an object: '[]'",
        "subscribe_operator_events skips event 8: it cannot be decoded: ValueError",
        "subscribe_signal_delivery skips event 9: the details of a signal cannot be read: "
        "ValueError('badly formed hexadecimal UUID string')",
    ]


async def test_a_row_without_a_lease_for_each_execution_is_skipped_as_a_whole(
    engine: Engine, given: Given, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await complete_together(engine, 3)
    await connection.execute("update event set lease_ids = lease_ids[:2] where kind = 'released'")
    last = await given.completed()
    async with engine.subscribe_lease_history(OLDEST) as events:
        found = await take(events, 5)
    assert [type(event) for event in found] == [*[LeaseAcquired] * 4, LeaseReleased]
    assert ids(found[3:]) == [last, last]
    assert "skips event 2: the numbers of executions and leases differ" in caplog.text


@pytest.mark.parametrize("kind", [bytearray, memoryview])
async def test_a_cursor_may_be_any_kind_of_bytes(engine: Engine, given: Given, kind: type) -> None:
    async with engine.subscribe_completion(kind(OLDEST)) as events:
        one = await given.completed()
        assert ids(await take(events, 1)) == [one]
