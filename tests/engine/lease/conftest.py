"""Fixtures of the lease tests; every test must leave rows that operations can have written."""

import asyncpg
import pytest

from engine.cases import Emptied
from flowfabric.engine.engine import Engine


@pytest.fixture(autouse=True)
def _leaves_rows_consistent(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames and "altered_rows" not in request.fixturenames:
        request.getfixturevalue("consistent_rows")


@pytest.fixture
def emptied(request: pytest.FixtureRequest, engine: Engine, connection: asyncpg.Connection) -> Emptied:
    """Delete the executions of the database: `await emptied()`."""
    return Emptied(engine, connection, checks="altered_rows" not in request.fixturenames)


@pytest.fixture(autouse=True)
def _scans_are_free(scans_are_free: None) -> None: ...
