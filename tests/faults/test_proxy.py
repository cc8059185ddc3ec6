"""The proxy of these tests: it forwards whole messages, and fails exactly where it is told to."""

import asyncio

import asyncpg
import pytest

from .proxy import Action, Messages, Proxy, Side, Strike

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
