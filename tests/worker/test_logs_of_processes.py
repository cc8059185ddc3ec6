"""What a worker process writes to stderr."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric import Fabric

from . import logging_process

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


@pytest.fixture
async def fabric(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    """The fabric of the worker process, connected to the test's database."""
    monkeypatch.setattr(logging_process.fabric, "_url", url)
    async with logging_process.fabric as fabric:
        yield fabric


async def lines_of_process(url: str, *arguments: str) -> list[str]:
    """Run a worker process until it stops, and return what it wrote to stderr."""
    command = [sys.executable, str(Path(logging_process.__file__)), url, *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr.splitlines()


async def test_a_process_without_a_logging_setup_logs_to_stderr(fabric: Fabric, url: str) -> None:
    greeted, failed = await logging_process.greet.submit("you"), await logging_process.fail.submit()
    lines = await lines_of_process(url)
    stamped = [re.sub(f"^{STAMP} ", "", line) for line in lines if re.match(f"{STAMP} [A-Z]+ ", line)]
    assert stamped[0] == (
        "INFO flowfabric.worker: worker w-1 started: lanes default; tasks fail, greet; concurrency 64;"
        " namespace default"
    )
    assert f"INFO app.orders: hello you [task=greet attempt=1 execution_id={greeted.id}]" in stamped
    assert any(line.startswith("INFO flowfabric.worker: worker w-1 stops: ") for line in stamped)
    assert stamped[-1].startswith("INFO flowfabric.worker: worker w-1 has stopped after ")
    assert not any("not shown" in line for line in lines)
    (at,) = [nth for nth, line in enumerate(lines) if " ERROR " in line]
    assert re.sub(f"^{STAMP} ", "", lines[at]) == (
        f"ERROR flowfabric.worker.reports: {failed.id} (fail) failed in attempt 1 for good: ValueError: no luck"
        " [attempt=1]"
    )
    assert lines[at + 1] == "Traceback (most recent call last):"


async def test_the_logging_setup_of_a_process_is_left_alone(fabric: Fabric, url: str) -> None:
    run = await logging_process.fail.submit()
    lines = await lines_of_process(url, "configured")
    assert lines[0] == f"ERROR|fail|{run.id} (fail) failed in attempt 1 for good: ValueError: no luck"
    assert lines[-1] == "ValueError: no luck"
    assert len([line for line in lines if run.id in line]) == 1
