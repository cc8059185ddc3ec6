"""What a worker process writes to its terminal."""

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
    """What a worker process writes to stderr until it has stopped."""
    command = [sys.executable, str(Path(logging_process.__file__)), url, *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr.splitlines()


async def test_a_process_that_sets_up_no_logging_shows_what_its_worker_does(fabric: Fabric, url: str) -> None:
    run = await logging_process.greet.submit("you")
    lines = await lines_of_process(url)
    assert all(re.match(f"{STAMP} [A-Z]+ ", line) for line in lines)
    texts = [re.sub(f"^{STAMP} ", "", line) for line in lines]
    assert texts[:2] == [
        "INFO flowfabric.worker: worker w-1 started: lanes default; tasks fail, greet; concurrency 64;"
        " namespace default",
        f"INFO app.orders: hello you [task=greet attempt=1 execution_id={run.id}]",
    ]
    assert texts[2].startswith("INFO flowfabric.worker: worker w-1 stops: ")
    assert texts[-1].startswith("INFO flowfabric.worker: worker w-1 has stopped after ")


async def test_a_failure_is_shown_with_its_fields_before_its_traceback(fabric: Fabric, url: str) -> None:
    run = await logging_process.fail.submit()
    lines = await lines_of_process(url)
    (at,) = [nth for nth, line in enumerate(lines) if " ERROR " in line]
    assert re.sub(f"^{STAMP} ", "", lines[at]) == (
        f"ERROR flowfabric.worker.reports: {run.id} (fail) failed in attempt 1 for good: ValueError: no luck"
        " [task=fail attempt=1]"
    )
    assert lines[at + 1] == "Traceback (most recent call last):"


async def test_a_process_that_has_set_up_logging_is_left_alone(fabric: Fabric, url: str) -> None:
    run = await logging_process.fail.submit()
    lines = await lines_of_process(url, "configured")
    assert lines[0] == f"ERROR|fail|{run.id} (fail) failed in attempt 1 for good: ValueError: no luck"
    assert lines[-1] == "ValueError: no luck"
    assert len([line for line in lines if run.id in line]) == 1
