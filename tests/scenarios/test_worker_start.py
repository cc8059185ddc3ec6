"""A worker process waits for a server that is not up yet, and reports any other failure to start in one line."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from databases import at_database, execute
from engine.state import all_cases
from faults.proxy import Proxy
from fixtures import Eventually
from flowfabric import Fabric
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings

from . import worker_process
from .command import migrate
from .killable import PASSWORD, as_app
from .processes import Process, environment_for
from .test_start import free_port

SECRET = "ab" * 32
StartWorker = Callable[..., Process]
"""Starts a worker process on an address with these variables."""


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    """Start worker processes; those that still run are killed after the test."""
    processes: list[Process] = []

    def start(url: str, **variables: str) -> Process:
        environment = environment_for(**({"FF_DATABASE_URL": url} if url else {}) | variables)
        log = tmp_path / f"{len(processes)}.log"
        processes.append(Process(worker_process.run, "worker", log=log, environment=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def texts(process: Process) -> list[str]:
    """The lines that a process has logged so far, without their level and logger."""
    return [line.partition(": ")[2] for line in process.log.splitlines(keepends=True) if line.endswith("\n")]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A worker that cannot start: how it is started and what it must print."""

    url: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    code: int = 1
    begin: str = "flowfabric: "
    text: str = ""
    end: str = ""


async def test_a_worker_that_cannot_start_says_why_in_one_line(
    url: str, empty_url: str, password_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    (taken := tmp_path / "taken").write_text("a file")
    no_key = "flowfabric: no signing key is stored: set FF_WAITPOINT_HMAC_SECRET to 64 hex digits"
    wrong_url = f"mysql://app:{PASSWORD}@host/shop"
    failures = {
        "no schema": Failure(url=empty_url, begin="flowfabric: schema flowfabric ", end="run `ff migrate`"),
        "no signing key": Failure(url=url, begin=no_key),
        "wrong password": Failure(
            url=as_app(password_url, "wrong"),
            text="refuses user app for database flowfabric: password authentication failed",
        ),
        "no database": Failure(
            url=at_database(password_url, "shop"), begin="flowfabric: there is no database shop at "
        ),
        "no lane": Failure(url=url, variables={"FF_LANES": ","}, code=2, begin="flowfabric: FF_LANES=,: "),
        "pool size": Failure(
            url=url,
            variables={"FF_DATABASE_POOL_SIZE": "none"},
            code=2,
            begin="flowfabric: FF_DATABASE_POOL_SIZE=none: ",
        ),
        "wrong URL": Failure(url=wrong_url, code=2, begin="flowfabric: FF_DATABASE_URL: must begin with postgresql://"),
        "no embedded server": Failure(variables={"FF_HOME": str(taken)}, text=str(taken)),
    }
    started = {name: start_worker(failure.url, **failure.variables) for name, failure in failures.items()}
    with all_cases() as case:
        for name, failure in failures.items():
            with case(name):
                assert await started[name].exit_code() == failure.code
                (line,) = started[name].log.splitlines()
                assert line.startswith(failure.begin)
                assert failure.text in line
                assert line.endswith(failure.end)
                assert PASSWORD not in line


def test_an_interpreter_whose_worker_cannot_start_prints_one_line_and_exits_with_the_code() -> None:
    done = subprocess.run(
        [sys.executable, worker_process.__file__, "worker"],
        env=environment_for(FF_DATABASE_URL="postgresql://127.0.0.1/shop", FF_LANES=""),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowfabric: FF_LANES='': must name at least one lane")


@asynccontextmanager
async def submitted_run(url: str) -> AsyncIterator[Any]:
    """A run that waits for a worker."""
    fabric = Fabric(url)
    pause = fabric.task(name="pause")(worker_process.pause.__wrapped__)
    async with fabric:
        yield await pause.submit(0)


async def test_a_worker_waits_for_a_server_that_is_not_up_yet(
    url: str, start_worker: StartWorker, eventually: Eventually
) -> None:
    port = free_port()
    proxy = Proxy(url, port=port)
    database = urlsplit(url).path[1:]
    address = f"postgresql://postgres:{PASSWORD}@127.0.0.1:{port}/{database}"
    process = start_worker(address, FF_WAITPOINT_HMAC_SECRET=SECRET)
    await eventually(lambda: texts(process))
    proxy.refusal = "57P03", "the database system is starting up"
    async with submitted_run(url) as run, proxy:
        await eventually(lambda: proxy.connections >= 2)
        proxy.refusal = None
        assert (await run.result(timeout=60))["worker"] == "worker"
        process.send_signal(signal.SIGTERM)
        assert await process.exit_code() == 0
    waiting, connected, started, *stopped = texts(process)
    assert waiting == (
        f"waiting for the server: no server answers at 127.0.0.1:{port} (database {database}): connection refused;"
        " start the server, or correct the database URL (FF_DATABASE_URL)\n"
    )
    assert connected.startswith("the server answers after ")
    assert started.startswith("worker worker started: ")
    assert [text.startswith("worker worker ") for text in stopped] == [True, True]
    assert PASSWORD not in process.log


async def test_a_worker_waits_for_a_read_only_server_to_become_writable(
    password_url: str, start_worker: StartWorker, eventually: Eventually
) -> None:
    settings = Settings(database_url=password_url, schema_name="writable_later", migrate_on_start=True)
    async with Engine.connect(settings=settings):
        pass
    await execute(
        password_url,
        "grant all on schema writable_later to app",
        "grant all on all tables in schema writable_later to app",
        "grant all on all sequences in schema writable_later to app",
        "alter role app set default_transaction_read_only = on",
    )
    try:
        url = as_app(password_url, PASSWORD)
        code, out, err = await migrate(url, "--check", "--schema", "writable_later")
        assert (code, out) == (1, "")
        reason = err.removeprefix("ff: ")
        assert reason.endswith(
            " (database flowfabric) is read-only: default_transaction_read_only is on; turn it off where it is set,"
            " for example `alter role app set default_transaction_read_only = off`\n"
        )
        process = start_worker(url, FF_SCHEMA="writable_later")
        await eventually(lambda: texts(process))
        assert texts(process) == [f"waiting for the server: {reason}"]
        await execute(password_url, "alter role app set default_transaction_read_only = off")
        await eventually(lambda: len(texts(process)) > 1)
        assert texts(process)[1].startswith("the server answers after ")
        process.kill()
    finally:
        await execute(
            password_url, "drop schema writable_later cascade", "alter role app reset default_transaction_read_only"
        )


async def test_a_worker_that_waits_for_its_server_stops_on_a_signal(
    start_worker: StartWorker, eventually: Eventually
) -> None:
    numbers = signal.SIGTERM, signal.SIGINT
    processes = [start_worker(f"postgresql://app:{PASSWORD}@127.0.0.1:{free_port()}/shop") for _ in numbers]
    for process, number in zip(processes, numbers, strict=True):
        await eventually(lambda process=process: texts(process))
        process.send_signal(number)
    for process in processes:
        assert await process.exit_code() == 0
        (text,) = texts(process)
        assert text.startswith("waiting for the server: ")
        assert PASSWORD not in text
