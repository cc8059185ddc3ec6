"""A start that fails says what to do in a line or two, and a worker waits for a server that is not there yet."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from databases import at_database, execute
from faults.proxy import Proxy
from fixtures import Eventually, Rows
from flowfabric import EngineError, Fabric
from flowfabric.db import session
from flowfabric.db.embedded import Embedded
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings

from . import worker_process
from .command import migrate

PASSWORD = "pa55word"
STARTING_UP = ("57P03", "the database system is starting up")
REFUSED_SETTING = ("08P01", "unsupported startup parameter: enable_seqscan")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that asks the user app for a password."""
    embedded = Embedded.start(tmp_path_factory.mktemp("strict") / "home")
    rules = embedded.data / "pg_hba.conf"
    rules.write_text(f"local all app scram-sha-256\n{rules.read_text()}")
    asyncio.run(execute(embedded.url, f"create role app login password '{PASSWORD}'", "select pg_reload_conf()"))
    yield embedded.url
    embedded.release(discard=True)


def as_app(url: str, password: str) -> str:
    """The same address for the user app."""
    return url.replace("postgres@", f"app:{password}@", 1)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def refusal(url: str, **settings: Any) -> EngineError:
    """The error that a start on an address is refused with."""
    with pytest.raises(EngineError) as caught:
        async with Engine.connect(settings=Settings(database_url=url, **settings)):
            pass
    assert PASSWORD not in f"{caught.value} {caught.value!r}"
    return caught.value


# What a program is told.


async def test_a_server_that_is_not_there_is_told_with_its_address() -> None:
    port = free_port()
    refused = await refusal(f"postgresql://app:{PASSWORD}@127.0.0.1:{port}/shop")
    assert str(refused) == (
        f"transport: no server answers at 127.0.0.1:{port} (database shop): connection refused;"
        " start the server, or correct the database URL (FF_DATABASE_URL)"
    )


async def test_a_host_that_is_unknown_is_told_by_its_name() -> None:
    refused = await refusal(f"postgresql://app:{PASSWORD}@nowhere.invalid/shop")
    assert (refused.code, refused.retryable) == ("transport", True)
    assert "the host of nowhere.invalid:5432 (database shop) is unknown" in str(refused)


async def test_a_socket_that_is_not_there_is_told_by_its_folder(tmp_path: Path) -> None:
    refused = await refusal(f"postgresql://app:{PASSWORD}@/shop?host={tmp_path}&port=5433")
    assert f"no server answers at {tmp_path}:5433 (database shop): connection refused" in str(refused)


async def test_a_server_that_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refused = await refusal(f"postgresql://app:{PASSWORD}@127.0.0.1:{silent.getsockname()[1]}/shop")
    assert (refused.code, refused.retryable) == ("timeout", True)
    assert "within 0.1 s; check the host and the port in the database URL" in str(refused)


async def test_a_database_that_is_not_there_is_told_by_its_name(strict: str) -> None:
    refused = await refusal(at_database(strict, "shop"))
    assert (refused.code, refused.retryable) == ("protocol", False)
    assert "there is no database shop at /" in str(refused)
    assert "create it, or correct the database URL (FF_DATABASE_URL)" in str(refused)


@pytest.mark.parametrize("password", ["wrong", "", "pa55word%20"])
async def test_a_wrong_password_is_told_with_the_user(strict: str, password: str) -> None:
    refused = await refusal(as_app(strict, password))
    assert refused.retryable is False
    assert "correct the user or the password in the database URL (FF_DATABASE_URL)" in str(refused) or not password
    assert "wrong" not in str(refused)


async def test_a_role_that_may_not_create_the_schema_is_told_so(strict: str) -> None:
    refused = await refusal(as_app(strict, PASSWORD), migrate_on_start=True, schema_name="shop")
    assert (refused.code, refused.retryable) == ("unavailable", False)
    assert "user app may not create schema shop" in str(refused)


@pytest.mark.parametrize(
    ("sqlstate", "text", "code", "told"),
    [
        (*STARTING_UP, "busy_loading", "does not accept connections yet: the database system is starting up"),
        ("53300", "sorry, too many clients already", "busy_loading", "lower FF_DATABASE_POOL_SIZE"),
        (*REFUSED_SETTING, "protocol", "unsupported startup parameter: enable_seqscan"),
        ("42704", 'unrecognized configuration parameter "jit"', "protocol", "see docs/pgbouncer.md"),
        ("28000", "no pg_hba.conf entry for host", "auth", "refuses user postgres for database "),
        ("XX000", "out of luck", "protocol", "refuses the connection: out of luck (XX000)"),
    ],
)
async def test_what_a_server_says_is_told(url: str, sqlstate: str, text: str, code: str, told: str) -> None:
    async with Proxy(url) as proxy:
        proxy.refusal = sqlstate, text
        refused = await refusal(proxy.url)
        assert (refused.code, refused.retryable) == (code, code == "busy_loading")
        assert told in str(refused)
        assert f"127.0.0.1:{urlsplit(proxy.url).port}" in str(refused)


