"""Hints between processes: received soon, sent in batches, and resumed after a lost connection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import asyncpg
import pytest

from faults.proxy import Proxy, Side
from fixtures import Eventually
from flowfabric.db.database import Database
from flowfabric.db.migrate import check_schema_name
from flowfabric.db.notify import EVERYTHING, Hints
from flowfabric.engine.core.wakeups import Wakeups

from .holders import fork, fork_is_intended

SESSIONS = """from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
                and application_name = 'flowfabric'"""
LISTENERS = f"select count(*) {SESSIONS} and query like '/* listener */%'"
END_LISTENERS = f"select pg_terminate_backend(pid) {SESSIONS} and query like '/* listener */%'"
END_ALL = f"select pg_terminate_backend(pid) {SESSIONS}"

Open = Callable[..., Awaitable[Hints]]


@pytest.fixture
async def other(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


@pytest.fixture
async def hints(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    """Open the hints of any number of engines on the test's database; `listen` waits until the connection is there."""
    monkeypatch.setattr(Hints, "LISTEN_SECONDS", 60.0)
    async with AsyncExitStack() as stack:

        async def open_hints(*, address: str = url, schema: str = "flowfabric", polls_only: bool = False) -> Hints:
            database = await Database.open(address, schema=schema, pool_size=1)
            stack.push_async_callback(database.close)
            hints = Hints(database, polls_only=polls_only)
            stack.push_async_callback(hints.close)
            return hints

        yield open_hints


class Heard:
    """The hints received on one channel, in order."""

    def __init__(self, hints: Hints, channel: str) -> None:
        self.hints: list[list[str]] = []
        hints.subscribe(channel, self.hints.append)

    @property
    def words(self) -> list[str]:
        """Every word received, except the one that says hints may have been missed."""
        return [word for words in self.hints for word in words if word != EVERYTHING]

    def forget(self) -> None:
        """Forget the hints received so far."""
        self.hints.clear()


async def test_a_hint_reaches_the_other_engines_but_not_its_sender(hints: Open, eventually: Eventually) -> None:
    sender, one, two = await hints(), await hints(), await hints()
    heard = {process: Heard(process, "work") for process in (sender, one, two)}
    for process in heard:
        await process.listen()
        assert process.is_listening
    sender.send("work", "default")
    await eventually(lambda: all(heard[process].words == ["default"] for process in (one, two)))
    # Hints arrive in the order of their commits, so the sender's own hint has come back before this one.
    one.send("work", "last")
    await eventually(lambda: "last" in heard[sender].words)
    assert heard[sender].words == ["last"]


async def test_a_hint_without_a_sender_reaches_every_engine(
    hints: Open, other: asyncpg.Connection, eventually: Eventually
) -> None:
    processes = [await hints(), await hints()]
    heard = [Heard(process, "work") for process in processes]
    for process in processes:
        await process.listen()
    await other.execute("select pg_notify('flowfabric_work', 'default other')")
    await eventually(lambda: all(ear.words == ["default", "other"] for ear in heard))


@fork_is_intended
def test_a_hint_of_a_forked_process_reaches_its_parent(url: str, eventually: Eventually) -> None:
    # Made before the fork, so that parent and child have the same token.
    hints = Hints(Database(url, "flowfabric", 1))
    heard = Heard(hints, "work")

    def send(read: Callable[[], str], _: Callable[[object], None]) -> None:
        async def work() -> None:
            hints.send("work", "from-the-child")
            await hints.close()

        read()
        asyncio.run(work())

    async def listen() -> None:
        await hints.listen()
        child.order("send")
        await eventually(lambda: heard.words)
        await hints.close()

    child = fork(send)
    try:
        asyncio.run(listen())
        assert (heard.words, child.wait()) == (["from-the-child"], 0)
    finally:
        child.kill()


async def test_a_hint_is_received_only_on_its_channel_and_in_its_schema(hints: Open, eventually: Eventually) -> None:
    sender, here, there = await hints(), await hints(), await hints(schema="elsewhere")
    ended, others = Heard(here, "ended"), [Heard(here, "work"), Heard(there, "ended")]
    await here.listen()
    await there.listen()
    assert ended.hints == [[EVERYTHING]], "a listener that starts may have missed hints"
    sender.send("ended", "a")
    await eventually(lambda: ended.words == ["a"])
    assert [other.words for other in others] == [[], []]


