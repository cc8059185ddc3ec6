"""A role that may only read and write rows can do everything except create daily partitions."""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from fixtures import Clock, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.reconcile.loop import Reconciler
from flowfabric.settings import Settings

DAY = 86_400


@pytest.fixture
async def restricted(url: str, connection: asyncpg.Connection) -> AsyncIterator[Engine]:
    """An engine of a role with the privileges that docs/operating.md names."""
    role = f"ff_restricted_{uuid4().hex}"
    await connection.execute(
        f"""create role {role} login;
            grant usage on schema flowfabric to {role};
            grant select, insert, update, delete on all tables in schema flowfabric to {role};
            grant usage on all sequences in schema flowfabric to {role}"""
    )
    parts = urlsplit(url)
    address = urlunsplit(parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}"))
    try:
        async with Engine.connect(settings=Settings(database_url=address)) as engine:
            yield engine
    finally:
        await connection.execute(f"drop owned by {role}; drop role {role}")


async def test_a_role_that_does_not_own_the_tables_works_without_daily_partitions(
    restricted: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    eventually: Eventually,
    connection: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given.engine = restricted
    async with Reconciler(restricted) as reconciler:
        await eventually(lambda: reconciler.stats["event_partitions"].cycles == 1)
    assert await parts_of(restricted).event_partitions.keep_partitions() == 0
    ended = await given.completed(tags={"app.a": "b"}, idempotency_key="k")
    await given.backing_off()
    await given.registered()
    await given.reclaimable()
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    owner, role = await connection.fetchrow(
        "select quote_ident(current_user), rolname from pg_roles where rolname like 'ff_restricted_%'"
    )
    assert record.getMessage() == (
        f"cannot create daily event partitions: user {role} does not own table event of schema flowfabric, {owner} does"
        " (permission denied for schema flowfabric); events go to event_default and are deleted row by row;"
        f" to have partitions, run a worker as {owner}"
    )
    assert record.exc_info is None
    assert await restricted.get_execution_result(ended) == b"done"
    events = await rows.of("event_each")
    assert len(events) == len(await rows.of("event_default")) > 0
    await clock.advance(seconds=DAY + 1)
    assert await parts_of(restricted).event_partitions.trim_events() == len(events)
    assert (await parts_of(restricted).retention.trim_batch()).done == 1
