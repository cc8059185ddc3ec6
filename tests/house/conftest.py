"""Plans are made by new sessions, on tables that no other test has used."""

from collections.abc import AsyncIterator

import pytest

from databases import Databases


@pytest.fixture
async def url(request: pytest.FixtureRequest, _leaves_no_task: None, databases: Databases) -> AsyncIterator[str]:
    """The address of an unused database, or of a copy of `original` where the test or a fixture of it asks for that."""
    if "original" in request.fixturenames:
        one = databases.new(template=request.getfixturevalue("original"))
    else:
        one = databases.one(fresh=True)
    async with one as url:
        yield url
