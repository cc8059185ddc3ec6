"""An engine on a schema that is newer than itself, as during a deploy."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest

from engine.event.following import take
from engine.flow.graphs import BuiltFlow
from engine.state import all_cases, claim, new, refused
from engine.stream.writing import STREAM_TABLES, append, patch, payloads
from engine.waits import suspend_run
from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.db.migrate import FOLDER, load_migrations, migrate
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import UnavailableError
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.flow import FlowEnded, FlowStatus
from flowfabric.model.handle import Handle
from flowfabric.model.lease import Completed, Renewed, RetryScheduled, Revoked
from flowfabric.model.states import HandleKind
from flowfabric.model.stream import DurableSummary, Frame
from flowfabric.model.support import NothingToPrepare
from flowfabric.reconcile.loop import Reconciler
from flowfabric.settings import Settings
from scenarios.previous import PREVIOUS, PreviousVersion, extract, started

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


# The previous version, which has no flows, beside this one.


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path to import the previous version from."""
    return extract(tmp_path_factory.mktemp("previous"))


def test_without_the_history_of_the_repository_the_tests_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"commit {PREVIOUS}, could not be read: .*full clone"):
        extract(tmp_path / "source", root=tmp_path)


def test_the_previous_version_is_the_newest_with_an_older_schema(source: Path) -> None:
    known = [migration.checksum for migration in load_migrations()]
    before = [migration.checksum for migration in load_migrations(source / "flowfabric" / "db" / "migrations")]
    assert before == known[:-1]


RETRIED = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 0}}}
DAY_MS = 86_400_000


async def claimed_by(previous: PreviousVersion, lane: str) -> Handle:
    """The next execution of a lane, claimed by a worker of the previous version.

    What the other version queued below the watermark of a claim may be found only by a later scan, so the claim waits.
    """
    (run,) = await previous(
        "claim_many",
        lanes=(lane,),
        worker_id="old",
        worker_instance_id="old-1",
        limit=1,
        lease_ttl_ms=30_000,
        max_wait_ms=30_000,
    )
    handle: Handle = run.handle
    return handle


async def test_both_versions_write_to_the_streams_of_an_attempt_and_end_them(
    engine: Engine,
    given: Given,
    clock: Clock,
    rows: Rows,
    url: str,
    source: Path,
    tmp_path: Path,
) -> None:
    lanes = ("completed", "cancelled", "failed", "retried", "lost", "reclaimed", "waiting")
    expected: dict[tuple[str, int], str] = {}
    await clock.stop()
    async with engine.subscribe_completion() as ends, engine.subscribe_lease_history() as leases:
        handles = [
            await given.claimed(lane_id=lane, policy=None if lane == "failed" else RETRIED, lease_ttl_ms=30_000)
            for lane in lanes
        ]
        completed, cancelled, failed, retried, lost, reclaimed, waiting = handles
        for handle in handles:
            await append(engine, handle)
            await patch(engine, handle, '{"a": 1}')

        async with started(source, url, tmp_path / "first.log") as previous:
            # It appends to streams of this version, and this version to streams of its own.
            for handle in handles:
                assert (await previous("append_frame", handle, Frame(bytes=b"y"))).frame_count == 3
                merged = await previous("append_frame", handle, Frame(bytes=b'{"b": 2}', mode=DurableSummary()))
                assert merged.summary_version == 2
            made = await previous("create_execution", **new(lane_id="made"))
            own = await claimed_by(previous, "made")
            assert own.execution_id == made.execution_id
            await previous("append_frame", own, Frame(bytes=b"y"))
            assert (await append(engine, own)).frame_count == 2
            found = await previous("tail_stream", own.execution_id, 0, block_ms=1_000)
            assert [frame.payload for frame in found.frames] == [b"y", b"x"]
            # Its ends close the streams.
            await previous("complete", own, b"")
            await previous("complete", completed, b"")
            await previous("cancel_execution", execution_id=cancelled.execution_id, reason="not wanted")
            await previous("fail", failed, reason="no luck")
            await previous("fail", retried, reason="no luck")
            suspended = await suspend_run(engine, waiting)
            await previous(
                "deliver_signal",
                execution_id=waiting.execution_id,
                waitpoint_id=suspended.details.waitpoint_id,
                waitpoint_token=suspended.details.waitpoint_token.reveal(),
                signal_name="ready",
            )
            resumed = await claimed_by(previous, "waiting")
            assert resumed.attempt_id == waiting.attempt_id
            await append(engine, resumed, b"resumed")
        for handle in (own, completed, cancelled, failed, retried):
            await refused(append(engine, handle), "stream_closed")
        await refused(append(engine, waiting), "stale_owner_cannot_append")

        # Another process of that version goes on: it resumes, and takes over expired leases.
        async with started(source, url, tmp_path / "second.log") as previous:
            await previous("complete", resumed, b"")
            await clock.advance(ms=30_000)
            await previous("catch_up")
            for handle in (lost, reclaimed):
                assert (await engine.read_stream(handle.execution_id, 0)).closed_reason == "lease_expired"
                await refused(append(engine, handle), "stale_owner_cannot_append")
            taken = await claimed_by(previous, "reclaimed")
            await append(engine, taken, b"next attempt")
            await previous("complete", taken, b"")
            for lane, handle in (("retried", retried), ("lost", lost)):
                (run,) = await claim(engine, lane)
                assert (await append(engine, run.handle, b"next attempt")).frame_count == 1
                await refused(append(engine, handle), "stale_owner_cannot_append")
                await engine.complete(run.handle, b"")
                expected[handle.execution_id, 1] = "attempt_success"
            assert await previous("find_inconsistencies") == []

            expected |= {
                (own.execution_id, 0): "attempt_success",
                (completed.execution_id, 0): "attempt_success",
                (cancelled.execution_id, 0): "attempt_cancelled",
                (failed.execution_id, 0): "attempt_failure",
                (retried.execution_id, 0): "attempt_failure",
                (lost.execution_id, 0): "reclaimed",
                (reclaimed.execution_id, 0): "reclaimed",
                (reclaimed.execution_id, 1): "attempt_success",
                (waiting.execution_id, 0): "attempt_success",
            }
            for read in (engine.read_stream, partial(previous, "read_stream")):
                assert {key: (await read(*key)).closed_reason for key in expected} == expected
            written = [b"x", b'{"a": 1}', b"y", b'{"b": 2}']
            assert [await payloads(engine, handle) for handle in handles[:-1]] == [written] * 6
            assert await payloads(engine, waiting) == [*written, b"resumed"]
            assert len(expected) == len(await rows.of("stream"))
            assert await engine.find_inconsistencies() == []

            ended = {handle.execution_id for handle in (*handles, own)}
            # The signal that satisfied the wait is an event of completions and one of signals.
            assert len(await rows.of("event_each", kind="signal")) == 1
            assert {event.execution_id for event in await take(ends, len(ended) + 1)} == ended
            assert {event.execution_id for event in await take(leases, len(ended))} <= ended

            # Its retention deletes the streams with their executions.
            await clock.advance(ms=DAY_MS)
            await previous("catch_up")
        for table in ("execution", *STREAM_TABLES):
            assert await rows.of(table) == []
    assert await engine.find_inconsistencies() == []


