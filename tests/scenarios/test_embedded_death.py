"""The embedded server is killed under the processes that hold it: one of them starts it again, and work goes on."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from fixtures import Eventually
from flowfabric import Fabric, Run, Settings
from flowfabric.db.embedded import Embedded
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.model.execution import Created

from . import embedded_process
from .embedded_process import tell

STARTED_AGAIN = "was started again"
NEW: dict[str, Any] = {
    "namespace": "tests",
    "lane_id": "default",
    "execution_kind": "job",
    "input_payload": b"{}",
    "priority": 0,
    "creator_identity": "test",
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home of the test's own; its server is gone afterwards."""
    home = tmp_path / "home"
    yield home
    Embedded.start(home).release(discard=True)


@pytest.fixture
async def engine(home: Path) -> AsyncIterator[Engine]:
    """An engine on the embedded server of the home."""
    async with Engine.connect(settings=Settings(home=home, database_url=None)) as engine:
        yield engine


def postmaster(home: Path) -> int:
    """The process id of the server of a home."""
    return int((Embedded.data_of(home) / "postmaster.pid").read_text().splitlines()[0])


def servers(home: Path) -> list[int]:
    """The processes that were started as the server of a home."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(Embedded.data_of(home)) in command.read_bytes().split(b"\0"):
                found.append(int(command.parent.name))
    return found


def spawn(name: str, log: Path) -> subprocess.Popen[bytes]:
    """A worker process on the home of the environment."""
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, embedded_process.__file__, name], stderr=output)


def lines(text: str) -> list[str]:
    """The lines that tell of a server that was started again."""
    return [line for line in text.splitlines() if STARTED_AGAIN in line]


async def kept(engine: Engine, execution_id: str) -> bool:
    """Whether an execution is in the store, as soon as the store answers."""
    with suppress(TransportError):
        return await engine.read_execution_state(execution_id) is not None
    return False


async def ended(run: Run[Any]) -> bool:
    """Whether a run has succeeded, as far as the store answers."""
    with suppress(EngineError):
        return (await run.status()).state == "completed"
    return False


async def test_a_killed_server_is_started_again_under_a_worker_and_nothing_is_lost(
    home: Path, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = Fabric(settings=Settings(home=home, database_url=None))

    @fabric.task
    async def double(number: int) -> int:
        return 2 * number

    with caplog.at_level(logging.WARNING, logger="flowfabric.db"):
        async with fabric, fabric.worker(lease_ttl=2):
            runs = [await double.submit(number) for number in range(20)]
            for kills in (1, 2):
                killed = postmaster(home)
                runs += await asyncio.gather(*(double.submit(number) for number in range(20)))
                os.kill(killed, signal.SIGKILL)
                # Nothing is asked of the server from here: the worker brings it back for itself.
                await eventually(lambda kills=kills: len(lines(caplog.text)) == kills)
                runs += [await double.submit(number) for number in range(20)]
                for run in runs:
                    await eventually(lambda run=run: ended(run))
                assert postmaster(home) != killed
                assert servers(home) == [postmaster(home)]
            assert f"died (process {killed}) and was started again (process {postmaster(home)})" in caplog.text
            assert str(Embedded.data_of(home)) in caplog.text
    assert len(lines(caplog.text)) == 2
    assert servers(home) == []


async def test_calls_that_find_the_server_dead_at_once_start_one(
    engine: Engine, home: Path, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    acknowledged = [(await engine.create_execution(**NEW)).execution_id for _ in range(20)]
    # A session that is idle keeps the memory of the dead server for a moment.
    async with second_engine(engine, pool_size=5) as other:
        await asyncio.gather(*(other.ping() for _ in range(5)))
        os.kill(postmaster(home), signal.SIGKILL)
        made = await asyncio.gather(*(engine.create_execution(**NEW) for _ in range(20)))
        acknowledged += [one.execution_id for one in made if isinstance(one, Created)]
        assert len(acknowledged) == 40
        for one in acknowledged:
            await eventually(lambda one=one: kept(other, one))
            await eventually(lambda one=one: kept(engine, one))
    assert len(lines(caplog.text)) == 1


async def test_of_two_processes_one_starts_the_server_again(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FF_HOME", str(home))
    monkeypatch.delenv("FF_DATABASE_URL", raising=False)
    log = tmp_path / "log"
    async with embedded_process.fabric as fabric:
        process = spawn("other", log)
        try:
            assert await (await tell.submit(0)).result(timeout=60) == "0 by other"
            async with fabric.worker(worker_instance_id="this", lease_ttl=2):
                for kills in (1, 2, 3):
                    os.kill(postmaster(home), signal.SIGKILL)
                    runs = await asyncio.gather(*(tell.submit(number) for number in range(30)))
                    for run in runs:
                        await eventually(lambda run=run: ended(run))
                    assert len(lines(caplog.text) + lines(log.read_text())) == kills
                    await eventually(lambda: servers(home) == [postmaster(home)])
        finally:
            process.terminate()
            assert process.wait(timeout=60) == 0


async def test_of_many_holders_that_find_the_server_dead_at_once_one_starts_it(
    home: Path, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    holders = [await asyncio.to_thread(Embedded.start, home) for _ in range(6)]
    try:
        for kills in (1, 2):
            os.kill(killed := postmaster(home), signal.SIGKILL)
            # A dying process may still accept a connection.
            await eventually(lambda killed=killed: killed not in servers(home))
            together = threading.Barrier(len(holders))

            def revive(holder: Embedded, together: threading.Barrier = together) -> bool:
                together.wait(timeout=30)
                return holder.revive()

            with ThreadPoolExecutor(len(holders)) as threads:
                assert all(threads.map(revive, holders))
            assert len(lines(caplog.text)) == kills
            # A child of the server has its command line for a moment.
            await eventually(lambda: servers(home) == [postmaster(home)])
            assert {holder.pid for holder in holders} == {postmaster(home)} != {killed}
            assert not any(holder.revive() for holder in holders)
    finally:
        for holder in holders:
            await asyncio.to_thread(holder.release)


async def test_the_server_is_stopped_while_handlers_block_every_thread_of_the_event_loop(
    home: Path, one_thread: ThreadPoolExecutor
) -> None:
    gate = threading.Event()
    try:
        async with asyncio.timeout(30), Engine.connect(settings=Settings(home=home, database_url=None)):
            one_thread.submit(gate.wait, 60)
            assert servers(home)
        assert servers(home) == []
    finally:
        gate.set()


async def test_a_server_whose_data_was_deleted_is_not_made_anew(
    home: Path, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    async with Engine.connect(settings=Settings(home=home, database_url=None, submit_patience_ms=0)) as engine:
        await engine.ping()
        data, kept_aside = Embedded.data_of(home), Embedded.data_of(home).with_name("aside")
        os.kill(postmaster(home), signal.SIGKILL)
        await eventually(lambda: not servers(home))
        data.rename(kept_aside)
        for _ in range(3):
            with pytest.raises(TransportError):
                await engine.create_execution(**NEW)
        assert not data.exists()
        kept_aside.rename(data)
        await eventually(lambda: kept_created(engine))
    assert len(lines(caplog.text)) == 1


async def kept_created(engine: Engine) -> bool:
    with suppress(TransportError):
        return isinstance(await engine.create_execution(**NEW), Created)
    return False


async def test_what_was_released_is_not_started_again(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = await asyncio.to_thread(Embedded.start, home)
    await asyncio.to_thread(server.release)
    assert not await asyncio.to_thread(server.revive)
    assert servers(home) == []
    with pytest.raises(OSError, match=r"[Nn]o such file|refused"):
        await asyncpg.connect(server.url)
    assert lines(caplog.text) == []