async def test_concurrent_hints_are_sent_in_one_batch(hints: Open, eventually: Eventually) -> None:
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    heard.forget()
    sender.send("work", "first")
    await eventually(lambda: heard.hints == [["first"]])
    for n in range(1000):
        sender.send("work", f"lane{n % 10}")
    await eventually(lambda: heard.hints[1:] == [[f"lane{n}" for n in range(10)]])


async def test_hints_of_all_channels_are_sent_in_one_statement(url: str, hints: Open, eventually: Eventually) -> None:
    channels = await channels_of(hints)
    async with Proxy(url) as proxy:
        sender, listener = await hints(address=proxy.url), await hints()
        heard = {channel: Heard(listener, channel) for channel in channels}
        await listener.listen()
        messages = []
        # The first one opens the connection and prepares the statement.
        for batch in (channels[:1], channels[:1], channels):
            for ear in heard.values():
                ear.forget()
            proxy.arm(None)
            for channel in batch:
                sender.send(channel, "a")
            await eventually(lambda batch=batch: all(heard[channel].words == ["a"] for channel in batch))
            messages.append(proxy.counted(Side.CLIENT))
        assert len(channels) == 10
        assert messages[1] == messages[2] < messages[0]
        await sender.close()


async def channels_of(hints: Open) -> list[str]:
    """The channels that an engine subscribes to."""
    engine = await hints()
    Wakeups(engine)
    return list(engine._callbacks)


async def test_every_channel_works_in_a_schema_with_the_longest_name(hints: Open, eventually: Eventually) -> None:
    channels = await channels_of(hints)
    schema = check_schema_name("s" * 57)
    sender, listener = await hints(schema=schema), await hints(schema=schema)
    elsewhere = await hints(schema="s" * 56 + "t")
    heard = {channel: Heard(listener, channel) for channel in channels}
    silent = {channel: Heard(elsewhere, channel) for channel in channels}
    await listener.listen()
    await elsewhere.listen()
    for channel in channels:
        sender.send(channel, channel)
    await eventually(lambda: all(heard[channel].words == [channel] for channel in channels))
    # Sent last, so received last.
    (await hints(schema="s" * 56 + "t")).send("work", "last")
    await eventually(lambda: silent["work"].words == ["last"])
    assert [channel for channel in channels if silent[channel].words] == ["work"]


@pytest.mark.parametrize("letter", ["x", "é"])
async def test_words_that_need_up_to_four_notifications_all_arrive(
    letter: str, hints: Open, eventually: Eventually
) -> None:
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    heard.forget()
    # 69 words of 100 bytes fit into one.
    words = [f"{nth:03}{letter * (97 // len(letter.encode()))}"[:100] for nth in range(4 * 69)]
    for word in words:
        sender.send("work", word)
    await eventually(lambda: len(heard.words) == len(words))
    assert (sorted(heard.words), len(heard.hints)) == (words, 4)


async def test_more_words_than_fit_into_four_notifications_become_everything(
    hints: Open, eventually: Eventually
) -> None:
    sender, listener = await hints(), await hints()
    work, ended = Heard(listener, "work"), Heard(listener, "ended")
    await listener.listen()
    for too_many in ([f"{nth:099}" for nth in range(4 * 70 + 1)], ["x" * 7_000]):
        work.forget()
        ended.forget()
        for word in too_many:
            sender.send("work", word)
        sender.send("ended", "a")
        await eventually(lambda: work.hints and ended.hints)
        assert (work.hints, ended.hints) == ([[EVERYTHING]], [["a"]])


async def test_a_lost_listener_reconnects_and_reports_the_gap(
    hints: Open, other: asyncpg.Connection, eventually: Eventually
) -> None:
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    heard.forget()
    await other.fetch(END_LISTENERS)
    await eventually(lambda: heard.hints == [[EVERYTHING]])
    assert listener.is_listening
    sender.send("work", "after")
    await eventually(lambda: heard.words == ["after"])

    async def is_the_only_one() -> bool:
        return bool(await other.fetchval(LISTENERS) == 1)

    # A terminated session stays in pg_stat_activity for a short time.
    await eventually(is_the_only_one)


async def test_a_lost_sender_reconnects(hints: Open, other: asyncpg.Connection, eventually: Eventually) -> None:
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    sender.send("work", "before")
    await eventually(lambda: "before" in heard.words)
    await other.fetch(END_ALL)

    def again() -> bool:
        sender.send("work", "after")
        return "after" in heard.words

    await eventually(again)


