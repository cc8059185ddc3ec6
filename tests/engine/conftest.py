"""Fixtures of the engine tests: a clock that only the test moves, so that every timestamp has one right value."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fixtures import Clock, Explain, Rows
from flowfabric.db.database import Database
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease import claim as claim_family
from flowfabric.model.explanation import Explanation


@pytest.fixture
async def clock(clock: Clock) -> Clock:
    """A stopped clock, which only the test moves: `await clock.advance(seconds=31)`."""
    await clock.stop()
    return clock


@pytest.fixture
def hints_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling: only a notification (a hint) wakes a waiting claim."""
    monkeypatch.setattr(claim_family, "POLL_SECONDS", 600.0)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each statement was executed outside of transactions."""
    fetch, seen = Database.fetch, Counter[str]()

    async def fetch_and_count(database: Database, statement: Statement, *values: Any, **options: Any) -> Any:
        seen[statement.name] += 1
        return await fetch(database, statement, *values, **options)

    monkeypatch.setattr(Database, "fetch", fetch_and_count)
    return seen


@pytest.fixture
def explain(engine: Engine, rows: Rows) -> Explain:
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
