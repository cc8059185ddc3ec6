"""Fixtures of the tests of limits; every test must leave rows that operations can have written."""

import pytest


@pytest.fixture(autouse=True)
def _leaves_rows_consistent(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames and "altered_rows" not in request.fixturenames:
        request.getfixturevalue("consistent_rows")


@pytest.fixture(autouse=True)
def _scans_are_free(scans_are_free: None) -> None: ...
