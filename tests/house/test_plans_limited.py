"""Reads of limited executions touch few rows, however many wait in a queue without room."""

from collections.abc import AsyncIterator

import pytest

from creates import new
from databases import Databases
from engine.limit.limits import limited, quota
from engine.state import claim
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import NewExecution
from house.filled import STATISTICS, copied, filled
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

BACKLOG, TENANTS, PLAIN = 10_000, 300, 5


async def fill(engine: Engine) -> None:
    """Create a deep backlog of one tenant without a free slot, work of many others with room, and plain work."""
    policy = limited(await quota(engine, running=2, key_from="tag:app.tenant"))

    def job(tenant: str) -> NewExecution:
        return new(policy=policy, tags={"app.tenant": tenant})

    await engine.create_many([job("deep") for _ in range(3)])
    assert len(await claim(engine)) == 2
    for _ in range(BACKLOG // 500):
        await engine.create_many([job("deep") for _ in range(500)])
    await engine.create_many([job(f"t{nth}") for nth in range(TENANTS)])
    # Idle tenants have a key and a queue, but no entry.
    for nth in range(0, TENANTS, 100):
        await engine.create_many([new(lane_id="idle", policy=policy, tags={"app.tenant": f"i{nth}"}) for _ in range(3)])
    await engine.create_many([new() for _ in range(PLAIN)])


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with a deep backlog."""
    async with filled(databases, fill, VACUUM) as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """A copy of it, with and without statistics."""
    async with copied(databases, store, *(["analyze"] if request.param == "statistics" else [])) as url:
        yield url


@pytest.fixture
def url(original: str) -> str:
    """The address of the filled database."""
    return original


async def test_a_page_of_waiting_executions_does_not_read_the_backlog_of_a_queue_without_room(
    engine: Engine, touched: Touched
) -> None:
    for order in ("newest", "oldest"):
        touched.clear()
        page = await engine.list_executions(public_state="waiting", order=order, limit=100)
        assert len(page.executions) == 100
        assert {each.public_state for each in page.executions} == {"waiting"}
        assert touched.sum("list_candidates") + touched.sum(f"list_{order}") <= 4_000


async def test_a_page_of_rate_limited_executions_reads_few_of_many(engine: Engine, touched: Touched) -> None:
    for order in ("newest", "oldest"):
        touched.clear()
        page = await engine.list_executions(public_state="rate_limited", order=order, limit=50)
        assert len(page.executions) == 50
        assert touched.sum("list_candidates") + touched.sum(f"list_{order}") <= 6_000


async def test_a_count_reads_no_row_of_an_execution_that_waits_in_a_queue_without_room(
    engine: Engine, touched: Touched
) -> None:
    counts = {str(each.public_state): each.count for each in await engine.count_executions(by="state")}
    assert counts["rate_limited"] == BACKLOG + 1
    assert counts["waiting"] == TENANTS + 9 + PLAIN
    read = touched.by_table("count_executions")
    assert read["execution"] <= 20
    assert read["ready"] <= BACKLOG + 4 * TENANTS


async def test_an_explanation_of_a_limited_execution_touches_few_rows(engine: Engine, touched: Touched) -> None:
    (last,) = (await engine.list_executions(public_state="rate_limited", limit=1)).executions
    touched.clear()
    found = await engine.explain(last.execution_id)
    assert "uses 2 of 2 slots" in found.summary
    # It counts up to a thousand entries ahead of it.
    assert touched.sum("read_reasons") <= 1_000 + 50
