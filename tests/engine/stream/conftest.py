"""Fixtures of the stream tests."""

import pytest

from flowfabric.engine.stream.parked import ParkedTails


@pytest.fixture
def hints_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling: only a notification (a hint) wakes a parked tail."""
    monkeypatch.setattr(ParkedTails, "RECHECK_SECONDS", 600.0)
    monkeypatch.setattr(ParkedTails, "POLL_SECONDS", (600.0, 600.0))
