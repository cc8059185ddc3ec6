"""Hints between processes: heard soon, told together, healed when lost, and never needed."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from flowfabric.db.database import Database
from flowfabric.db.migrate import check_schema_name
from flowfabric.db.notify import EVERYTHING, Hints

SESSIONS = """from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
                and application_name = 'flowfabric'"""
LISTENERS = f"select count(*) {SESSIONS} and query like '/* probe */%'"
END_LISTENERS = f"select pg_terminate_backend(pid) {SESSIONS} and query like '/* probe */%'"
END_ALL = f"select pg_terminate_backend(pid) {SESSIONS}"

Open = Callable[..., Awaitable[Hints]]


@pytest.fixture
async def other(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


@pytest.fixture
async def hints(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    """Open the hints of any number of processes on the test's database; they wait as long as a connection takes."""
    monkeypatch.setattr(Hints, "LISTEN_SECONDS", 60.0)
    async with AsyncExitStack() as stack:

        async def open_hints(*, schema: str = "flowfabric", polls_only: bool = False) -> Hints:
            database = await Database.open(url, schema=schema, pool_size=1)
            stack.push_async_callback(database.close)
            hints = Hints(database, polls_only=polls_only)
            stack.push_async_callback(hints.close)
            return hints

        yield open_hints


class Heard:
    """The hints of one channel as they came."""

    def __init__(self, hints: Hints, channel: str) -> None:
        self.hints: list[list[str]] = []
        hints.subscribe(channel, self.hints.append)

    @property
    def words(self) -> list[str]:
        """Every word heard, but for the one that says something may have been missed."""
        return [word for words in self.hints for word in words if word != EVERYTHING]

    def forget(self) -> None:
        """Begin anew."""
        self.hints.clear()


async def test_a_hint_reaches_the_other_engines_and_not_the_one_that_sent_it(hints: Open, eventually: Any) -> None:
    sender, one, two = await hints(), await hints(), await hints()
    heard = {process: Heard(process, "work") for process in (sender, one, two)}
    for process in heard:
        await process.listen()
        assert process.is_listening
    sender.send("work", "default")
    await eventually(lambda: all(heard[process].words == ["default"] for process in (one, two)))
    # Hints arrive in the order of their commits: its own one has come back to the sender before this one.
    one.send("work", "last")
    await eventually(lambda: "last" in heard[sender].words)
    assert heard[sender].words == ["last"]


async def test_a_hint_that_names_no_sender_reaches_everybody(
    hints: Open, other: asyncpg.Connection, eventually: Any
) -> None:
    processes = [await hints(), await hints()]
    heard = [Heard(process, "work") for process in processes]
    for process in processes:
        await process.listen()
    await other.execute("select pg_notify('flowfabric_work', 'default other')")
    await eventually(lambda: all(ear.words == ["default", "other"] for ear in heard))


