"""`ff migrate --check` and engines through a real PgBouncer."""

import asyncio
from typing import Any

import pytest

from creates import new
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Created
from flowfabric.settings import Settings

from .command import migrate
from .pgbouncer import keeps_statements, pgbouncer

KEPT = {"max_prepared_statements": 200} if keeps_statements() else {}
NOT_KEPT = {"max_prepared_statements": 0} if keeps_statements() else {}


WORKING: dict[str, dict[str, Any]] = {"session": {"pool_mode": "session", "default_pool_size": 20}}
if keeps_statements():
    WORKING["transaction"] = {"pool_mode": "transaction", **KEPT}


@pytest.mark.parametrize("mode", WORKING)
async def test_a_pooler_that_keeps_statements_passes_and_works(url: str, mode: str) -> None:
    async with pgbouncer(url, **WORKING[mode]) as address:
        code, out, err = await migrate(address, "--check", FF_WAITPOINT_HMAC_SECRET="ab" * 32)
        assert (code, err) == (0, "")
        assert out.endswith("up to date\n")
        async with Engine.connect(settings=Settings(database_url=address, listen=False)) as engine:
            made = await asyncio.gather(
                *(engine.create_many([new(idempotency_key=f"{at}-{nth}") for nth in range(5)]) for at in range(20))
            )
        assert {type(each) for answers in made for each in answers} == {Created}


async def test_a_pooler_that_loses_statements_fails_the_check(url: str) -> None:
    async with pgbouncer(url, pool_mode="transaction", **NOT_KEPT) as address:
        code, out, err = await migrate(address, "--check", FF_WAITPOINT_HMAC_SECRET="ab" * 32)
    assert (code, out) == (1, "")
    assert (
        ": prepared statements are lost between transactions: a pooler in transaction mode does not keep them;" in err
    )
    assert (err.startswith("ff: 127.0.0.1:"), err.count("\n")) == (True, 1)


@pytest.mark.parametrize("connections", [1, 2])
async def test_a_pooler_with_too_few_connections_fails_the_check_in_session_mode(url: str, connections: int) -> None:
    async with pgbouncer(url, pool_mode="session", default_pool_size=connections) as address:
        code, out, err = await migrate(address, "--check", FF_WAITPOINT_HMAC_SECRET="ab" * 32)
    assert (code, out) == (1, "")
    assert ": a second session gets no answer within 2 s: a pooler has too few connections to the server;" in err
