"""How a worker process ends on SIGTERM and SIGINT, also if a handler or a thread does not return."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from fixtures import Eventually
from flowfabric import Fabric
from flowfabric.worker.interrupts import calling_on_interrupts

from . import blocking_process, ending_process, interrupted_process

Process: TypeAlias = subprocess.Popen[bytes]
Start: TypeAlias = Callable[[float], Process]
Logged: TypeAlias = Callable[[], list[str]]

DRAIN_SECONDS = 0.2
LEFT = "another worker can claim it when its lease expires, within 120 s"
STOP_SECONDS = 30.0
"""Much more than a stop takes on a busy machine, and much less than the handlers and their leases."""


@pytest.fixture
async def fabric(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    """The fabric of the worker process, connected to the test's database."""
    monkeypatch.setattr(blocking_process.fabric, "_url", url)
    async with blocking_process.fabric as fabric:
        yield fabric


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The stderr of the worker process."""
    return tmp_path / "log"


@pytest.fixture
def start(url: str, log: Path) -> Iterator[Start]:
    """Start a worker process with this drain time; it is killed at the end of the test."""
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
def logged(log: Path) -> Logged:
    """The lines of the log after the start of the worker, each from its text on."""

    def logged() -> list[str]:
        lines = [line.partition(": ")[2] for line in log.read_text().splitlines()]
        # On a busy machine the last claim may not be answered in time, which is logged and not tested here.
        texts = [text for text in lines if not text.startswith("a claim was not answered")]
        return [re.sub(r"stopped after [0-9.]+ s", "stopped", text) for text in texts[1:]]

    return logged


async def test_handlers_and_threads_that_do_not_stop_do_not_delay_the_end_of_a_process(
    fabric: Fabric, start: Start, logged: Logged, tmp_path: Path, eventually: Eventually
) -> None:
    files = [tmp_path / name for name in ("blocked", "all threads blocked", "ignoring")]
    blocked, of_asyncio, ignoring = (
        await blocking_process.block.submit(str(files[0])),
        await blocking_process.block_threads.submit(str(files[1])),
        await blocking_process.ignore_cancellation.submit(str(files[2])),
    )
    process = start(DRAIN_SECONDS)
    await eventually(lambda: all(file.exists() for file in files))
    process.terminate()
    assert process.wait(timeout=STOP_SECONDS) == 0
    stops, time_up, *left, last = logged()
    assert [stops, time_up, last] == [
        "worker w-1 stops: 3 handlers running, waiting up to 0.2 s; a second signal ends at once",
        "worker w-1 has waited 0.2 s: cancelling 3 handlers",
        "worker w-1 has stopped: 0 finished while it stopped, 1 handed back, 2 left until their leases expire",
    ]
    assert sorted(left) == sorted(
        [
            f"{of_asyncio.id} (block_threads) is handed back: any worker can claim it now [attempt=1]",
            f"{blocked.id} (block) does not stop: {LEFT} [attempt=1]",
            f"{ignoring.id} (ignore_cancellation) does not stop: {LEFT} [attempt=1]",
        ]
    )
    assert (await ignoring.status()).state == "active"


async def test_a_second_signal_ends_the_process_at_once(
    fabric: Fabric, start: Start, logged: Logged, tmp_path: Path, eventually: Eventually
) -> None:
    await blocking_process.block.submit(str(tmp_path / "started"))
    process = start(600)
    await eventually((tmp_path / "started").exists)
    process.send_signal(signal.SIGINT)
    await eventually(logged)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=STOP_SECONDS) == 143
    assert logged() == [
        "worker w-1 stops: 1 handler running, waiting up to 600 s; a second signal ends at once",
        "SIGTERM again: this process ends at once",
    ]


async def test_the_exit_code_names_the_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    exit_codes: list[int] = []
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    stopped = asyncio.Event()
    before = signal.getsignal(signal.SIGINT)
    with calling_on_interrupts(stopped.set):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stopped.wait(), 60)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
    assert exit_codes == [130, 143]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_before_the_worker_starts_ends_the_process_cleanly(url: str) -> None:
    command = [sys.executable, str(Path(interrupted_process.__file__)), url]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_failed_start_is_one_line_on_stderr_even_if_a_thread_does_not_return() -> None:
    command = [sys.executable, str(Path(ending_process.__file__)), "0.1", "the password is wrong"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    of_threads, *others = ended.stderr.splitlines()
    assert of_threads.startswith("the process ends without waiting for threads that do not return: asyncio_")
    assert others == ["flowfabric: the password is wrong"]


def test_an_interrupt_while_a_process_waits_for_its_threads_ends_it_at_once() -> None:
    command = [sys.executable, str(Path(ending_process.__file__)), "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()
