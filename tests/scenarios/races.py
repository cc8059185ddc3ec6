"""Support for races: engines that compete for the same executions, and calls that start together.

`FF_TEST_SWEEP=whole` runs more rounds of every race.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from engine.state import IS_WHOLE, items, new
from fixtures import Eventually, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.settings import Settings

ROUNDS = 500 if IS_WHOLE else 30
TOGETHER = 20
"""How many races of a wave run at the same time."""
HOUR_MS = 3_600_000
"""A lease time that is longer than any test."""
HEAD_STARTS = (0, 0, 1, 3, 7, 15, 31, 63, 127, None)
"""How many turns of the event loop one call of a race starts before the others; None: they wait for its answer."""

Rivals = Callable[[int], Awaitable[list[Engine]]]
"""Opens a number of engines that compete with each other."""
Raced = list[tuple[Any, list[Any]]]
"""The subject of each race and the outcomes of its calls."""


@pytest.fixture
async def rivals(url: str, connection: asyncpg.Connection, eventually: Eventually) -> AsyncIterator[Rivals]:
    """Open engines with pools of their own; after the test, the server must not have counted a deadlock."""
    async with AsyncExitStack() as stack:

        async def open_rivals(count: int) -> list[Engine]:
            settings = Settings(database_url=url, database_pool_size=4)
            return [await stack.enter_async_context(Engine.connect(settings=settings)) for _ in range(count)]

        yield open_rivals

    async def are_gone() -> bool:
        query = "select count(*) from pg_stat_activity where datname = current_database() and application_name = $1"
        return bool(await connection.fetchval(query, "flowfabric") == 0)

    # A session may report its deadlocks only when it ends.
    await eventually(are_gone)
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    assert await connection.fetchval(deadlocks) == 0


async def outcome(call: Awaitable[Any]) -> Any:
    """The answer of a call, or the code of its refusal."""
    try:
        return await call
    except EngineError as refusal:
        return refusal.code


async def race(nth: int, *calls: Awaitable[Any]) -> list[Any]:
    """The outcomes of competing calls, in the order of the calls.

    In every ten rounds another call starts first, each time with another head start. So every call wins some rounds,
    even one that needs more round trips than its rivals.
    """
    first = nth // len(HEAD_STARTS) % len(calls)
    head_start = HEAD_STARTS[nth % len(HEAD_STARTS)]
    leader = asyncio.ensure_future(outcome(calls[first]))

    async def follow(call: Awaitable[Any]) -> Any:
        if head_start is None:
            await asyncio.wait([leader])
        else:
            for _ in range(head_start):
                await asyncio.sleep(0)
        return await outcome(call)

    others = [at for at in range(len(calls)) if at != first]
    random.shuffle(others)
    answers = await asyncio.gather(leader, *(follow(calls[at]) for at in others))
    by_call = dict(zip([first, *others], answers, strict=True))
    return [by_call[at] for at in range(len(calls))]


async def race_all(wave: int, calls: Callable[[Any], Sequence[Awaitable[Any]]], subjects: Sequence[Any]) -> Raced:
    """Run a race for each subject of a wave, all at the same time."""
    races = [race(wave * TOGETHER + at, *calls(subject)) for at, subject in enumerate(subjects)]
    return list(zip(subjects, await asyncio.gather(*races), strict=True))


def check_winners(won: Counter[Any], *expected: Any, rounds: int = ROUNDS) -> None:
    """Every round had a winner, and each of the expected ones has won some."""
    assert set(won) == set(expected), won
    assert won.total() == rounds


async def claim(engine: Engine, *, limit: int = 1, lease_ttl_ms: int = 30_000) -> list[Any]:
    """Claim for a worker that only this engine has."""
    name = f"worker-{id(engine)}"
    return list(
        await engine.claim_many(
            lanes=("default",), worker_id=name, worker_instance_id=name, limit=limit, lease_ttl_ms=lease_ttl_ms
        )
    )


async def claimed(engine: Engine, *, count: int = 1, lease_ttl_ms: int = 30_000, **overrides: Any) -> list[Handle]:
    """The handles of new executions."""
    await engine.create_many(items(*(new(**overrides) for _ in range(count))))
    handles = [one.handle for one in await claim(engine, limit=count, lease_ttl_ms=lease_ttl_ms)]
    assert len(handles) == count
    return handles


async def cancel_all(engine: Engine, *execution_ids: str) -> None:
    """Cancel what a round has left, so that the lane is empty for the next one."""
    for execution_id in execution_ids:
        await outcome(engine.cancel_execution(execution_id=execution_id, reason="round over"))


def given_id(number: int) -> str:
    """An execution id chosen by the caller."""
    return f"{{fp:{number % 256}}}:11111111-2222-3333-4444-{number:012}"


async def completion_counts(rows: Rows) -> Counter[str]:
    """How many completion events each execution has."""
    return Counter(str(event["execution_id"]) for event in await rows.of("event_each") if event["outcome"] is not None)
