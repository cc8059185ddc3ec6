"""Fixtures of the scenarios, and which of them need a program that may be missing."""

import asyncio
import shutil
from collections.abc import AsyncIterator

import pytest

from .killable import KillableServer, embedded_home
from .pgbouncer import BINARY, keeps_statements

# PgBouncer is a system package, not a dependency of the project.
collect_ignore: list[str] = []
if not shutil.which(BINARY):
    collect_ignore += ["test_pgbouncer.py", "test_pgbouncer_transactions.py"]
elif not keeps_statements():
    collect_ignore += ["test_pgbouncer_transactions.py"]


@pytest.fixture(scope="session")
async def killable(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KillableServer]:
    """A server that tests may kill if they start it again."""
    with embedded_home(tmp_path_factory.mktemp("killable")) as home:
        server = KillableServer(home)
        await server.start()
        yield server
        await asyncio.to_thread(server.stop)


@pytest.fixture
def password_url(killable: KillableServer) -> str:
    """The URL of a server that asks the user `app` for a password."""
    return killable.url
