"""Support for tests of batches: how many items they have, and what both forms of a batch answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from engine.state import IS_WHOLE
from fixtures import uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError

GOOD = 99 if IS_WHOLE else 29
"""How many good items a batch has."""
MIDDLE = GOOD // 2
"""The place of the bad item among the good ones."""
LOCKED_TEXT = (
    "{} is locked by another session: 3 tries failed (canceling statement due to lock timeout); "
    "nothing was written, repeat the call"
)

Batched = Callable[[Engine, Sequence[Any]], Coroutine[Any, Any, list[Any]]]
"""Calls an operation for several items and returns an answer for each."""


async def gathered(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The answers of single calls made at the same time; a refusal is returned, not raised."""
    return await asyncio.gather(*calls, return_exceptions=True)


def code(answer: object) -> str | None:
    """The code of a refusal, None for a success."""
    return answer.code if isinstance(answer, EngineError) else None


@asynccontextmanager
async def locked(connection: asyncpg.Connection, execution_id: str) -> AsyncIterator[None]:
    """Lock the row of an execution, and its claim, the only row that a renewal writes."""
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(execution_id))
        await connection.execute("select from claim where $1 = any(execution_ids) for update", uuid_of(execution_id))
        yield
