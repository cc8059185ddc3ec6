"""Fixtures of the tests of flows."""

from collections.abc import Awaitable, Callable

import pytest

from fixtures import Given
from flowfabric.engine.flow import backlog, siblings

from .flows import Flow, new_flow

NewFlow = Callable[[], Awaitable[Flow]]


@pytest.fixture(autouse=True)
def long_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pass of a sweep process all flows and groups, however slow the machine is."""
    for module in (backlog, siblings):
        monkeypatch.setattr(module, "PASS_SECONDS", 3600.0)


@pytest.fixture
def flows(given: Given) -> NewFlow:
    """Create a flow without members."""
    return lambda: new_flow(given)
