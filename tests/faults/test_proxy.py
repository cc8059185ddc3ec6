"""The fault proxy forwards whole messages and fails exactly at the chosen one."""

import asyncio

import asyncpg
import pytest

from .proxy import Action, Fault, Messages, Proxy, Side, startup_packet, startup_parameters

_LOST = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError)


async def _connect(proxy: Proxy) -> asyncpg.Connection:
    return await asyncpg.connect(proxy.url)


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4, "big") + body


def test_a_stream_is_split_into_messages_regardless_of_packet_size() -> None:
    startup = _message(b"", b"\x00\x03\x00\x00user\x00me\x00\x00")
    sent = [startup, _message(b"Q", b"select 1\x00"), _message(b"S", b""), _message(b"X", b"")]
    for size in (1, 3, 1000):
        messages, stream = Messages(Side.CLIENT), b"".join(sent)
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [message for piece in pieces for message in messages.feed(piece)] == sent


async def test_messages_are_forwarded_and_counted(url: str) -> None:
    async with Proxy(url) as proxy:
        connection = await _connect(proxy)
        proxy.arm(None)
        assert await connection.fetchval("select repeat('x', 200000)") == "x" * 200000
        assert proxy.counted(Side.CLIENT) >= 3
        assert proxy.counted(Side.SERVER) >= 4
        await connection.close()


async def test_a_connection_can_be_cut_before_every_message(url: str) -> None:
    """A cut before the message that commits leaves no row; a cut before the answer leaves the row."""
    async with Proxy(url) as proxy:
        direct = await asyncpg.connect(url)
        await direct.execute("create table kept (n integer)")
        for side in Side:
            stored, nth = [], 0
            while True:
                nth += 1
                connection = await _connect(proxy)
                proxy.arm(Fault(action=Action.CUT_BEFORE, side=side, nth=nth))
                try:
                    await connection.execute("insert into kept values ($1)", nth)
                except _LOST:
                    await proxy.settled()
                    stored.append(await direct.fetchval("select count(*) from kept where n = $1", nth))
                    continue
                finally:
                    connection.terminate()
                break
            assert stored == sorted(stored), "a row stored at one message was not stored at a later one"
            assert stored[0] == 0
            assert stored[-1] == (1 if side is Side.SERVER else 0), stored
        await direct.execute("drop table kept")
        await direct.close()


async def test_the_answer_to_a_commit_is_dropped_after_the_commit(url: str) -> None:
    async with Proxy(url) as proxy:
        direct = await asyncpg.connect(url)
        await direct.execute("create table kept (n integer)")
        connection = await _connect(proxy)
        await connection.execute("begin; insert into kept values (1)")
        (link,) = proxy.links
        link.drop_answer()
        with pytest.raises(_LOST):
            await connection.execute("commit")
        await proxy.settled()
        assert proxy.dropped == 1
        assert await direct.fetchval("select count(*) from kept") == 1
        await direct.execute("drop table kept")
        await direct.close()


@pytest.mark.parametrize("side", Side)
async def test_a_silent_connection_stays_open_and_delivers_nothing_until_healed(url: str, side: Side) -> None:
    async with Proxy(url) as proxy:
        connection = await _connect(proxy)
        proxy.silence(sides=(side,))
        asked = asyncio.create_task(connection.fetchval("select 1"))
        done, _ = await asyncio.wait((asked,), timeout=0.05)
        assert not done
        proxy.heal()
        assert await asked == 1
        await connection.close()


async def test_a_delayed_message_arrives(url: str) -> None:
    async with Proxy(url) as proxy:
        connection = await _connect(proxy)
        proxy.arm(Fault(action=Action.DELAY, side=Side.SERVER, seconds=0.1))
        before = asyncio.get_running_loop().time()
        assert await connection.fetchval("select 1") == 1
        assert asyncio.get_running_loop().time() - before >= 0.1
        await connection.close()


async def test_connections_can_be_cut_and_refused(url: str) -> None:
    async with Proxy(url) as proxy:
        connection = await _connect(proxy)
        assert proxy.cut() == 1
        with pytest.raises(_LOST):
            await connection.fetchval("select 1")
        proxy.refuses = True
        with pytest.raises(_LOST):
            await _connect(proxy)
        proxy.heal()
        connection = await _connect(proxy)
        await connection.close()


@pytest.mark.parametrize("sslmode", ["disable", "prefer"])
async def test_connections_can_be_refused_with_an_error_message(url: str, sslmode: str) -> None:
    async with Proxy(url) as proxy:
        proxy.refusal = "57P03", "the database system is starting up"
        for _ in range(2):
            with pytest.raises(asyncpg.CannotConnectNowError, match="is starting up"):
                await asyncpg.connect(proxy.url.replace("disable", sslmode))
        assert proxy.connections == 2
        proxy.refusal = None
        await (await _connect(proxy)).close()


async def test_new_connections_can_be_silent_from_the_start(url: str) -> None:
    async with Proxy(url) as proxy:
        proxy.silences_new = True
        connecting = asyncio.create_task(_connect(proxy))
        done, _ = await asyncio.wait((connecting,), timeout=0.05)
        assert not done
        proxy.heal()
        await (await connecting).close()
        await (await _connect(proxy)).close()


async def test_ignored_startup_parameters_do_not_reach_the_server(url: str) -> None:
    async with Proxy(url) as proxy:
        proxy.ignores = frozenset({"search_path"})
        wanted = {"search_path": "elsewhere", "application_name": "kept"}
        connection = await asyncpg.connect(proxy.url, server_settings=wanted)
        assert await connection.fetchval("show search_path") != "elsewhere"
        assert await connection.fetchval("show application_name") == "kept"
        (link,) = proxy.links
        assert link.parameters is not None
        assert wanted.items() <= link.parameters.items()
        await connection.close()


def test_a_startup_packet_is_read_and_written() -> None:
    asked = {"user": "me", "options": "", "search_path": "a,b"}
    (packet,) = Messages(Side.CLIENT).feed(startup_packet(asked))
    assert startup_parameters(packet) == asked
    cancels = _message(b"", (80877102).to_bytes(4, "big") + b"12345678")
    assert startup_parameters(cancels) == {}


async def test_the_proxy_listens_on_the_given_port(url: str) -> None:
    async with Proxy(url) as proxy:
        port = proxy.port
    async with Proxy(url, port=port) as proxy:
        assert proxy.port == port
        await (await _connect(proxy)).close()
