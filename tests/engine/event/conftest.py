"""Fixtures of the tests of feeds."""

import pytest

from flowfabric.engine.event.reader import Reader


@pytest.fixture
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers poll often, for tests whose events come without hints."""
    monkeypatch.setattr(Reader, "HINTED_SECONDS", 0.02)
    monkeypatch.setattr(Reader, "UNHINTED_SECONDS", (0.02, 0.02))
