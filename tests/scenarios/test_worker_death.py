"""Workers that die, freeze or are told to go: no work is lost, and none is ended twice."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures import Clock, Eventually, Rows
from flowfabric import Fabric, Run

from . import worker_process
from .worker_process import Told

Process = subprocess.Popen[bytes]


@pytest.fixture
async def fabric(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    """The fabric of the worker processes, connected to the test's database."""
    monkeypatch.setattr(worker_process.fabric, "_url", url)
    async with worker_process.fabric as fabric:
        yield fabric


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    """Start a worker process under a name; what is left of them is killed with the test."""
    processes: list[Process] = []

    def start(name: str) -> Process:
        with (tmp_path / f"{name}.log").open("wb") as log:
            command = [sys.executable, str(Path(worker_process.__file__)), url, name]
            processes.append(subprocess.Popen(command, stderr=log))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(timeout=60)


async def submit_waiting(tmp_path: Path, count: int) -> list[Run[Told]]:
    return [await worker_process.wait_for_gate.submit(str(tmp_path)) for _ in range(count)]


def started(tmp_path: Path, name: str) -> int:
    return len(list(tmp_path.glob(f"{name} *")))


async def test_the_runs_of_a_killed_worker_come_back_by_themselves(
    fabric: Fabric, start: Callable[[str], Process], tmp_path: Path, eventually: Eventually, rows: Rows, clock: Clock
) -> None:
    await clock.stop()
    runs = await submit_waiting(tmp_path, 5)
    first = start("first")
    await eventually(lambda: started(tmp_path, "first") == 5)
    first.kill()
    await clock.advance(ms=worker_process.LEASE_TTL_MS + 1)
    start("second")
    await eventually(lambda: started(tmp_path, "second") == 5)
    (tmp_path / "gate").touch()
    for run in runs:
        assert await run.result(timeout=60) == {"worker": "second", "attempt_index": 1, "attempt_type": "reclaim"}
        assert len([event for event in await rows.events(run.id) if event["outcome"] is not None]) == 1


async def test_a_worker_that_froze_past_its_lease_cannot_complete(
    fabric: Fabric, start: Callable[[str], Process], tmp_path: Path, eventually: Eventually, rows: Rows, clock: Clock
) -> None:
    await clock.stop()
    (run,) = await submit_waiting(tmp_path, 1)
    frozen = start("frozen")
    await eventually(lambda: started(tmp_path, "frozen") == 1)
    frozen.send_signal(signal.SIGSTOP)
    await clock.advance(ms=worker_process.LEASE_TTL_MS + 1)
    other = start("other")
    await eventually(lambda: started(tmp_path, "other") == 1)
    (tmp_path / "gate").touch()
    told = await run.result(timeout=60)
    assert told == {"worker": "other", "attempt_index": 1, "attempt_type": "reclaim"}
    other.terminate()
    assert other.wait(timeout=60) == 0
    frozen.send_signal(signal.SIGCONT)
    # It goes on with other work, and what it had in hand has changed nothing.
    after = await worker_process.pause.submit(0)
    assert (await after.result(timeout=60))["worker"] == "frozen"
    log = tmp_path / "frozen.log"
    await eventually(lambda: any(words in log.read_text() for words in ("is stopped", "was refused")))
    assert await run.result(timeout=60) == told
    assert len([event for event in await rows.events(run.id) if event["outcome"] is not None]) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_that_is_told_to_go_finishes_what_it_runs(
    fabric: Fabric,
    start: Callable[[str], Process],
    tmp_path: Path,
    eventually: Eventually,
    rows: Rows,
    clock: Clock,
    number: signal.Signals,
) -> None:
    await clock.stop()
    runs = await submit_waiting(tmp_path, 3)
    worker = start("worker")
    await eventually(lambda: started(tmp_path, "worker") == 3)
    worker.send_signal(number)
    (tmp_path / "gate").touch()
    assert [(await run.result(timeout=60))["attempt_index"] for run in runs] == [0, 0, 0]
    assert worker.wait(timeout=60) == 0
    assert await rows.of("worker") == []


async def test_nothing_is_lost_or_ended_twice_when_a_busy_worker_is_killed(
    fabric: Fabric, start: Callable[[str], Process], eventually: Eventually, rows: Rows
) -> None:
    runs = [await worker_process.pause.submit(0.02) for _ in range(200)]
    workers = [start("first"), start("second")]

    async def endings() -> dict[Any, int]:
        counted: dict[Any, int] = {}
        for event in await rows.of("event_each"):
            if event["outcome"] is not None:
                counted[event["execution_id"]] = counted.get(event["execution_id"], 0) + 1
        return counted

    async def a_quarter_has_ended() -> bool:
        return len(await endings()) >= 50

    await eventually(a_quarter_has_ended)
    os.kill(workers[0].pid, signal.SIGKILL)
    told = [await run.result(timeout=30) for run in runs]
    assert len(told) == 200
    counted = await endings()
    assert (len(counted), set(counted.values())) == (200, {1})
