"""The proxy of these tests: it forwards whole messages, and fails exactly where it is told to."""

import asyncio

import asyncpg
import pytest

from .proxy import Action, Messages, Proxy, Side, Strike, startup_packet, startup_parameters

_LOST = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError)


async def _connect(proxy: Proxy) -> asyncpg.Connection:
    return await asyncpg.connect(proxy.url)


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4, "big") + body


def test_messages_are_found_however_they_arrive() -> None:
    startup = _message(b"", b"\x00\x03\x00\x00user\x00me\x00\x00")
    sent = [startup, _message(b"Q", b"select 1\x00"), _message(b"S", b""), _message(b"X", b"")]
    for size in (1, 3, 1000):
        messages, stream = Messages(Side.CLIENT), b"".join(sent)
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [message for piece in pieces for message in messages.feed(piece)] == sent


async def test_it_forwards_and_counts(url: str) -> None:
    async with Proxy(url) as proxy:
        connection = await _connect(proxy)
        proxy.arm(None)
        assert await connection.fetchval("select repeat('x', 200000)") == "x" * 200000
        assert proxy.counted(Side.CLIENT) >= 3
        assert proxy.counted(Side.SERVER) >= 4
        await connection.close()


async def test_every_message_can_be_the_last(url: str) -> None:
    """Before the message that commits nothing is stored; where the answer alone is lost, the row is there."""
    async with Proxy(url) as proxy:
        direct = await asyncpg.connect(url)
        await direct.execute("create table kept (n integer)")
        for side in Side:
            stored, nth = [], 0
            while True:
                nth += 1
                connection = await _connect(proxy)
                proxy.arm(Strike(action=Action.CUT_BEFORE, side=side, nth=nth))
                try:
                    await connection.execute("insert into kept values ($1)", nth)
                except _LOST:
                    await proxy.settled()
                    stored.append(await direct.fetchval("select count(*) from kept where n = $1", nth))
                    continue
                finally:
                    connection.terminate()
                break
            assert stored == sorted(stored), "once a message is late enough, the row is there"
            assert stored[0] == 0
            assert stored[-1] == (1 if side is Side.SERVER else 0), stored
        await direct.execute("drop table kept")
        await direct.close()


async def test_the_answer_to_a_commit_is_dropped_after_it_took_effect(url: str) -> None:
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
async def test_a_silent_connection_is_open_and_says_nothing_until_it_is_healed(url: str, side: Side) -> None:
    async with Proxy(url) as proxy:
        connection = await _connect(proxy)
        proxy.silence(sides=(side,))
        asked = asyncio.create_task(connection.fetchval("select 1"))
        done, _ = await asyncio.wait((asked,), timeout=0.2)
        assert not done
        proxy.heal()
        assert await asked == 1
        await connection.close()


async def test_a_delayed_message_arrives(url: str) -> None:
    async with Proxy(url) as proxy:
        connection = await _connect(proxy)
        proxy.arm(Strike(action=Action.DELAY, side=Side.SERVER, seconds=0.2))
        before = asyncio.get_running_loop().time()
        assert await connection.fetchval("select 1") == 1
        assert asyncio.get_running_loop().time() - before >= 0.2
        await connection.close()


async def test_connections_are_refused_and_cut(url: str) -> None:
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
async def test_connections_are_answered_with_an_error(url: str, sslmode: str) -> None:
    async with Proxy(url) as proxy:
        proxy.refusal = "57P03", "the database system is starting up"
        for _ in range(2):
            with pytest.raises(asyncpg.CannotConnectNowError, match="is starting up"):
                await asyncpg.connect(proxy.url.replace("disable", sslmode))
        assert proxy.connections == 2
        proxy.refusal = None
        await (await _connect(proxy)).close()


async def test_connections_are_silent_from_their_start(url: str) -> None:
    async with Proxy(url) as proxy:
        proxy.silences_new = True
        connecting = asyncio.create_task(_connect(proxy))
        done, _ = await asyncio.wait((connecting,), timeout=0.2)
        assert not done
        proxy.heal()
        await (await connecting).close()
        await (await _connect(proxy)).close()


async def test_the_server_is_not_told_of_ignored_parameters(url: str) -> None:
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


async def test_it_listens_where_it_is_told_to(url: str) -> None:
    async with Proxy(url) as proxy:
        port = proxy.port
    async with Proxy(url, port=port) as proxy:
        assert proxy.port == port
        await (await _connect(proxy)).close()
