"""Fixtures of the tests of limits; every test must leave rows that operations can have written."""

import pytest

from flowfabric.engine.lease.limited import LimitedClaims


@pytest.fixture(autouse=True)
def _leaves_rows_consistent(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames and "altered_rows" not in request.fixturenames:
        request.getfixturevalue("consistent_rows")


@pytest.fixture(autouse=True)
def _scans_are_free(scans_are_free: None) -> None: ...


@pytest.fixture
def without_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let claims be those of a process that knows no limits."""

    async def never(*_: object) -> bool:
        return False

    monkeypatch.setattr(LimitedClaims, "are_needed", never)
