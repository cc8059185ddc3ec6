"""Fixtures of the stream tests."""

import pytest

from flowfabric.engine.stream.parked import ParkedTails


@pytest.fixture
def hints_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling: only a notification (a hint) wakes a parked tail."""
    monkeypatch.setattr(ParkedTails, "HINTED_SECONDS", 600.0)
    monkeypatch.setattr(ParkedTails, "UNHINTED_SECONDS", (600.0, 600.0))
