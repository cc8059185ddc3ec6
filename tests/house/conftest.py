"""Statements are planned by new sessions, on tables that no other test has used."""

from collections.abc import AsyncIterator

import pytest

from databases import Databases


@pytest.fixture
async def url(request: pytest.FixtureRequest, _leaves_no_task: None, databases: Databases) -> AsyncIterator[str]:
    """The address of an unused database; a copy of `original` if the test or one of its fixtures requests that."""
    if "original" in request.fixturenames:
        one = databases.new(template=request.getfixturevalue("original"))
    else:
        one = databases.one(fresh=True)
    async with one as url:
        yield url
