"""LISTEN through a PgBouncer in transaction mode, which forwards no notifications but keeps prepared statements."""

from typing import Any

import pytest

from fixtures import Eventually
from flowfabric.db.database import Connection, Database
from flowfabric.db.notify import Hints

from .pgbouncer import load, pgbouncer


class Counted(Database):
    """A database that counts the connections opened outside the pool."""

    connections = 0

    async def connect(self, **settings: str) -> Connection:
        self.connections += 1
        return await super().connect(**settings)


TRANSACTION = {"pool_mode": "transaction", "max_prepared_statements": 400}
DEAF: dict[str, dict[str, Any]] = {
    "one connection": {**TRANSACTION, "default_pool_size": 1},
    "many connections": {**TRANSACTION, "default_pool_size": 20},
    "subscriptions dropped": {**TRANSACTION, "server_reset_query": "unlisten *", "server_reset_query_always": 1},
}


@pytest.mark.parametrize("sessions", [0, 4], ids=["idle", "under load"])
@pytest.mark.parametrize("mode", DEAF)
async def test_a_listener_behind_a_pooler_in_transaction_mode_never_counts_as_listening(
    url: str,
    mode: str,
    sessions: int,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Hints, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(Hints, "PROBE_TIMEOUT_SECONDS", 0.1)
    async with pgbouncer(url, **DEAF[mode]) as address, load(address, sessions=sessions):
        database = Counted(address, "flowfabric", 1)
        hints = Hints(database)
        states: list[bool] = []
        # Called with hints that do arrive, and when the hints count as listening.
        hints.subscribe("work", lambda _: states.append(hints.is_listening))
        try:
            assert hints.start_listening()
            await eventually(lambda: any(states) or database.connections >= 20)
        finally:
            await hints.close()
            await database.close()
    assert not any(states)
    assert caplog.text.count("LISTEN receives nothing over this connection") == 1
