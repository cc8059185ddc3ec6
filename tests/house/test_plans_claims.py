"""A claim reads only the entries it takes, however many queues there are and however much was claimed before."""

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from creates import new
from databases import Databases
from flowfabric.engine.core.watermark import ScanWatermarks
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.grant import Granted
from flowfabric.settings import Settings
from house.filled import STATISTICS, copied, filled
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

SPANS = 8
"""The index scans that a claim merges; it reads one entry ahead of each."""
WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}


async def claim(engine: Engine, limit: int, *lanes: str, **overrides: Any) -> list[Any]:
    return await engine.claim_many(lanes=lanes or ("default",), limit=limit, **{**WORKER, **overrides})


async def fill(engine: Engine) -> None:
    """Create 4,000 executions of 200 kinds in one lane, and 500 in each of four other lanes."""
    for nth in range(0, 4000, 1000):
        await engine.create_many([new(execution_kind=f"kind{n % 200}") for n in range(nth, nth + 1000)])
    for lane in range(4):
        await engine.create_many([new(lane_id=f"lane{lane}") for _ in range(500)])


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with a backlog."""
    async with filled(databases, fill) as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """The address of a database with a backlog, with and without statistics."""
    async with copied(databases, store, *(["vacuum analyze"] if request.param == "statistics" else [])) as url:
        yield url


@pytest.fixture
def backlog(original: str, lasting_watermarks: None, engine: Engine) -> Engine:
    """An engine on a store with 4,000 executions of 200 kinds in one lane, and 500 in each of four other lanes."""
    return engine


async def test_a_claim_reads_what_it_takes_and_one_entry_of_each_span(backlog: Engine, touched: Touched) -> None:
    for limit in (1, 10, 100, 500):
        touched.clear()
        assert len(await claim(backlog, limit)) == limit
        assert touched.of("claim_by_route", "ready") <= limit + SPANS
        assert touched.of("claim_by_route", "execution") == limit
        assert touched["claim_by_route"] <= 2 * limit + SPANS


async def test_a_claim_from_several_lanes_reads_what_it_takes_and_one_entry_of_each_span(
    backlog: Engine, touched: Touched
) -> None:
    lanes = ("default", "lane0", "lane1", "lane2", "lane3")
    for limit in (1, 10, 100, 500):
        touched.clear()
        assert len(await claim(backlog, limit, *lanes)) == limit
        # With more than eight spans, the first entry of each is read as well.
        assert touched.of("claim_by_route", "ready") <= limit + SPANS + 2 * len(lanes)
        assert touched.of("claim_by_route", "execution") == limit


async def test_a_claim_of_few_kinds_scans_their_queues(backlog: Engine, touched: Touched) -> None:
    assert len(await claim(backlog, 10, kinds=["kind7"])) == 10
    assert touched.of("claim_by_queue", "ready") <= 10 + SPANS
    touched.clear()
    assert len(await claim(backlog, 40, kinds=["kind1", "kind2", "kind3"])) == 40
    assert touched.of("claim_by_queue", "ready") <= 40 + SPANS
    assert touched.of("claim_by_queue", "execution") == 40
    assert "claim_by_route" not in touched


async def test_a_claim_of_many_kinds_reads_no_execution_of_another_kind(backlog: Engine, touched: Touched) -> None:
    # The worker names one kind in ten: of the others the entry is read, but not the execution.
    assert len(await claim(backlog, 100, kinds=[f"kind{n * 10}" for n in range(20)])) == 100
    assert touched.of("claim_by_route", "ready") <= 10 * 100 + SPANS
    assert touched.of("claim_by_route", "execution") == 100


async def test_a_grant_reads_one_entry_of_each_span(backlog: Engine, touched: Touched) -> None:
    for _ in range(5):
        assert isinstance(await backlog.claim_for_worker(lane_id="default", **WORKER), Granted)
    # The executions granted before are still at the head of the queue.
    assert touched.of("lock_best_of_routes", "ready") <= 5 + SPANS
    assert touched.of("lock_best_of_routes", "execution") == 1


FINISHED = 2_000


@pytest.fixture
async def pinned(
    lasting_watermarks: None, engine: Engine, url: str, touched: Touched, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Engine]:
    """An engine that has completed many executions while another session holds an older snapshot."""
    # The full scan of the first claim here does not postpone the next one.
    monkeypatch.setattr(ScanWatermarks, "FREE_SECONDS", 3600.0)
    other = await asyncpg.connect(url)
    await other.execute("begin isolation level repeatable read; select 1 from flowfabric.ready")
    for _ in range(FINISHED // 1000):
        await engine.create_many([new() for _ in range(1000)])
        runs = await claim(engine, 1000)
        await engine.complete_many([(run.handle, b"1") for run in runs])
    touched.clear()
    yield engine
    await other.execute("rollback")
    await other.close()


async def test_a_claim_starts_at_its_watermark_while_dead_entries_cannot_be_removed(
    pinned: Engine, touched: Touched
) -> None:
    for limit in (1, 10, 100):
        await pinned.create_many([new() for _ in range(limit)])
        touched.clear()
        assert len(await claim(pinned, limit)) == limit
        assert touched.of("claim_by_route", "ready") <= limit + SPANS


def make_full_scans_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat no full scan during the test, however fast it was."""
    monkeypatch.setattr(ScanWatermarks, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(ScanWatermarks, "SHARE", 1_000_000)
    monkeypatch.setattr(ScanWatermarks, "LONGEST_SECONDS", 3600.0)


async def test_repeated_claims_that_find_nothing_do_one_full_scan(
    pinned: Engine, touched: Touched, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_full_scans_rare(monkeypatch)
    entries = []
    for _ in range(20):
        touched.clear()
        assert await claim(pinned, 10) == []
        entries.append(touched.of("claim_by_route", "ready"))
    assert entries[0] >= FINISHED
    assert max(entries[1:]) <= SPANS


async def test_an_empty_lane_gets_no_full_scan_while_another_lane_has_work(
    pinned: Engine, touched: Touched, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_full_scans_rare(monkeypatch)
    lanes = ("default", "other")
    await pinned.create_many([new()])
    assert len(await claim(pinned, 1, *lanes)) == 1
    await pinned.create_many([new(lane_id="other") for _ in range(100)])
    # The watermarks expire, so the next claim does one full scan.
    for watermarks in parts_of(pinned).wakeups.watermarks._by_route.values():
        watermarks.end()
    touched.clear()
    assert len(await claim(pinned, 2, *lanes)) == 2
    assert touched.of("claim_by_route", "ready") >= FINISHED
    for _ in range(20):
        touched.clear()
        assert len(await claim(pinned, 2, *lanes)) == 2
        assert touched.of("claim_by_route", "ready") <= 2 + SPANS


async def test_a_claim_without_watermarks_does_a_full_scan(
    pinned: Engine, touched: Touched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScanWatermarks, "raise_to", lambda *_: None)
    parts_of(pinned).wakeups.watermarks.clear()
    await pinned.create_many([new()])
    assert len(await claim(pinned, 1)) == 1
    assert touched.of("claim_by_route", "ready") >= FINISHED


_UPDATES = """
select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables
 where schemaname = 'flowfabric' and relname = 'execution'
"""


@pytest.mark.parametrize("result", [b"done", b"x" * 1_500], ids=["small", "large"])
async def test_most_updates_of_a_claimed_and_completed_execution_are_hot(
    url: str, connection: asyncpg.Connection, result: bytes
) -> None:
    async with Engine.connect(settings=Settings(database_url=url)) as engine:
        await engine.create_many([new(input_payload=b"x" * 100) for _ in range(1000)])
        await engine.create_many([new(input_payload=b"x" * 100) for _ in range(1000)])
        for _ in range(20):
            runs = await claim(engine, 100)
            await engine.complete_many([(run.handle, result) for run in runs])
    # Closing the engine has flushed the statistics of its sessions.
    await connection.execute("select pg_stat_clear_snapshot()")
    updates, hot = await connection.fetchrow(_UPDATES)
    assert updates == 4000
    assert hot / updates > 0.9


async def test_a_vacuum_removes_the_entries_of_claimed_executions(
    backlog: Engine, touched: Touched, connection: asyncpg.Connection
) -> None:
    await claim(backlog, 1000)
    await connection.execute(f"{VACUUM} ready")
    parts_of(backlog).wakeups.watermarks.clear()
    touched.clear()
    assert len(await claim(backlog, 10)) == 10
    assert touched.of("claim_by_route", "ready") <= 10 + SPANS