def test_a_hint_of_a_forked_process_reaches_its_parent(server_url: str) -> None:
    script = Path(__file__).with_name("forked_hints.py")
    done = subprocess.run([sys.executable, str(script), server_url], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("['from-the-child']\n", 0), done.stderr


async def test_a_hint_is_heard_on_its_channel_only(hints: Open, eventually: Any) -> None:
    sender, listener = await hints(), await hints()
    work, ended = Heard(listener, "work"), Heard(listener, "ended")
    await listener.listen()
    sender.send("ended", "a")
    await eventually(lambda: ended.words == ["a"])
    assert work.words == []


async def test_schemas_of_one_database_do_not_hear_each_other(hints: Open, eventually: Any) -> None:
    sender, here, there = await hints(), await hints(), await hints(schema="elsewhere")
    ours, theirs = Heard(here, "work"), Heard(there, "work")
    await here.listen()
    await there.listen()
    sender.send("work", "a")
    await eventually(lambda: ours.words == ["a"])
    assert theirs.words == []


async def test_hints_of_one_moment_travel_together(hints: Open, eventually: Any) -> None:
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    heard.forget()
    sender.send("work", "first")
    await eventually(lambda: heard.hints == [["first"]])
    for n in range(1000):
        sender.send("work", f"lane{n % 10}")
    await eventually(lambda: heard.hints[1:] == [[f"lane{n}" for n in range(10)]])


async def test_hints_are_heard_in_a_schema_of_the_longest_name(hints: Open, eventually: Any) -> None:
    schema = check_schema_name("s" * 57)
    sender, listener = await hints(schema=schema), await hints(schema=schema)
    heard = {channel: Heard(listener, channel) for channel in ("work", "ended")}
    await listener.listen()
    for channel in heard:
        sender.send(channel, "a")
    await eventually(lambda: all(ear.words == ["a"] for ear in heard.values()))


async def test_more_words_than_fit_a_hint_say_everything(hints: Open, eventually: Any) -> None:
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    heard.forget()
    for n in range(1000):
        sender.send("work", f"a-lane-with-a-long-name-{n}")
    await eventually(lambda: heard.hints)
    assert heard.hints[0] == [EVERYTHING]


async def test_a_listener_hears_that_it_may_have_missed_something_when_it_begins(hints: Open) -> None:
    listener = await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    assert heard.hints == [[EVERYTHING]]


async def test_a_lost_listener_listens_again_and_hears_of_the_gap(
    hints: Open, other: asyncpg.Connection, eventually: Any
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

    # A session that was ended takes a moment to leave the server's list.
    await eventually(is_the_only_one)


async def test_a_lost_sender_sends_again(hints: Open, other: asyncpg.Connection, eventually: Any) -> None:
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


async def test_to_listen_twice_is_to_listen_once(hints: Open, other: asyncpg.Connection) -> None:
    listener = await hints()
    Heard(listener, "work")
    await asyncio.gather(listener.listen(), listener.listen())
    await listener.listen()
    assert await other.fetchval(LISTENERS) == 1


async def test_a_deaf_process_tells_but_does_not_listen(
    hints: Open, other: asyncpg.Connection, eventually: Any
) -> None:
    deaf, listener = await hints(polls_only=True), await hints()
    silent, heard = Heard(deaf, "work"), Heard(listener, "work")
    await deaf.listen()
    await listener.listen()
    heard.forget()
    deaf.send("work", "default")
    await eventually(lambda: heard.words == ["default"])
    assert (deaf.is_listening, silent.hints) == (False, [])
    assert await other.fetchval(LISTENERS) == 1


async def test_what_is_pending_is_told_before_the_end(
    hints: Open, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hints, "CLOSE_SECONDS", 60.0)
    sender, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    sender.send("work", "last words")
    await sender.close()
    sender.send("work", "too late")
    await eventually(lambda: heard.words == ["last", "words"])


async def test_closing_ends_the_sessions(hints: Open, other: asyncpg.Connection, eventually: Any) -> None:
    process = await hints()
    Heard(process, "work")
    await process.listen()
    process.send("work", "a")
    await process.close()
    assert not process.is_listening
    await eventually(lambda: no_sessions(other))


async def no_sessions(other: asyncpg.Connection) -> bool:
    # The pool of the process keeps its one session.
    return bool(await other.fetchval(f"select count(*) <= 1 {SESSIONS}"))


async def test_closing_what_never_began_is_no_trouble(hints: Open) -> None:
    process = await hints()
    await process.close()
    await process.close()


async def test_the_first_hints_after_a_quiet_time_do_not_wait_for_each_other_and_later_ones_do(
    hints: Open, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hints, "PAUSE", 3600.0)
    teller, listener = await hints(), await hints()
    heard = Heard(listener, "work")
    await listener.listen()
    told = [f"n{nth}" for nth in range(Hints.AT_ONCE)]
    for nth, word in enumerate(told):
        teller.send("work", word)
        await eventually(lambda nth=nth: heard.words == told[: nth + 1])
    heard.forget()
    for word in ("one", "another"):
        teller.send("work", word)
    # By another way, so that whatever was on its way has arrived.
    (await hints()).send("work", "last")
    await eventually(lambda: "last" in heard.words)
    assert heard.words == ["last"]