async def test_the_previous_version_goes_on_after_a_revoke_and_a_changed_priority(
    engine: Engine, rows: Rows, clock: Clock, url: str, source: Path, tmp_path: Path
) -> None:
    await clock.stop()
    async with started(source, url, tmp_path / "log") as previous:
        await previous("create_execution", **new(lane_id="revoked"))
        held = await claimed_by(previous, "revoked")
        await previous("append_frame", held, Frame(bytes=b"y"))
        assert isinstance(await engine.revoke_lease(held.execution_id), Revoked)
        (refusal,) = await previous("complete_many", [(held, b"late")])
        assert refusal.code == "lease_revoked"
        closed = await previous("read_stream", held.execution_id, 0)
        assert closed.closed_reason == "attempt_interrupted"
        taken = await claimed_by(previous, "revoked")
        assert (taken.execution_id, taken.attempt_index, taken.kind) == (held.execution_id, 1, HandleKind.RECLAIMED)
        await previous("complete", taken, b"")
        assert (await previous("read_stream", held.execution_id, 0)).closed_reason == "reclaimed"

        first = await previous("create_execution", **new(lane_id="moved", priority=0))
        second = await previous("create_execution", **new(lane_id="moved", priority=5))
        await engine.change_priority(first.execution_id, 9)
        for made in (first, second):
            run = await claimed_by(previous, "moved")
            assert run.execution_id == made.execution_id
            await previous("complete", run, b"")
        assert await previous("find_inconsistencies") == []
        assert await engine.find_inconsistencies() == []
        await clock.advance(ms=DAY_MS)
        await previous("catch_up")
    for table in ("execution", *STREAM_TABLES):
        assert await rows.of(table) == []


async def test_a_flow_ends_whose_members_the_previous_version_has_ended(
    engine: Engine, given: Given, rows: Rows, clock: Clock, url: str, source: Path, tmp_path: Path
) -> None:
    await clock.stop()
    flow = await BuiltFlow.create(given, rows)
    completed, cancelled = await flow.member(lane_id="completed"), await flow.member()
    async with started(source, url, tmp_path / "log") as previous:
        await previous("complete", await claimed_by(previous, "completed"), b"")
        await previous("cancel_execution", execution_id=cancelled, reason="not wanted")
    await Reconciler(engine).catch_up()
    assert await engine.wait_for_flow(flow.flow_id, 0) == FlowEnded(flow_id=flow.flow_id, status=FlowStatus.FAILED)
    found = await engine.read_flow_summary(flow.flow_id)
    assert found is not None
    assert (found.members_completed, found.members_cancelled, found.total_members) == (1, 1, 2)
    assert await engine.get_execution_result(completed) == b""


async def test_the_previous_version_claims_nothing_that_has_limits(
    engine: Engine, given: Given, url: str, source: Path, tmp_path: Path
) -> None:
    async with started(source, url, tmp_path / "log") as previous:
        made = [(await previous("create_execution", **new())).execution_id]
        budget = UUID(int=1)
        await engine.attach_budget("namespace", "tests", budget)
        made += [await given.created(), (await previous("create_execution", **new())).execution_id]
        worker = {"worker_id": "previous", "worker_instance_id": "previous-1"}
        assert await previous("claim_many", lanes=("default",), limit=10, **worker) == []
        await engine.detach_budget("namespace", "tests", budget)
        claimed = await previous("claim_many", lanes=("default",), limit=10, **worker)
        assert [each.execution_id for each in claimed] == made
