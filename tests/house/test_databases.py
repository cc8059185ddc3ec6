"""A test inherits nothing from earlier tests except open sessions with prepared statements."""

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
    """Every row, the value of every sequence and the clock of a database."""
    connection = await session(url, "test contents")
    try:
        seen = await type(rows)(connection).snapshot()
        sequences = dict(await connection.fetch(_SEQUENCES))
        return seen, sequences, await connection.fetch("select offset_ms, is_stopped from test_clock")
    finally:
        await connection.close()


async def use(url: str) -> None:
    """Create rows in most tables and move the clock."""
    async with Engine.connect(settings=Settings(database_url=url)) as engine:
        await engine.create_many([new(idempotency_key="key", tags={"app.a": "b"}, delay_until=2**40), new()])
        (run,) = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=1)
        await engine.complete(run.handle, b"x" * 1000)
    connection = await session(url, "test clock")
    await connection.execute("update test_clock set offset_ms = 5, is_stopped = true")
    await connection.close()


@pytest.mark.parametrize("large", [module._LARGE, 0], ids=["deleted rows", "truncated tables"])
async def test_a_database_is_emptied_before_the_next_test(
    databases: Databases, rows: Rows, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(module, "_STATE", module._STATE.replace(f"> {module._LARGE}", f"> {large}"))
    async with databases.new() as url:
        untouched = await contents(url, rows)
    async with databases.one() as url:
        await use(url)
        assert await contents(url, rows) != untouched
    async with databases.one() as again:
        assert again == url
        assert await contents(again, rows) == untouched


async def test_a_database_with_a_changed_schema_or_statistics_is_not_used_again(databases: Databases) -> None:
    for change in ("create table another (id int)", "analyze", "delete from schema_migration where number = 1"):
        async with databases.one() as url:
            await use(url)
            connection = await session(url, "test")
            await connection.execute(change)
            await connection.close()
        async with databases.one() as another:
            assert another != url, change


async def test_a_session_left_open_fails_the_test_and_its_database_is_not_used_again(
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


async def test_only_a_session_closed_after_a_test_is_kept_and_it_is_reset(
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
        # A different application name needs a different session.
        other = await session(url, "other")
        assert other.get_server_pid() != pid
        for connection in (watching, again, other):
            await connection.close()
