"""What every test here relies on, and what it must leave behind: rows that operations can have written."""

import pytest

from flowfabric.engine.core.watermark import WalkWatermarks


@pytest.fixture(autouse=True)
def _leaves_rows_consistent(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames and "altered_rows" not in request.fixturenames:
        request.getfixturevalue("consistent_rows")


@pytest.fixture(autouse=True)
def _walks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that finds nothing walks everything again, however slow the machine is."""
    monkeypatch.setattr(WalkWatermarks, "FREE_SECONDS", 600.0)
