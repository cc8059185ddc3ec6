"""`ff migrate --check` and engines through a real PgBouncer."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from creates import new
from flowfabric.engine.engine import Engine
from flowfabric.model.outcomes import Created
from flowfabric.settings import Settings

from .pgbouncer import keeps_statements, pgbouncer

KEPT = {"max_prepared_statements": 200} if keeps_statements() else {}
NOT_KEPT = {"max_prepared_statements": 0} if keeps_statements() else {}


async def checked(url: str) -> tuple[int, str, str]:
    """The exit code and the output of the command on an address."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("FF_")}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "flowfabric.cli.main", "migrate", "--check", "--database-url", url],
        env={**given, "FF_WAITPOINT_HMAC_SECRET": "ab" * 32},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


WORKING: dict[str, dict[str, Any]] = {"session": {"pool_mode": "session", "default_pool_size": 20}}
if keeps_statements():
    WORKING["transaction"] = {"pool_mode": "transaction", **KEPT}


@pytest.mark.parametrize("mode", WORKING)
async def test_a_pooler_that_keeps_statements_passes_and_works(url: str, mode: str) -> None:
    async with pgbouncer(url, **WORKING[mode]) as address:
        code, out, err = await checked(address)
        assert (code, err) == (0, "")
        assert out.endswith("up to date\n")
        async with Engine.connect(settings=Settings(database_url=address, listen=False)) as engine:
            made = await asyncio.gather(
                *(engine.create_many([new(idempotency_key=f"{at}-{nth}") for nth in range(5)]) for at in range(20))
            )
        assert {type(each) for answers in made for each in answers} == {Created}


async def test_a_pooler_that_loses_statements_fails_the_check(url: str) -> None:
    async with pgbouncer(url, pool_mode="transaction", **NOT_KEPT) as address:
        code, out, err = await checked(address)
    assert (code, out) == (1, "")
    assert (
        ": prepared statements are lost between transactions: a pooler in transaction mode does not keep them;" in err
    )
    assert (err.startswith("ff: 127.0.0.1:"), err.count("\n")) == (True, 1)


@pytest.mark.parametrize("connections", [1, 2])
async def test_a_pooler_with_too_few_connections_fails_the_check_in_session_mode(url: str, connections: int) -> None:
    async with pgbouncer(url, pool_mode="session", default_pool_size=connections) as address:
        code, out, err = await checked(address)
    assert (code, out) == (1, "")
    assert ": a second session gets no answer within 2 s: a pooler has too few connections to the server;" in err
