"""Cursors continue in a store that was dumped and restored, where transaction ids mean something else."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from databases import execute
from fixtures import Engines, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.errors import InvalidInputError
from flowfabric.feeds import OLDEST, CompletionEvent
from flowfabric.model.support import Applied, NothingToPrepare
from flowfabric.settings import Settings
from servers import served
from sessions import SESSIONS, session

from .following import HOLDS, SLOW, complete_together, held_commits, ids, take, waits_for_commit

OLDER_SERVER = """
do $$ begin for _ in 1 .. 5000 loop perform pg_current_xact_id(); commit; end loop; end $$
"""
"""Use up transaction ids, so that those of a new server are lower."""


class Dumps:
    """Dumps of the database of a test, and restores of them."""

    def __init__(self, url: str, folder: Path, tools: Path) -> None:
        self._url = url
        self._file = folder / "store.dump"
        self._tools = tools

    async def dump(self) -> None:
        """Dump the database."""
        await self._run("pg_dump", "--format=custom", f"--file={self._file}", self._url)

    async def restore(self) -> None:
        """Replace the contents of the database by the dump."""
        # Sessions of earlier tests have prepared statements with types of the old schema.
        await SESSIONS.close_parked(urlsplit(self._url).path[1:])
        await execute(self._url, "drop schema flowfabric cascade")
        await self.restore_at(self._url)
        # The database is not for another test.
        await execute(self._url, "insert into flowfabric.test_change values ('restore')")

    async def restore_at(self, url: str) -> None:
        """Restore the dump in another database."""
        await self._run("pg_restore", "--no-owner", f"--dbname={url}", str(self._file))

    async def _run(self, tool: str, *arguments: str) -> None:
        command = [str(self._tools / tool), *arguments]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture
async def dumps(url: str, tmp_path: Path) -> Dumps:
    """Dumps of the database of the test."""
    connection = await session(url, "test tools")
    tools = Path(await connection.fetchval("select setting from pg_config where name = 'BINDIR'"))
    await connection.close()
    assert (tools / "pg_dump").exists(), f"{tools} has no pg_dump; install the client programs of this server"
    return Dumps(url, tmp_path, tools)


async def read(engine: Engine, count: int) -> list[CompletionEvent]:
    """The first stored completions."""
    async with engine.subscribe_completion(OLDEST) as events:
        return await take(events, count)


async def now(engine: Engine) -> bytes:
    """The cursor of this moment."""
    async with engine.subscribe_completion() as events:
        return events.cursor


async def test_a_cursor_from_before_the_dump_continues(
    engine: Engine, engines: Engines, given: Given, dumps: Dumps, rows: Rows
) -> None:
    made = [*await complete_together(engine, 5), *[await given.completed() for _ in range(3)]]
    found, start = await read(engine, 8), await now(engine)
    made.append(await given.completed())
    await dumps.dump()
    await dumps.restore()
    restored = await engines()
    made.append(await Given(restored, given.clock).completed())
    for nth, event in enumerate(found):
        async with restored.subscribe_completion(event.cursor) as resumed:
            assert ids(await take(resumed, 9 - nth)) == made[nth + 1 :]
    async with restored.subscribe_completion(start) as resumed:
        after = await take(resumed, 2)
        assert ids(after) == made[8:]
    async with restored.subscribe_completion(after[0].cursor) as resumed:
        assert ids(await take(resumed, 1)) == made[9:]
    assert ids(await read(restored, 10)) == made
    assert sorted(row["generation"] for row in await rows.of("feed_origin")) == [1, 2]


async def test_a_cursor_from_after_the_dump_gets_the_events_after_the_restore(
    engine: Engine, engines: Engines, given: Given, dumps: Dumps
) -> None:
    await given.completed()
    await dumps.dump()
    for _ in range(5):
        await given.completed()
    found, start = await read(engine, 6), await now(engine)
    await dumps.restore()
    restored = await engines()
    # New events get the ids of those that are gone.
    made = [await Given(restored, given.clock).completed() for _ in range(8)]
    for cursor in (*(event.cursor for event in found), start):
        async with restored.subscribe_completion(cursor) as resumed:
            assert ids(await take(resumed, 8)) == made


async def test_two_restores_of_one_dump_are_told_apart(
    engine: Engine, engines: Engines, given: Given, dumps: Dumps
) -> None:
    await given.completed()
    await dumps.dump()
    await dumps.restore()
    first = await engines()
    for _ in range(3):
        await Given(first, given.clock).completed()
    found, start = await read(first, 4), await now(first)
    await dumps.restore()
    second = await engines()
    made = [await Given(second, given.clock).completed() for _ in range(5)]
    for cursor in (*(event.cursor for event in found), start):
        async with second.subscribe_completion(cursor) as resumed:
            assert ids(await take(resumed, 5)) == made


async def test_a_subscription_notices_that_its_store_was_restored(
    engine: Engine, engines: Engines, given: Given, dumps: Dumps, rows: Rows
) -> None:
    await given.completed()
    async with engine.subscribe_completion() as events:
        one = await given.completed()
        assert ids(await take(events, 1)) == [one]
        await dumps.dump()
        await dumps.restore()
        restored = Given(await engines(), given.clock)
        made = [await restored.completed(), await restored.completed()]
        assert ids(await take(events, 2)) == made
        assert len(await rows.of("feed_origin")) == 2


async def test_processes_that_notice_a_restore_at_once_record_it_once(
    engine: Engine, engines: Engines, connection: asyncpg.Connection, rows: Rows
) -> None:
    assert isinstance(await engine.prepare(), NothingToPrepare)
    others = [await engines() for _ in range(4)]
    await connection.execute("update feed_origin set origin = 'another server'")
    done = await asyncio.gather(*(one.prepare() for one in (engine, *others)))
    assert [one for one in done if one == Applied(description="events restored from another server")] == [
        one for one in done if isinstance(one, Applied)
    ]
    assert sum(isinstance(one, Applied) for one in done) == 1
    assert len(await rows.of("feed_origin")) == 2


async def test_a_cursor_ahead_of_a_store_that_lost_events_is_refused(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    for _ in range(3):
        await given.completed()
    (first, *_, last), start = await read(engine, 3), await now(engine)
    # A standby that lacked the last commits was promoted.
    await connection.execute("delete from event where event_id > 3")
    for cursor in (last.cursor, start):
        with pytest.raises(InvalidInputError, match=r"^invalid_input: the store has no event") as caught:
            await engine.subscribe_completion(cursor)
        assert isinstance(caught.value.detail, dict)
        assert caught.value.detail["reason"] == "cursor_ahead"
        assert caught.value.detail["oldest_cursor"] == OLDEST
    async with engine.subscribe_completion(first.cursor):
        pass


class TestAnotherServer:
    """A restore on a new server: its transaction ids are lower than those of the events."""

    @pytest.fixture
    def alteration(self) -> str:
        """Lets a test delay commits."""
        return HOLDS

    @pytest.mark.usefixtures("patient_with_locks", "fast_polls")
    async def test_cursors_continue_on_another_server(
        self,
        engine: Engine,
        given: Given,
        url: str,
        eventually: Eventually,
        dumps: Dumps,
        connection: asyncpg.Connection,
    ) -> None:
        await connection.execute(OLDER_SERVER)
        slow = await given.claimed(lane_id=SLOW)
        shared = await complete_together(engine, 10)
        async with engine.subscribe_completion(OLDEST) as events:
            found = await take(events, 10)
            async with held_commits(url) as holder:
                completing = asyncio.create_task(engine.complete(slow))
                await eventually(lambda: waits_for_commit(holder))
                fast = await given.completed()
                found += await take(events, 1)
                await eventually(lambda: events.cursor != found[-1].cursor)
                between = events.cursor
            await completing
        unread = await given.completed()
        expected = [*shared, fast, slow.execution_id, unread]
        await dumps.dump()
        async with another_server(dumps) as other:
            elsewhere = Given(other, given.clock)
            later = await elsewhere.completed()
            for nth in (0, 4, 9, 10):
                async with other.subscribe_completion(found[nth].cursor) as resumed:
                    got = ids(await take(resumed, 13 - nth))
                    assert sorted(got) == sorted([*expected[nth + 1 :], later])
                    assert got[-1] == later
            async with other.subscribe_completion(between) as resumed:
                assert ids(await take(resumed, 3)) == [slow.execution_id, unread, later]
            async with other.subscribe_completion(OLDEST) as resumed:
                assert sorted(ids(await take(resumed, 14))) == sorted([*expected, later])
                last = await elsewhere.completed()
                assert ids(await take(resumed, 1)) == [last]


@asynccontextmanager
async def another_server(dumps: Dumps) -> AsyncIterator[Engine]:
    """An engine on another server that has the dump."""
    with served(int(os.environ.get("FF_TEST_POSTGRES", "18"))) as server:
        await dumps.restore_at(server)
        async with Engine.connect(settings=Settings(database_url=server)) as engine:
            yield engine
