"""Fixtures of the engine tests: a clock that only the test moves, so that every timestamp has one right value."""

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from flowfabric.engine.engine import Engine
from flowfabric.engine.lease import claim as claim_family
from flowfabric.model.explanation import Explanation


class StandingClock:
    """The clock of the test's database; only the test moves it."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def advance(self, *, seconds: float = 0, ms: int = 0) -> int:
        """Move the clock forward and return the new time in milliseconds."""
        return await self.set(await self.now() + round(seconds * 1000) + ms)

    async def set(self, now: int) -> int:
        """Set the clock to a time and return it."""
        await self._connection.execute("update test_clock set offset_ms = $1, stands = true", now)
        return now

    async def now(self) -> int:
        """The time in milliseconds."""
        now: int = await self._connection.fetchval("select ff_now()")
        return now


@pytest.fixture
async def clock(url: str) -> AsyncIterator[StandingClock]:
    """A clock that stands still: `await clock.advance(seconds=31)`."""
    connection = await asyncpg.connect(
        url, server_settings={"search_path": "flowfabric", "application_name": "test clock"}
    )
    clock = StandingClock(connection)
    await clock.set(await clock.now())
    yield clock
    await connection.close()


@pytest.fixture
def hints_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling: only a hint wakes a waiting claim."""
    monkeypatch.setattr(claim_family, "POLL_SECONDS", 600.0)


@pytest.fixture
def explain(engine: Engine, rows: Any) -> Any:
    """Explain an execution, and check that this changes nothing and agrees with its row."""

    async def explain(execution_id: str) -> Explanation:
        async with rows.unchanged():
            found = await engine.explain(execution_id)
        info = await engine.read_execution_info(execution_id)
        assert info is not None
        assert (found.execution_id, found.public_state) == (info.execution_id, info.public_state)
        assert found.state_vector == info.state_vector
        assert found.since == (await rows.execution(execution_id))["last_transition_at"]
        return found

    return explain


@pytest.fixture
async def consistent_rows(engine: Engine) -> AsyncIterator[None]:
    """Fail if the test leaves rows that no operation can have written."""
    yield
    assert await engine.find_inconsistencies() == []


@pytest.fixture
def altered_rows() -> None:
    """Mark a test that leaves rows that no operation writes."""
