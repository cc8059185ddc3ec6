"""When the embedded server is killed, one of the processes that hold it starts it again, and work goes on."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from engine.state import new, rounds
from fixtures import Eventually
from flowfabric import Run, Settings
from flowfabric.db.embedded import Embedded
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.model.execution import Created

from . import embedded_process
from .embedded_process import LEASE_TTL_S, worker_of
from .killable import embedded_home
from .processes import Process, environment_for

# No worker of these tests claims from this lane.
NEW = new(lane_id="unclaimed")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home whose server every test starts, and stops by releasing it."""
    with embedded_home(tmp_path_factory.mktemp("embedded")) as home:
        yield home


def postmaster(home: Path) -> int:
    """The process id of the server of a home."""
    return int((Embedded.data_of(home) / "postmaster.pid").read_text().splitlines()[0])


def servers(home: Path) -> list[int]:
    """The processes whose command line names the data of a home."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(Embedded.data_of(home)) in command.read_bytes().split(b"\0"):
                found.append(int(command.parent.name))
    return found


def restarts(text: str) -> list[str]:
    """The log lines that report a restart of the server."""
    return [line for line in text.splitlines() if "was started again" in line]


async def exists(engine: Engine, execution_id: str) -> bool:
    """Whether an execution is in the store; False while the store does not answer."""
    with suppress(TransportError):
        return await engine.read_execution_state(execution_id) is not None
    return False


async def is_completed(run: Run[Any]) -> bool:
    """Whether a run has succeeded; False while the store does not answer."""
    with suppress(EngineError):
        return (await run.status()).state == "completed"
    return False


async def is_writable(engine: Engine) -> bool:
    """Whether an execution can be created."""
    with suppress(TransportError):
        return isinstance(await engine.create_execution(**NEW), Created)
    return False


async def test_one_of_two_processes_starts_a_killed_server_again_and_nothing_is_lost(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FF_HOME", str(home))
    monkeypatch.delenv("FF_DATABASE_URL", raising=False)
    environment = environment_for(FF_HOME=str(home))
    async with embedded_process.fabric as fabric:
        other = Process(embedded_process.run, "other", log=tmp_path / "log", environment=environment)

        def restarted() -> list[str]:
            return restarts(caplog.text) + restarts(other.log)

        async def submit() -> list[Run[str]]:
            return list(await asyncio.gather(*(worker_of.submit(number) for number in range(20))))

        try:
            assert await (await worker_of.submit(0)).result(timeout=60) == "0 by other"
            async with fabric.worker(worker_instance_id="this", lease_ttl=LEASE_TTL_S):
                for kills in (at + 1 for at in rounds(2, whole=6)):
                    killed, runs = postmaster(home), await submit()
                    os.kill(killed, signal.SIGKILL)
                    if kills % 2:
                        # The workers start the server by themselves: nothing else calls it.
                        await eventually(lambda kills=kills: len(restarted()) == kills)
                    runs += await submit()
                    for run in runs:
                        await eventually(lambda run=run: is_completed(run))
                    assert len(restarted()) == kills
                    await eventually(lambda: servers(home) == [postmaster(home)])
                    assert f"died (process {killed}) and was started again (process {postmaster(home)})" in "".join(
                        restarted()
                    )
                assert all(str(Embedded.data_of(home)) in line for line in restarted())
        finally:
            other.send_signal(signal.SIGTERM)
            assert await other.exit_code() == 0
    assert servers(home) == []


async def test_a_worker_without_other_processes_starts_a_killed_server_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FF_HOME", str(home))
    monkeypatch.delenv("FF_DATABASE_URL", raising=False)
    async with embedded_process.fabric as fabric, fabric.worker(worker_instance_id="this", lease_ttl=LEASE_TTL_S):
        assert await (await worker_of.submit(0)).result(timeout=60) == "0 by this"
        os.kill(postmaster(home), signal.SIGKILL)
        await eventually(lambda: restarts(caplog.text))
        assert await (await worker_of.submit(1)).result(timeout=60) == "1 by this"
    assert len(restarts(caplog.text)) == 1
    assert servers(home) == []


async def test_concurrent_calls_that_find_the_server_dead_start_it_once(
    home: Path, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    settings = Settings(home=home, database_url=None)
    # An idle session keeps the memory of the dead server until it notices.
    async with Engine.connect(settings=settings) as engine, second_engine(engine, pool_size=5) as other:
        acknowledged = [(await engine.create_execution(**NEW)).execution_id for _ in range(20)]
        await asyncio.gather(*(other.ping() for _ in range(5)))
        os.kill(postmaster(home), signal.SIGKILL)
        created = await asyncio.gather(*(engine.create_execution(**NEW) for _ in range(20)))
        acknowledged += [one.execution_id for one in created if isinstance(one, Created)]
        assert len(acknowledged) == 40
        for execution_id in acknowledged:
            await eventually(lambda execution_id=execution_id: exists(other, execution_id))
            await eventually(lambda execution_id=execution_id: exists(engine, execution_id))
    assert len(restarts(caplog.text)) == 1


async def test_concurrent_holders_start_a_dead_server_once_and_a_released_one_never(
    home: Path, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    holders = [await asyncio.to_thread(Embedded.start, home) for _ in range(6)]
    try:
        for kills in (1, 2):
            os.kill(killed := postmaster(home), signal.SIGKILL)
            # A dying process may still accept a connection.
            await eventually(lambda killed=killed: killed not in servers(home))
            barrier = threading.Barrier(len(holders))

            def revive(holder: Embedded, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait(timeout=30)
                return holder.revive()

            with ThreadPoolExecutor(len(holders)) as threads:
                assert all(threads.map(revive, holders))
            assert len(restarts(caplog.text)) == kills
            # A child of the server briefly has the command line of its parent.
            await eventually(lambda: servers(home) == [postmaster(home)])
            assert {holder.pid for holder in holders} == {postmaster(home)} != {killed}
            assert not any(holder.revive() for holder in holders)
    finally:
        for holder in holders:
            await asyncio.to_thread(holder.release)
    assert servers(home) == []
    assert not any([await asyncio.to_thread(holder.revive) for holder in holders])
    assert servers(home) == []
    with pytest.raises(OSError, match=r"[Nn]o such file|refused"):
        await asyncpg.connect(holders[0].url)
    assert len(restarts(caplog.text)) == 2


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


async def test_a_server_whose_data_was_deleted_is_not_replaced_by_an_empty_one(
    home: Path, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    async with Engine.connect(settings=Settings(home=home, database_url=None, submit_patience_ms=0)) as engine:
        await engine.ping()
        data, moved = Embedded.data_of(home), Embedded.data_of(home).with_name("moved")
        os.kill(postmaster(home), signal.SIGKILL)
        await eventually(lambda: not servers(home))
        data.rename(moved)
        for _ in range(3):
            with pytest.raises(TransportError):
                await engine.create_execution(**NEW)
        assert not data.exists()
        moved.rename(data)
        await eventually(lambda: is_writable(engine))
    assert len(restarts(caplog.text)) == 1
