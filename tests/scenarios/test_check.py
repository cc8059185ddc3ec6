"""`ff migrate` and `ff migrate --check` on a server that a process could not use: one line says why and what to do."""

import json
from collections.abc import AsyncIterator

import asyncpg
import pytest

from databases import at_database, execute
from engine.state import all_cases, new
from faults.proxy import Proxy
from fixtures import Rows
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings

from .command import migrate, migrate_in_process
from .killable import PASSWORD, KillableServer, as_app
from .test_start import free_port, start_error


async def test_check_succeeds_if_a_process_could_start(url: str, rows: Rows) -> None:
    async with rows.unchanged():
        code, out, err = await migrate(url, "--check", FF_WAITPOINT_HMAC_SECRET="ab" * 32)
    assert (code, err) == (0, "")
    assert out.endswith("up to date\n")


async def test_check_fails_without_a_signing_key(url: str, rows: Rows) -> None:
    async with rows.unchanged():
        code, out, err = await migrate_in_process(url, "--check")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("ff: no signing key is stored: set FF_WAITPOINT_HMAC_SECRET")
    async with rows.unchanged():
        code, out, err = await migrate(url, "--check", "--json")
    answer = json.loads(out)
    assert (code, err, answer["runs"], answer["verdict"]) == (1, "", False, "current")
    assert answer["text"].startswith("no signing key is stored")


async def test_check_fails_if_the_partition_counts_differ(engine: Engine, url: str) -> None:
    code, _, err = await migrate(url, "--check", FF_FLOW_PARTITIONS="7")
    assert code == 1
    assert err.startswith("ff: the store was created with FF_FLOW_PARTITIONS=256")
    assert (await migrate(url, "--check"))[0] == 0


async def test_check_fails_if_a_pooler_rejects_a_session_setting(engine: Engine, url: str) -> None:
    async with Proxy(url) as proxy:
        proxy.refusal = "08P01", "unsupported startup parameter: enable_seqscan"
        code, out, err = await migrate(proxy.url, "--check")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "rejects a session setting that every process sends: unsupported startup parameter: enable_seqscan" in err
    assert err.endswith("see docs/pgbouncer.md\n")


async def test_check_fails_if_a_pooler_ignores_the_search_path(engine: Engine, url: str) -> None:
    async with Proxy(url) as proxy:
        proxy.ignores = frozenset({"search_path"})
        code, _, err = await migrate(proxy.url, "--check")
        assert code == 1
        assert "the session setting search_path=flowfabric is not in effect: a pooler in front of" in err
        failed = await start_error(proxy.url)
        assert (failed.code, failed.detail) == ("unavailable", err.removeprefix("ff: ").strip())


async def test_check_warns_if_a_pooler_ignores_another_setting(engine: Engine, url: str) -> None:
    async with Proxy(url) as proxy:
        proxy.ignores = frozenset({"enable_seqscan", "statement_timeout"})
        code, out, err = await migrate(proxy.url, "--check")
    assert (code, err.count("\n")) == (0, 1)
    assert out.endswith("up to date\n")
    assert "these session settings are not in effect: enable_seqscan, statement_timeout; " in err


async def test_check_answers_in_json_if_the_schema_cannot_be_read(password_url: str) -> None:
    addresses = {
        "no server answers at 127.0.0.1:": f"postgresql://app@127.0.0.1:{free_port()}/shop",
        "refuses user app for database flowfabric": as_app(password_url, "wrong"),
        "there is no database shop at ": at_database(password_url, "shop"),
    }
    with all_cases() as case:
        for reason, address in addresses.items():
            with case(reason):
                code, out, err = await migrate(address, "--check", "--json")
                answer = json.loads(out)
                assert (code, err) == (1, "")
                assert reason in answer.pop("text")
                assert answer == {
                    "schema": "flowfabric",
                    "runs": False,
                    "verdict": "unreachable",
                    "pending": [],
                    "newer": [],
                }