async def test_an_address_the_driver_cannot_use_is_told_without_it(url: str) -> None:
    refused = await refusal(f"postgresql://app:{PASSWORD}@localhost/shop?sslmode=sometimes")
    assert refused.retryable is False
    assert "the database URL cannot be used: `sslmode` parameter must be one of" in str(refused)


@pytest.mark.parametrize(
    ("answer", "options", "code", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "", "protocol", "what answers at {} is not Postgres; correct the"),
        (
            b"N",
            "?sslmode=require",
            "protocol",
            "{} (database shop) does not support TLS, which sslmode in the database URL",
        ),
        (b"", "", "transport", "{} (database shop) closed the connection during the login; "),
        (b"N", "", "transport", "{} (database shop) closed the connection during the login; "),
    ],
    ids=["HTTP", "no TLS", "hangs up", "hangs up after TLS"],
)
async def test_what_is_no_postgres_server_is_told_by_what_it_does(
    answer: bytes, options: str, code: str, told: str
) -> None:
    serving: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        await reader.read(8)
        writer.write(answer)
        if answer == b"N":
            await reader.read(65536)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        refused = await refusal(f"postgresql://app:{PASSWORD}@{address}/shop{options}")
        await asyncio.gather(*filter(None, serving))
    assert (refused.code, refused.retryable) == (code, code == "transport")
    assert told.format(address) in str(refused)


async def test_a_server_that_is_not_there_shows_no_traces_of_the_driver() -> None:
    with pytest.raises(EngineError) as caught:
        async with Fabric(f"postgresql://app:{PASSWORD}@127.0.0.1:{free_port()}/shop"):
            pass
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 1
    assert "asyncpg" not in shown


# What a worker process prints.


Worker = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """Start a worker process on an address; what is left of it ends with the test."""
    processes = []

    def start(url: str, **environment: str) -> "subprocess.Popen[str]":
        given = {name: value for name, value in os.environ.items() if not name.startswith("FF_")}
        process = subprocess.Popen(
            [sys.executable, worker_process.__file__, url, "worker"],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**given, **environment},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


async def said(process: "subprocess.Popen[str]") -> list[str]:
    """What a process has written until it ended."""
    _, text = await asyncio.to_thread(process.communicate, timeout=60)
    assert PASSWORD not in text
    assert "Traceback" not in text
    return text.splitlines()


async def text_of_line(process: "subprocess.Popen[str]") -> str:
    """The text of the next line that a process logs."""
    assert process.stderr is not None
    return (await asyncio.to_thread(process.stderr.readline)).rstrip("\n").partition(": ")[2]


async def test_a_worker_on_a_schema_that_is_missing_says_what_to_run(empty_url: str, worker: Worker) -> None:
    process = worker(empty_url)
    (line,) = await said(process)
    assert process.returncode == 1
    assert line.startswith("flowfabric: schema flowfabric ")
    assert line.endswith("run `ff migrate`")


async def test_a_worker_without_a_signing_key_says_which_variable_to_set(url: str, worker: Worker) -> None:
    process = worker(url)
    (line,) = await said(process)
    assert process.returncode == 1
    assert line.startswith("flowfabric: no signing key is stored: set FF_WAITPOINT_HMAC_SECRET to 64 hex digits")


async def test_a_worker_does_not_wait_for_a_password_to_become_right(strict: str, worker: Worker) -> None:
    process = worker(as_app(strict, "wrong"))
    (line,) = await said(process)
    assert process.returncode == 1
    assert "refuses user app for database flowfabric: password authentication failed" in line


async def test_a_worker_does_not_wait_for_a_database_to_be_made(strict: str, worker: Worker) -> None:
    process = worker(at_database(strict, "shop"))
    (line,) = await said(process)
    assert process.returncode == 1
    assert line.startswith("flowfabric: there is no database shop at ")


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"FF_LANES": ","}, "FF_LANES=,: "),
        ({"FF_LANES": ""}, "FF_LANES='': must name at least one lane"),
        ({"FF_DATABASE_POOL_SIZE": "none"}, "FF_DATABASE_POOL_SIZE=none: "),
        ({"FF_DATABASE_URL": f"mysql://app:{PASSWORD}@host/shop"}, "FF_DATABASE_URL: must begin with postgresql://"),
    ],
)
async def test_a_worker_with_a_wrong_setting_names_it_and_ends_with_2(
    url: str, worker: Worker, environment: dict[str, str], told: str
) -> None:
    process = worker(url, **environment)
    (line,) = await said(process)
    assert process.returncode == 2
    assert line.startswith(f"flowfabric: {told}")


