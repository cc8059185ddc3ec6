"""An engine that cannot start raises one error that names the server and says what to do."""

import asyncio
import socket
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from databases import at_database, execute
from engine.state import all_cases
from faults.proxy import Proxy
from flowfabric import EngineError, Fabric
from flowfabric.db import session
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings

from .killable import PASSWORD, as_app


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def start_error(url: str, **settings: Any) -> EngineError:
    """Start an engine on this URL and return its error, which must not contain the password."""
    with pytest.raises(EngineError) as caught:
        async with Engine.connect(settings=Settings(database_url=url, **settings)):
            pass
    assert PASSWORD not in f"{caught.value} {caught.value!r}"
    return caught.value


async def test_an_unreachable_server_is_named_by_its_address() -> None:
    port = free_port()
    failed = await start_error(f"postgresql://app:{PASSWORD}@127.0.0.1:{port}/shop")
    assert str(failed) == (
        f"transport: no server answers at 127.0.0.1:{port} (database shop): connection refused;"
        " start the server, or correct the database URL (FF_DATABASE_URL)"
    )


async def test_an_unknown_host_is_named() -> None:
    failed = await start_error(f"postgresql://app:{PASSWORD}@nowhere.invalid/shop")
    assert (failed.code, failed.retryable) == ("transport", True)
    assert "the host of nowhere.invalid:5432 (database shop) is unknown" in str(failed)


async def test_a_missing_socket_is_named_by_its_folder(tmp_path: Path) -> None:
    failed = await start_error(f"postgresql://app:{PASSWORD}@/shop?host={tmp_path}&port=5433")
    assert f"no server answers at {tmp_path}:5433 (database shop): connection refused" in str(failed)


async def test_a_connection_to_a_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        failed = await start_error(f"postgresql://app:{PASSWORD}@127.0.0.1:{silent.getsockname()[1]}/shop")
    assert (failed.code, failed.retryable) == ("timeout", True)
    assert "within 0.1 s; check the host and the port in the database URL" in str(failed)


async def test_a_missing_database_is_named(password_url: str) -> None:
    failed = await start_error(at_database(password_url, "shop"))
    assert (failed.code, failed.retryable) == ("protocol", False)
    assert "there is no database shop at /" in str(failed)
    assert "create it, or correct the database URL (FF_DATABASE_URL)" in str(failed)


async def test_a_wrong_password_is_not_retryable_and_not_shown(password_url: str) -> None:
    with all_cases() as case:
        for password in ("wrong", "", f"{PASSWORD}%20"):
            with case(repr(password)):
                failed = await start_error(as_app(password_url, password))
                assert failed.retryable is False
                assert "wrong" not in str(failed)
                if password:
                    assert "correct the user or the password in the database URL (FF_DATABASE_URL)" in str(failed)


async def test_a_role_that_may_not_create_the_schema_is_named(password_url: str) -> None:
    failed = await start_error(as_app(password_url, PASSWORD), migrate_on_start=True, schema_name="shop")
    assert (failed.code, failed.retryable) == ("unavailable", False)
    assert "user app may not create schema shop" in str(failed)


async def test_a_role_that_may_not_create_tables_is_told_how_to_own_the_schema(password_url: str) -> None:
    await execute(password_url, "create schema bare", "grant usage on schema bare to app")
    failed = await start_error(as_app(password_url, PASSWORD), migrate_on_start=True, schema_name="bare")
    await execute(password_url, "drop schema bare")
    assert failed.code == "unavailable"
    assert "user app may not apply 0001_core.sql to schema bare of database flowfabric (permission denied" in str(
        failed
    )
    assert str(failed).endswith("`alter schema bare owner to app`")


