"""An engine on a schema that is newer than itself, as during a deploy."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest

from engine.state import all_cases, claim, new, refused
from engine.stream.writing import append, payloads, read
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.db.migrate import FOLDER, load_migrations, migrate
from flowfabric.engine import parts as parts_module
from flowfabric.engine.core.consequence import Attachment
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import UnavailableError
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.lease import Completed, Renewed, RetryScheduled
from flowfabric.model.support import NothingToPrepare
from flowfabric.settings import Settings

MORE = """
alter table execution add column region text;
alter table ready add column region text not null default 'here';
alter table attempt add column region text;
alter table event add column region text;
create table region (region text primary key);
create index execution_region on execution (region);
"""

Release = Callable[[str], Awaitable[None]]
"""Migrates the test's database to the next release: `await release("yes")` to a compatible one."""


@pytest.fixture
def release(tmp_path: Path, connection: asyncpg.Connection) -> Release:
    """Migrate the test's database to the next release, compatible with this one or not."""
    folder = tmp_path / "migrations"
    shutil.copytree(FOLDER, folder)

    async def release(compatible: str) -> None:
        known = load_migrations(folder)
        file = folder / f"{len(known) + 1:04}_regions.sql"
        file.write_text(f"-- compatible: {compatible}\n-- Regions.\n{MORE}")
        applied = await migrate(connection, schema="flowfabric", migrations=load_migrations(folder))
        assert [migration.file for migration in applied] == [file.name]

    return release


async def test_an_engine_finishes_its_work_on_a_newer_compatible_schema(
    engine: Engine, given: Given, clock: Clock, release: Release
) -> None:
    retried = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 1000}}}
    completed, batched, failed, cancelled, lost = [await given.claimed(policy=retried) for _ in range(5)]
    keyed = await engine.create_execution(**new(idempotency_key="k"))
    delayed = await given.delayed(seconds=1)
    await given.registered()
    await release("yes")
    assert isinstance(await engine.renew(completed), Renewed)
    assert [type(verdict) for verdict in await engine.renew_many([batched, failed])] == [Renewed, Renewed]
    await engine.progress(completed, percent=50)
    await engine.complete(completed, b"done")
    assert [type(verdict) for verdict in await engine.complete_many([(batched, b"x")])] == [Completed]
    assert isinstance(await engine.fail(failed, reason="again"), RetryScheduled)
    await engine.cancel_execution(execution_id=cancelled.execution_id, reason="no")
    assert await engine.create_execution(**new(idempotency_key="k")) == Duplicate(execution_id=keyed.execution_id)
    assert isinstance(await engine.create_execution(**new(tags={"a.b": "c"})), Created)
    assert isinstance(await engine.create_execution(**new(idempotency_key="other")), Created)
    await engine.heartbeat_worker(worker_instance_id="worker-1", namespace="tests")
    await clock.advance(seconds=60)
    found: set[str] = set()
    while taken := await engine.claim_many(lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=10):
        found |= {one.execution_id for one in taken}
        verdicts = await engine.complete_many([(one.handle, None) for one in taken])
        assert {type(verdict) for verdict in verdicts} == {Completed}
    assert {failed.execution_id, lost.execution_id, delayed, keyed.execution_id} < found
    assert await engine.get_execution_result(completed.execution_id) == b"done"
    assert await engine.prepare() == NothingToPrepare()


async def test_running_work_goes_on_during_a_compatible_migration(
    engines: Engines, release: Release, eventually: Eventually
) -> None:
    done: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def work(engine: Engine, name: str) -> None:
        while not is_over.is_set():
            await engine.create_execution(**new())
            claimed = await engine.claim_many(lanes=("default",), worker_id=name, worker_instance_id=name, limit=5)
            for one in claimed:
                await engine.renew(one.handle)
                await engine.progress(one.handle, percent=1)
                await engine.complete(one.handle, b"x")
                done[name] += 1

    working = [asyncio.create_task(work(await engines(), f"w-{at}")) for at in range(2)]
    await eventually(lambda: len(done) == 2)
    await release("yes")
    before = dict(done)
    await eventually(lambda: all(done[name] > before[name] for name in before))
    is_over.set()
    await asyncio.gather(*working)


async def test_a_process_starts_on_a_newer_compatible_schema(url: str, release: Release, rows: Rows) -> None:
    await release("yes")
    with all_cases() as case:
        for migrates in (None, True, False):
            with case(f"migrate_on_start={migrates}"):
                async with Engine.connect(settings=Settings(database_url=url, migrate_on_start=migrates)) as engine:
                    assert isinstance(await engine.create_execution(**new()), Created)
                    assert await engine.claim(lane_id="default", worker_id="w", worker_instance_id="w-1") is not None
                assert len(await rows.of("region")) == 0


async def test_a_process_does_not_start_on_a_newer_breaking_schema(url: str, release: Release, rows: Rows) -> None:
    await release("no")
    with all_cases() as case:
        for migrates in (None, True, False):
            with case(f"migrate_on_start={migrates}"):
                async with rows.unchanged():
                    with pytest.raises(UnavailableError, match="broke compatibility, upgrade flowfabric") as refusal:
                        async with Engine.connect(settings=Settings(database_url=url, migrate_on_start=migrates)):
                            pytest.fail("it started")
                assert (refusal.value.code, refusal.value.retryable) == ("unavailable", False)


@pytest.fixture
async def previous(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that ends executions without closing their streams, as a version without streams does."""
    known = {bit: follow for bit, follow in parts_module.CONSEQUENCES.items() if bit is not Attachment.STREAM}
    with monkeypatch.context() as patched:
        patched.setattr(parts_module, "CONSEQUENCES", known)
        return await engines()


async def test_streams_of_attempts_that_a_version_without_streams_ended_are_closed(
    engine: Engine, previous: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    retried = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 0}}}
    lanes = ("completed", "cancelled", "failed", "lost")
    handles = [await given.claimed(lane_id=lane, policy=retried, lease_ttl_ms=30_000) for lane in lanes]
    for handle in handles:
        await append(engine, handle)
    completed, cancelled, failed, lost = handles
    await previous.complete(completed, b"")
    await previous.cancel_execution(execution_id=cancelled.execution_id, reason="not wanted")
    await previous.fail(failed, reason="no luck")
    # That version keeps the bit of the stream.
    await connection.execute("update execution set attached = 4 where execution_id = $1", uuid_of(failed.execution_id))
    await clock.advance(ms=30_000)
    assert await parts_of(previous).lease_expiry.mark_expired([lost.execution_id]) == 1
    await refused(append(engine, lost), "stale_owner_cannot_append")
    for handle in (completed, cancelled, failed):
        await refused(append(engine, handle), "stream_closed")
    for lane, handle in (("failed", failed), ("lost", lost)):
        (run,) = await claim(engine, lane)
        assert (await append(engine, run.handle, b"next attempt")).frame_count == 1
        await refused(append(engine, handle), "stale_owner_cannot_append")
        await engine.complete(run.handle, b"")
        assert (await read(engine, run.handle)).closed_reason == "attempt_success"
    assert [(await read(engine, handle)).closed_reason for handle in handles] == [
        "attempt_success",
        "attempt_cancelled",
        "attempt_failure",
        "reclaimed",
    ]
    assert [await payloads(engine, handle) for handle in handles] == [[b"x"]] * 4
    assert await engine.find_inconsistencies() == []
