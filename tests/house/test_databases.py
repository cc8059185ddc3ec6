"""What tests get from each other: nothing but open sessions that know their statements."""

import pytest

import databases as module
from creates import new
from databases import Databases
from fixtures import Rows
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings
from sessions import PARKED, SESSIONS, session

_SEQUENCES = "select sequencename::text, last_value from pg_sequences where schemaname = 'flowfabric'"
_SESSIONS = "select pid, application_name from pg_stat_activity where datname = current_database()"


async def contents(url: str, rows: Rows) -> tuple[object, object, object]:
    """Every row, every sequence and the clock of a database."""
    connection = await session(url, "test contents")
    try:
        seen = await type(rows)(connection).snapshot()
        sequences = dict(await connection.fetch(_SEQUENCES))
        return seen, sequences, await connection.fetch("select offset_ms, is_stopped from test_clock")
    finally:
        await connection.close()


async def used(url: str) -> None:
    """Leave rows in most tables, and move the clock."""
    async with Engine.connect(settings=Settings(database_url=url)) as engine:
        await engine.create_many([new(idempotency_key="key", tags={"app.a": "b"}, delay_until=2**40), new()])
        (run,) = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=1)
        await engine.complete(run.handle, b"x" * 1000)
    connection = await session(url, "test clock")
    await connection.execute("update test_clock set offset_ms = 5, is_stopped = true")
    await connection.close()


@pytest.mark.parametrize("large", [module._LARGE, 0], ids=["row by row", "truncated"])
async def test_a_database_that_was_used_is_as_a_new_one(
    databases: Databases, rows: Rows, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(module, "_STATE", module._STATE.replace(f"> {module._LARGE}", f"> {large}"))
    async with databases.new() as url:
        as_new = await contents(url, rows)
    async with databases.one() as url:
        await used(url)
        assert await contents(url, rows) != as_new
    async with databases.one() as again:
        assert again == url
        assert await contents(again, rows) == as_new


async def test_a_database_whose_schema_or_statistics_changed_is_given_to_nobody_else(databases: Databases) -> None:
    for change in ("create table another (id int)", "analyze", "delete from schema_migration where number = 1"):
        async with databases.one() as url:
            await used(url)
            connection = await session(url, "test")
            await connection.execute(change)
            await connection.close()
        async with databases.one() as another:
            assert another != url, change


async def test_a_session_left_open_is_reported_and_not_reused(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 0)
    one = databases.one()
    url = await one.__aenter__()
    connection = await session(url, "forgotten")
    with pytest.raises(AssertionError, match=r"left sessions open: \['forgotten idle: '\]"):
        await one.__aexit__(None, None, None)
    connection.terminate()
    async with databases.one() as another:
        assert another != url


async def test_only_sessions_that_are_closed_after_a_test_are_kept_under_another_name_and_as_they_were(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with databases.new() as url:
        watching, closed, kept = [await session(url, name) for name in ("watching", "closed", "kept")]
        pid = kept.get_server_pid()
        await closed.close()
        await kept.execute("set search_path to public; set statement_timeout = 7; listen anything")
        await kept.execute("select pg_advisory_lock(1)")
        with monkeypatch.context() as patch:
            patch.setattr(SESSIONS, "parks", True)
            await kept.close()
        assert closed.is_closed()
        names = dict(await watching.fetch(_SESSIONS))
        assert names[pid] == PARKED
        assert "kept" not in names.values()
        again = await session(url, "kept")
        assert again.get_server_pid() == pid
        assert (await again.fetchval("show search_path"), await again.fetchval("show statement_timeout")) == (
            "flowfabric",
            "0",
        )
        assert await again.fetch("select * from pg_listening_channels()") == []
        assert await watching.fetchval("select pg_try_advisory_lock(1)")
        # Other settings are another session.
        other = await session(url, "other")
        assert other.get_server_pid() != pid
        for connection in (watching, again, other):
            await connection.close()