async def test_an_error_that_the_server_sends_is_shown_with_its_address(url: str) -> None:
    # The SQLSTATE and the message that the server sends, the code of the error, and a part of its text.
    errors = [
        (
            ("57P03", "the database system is starting up"),
            "busy_loading",
            "does not accept connections yet: the database system is starting up",
        ),
        (("53300", "sorry, too many clients already"), "busy_loading", "lower FF_DATABASE_POOL_SIZE"),
        (
            ("08P01", "unsupported startup parameter: enable_seqscan"),
            "protocol",
            "unsupported startup parameter: enable_seqscan",
        ),
        (("42704", 'unrecognized configuration parameter "jit"'), "protocol", "see docs/pgbouncer.md"),
        (("28000", "no pg_hba.conf entry for host"), "auth", "refuses user postgres for database "),
        (("XX000", "out of luck"), "protocol", "refuses the connection: out of luck (XX000)"),
    ]
    async with Proxy(url) as proxy:
        with all_cases() as case:
            for refusal, code, text in errors:
                with case(refusal[0]):
                    proxy.refusal = refusal
                    failed = await start_error(proxy.url)
                    assert (failed.code, failed.retryable) == (code, code == "busy_loading")
                    assert text in str(failed)
                    assert f"127.0.0.1:{urlsplit(proxy.url).port}" in str(failed)


async def test_only_what_the_server_says_is_masked(url: str) -> None:
    # The password, what the server says, and what is shown of it.
    answers = [
        ("shop", "shop is no password for shop", "*** is no password for ***"),
        ("a", "a is bad", "*** is b***d"),
        ("%2A", "* or %2A", "*** or ***"),
        ("s%20p", "the password s p or s%20p", "the password *** or ***"),
    ]
    async with Proxy(url) as proxy:
        server = f"127.0.0.1:{urlsplit(proxy.url).port}"
        with all_cases() as case:
            for password, said, shown in answers:
                for login, option in ((f"shop:{password}", ""), ("shop", f"&password={password}")):
                    with case(f"{login}{option}"):
                        proxy.refusal = ("28P01", said)
                        failed = await start_error(f"postgresql://{login}@{server}/shop?sslmode=disable{option}")
                        assert str(failed) == (
                            f"auth: {server} refuses user shop for database shop: {shown};"
                            " correct the user or the password in the database URL (FF_DATABASE_URL)"
                        )


async def test_a_password_like_a_part_of_the_message_does_not_mask_that_part() -> None:
    port = free_port()
    for password in ("shop", "a", "127"):
        failed = await start_error(f"postgresql://app:{password}@127.0.0.1:{port}/shop")
        assert str(failed) == (
            f"transport: no server answers at 127.0.0.1:{port} (database shop): connection refused;"
            " start the server, or correct the database URL (FF_DATABASE_URL)"
        )


async def test_a_url_that_the_driver_rejects_is_not_shown() -> None:
    failed = await start_error(f"postgresql://app:{PASSWORD}@localhost/shop?sslmode=sometimes")
    assert failed.retryable is False
    assert "the database URL cannot be used: `sslmode` parameter must be one of" in str(failed)


async def test_the_error_says_how_an_unsuitable_server_answered() -> None:
    hangs_up = "{} (database shop) closed the connection during the login; "
    no_tls = "{} (database shop) does not support TLS, which sslmode in the database URL"
    # What the server sends, the options of the URL, the code of the error, and a part of its text.
    servers = {
        "HTTP": (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "",
            "protocol",
            "what answers at {} is not Postgres; correct the",
        ),
        "no TLS": (b"N", "?sslmode=require", "protocol", no_tls),
        "hangs up": (b"", "", "transport", hangs_up),
        "hangs up after refusing TLS": (b"N", "", "transport", hangs_up),
    }
    with all_cases() as case:
        for name, (answer, options, code, text) in servers.items():
            with case(name):
                await check_foreign_server(answer, options, code, text)


async def check_foreign_server(answer: bytes, options: str, code: str, text: str) -> None:
    """Check the error of a start on a server that answers the first message with these bytes and hangs up."""
    serving: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        await reader.read(8)
        writer.write(answer)
        # "N" refuses TLS; the client then sends its startup message without it.
        if answer == b"N":
            await reader.read(65536)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        failed = await start_error(f"postgresql://app:{PASSWORD}@{address}/shop{options}")
        await asyncio.gather(*filter(None, serving))
    assert (failed.code, failed.retryable) == (code, code == "transport")
    assert text.format(address) in str(failed)


async def test_a_failed_connection_shows_no_traceback_of_the_driver() -> None:
    with pytest.raises(EngineError) as caught:
        async with Fabric(f"postgresql://app:{PASSWORD}@127.0.0.1:{free_port()}/shop"):
            pass
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 1
    assert "asyncpg" not in shown
