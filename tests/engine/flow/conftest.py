"""Fixtures of the tests of flows."""

from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from fixtures import Given

from .flows import Flow, new_flow

NewFlow = Callable[[], Awaitable[Flow]]


@pytest.fixture
def flows(given: Given, connection: asyncpg.Connection) -> NewFlow:
    """Create a flow without members."""
    return lambda: new_flow(given, connection)