async def test_a_worker_whose_embedded_server_cannot_start_says_why(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    process = worker("", FF_HOME=str(tmp_path / "taken"))
    (line,) = await said(process)
    assert process.returncode == 1
    assert str(tmp_path / "taken") in line


# What `ff migrate --check` says before a process is started.


async def test_check_succeeds_where_a_process_could_start(url: str, rows: Rows) -> None:
    async with rows.unchanged():
        code, out, err = await migrate(url, "--check", FF_WAITPOINT_HMAC_SECRET="ab" * 32)
    assert (code, err) == (0, "")
    assert out.endswith("up to date\n")


async def test_check_fails_where_no_signing_key_is_stored_or_given(url: str, rows: Rows) -> None:
    async with rows.unchanged():
        code, out, err = await migrate(url, "--check")
    assert (code, out) == (1, "")
    assert err.startswith("ff: no signing key is stored: set FF_WAITPOINT_HMAC_SECRET")
    code, out, _ = await migrate(url, "--check", "--json")
    answer = json.loads(out)
    assert (code, answer["runs"], answer["verdict"]) == (1, False, "current")
    assert answer["text"].startswith("no signing key is stored")


async def test_check_fails_where_the_partition_counts_differ(engine: Engine, url: str) -> None:
    code, _, err = await migrate(url, "--check", FF_FLOW_PARTITIONS="7")
    assert code == 1
    assert err.startswith("ff: the store was created with FF_FLOW_PARTITIONS=256")
    assert (await migrate(url, "--check"))[0] == 0


async def test_check_fails_where_a_pooler_refuses_a_session_setting(engine: Engine, url: str) -> None:
    async with Proxy(url) as proxy:
        proxy.refusal = REFUSED_SETTING
        code, out, err = await migrate(proxy.url, "--check")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "rejects a session setting that every process sends: unsupported startup parameter: enable_seqscan" in err
    assert err.endswith("see docs/pgbouncer.md\n")


async def test_check_fails_where_a_pooler_ignores_the_search_path(engine: Engine, url: str) -> None:
    async with Proxy(url) as proxy:
        proxy.ignores = frozenset({"search_path"})
        code, _, err = await migrate(proxy.url, "--check")
        assert code == 1
        assert "the session setting search_path=flowfabric is not in effect: a pooler in front of" in err
        refused = await refusal(proxy.url)
        assert (refused.code, refused.detail) == ("unavailable", err.removeprefix("ff: ").strip())


async def test_check_warns_where_a_pooler_ignores_another_setting(engine: Engine, url: str) -> None:
    async with Proxy(url) as proxy:
        proxy.ignores = frozenset({"enable_seqscan", "statement_timeout"})
        code, out, err = await migrate(proxy.url, "--check")
    assert (code, err.count("\n")) == (0, 1)
    assert out.endswith("up to date\n")
    assert "these session settings are not in effect: enable_seqscan, statement_timeout; " in err


@pytest.mark.parametrize("case", ["no server", "wrong password", "no database"])
async def test_check_answers_in_json_where_the_schema_cannot_be_read(strict: str, case: str) -> None:
    address, told = {
        "no server": (f"postgresql://app@127.0.0.1:{free_port()}/shop", "no server answers at 127.0.0.1:"),
        "wrong password": (as_app(strict, "wrong"), "refuses user app for database flowfabric"),
        "no database": (at_database(strict, "shop"), "there is no database shop at "),
    }[case]
    code, out, err = await migrate(address, "--check", "--json")
    answer = json.loads(out)
    assert (code, err) == (1, "")
    assert told in answer.pop("text")
    assert answer == {"schema": "flowfabric", "runs": False, "verdict": "unreachable", "pending": [], "newer": []}


# A role that may do too little.


GRANTS = (
    "grant usage on schema {0} to app;"
    " grant select, insert, update, delete on all tables in schema {0} to app;"
    " grant usage on all sequences in schema {0} to app;"
)


@pytest.fixture
async def schema(strict: str) -> AsyncIterator[str]:
    """A migrated schema that the user app has no right on, on the server that asks it for a password."""
    name = "limited"
    async with Engine.connect(settings=Settings(database_url=strict, schema_name=name, migrate_on_start=True)):
        pass
    yield name
    await execute(strict, f"drop schema {name} cascade", "alter role app reset default_transaction_read_only")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), "user app may not read schema limited of database flowfabric: as its owner run `"),
        (("grant usage on schema limited to app",), "user app may not read schema limited of database flowfabric: "),
        (
            ("grant usage on schema limited to app", "grant select on all tables in schema limited to app"),
            " (database flowfabric) lacks INSERT, UPDATE, DELETE on tables ",
        ),
        (
            (GRANTS.format("limited"), "revoke usage on all sequences in schema limited from app"),
            " (database flowfabric) lacks USAGE on sequences claim_sequence, execution_sequence: as the owner run `",
        ),
    ],
    ids=["nothing", "schema", "reading", "no sequences"],
)
async def test_a_role_that_may_do_too_little_is_told_what_to_grant(
    strict: str, schema: str, given: tuple[str, ...], told: str
) -> None:
    await execute(strict, *given)
    url = as_app(strict, PASSWORD)
    code, _, err = await migrate(url, "--check", "--schema", schema)
    assert code == 1
    assert told in err
    grants = GRANTS.format(schema)
    assert err.endswith(f"`{grants}`\n")
    refused = await refusal(url, schema_name=schema)
    assert (refused.code, refused.detail) == ("unavailable", err.removeprefix("ff: ").strip())
    await execute(strict, grants)
    assert (await migrate(url, "--check", "--schema", schema))[0] == 0
    async with Engine.connect(settings=Settings(database_url=url, schema_name=schema)) as engine:
        await engine.create_execution(
            namespace="tests",
            lane_id="default",
            execution_kind="job",
            input_payload=b"{}",
            priority=0,
            creator_identity="test",
        )