async def test_listening_twice_opens_one_connection(hints: Open, other: asyncpg.Connection) -> None:
    listener = await hints()
    Heard(listener, "work")
    await asyncio.gather(listener.listen(), listener.listen())
    await listener.listen()
    assert await other.fetchval(LISTENERS) == 1


async def test_an_engine_that_only_polls_sends_hints_but_does_not_listen(
    hints: Open, other: asyncpg.Connection, eventually: Eventually
) -> None:
    polling, listener = await hints(polls_only=True), await hints()
    silent, heard = Heard(polling, "work"), Heard(listener, "work")
    await polling.listen()
    await listener.listen()
    heard.forget()
    polling.send("work", "default")
    await eventually(lambda: heard.words == ["default"])
    assert (polling.is_listening, silent.hints) == (False, [])
    assert await other.fetchval(LISTENERS) == 1


async def test_a_hint_that_can_wait_is_sent_with_the_next_one(
    hints: Open, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hints, "WAIT_SECONDS", 3600.0)
    sender, listener = await hints(), await hints()
    waiting, work = Heard(listener, "waiting"), Heard(listener, "work")
    await listener.listen()
    for word in ("one", "two"):
        sender.send("waiting", word, can_wait=True)
    # Hints arrive in order: when this one is here, earlier ones would be here too.
    (await hints()).send("work", "other")
    await eventually(lambda: work.words == ["other"])
    assert waiting.words == []
    sender.send("work", "now")
    await eventually(lambda: (sorted(waiting.words), work.words) == (["one", "two"], ["other", "now"]))


async def test_a_hint_that_can_wait_is_sent_alone_after_a_time(hints: Open, eventually: Eventually) -> None:
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "waiting")
    await listener.listen()
    for word in ("one", "two"):
        sender.send("waiting", word, can_wait=True)
        await eventually(lambda word=word: heard.words[-1:] == [word])


async def test_closing_sends_a_hint_that_waits(
    hints: Open, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hints, "WAIT_SECONDS", 3600.0)
    monkeypatch.setattr(Hints, "CLOSE_SECONDS", 60.0)
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "waiting")
    await listener.listen()
    sender.send("waiting", "last", can_wait=True)
    await sender.close()
    await eventually(lambda: heard.words == ["last"])


async def test_closing_sends_pending_hints(
    hints: Open, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hints, "CLOSE_SECONDS", 60.0)
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    sender.send("work", "last words")
    await sender.close()
    sender.send("work", "too late")
    await eventually(lambda: heard.words == ["last", "words"])


async def test_closing_ends_the_connections(hints: Open, other: asyncpg.Connection, eventually: Eventually) -> None:
    process = await hints()
    Heard(process, "work")
    await process.listen()
    process.send("work", "a")
    await process.close()
    assert not process.is_listening
    await eventually(lambda: no_sessions(other))


async def no_sessions(other: asyncpg.Connection) -> bool:
    # The pool keeps its one connection.
    return bool(await other.fetchval(f"select count(*) <= 1 {SESSIONS}"))


async def test_a_busy_sender_can_listen(hints: Open, eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hints and probes are sent over one connection, which runs one statement at a time."""
    monkeypatch.setattr(Hints, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(Hints, "PAUSE", 0.0001)
    busy, listener = await hints(), await hints()
    own, heard = Heard(busy, "work"), Heard(listener, "work")
    await busy.listen()
    await listener.listen()
    words = [f"n{nth}" for nth in range(100)]
    for word in words:
        busy.send("work", word)
        await eventually(lambda word=word: word in heard.words)
    assert (heard.words, own.hints) == (words, [[EVERYTHING]])


async def test_hints_that_were_never_used_can_be_closed_twice(hints: Open) -> None:
    process = await hints()
    await process.close()
    await process.close()


async def test_the_first_hints_after_an_idle_time_are_sent_at_once_and_later_ones_after_a_pause(
    hints: Open, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hints, "PAUSE", 3600.0)
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    first = [f"n{nth}" for nth in range(Hints.AT_ONCE)]
    for nth, word in enumerate(first):
        sender.send("work", word)
        await eventually(lambda nth=nth: heard.words == first[: nth + 1])
    heard.forget()
    for word in ("one", "another"):
        sender.send("work", word)
    # Hints arrive in order: when this one is here, earlier ones would be here too.
    (await hints()).send("work", "last")
    await eventually(lambda: "last" in heard.words)
    assert heard.words == ["last"]
    # Closing need not wait for the hints that the pause holds back.
    monkeypatch.setattr(Hints, "CLOSE_SECONDS", 0.01)
