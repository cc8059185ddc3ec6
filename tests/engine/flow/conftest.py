"""Fixtures of the tests of flows."""

from collections.abc import Awaitable, Callable

import pytest

from fixtures import Given

from .flows import Flow, new_flow

NewFlow = Callable[[], Awaitable[Flow]]


@pytest.fixture
def flows(given: Given) -> NewFlow:
    """Create a flow without members."""
    return lambda: new_flow(given)