GRANTS = (
    "grant usage on schema limited to app;"
    " grant select, insert, update, delete on all tables in schema limited to app;"
    " grant usage on all sequences in schema limited to app;"
)
REVOKES = (
    "revoke all on all sequences in schema limited from app",
    "revoke all on all tables in schema limited from app",
    "revoke all on schema limited from app",
)


@pytest.fixture
async def limited(password_url: str) -> AsyncIterator[str]:
    """The name of a migrated schema on which the user `app` has no privilege."""
    settings = Settings(database_url=password_url, schema_name="limited", migrate_on_start=True)
    async with Engine.connect(settings=settings):
        pass
    yield "limited"
    await execute(password_url, "drop schema limited cascade")


async def test_a_role_that_lacks_privileges_is_told_what_to_grant(password_url: str, limited: str) -> None:
    no_read = "user app may not read schema limited of database flowfabric: as its owner run `"
    usage = "grant usage on schema limited to app"
    cases: dict[str, tuple[tuple[str, ...], str]] = {
        "no privilege": ((), no_read),
        "usage of the schema": ((usage,), no_read),
        "only reading": (
            (usage, "grant select on all tables in schema limited to app"),
            " (database flowfabric) lacks INSERT, UPDATE, DELETE on tables ",
        ),
        "no sequences": (
            (GRANTS, "revoke usage on all sequences in schema limited from app"),
            " (database flowfabric) lacks USAGE on sequences claim_sequence, execution_sequence: as the owner run `",
        ),
    }
    url = as_app(password_url, PASSWORD)
    with all_cases() as case:
        for name, (commands, text) in cases.items():
            with case(name):
                await execute(password_url, *REVOKES, *commands)
                code, _, err = await migrate(url, "--check", "--schema", limited)
                assert code == 1
                assert text in err
                assert err.endswith(f"`{GRANTS}`\n")
                failed = await start_error(url, schema_name=limited)
                assert (failed.code, failed.detail) == ("unavailable", err.removeprefix("ff: ").strip())
                await execute(password_url, GRANTS)
                assert (await migrate(url, "--check", "--schema", limited))[0] == 0
    async with Engine.connect(settings=Settings(database_url=url, schema_name=limited)) as engine:
        await engine.create_execution(**new())


@pytest.fixture
async def read_only(fresh_database: None, url: str, connection: asyncpg.Connection) -> AsyncIterator[str]:
    """The address of a database whose transactions are read-only."""
    name = await connection.fetchval("select current_database()")
    await connection.execute(f"alter database {name} set default_transaction_read_only = on")
    yield url
    await execute(url, "set default_transaction_read_only = off", f"alter database {name} reset all")


async def test_a_read_only_database_is_reported_with_the_setting(read_only: str) -> None:
    code, out, err = await migrate(read_only, "--schema", "other")
    assert (code, out) == (1, "")
    assert err.startswith("ff: ")
    assert " is read-only: default_transaction_read_only is on; turn it off where it is set" in err
    assert err.count("\n") == 1
    code, out, err = await migrate(read_only, "--check", "--json", FF_WAITPOINT_HMAC_SECRET="ab" * 32)
    answer = json.loads(out)
    assert (code, err, answer["runs"], answer["verdict"]) == (1, "", False, "current")
    assert " is read-only: default_transaction_read_only is on; turn it off where it is set" in answer["text"]
    # A schema that is up to date needs no write.
    assert await migrate(read_only) == (0, "schema flowfabric is up to date\n", "")


async def test_a_standby_is_reported_until_it_is_promoted(killable: KillableServer) -> None:
    await killable.restart_as_standby()
    try:
        code, out, err = await migrate(killable.url, "--schema", "promoted")
        assert (code, out) == (1, "")
        assert " is read-only: it is a standby; name the primary in the database URL (FF_DATABASE_URL)" in err
        assert (err.startswith("ff: "), err.count("\n")) == (True, 1)
    finally:
        await killable.promote()
    code, out, _ = await migrate(killable.url, "--schema", "promoted", "--json")
    assert (code, len(json.loads(out)["applied"]) > 0) == (0, True)
