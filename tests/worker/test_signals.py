"""How a worker process ends on signals, also while a handler or a thread of it does not return."""

import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowfabric import Fabric
from flowfabric.worker.worker import CANCEL_SECONDS

from . import blocking_process, ending_process, interrupted_process

Process = subprocess.Popen[bytes]

DRAIN_SECONDS = 0.2
STOPPING = "worker w-1 stops: 1 handler running, waiting up to 0.2 s; a second signal ends at once"
CANCELLING = "worker w-1 has waited 0.2 s: cancelling 1 handler"
LEFT = "it is left to another worker when its lease expires, within 120 s"
ONE_LEFT = "0 finished, 0 handed back, 1 left until their leases expire"
MORE_SECONDS = 15.0
"""What a stop may take beyond the drain and the clean-up on a busy machine; the lease is much longer."""


@pytest.fixture
async def fabric(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    """The fabric of the worker process, connected to the test's database."""
    monkeypatch.setattr(blocking_process.fabric, "_url", url)
    async with blocking_process.fabric as fabric:
        yield fabric


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What the worker process writes to stderr."""
    return tmp_path / "log"


@pytest.fixture
def start(url: str, log: Path) -> Iterator[Callable[[float], Process]]:
    """Start a worker process that drains for so many seconds; it is killed with the test."""
    processes: list[Process] = []

    def start(drain_seconds: float) -> Process:
        command = [sys.executable, str(Path(blocking_process.__file__)), url, str(drain_seconds)]
        with log.open("wb") as stderr:
            processes.append(subprocess.Popen(command, stderr=stderr))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(timeout=60)


@pytest.fixture
def logged(log: Path) -> Callable[[], list[str]]:
    """The lines of the log since the worker stops, each from its text on."""

    def logged() -> list[str]:
        lines = [line.partition(": ")[2] for line in log.read_text().splitlines()]
        # On a busy machine the last claim may not be answered in time, which is logged and of no concern here.
        texts = [text for text in lines if not text.startswith("a claim was not answered")]
        return [re.sub(r"stopped after [0-9.]+ s", "stopped", text) for text in texts[1:]]

    return logged


async def test_a_thread_that_does_not_return_does_not_hold_a_process_that_stops(
    fabric: Fabric, start: Callable[[float], Process], logged: Any, tmp_path: Path, eventually: Any
) -> None:
    run = await blocking_process.block.submit(str(tmp_path / "started"))
    process = start(DRAIN_SECONDS)
    await eventually((tmp_path / "started").exists)
    process.terminate()
    assert process.wait(timeout=DRAIN_SECONDS + CANCEL_SECONDS + MORE_SECONDS) == 0
    assert logged() == [
        STOPPING,
        CANCELLING,
        f"{run.id} (block) does not stop: {LEFT} [task=block attempt=1]",
        f"worker w-1 has stopped: {ONE_LEFT}",
    ]


async def test_a_handler_that_ignores_its_cancellation_does_not_hold_a_process_that_stops(
    fabric: Fabric, start: Callable[[float], Process], logged: Any, tmp_path: Path, eventually: Any
) -> None:
    run = await blocking_process.ignore_cancellation.submit(str(tmp_path / "started"))
    process = start(DRAIN_SECONDS)
    await eventually((tmp_path / "started").exists)
    process.terminate()
    assert process.wait(timeout=DRAIN_SECONDS + CANCEL_SECONDS + MORE_SECONDS) == 0
    assert logged() == [
        STOPPING,
        CANCELLING,
        f"{run.id} (ignore_cancellation) does not stop: {LEFT} [task=ignore_cancellation attempt=1]",
        f"worker w-1 has stopped: {ONE_LEFT}",
    ]
    assert (await run.status()).state == "active"


async def test_threads_that_a_handler_has_started_do_not_hold_a_process_that_stops(
    fabric: Fabric, start: Callable[[float], Process], logged: Any, tmp_path: Path, eventually: Any
) -> None:
    run = await blocking_process.block_threads.submit(str(tmp_path / "started"))
    process = start(DRAIN_SECONDS)
    await eventually((tmp_path / "started").exists)
    process.terminate()
    assert process.wait(timeout=DRAIN_SECONDS + CANCEL_SECONDS + MORE_SECONDS) == 0
    *before, last = logged()
    assert before == [
        STOPPING,
        CANCELLING,
        f"{run.id} (block_threads) is handed back: any worker can claim it now [task=block_threads attempt=1]",
        "worker w-1 has stopped: 0 finished, 1 handed back",
    ]
    assert last.startswith("the process ends without waiting for threads that do not return: asyncio_")


def test_a_signal_before_the_worker_starts_ends_the_process_cleanly(url: str) -> None:
    command = [sys.executable, str(Path(interrupted_process.__file__)), url]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_start_that_fails_is_told_in_a_line_though_a_thread_does_not_return() -> None:
    command = [sys.executable, str(Path(ending_process.__file__)), "the password is wrong"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[1:] == ["flowfabric: the password is wrong"]


def test_an_interrupt_while_a_process_waits_for_its_threads_ends_it_at_once() -> None:
    command = [sys.executable, str(Path(ending_process.__file__))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_second_signal_ends_the_process_at_once(
    fabric: Fabric,
    start: Callable[[float], Process],
    logged: Any,
    tmp_path: Path,
    eventually: Any,
    number: signal.Signals,
    exit_code: int,
) -> None:
    await blocking_process.block.submit(str(tmp_path / "started"))
    process = start(600)
    await eventually((tmp_path / "started").exists)
    process.send_signal(number)
    await eventually(logged)
    process.send_signal(number)
    assert process.wait(timeout=30) == exit_code
    assert logged() == [
        "worker w-1 stops: 1 handler running, waiting up to 600 s; a second signal ends at once",
        f"{number.name} again: this process ends at once",
    ]
