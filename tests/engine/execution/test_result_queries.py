"""How often the store is queried for results, and how soon a waiter is answered."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from fixtures import Engines, Eventually, Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.results import Results
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import NewExecution
from flowfabric.worker.worker import Worker

QUERY = "list_results"
CLAIM = "claim_by_route"


@pytest.fixture
def hints_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling: only a hint leads to a query or a claim."""
    monkeypatch.setattr(Results, "POLL_SECONDS", (600.0, 600.0))
    monkeypatch.setattr("flowfabric.worker.claiming.LISTENING_POLL_SECONDS", 600.0)
    monkeypatch.setattr("flowfabric.worker.claiming.IDLE_SECONDS", 600.0)


async def listening(engine: Engine, eventually: Eventually) -> None:
    parts_of(engine).wakeups.hints.start_listening()
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)


@pytest.mark.usefixtures("hints_only")
async def test_a_hint_leads_to_the_result_at_once(
    engine: Engine,
    engines: Engines,
    given: Given,
    eventually: Eventually,
    statements: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A pause after the query for a new waiter would outlast the test.
    monkeypatch.setattr(Results, "PAUSE_SECONDS", (600.0, 600.0))
    await listening(engine, eventually)
    for nth, completing in enumerate((engine, await engines(), engine, engine)):
        run = await given.claimed()
        waiting = asyncio.create_task(engine.wait_for_ending(run.execution_id, timeout=60))
        await eventually(lambda nth=nth: statements[QUERY] == 2 * nth + 1)
        await completing.complete(run, b"x")
        assert (await waiting).result == b"x"
        assert statements[QUERY] == 2 * nth + 2


async def test_thousands_of_waiters_cause_a_bounded_number_of_queries(
    engine: Engine, eventually: Eventually, statements: Counter[str]
) -> None:
    await listening(engine, eventually)
    new = NewExecution(
        namespace="tests",
        lane_id="default",
        execution_kind="job",
        input_payload=b"{}",
        priority=0,
        creator_identity="test",
    )
    for _ in range(3):
        await engine.create_many([new] * 1000)
    worker: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1", "lease_ttl_ms": 600_000}
    claimed = [one for _ in range(3) for one in await engine.claim_many(lanes=["default"], limit=1000, **worker)]
    waiting = [asyncio.create_task(engine.wait_for_ending(one.execution_id)) for one in claimed]
    await eventually(lambda: statements[QUERY] > 0)
    # Each completion is its own statement, commit and hint.
    for one in claimed[:300]:
        await engine.complete(one.handle, b"x")
    for first in range(300, 3000, 900):
        await engine.complete_many([(one.handle, b"x") for one in claimed[first : first + 900]])
    assert len(await asyncio.gather(*waiting)) == 3000
    assert statements[QUERY] < 300 / 5


async def test_a_slow_query_is_followed_by_a_longer_pause(
    engine: Engine, given: Given, eventually: Eventually, statements: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Results, "PAUSE_SHARE", 1_000_000)
    monkeypatch.setattr(Results, "POLL_SECONDS", (600.0, 600.0))
    await listening(engine, eventually)
    run = await given.claimed()
    waiting = asyncio.create_task(engine.wait_for_ending(run.execution_id))
    for queries in range(1, Results.AT_ONCE + 2):
        await eventually(lambda queries=queries: statements[QUERY] == queries)
        await given.completed(lane_id="elsewhere")
    # These take longer than the pause after a query that costs nothing.
    for _ in range(30):
        await given.completed(lane_id="elsewhere")
    assert statements[QUERY] == Results.AT_ONCE + 1
    waiting.cancel()


@pytest.mark.usefixtures("hints_only")
async def test_hints_without_results_are_followed_by_longer_pauses(
    engine: Engine, given: Given, eventually: Eventually, statements: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Results, "PAUSE_SECONDS", (600.0, 600.0))
    await listening(engine, eventually)
    run = await given.claimed()
    waiting = asyncio.create_task(engine.wait_for_ending(run.execution_id))
    for queries in range(1, Results.AT_ONCE + 2):
        await eventually(lambda queries=queries: statements[QUERY] == queries)
        await given.completed(lane_id="elsewhere")
    for _ in range(10):
        await given.completed(lane_id="elsewhere")
    assert statements[QUERY] == Results.AT_ONCE + 1
    waiting.cancel()


@pytest.mark.usefixtures("hints_only")
async def test_a_claim_is_not_repeated_for_a_hint_of_its_own_engine(
    engine: Engine, engines: Engines, given: Given, eventually: Eventually, statements: Counter[str]
) -> None:
    async def job(a: int) -> None: ...

    other = await engines()
    await listening(engine, eventually)
    async with Worker(engine, lanes=["default"], handlers={"job": job}, reconcile=False):
        await eventually(lambda: parts_of(engine).wakeups._waiting.get("default"))
        statements.clear()
        for nth in range(1, 4):
            await engine.wait_for_ending(await given.created(), timeout=60)
            await eventually(lambda: parts_of(engine).wakeups._waiting.get("default"))
            # Hints arrive in the order of their commits: those of this engine have come back before this one.
            wakes = parts_of(engine).wakeups.wakes(["beacon"])
            parts_of(other).wakeups.lane("beacon")
            await eventually(lambda wakes=wakes: parts_of(engine).wakeups.wakes(["beacon"]) > wakes)
            assert statements[CLAIM] == nth
