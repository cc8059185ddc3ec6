"""Every event has the namespace, the instance tag and the tags that its execution had when the event was written."""

import asyncio

import asyncpg

from creates import new
from engine.sending import Waiting
from engine.state import claim, event_texts
from engine.waits import suspend_run
from fixtures import Clock, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.tags import SQL
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import row_key
from flowfabric.model.lease import ClaimedExecution

from .written import written

OLD = {"ff.instance_id": "blue", "app.customer": "ü \"'\\", "app.empty": ""}
NEW = {"ff.instance_id": "green", "app.customer": "other"}


async def test_every_kind_of_event_keeps_the_tags_of_the_time_it_was_written(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    run = await given.run(namespace="tenant", tags=OLD, lease_ttl_ms=1000)
    await engine.renew(run.handle)
    await clock.advance(ms=1001)
    assert await parts_of(engine).lease_expiry.sweep() == 1
    (reclaimed,) = await claim(engine)
    wait = Waiting(engine, run.handle).on((await suspend_run(engine, reclaimed.handle)).details)
    await wait.send("other")
    await engine.resume_execution(execution_id=run.execution_id)
    (resumed,) = await claim(engine)
    wait.on((await suspend_run(engine, resumed.handle)).details)
    await wait.send("ready")
    (resumed,) = await claim(engine)
    await engine.complete(resumed.handle)
    cancelled = await given.cancelled(namespace="tenant", tags=OLD)

    before = [await written(rows, execution_id) for execution_id in (run.execution_id, cancelled)]
    assert await event_texts(rows, run.execution_id) == [
        "tag_attached",
        "acquired",
        "renewed",
        "expired",
        "reclaimed",
        "released suspend",
        "signal",
        "operator_resumed",
        "acquired claim_resumed",
        "released suspend",
        "signal",
        "ended>resumable",
        "acquired claim_resumed",
        "released completed>success",
    ]
    (namespace,) = await rows.of("namespace", namespace="tenant")
    for event in (event for events in before for event in events):
        assert (event.namespace_no, event.instance_tag, event.tags) == (namespace["namespace_no"], "blue", OLD), event
    for execution_id in (run.execution_id, cancelled):
        await engine.set_execution_tags(execution_id, NEW)
    for execution_id, events in zip((run.execution_id, cancelled), before, strict=True):
        assert (await written(rows, execution_id))[: len(events)] == events


async def test_later_events_have_the_new_tags(engine: Engine, given: Given, rows: Rows) -> None:
    run = await given.run()
    await engine.renew(run.handle)
    await engine.set_execution_tag(run.execution_id, "app.customer", "first")
    await engine.renew(run.handle)
    await engine.set_execution_tags(run.execution_id, {"app.customer": "second", "app.more": "x"})
    await engine.complete(run.handle)
    assert [event.tags for event in await written(rows, run.execution_id)] == [
        None,
        None,
        {"app.customer": "first"},
        {"app.customer": "second", "app.more": "x"},
    ]


async def test_executions_with_equal_tags_share_event_rows(engine: Engine, rows: Rows) -> None:
    tenants = [{"ff.instance_id": "a"}, {"ff.instance_id": "b"}, {"app.customer": "a"}, {"app.customer": "b"}, None]
    items = [new(tags=tags) for _ in range(10) for tags in tenants]
    created = await engine.create_many(items)
    runs: list[ClaimedExecution] = await claim(engine, limit=100)
    await engine.renew_many([run.handle for run in runs])
    await engine.complete_many([(run.handle, b"done") for run in runs])
    for kind in ("acquired", "renewed", "released"):
        assert [len(row["execution_ids"]) for row in await rows.of("event", kind=kind)] == [10] * len(tenants), kind
    for one, tags in zip(created, tenants * 10, strict=True):
        events = await written(rows, one.execution_id, "acquired", "renewed", "released")  # type: ignore[union-attr]
        instance = tags and tags.get("ff.instance_id")
        assert [(event.instance_tag, event.tags) for event in events] == [(instance, tags)] * 3


async def set_tag_in(connection: asyncpg.Connection, execution_id: str, key: str, value: str) -> None:
    """Set a tag in the transaction of a connection."""
    partition, uuid = row_key(execution_id)  # type: ignore[arg-type]
    values = {
        "partition_key": partition,
        "execution_id": uuid,
        "keys": [key],
        "values": [value],
        "instance_key": "ff.instance_id",
        "instance_tag": None,
    }
    await connection.fetch(SQL.set_tags.sql, *SQL.set_tags.arguments(values))


async def test_a_completion_that_waits_for_a_tag_change_reports_the_new_tags(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    """Also if the execution had no tags before: the completion's statement began before the change was committed."""

    async def is_waited_for() -> bool:
        waiters = "select count(*) from pg_stat_activity where pg_backend_pid() = any(pg_blocking_pids(pid))"
        return bool(await connection.fetchval(waiters) > 0)

    for tags in (None, {"app.customer": "old"}):
        handle = await given.claimed(tags=tags)
        async with connection.transaction():
            await set_tag_in(connection, handle.execution_id, "app.customer", "new")
            under_way = asyncio.create_task(engine.complete(handle))
            await eventually(is_waited_for)
        await under_way
        assert [event.tags for event in await written(rows, handle.execution_id, "released")] == [
            {"app.customer": "new"}
        ]


async def test_a_tag_change_between_the_start_of_a_statement_and_its_lock_is_not_missed(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    """The statement that marks two leases as expired waits for the first while the tags of the second change."""
    first, second = [await given.claimed(lease_ttl_ms=1000, tags={"app.customer": "old"}) for _ in range(2)]
    await clock.advance(seconds=2)
    expiry = parts_of(engine).lease_expiry

    async def is_waited_for() -> bool:
        waiters = "select count(*) from pg_stat_activity where pg_backend_pid() = any(pg_blocking_pids(pid))"
        return bool(await connection.fetchval(waiters) > 0)

    async with connection.transaction():
        await connection.execute(
            "select from claim where execution_ids = array[$1::uuid] for update", uuid_of(first.execution_id)
        )
        under_way = asyncio.create_task(expiry.mark_expired([first.execution_id, second.execution_id]))
        await eventually(is_waited_for)
        await engine.set_execution_tag(second.execution_id, "app.customer", "new")
    await under_way
    await expiry.mark_expired([second.execution_id])
    assert [event.tags for event in await written(rows, first.execution_id, "expired")] == [{"app.customer": "old"}]
    assert [event.tags for event in await written(rows, second.execution_id, "expired")] == [{"app.customer": "new"}]