async def test_a_role_that_may_not_make_tables_in_the_schema_is_told_so(strict: str) -> None:
    await execute(strict, "create schema bare", "grant usage on schema bare to app")
    refused = await refusal(as_app(strict, PASSWORD), migrate_on_start=True, schema_name="bare")
    await execute(strict, "drop schema bare")
    assert refused.code == "unavailable"
    assert "user app may not apply 0001_core.sql to schema bare of database flowfabric (permission denied" in str(
        refused
    )
    assert str(refused).endswith("`alter schema bare owner to app`")


async def test_a_read_only_server_is_told_and_a_worker_waits_for_it_to_change(
    strict: str, schema: str, worker: Worker
) -> None:
    await execute(strict, GRANTS.format(schema), "alter role app set default_transaction_read_only = on")
    url = as_app(strict, PASSWORD)
    code, out, _ = await migrate(url, "--check", "--schema", schema, "--json")
    answer = json.loads(out)
    assert (code, answer["runs"], answer["verdict"]) == (1, False, "current")
    assert answer["text"].endswith(
        " (database flowfabric) is read-only: default_transaction_read_only is on; turn it off where it is set,"
        " for example `alter role app set default_transaction_read_only = off`"
    )
    process = worker(url, FF_SCHEMA=schema)
    assert await text_of_line(process) == f"waiting for the server: {answer['text']}"
    await execute(strict, "alter role app set default_transaction_read_only = off")
    assert (await text_of_line(process)).startswith("the server answers after ")


@asynccontextmanager
async def submitted(url: str) -> AsyncIterator[Any]:
    """A run that waits for a worker, submitted to the server itself."""
    fabric = Fabric(url)
    pause = fabric.task(name="pause")(worker_process.pause.__wrapped__)
    async with fabric:
        yield await pause.submit(0)


async def test_a_worker_waits_for_a_server_that_is_not_there_yet(
    url: str, worker: Worker, eventually: Eventually
) -> None:
    port = free_port()
    proxy = Proxy(url, port=port)
    address = f"postgresql://postgres:{PASSWORD}@127.0.0.1:{port}{urlsplit(url).path}"
    process = worker(address, FF_WAITPOINT_HMAC_SECRET="ab" * 32)
    first = await text_of_line(process)
    database = urlsplit(url).path[1:]
    assert first == (
        f"waiting for the server: no server answers at 127.0.0.1:{port} (database {database}): connection refused;"
        " start the server, or correct the database URL (FF_DATABASE_URL)"
    )
    proxy.refusal = STARTING_UP
    async with submitted(url) as run, proxy:
        await eventually(lambda: proxy.connections >= 2)
        proxy.refusal = None
        assert (await run.result(timeout=60))["worker"] == "worker"
        process.send_signal(signal.SIGTERM)
        rest = await said(process)
    assert process.returncode == 0
    answered, started, *stopped = [line.partition(": ")[2] for line in rest]
    assert answered.startswith("the server answers after ")
    assert started.startswith("worker worker started: ")
    assert [text.startswith("worker worker ") for text in stopped] == [True, True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_that_waits_for_its_server_can_be_told_to_go(worker: Worker, number: signal.Signals) -> None:
    process = worker(f"postgresql://app:{PASSWORD}@127.0.0.1:{free_port()}/shop")
    assert (await text_of_line(process)).startswith("waiting for the server: ")
    process.send_signal(number)
    assert await said(process) == []
    assert process.returncode == 0
