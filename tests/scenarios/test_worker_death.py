"""When workers die, freeze or are told to stop, no work is lost and none ends twice."""

import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures import Clock, Eventually, Rows
from flowfabric import Fabric, Run, quorum

from . import worker_process
from .processes import Process, environment_for
from .worker_process import LEASE_TTL_MS, RunInfo

StartWorker = Callable[[str], Process]
"""Starts a worker process under a name."""


@pytest.fixture
async def fabric(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    """The fabric of the worker processes, connected to the test's database."""
    monkeypatch.setenv("FF_DATABASE_URL", url)
    async with worker_process.fabric as fabric:
        yield fabric


@pytest.fixture
def start_worker(url: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Start worker processes; those that still run are killed after the test."""
    processes: list[Process] = []
    environment = environment_for(FF_DATABASE_URL=url)

    def start(name: str) -> Process:
        log = tmp_path / f"{name}.log"
        processes.append(Process(worker_process.run, name, log=log, environment=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


async def submit_waiting(tmp_path: Path, count: int) -> list[Run[RunInfo]]:
    return [await worker_process.wait_for_gate.submit(str(tmp_path)) for _ in range(count)]


def started(tmp_path: Path, name: str) -> int:
    return len(list(tmp_path.glob(f"{name} *")))


def written(tmp_path: Path) -> dict[str, str]:
    """What the runs have written, by the name of their worker."""
    return {path.name.partition(" ")[0]: path.read_text() for path in tmp_path.glob("* *")}


async def end_events(rows: Rows) -> Counter[Any]:
    """The number of end events of each execution."""
    return Counter(event["execution_id"] for event in await rows.of("event_each") if event["outcome"] is not None)


async def test_the_runs_of_a_killed_worker_are_reclaimed(
    fabric: Fabric, start_worker: StartWorker, tmp_path: Path, eventually: Eventually, rows: Rows, clock: Clock
) -> None:
    await clock.stop()
    runs = await submit_waiting(tmp_path, 5)
    first = start_worker("first")
    await eventually(lambda: started(tmp_path, "first") == 5)
    first.kill()
    await clock.advance(ms=LEASE_TTL_MS + 1)
    start_worker("second")
    await eventually(lambda: started(tmp_path, "second") == 5)
    (tmp_path / "gate").touch()
    for run in runs:
        assert await run.result(timeout=60) == {"worker": "second", "attempt_index": 1, "attempt_type": "reclaim"}
    ends = await end_events(rows)
    assert (len(ends), set(ends.values())) == (5, {1})


async def test_a_reader_follows_the_stream_of_a_run_whose_worker_is_killed(
    fabric: Fabric, start_worker: StartWorker, tmp_path: Path, clock: Clock
) -> None:
    await clock.stop()
    run = await worker_process.write_until_gate.submit(str(tmp_path))
    first = start_worker("first")
    found: list[tuple[int, str]] = []
    is_killed = False
    async for frame in run.stream():
        found.append((frame.attempt, frame.text))
        if not is_killed and len(found) == 50:
            first.kill()
            is_killed = True
            await clock.advance(ms=LEASE_TTL_MS + 1)
            start_worker("second")
        elif frame.attempt == 2 and frame.text == "50":
            (tmp_path / "gate").touch()
    count = await run.result(timeout=60)
    before = [text for attempt, text in found if attempt == 1]
    after = [text for attempt, text in found if attempt == 2]
    assert before == [str(number) for number in range(len(before))]
    assert after == [str(number) for number in range(count)]
    assert found == [(1, text) for text in before] + [(2, text) for text in after]


async def test_a_worker_that_froze_past_its_lease_cannot_complete(
    fabric: Fabric, start_worker: StartWorker, tmp_path: Path, eventually: Eventually, rows: Rows, clock: Clock
) -> None:
    await clock.stop()
    (run,) = await submit_waiting(tmp_path, 1)
    frozen = start_worker("frozen")
    await eventually(lambda: started(tmp_path, "frozen") == 1)
    frozen.send_signal(signal.SIGSTOP)
    await clock.advance(ms=LEASE_TTL_MS + 1)
    other = start_worker("other")
    await eventually(lambda: started(tmp_path, "other") == 1)
    (tmp_path / "gate").touch()
    result = await run.result(timeout=60)
    assert result == {"worker": "other", "attempt_index": 1, "attempt_type": "reclaim"}
    other.send_signal(signal.SIGTERM)
    assert await other.exit_code() == 0
    frozen.send_signal(signal.SIGCONT)
    # It runs other work, and the run it had lost has changed nothing.
    after = await worker_process.pause.submit(0)
    assert (await after.result(timeout=60))["worker"] == "frozen"
    await eventually(lambda: any(text in frozen.log for text in ("is stopped", "was refused")))
    assert await run.result(timeout=60) == result
    assert len([event for event in await rows.events(run.id) if event["outcome"] is not None]) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_that_is_told_to_stop_finishes_its_runs(
    fabric: Fabric,
    start_worker: StartWorker,
    tmp_path: Path,
    eventually: Eventually,
    rows: Rows,
    clock: Clock,
    number: signal.Signals,
) -> None:
    await clock.stop()
    runs = await submit_waiting(tmp_path, 3)
    worker = start_worker("worker")
    await eventually(lambda: started(tmp_path, "worker") == 3)
    worker.send_signal(number)
    (tmp_path / "gate").touch()
    assert [(await run.result(timeout=60))["attempt_index"] for run in runs] == [0, 0, 0]
    assert await worker.exit_code() == 0
    assert await rows.of("worker") == []


async def test_nothing_is_lost_or_ends_twice_when_a_busy_worker_is_killed(
    fabric: Fabric, start_worker: StartWorker, eventually: Eventually, rows: Rows, clock: Clock
) -> None:
    runs = [await worker_process.pause.submit(0.02) for _ in range(200)]
    first = start_worker("first")
    start_worker("second")

    async def a_quarter_has_ended() -> bool:
        return len(await end_events(rows)) >= 50

    await eventually(a_quarter_has_ended)
    first.kill()
    # The leases of the other worker expire too: what it runs is reclaimed while it runs.
    await clock.advance(ms=LEASE_TTL_MS + 1)
    for run in runs:
        await run.result(timeout=60)
    ends = await end_events(rows)
    assert (len(ends), set(ends.values())) == (200, {1})


async def test_a_node_of_a_flow_gets_the_same_results_after_its_worker_was_killed(
    fabric: Fabric, start_worker: StartWorker, tmp_path: Path, eventually: Eventually, clock: Clock
) -> None:
    await clock.stop()
    flow = fabric.flow("collect")
    pauses = [flow.add(worker_process.pause, seconds) for seconds in (0.0, 0.0, 0.2)]
    collected = flow.add(worker_process.collect, quorum(2, of=pauses), str(tmp_path))
    run = await flow.submit()
    first = start_worker("first")
    await eventually(lambda: started(tmp_path, "first") == 1)
    first.kill()
    await clock.advance(ms=LEASE_TTL_MS + 1)
    start_worker("second")
    await eventually(lambda: started(tmp_path, "second") == 1)
    await run.run(pauses[2]).result(timeout=60)
    (tmp_path / "gate").touch()
    assert await run.run(collected).result(timeout=60) == ["first", "first"]
    await run.result(timeout=60)
    assert written(tmp_path) == {"first": "['first', 'first'] 1", "second": "['first', 'first'] 2"}
