"""Processes forked from one that has imported flowfabric already: a new interpreter takes longer than most tests."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["flowfabric"])
_TIMEOUT_S = 60


def environment_for(**variables: str) -> dict[str, str]:
    """The environment of this process with these variables as the only ones of FlowFabric."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FF_")} | variables


class Process:
    """A process that runs a function of a module and writes its stderr to a file."""

    def __init__(self, run: Callable[..., None], *arguments: str, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        log.touch()
        self._process = _FORKS.Process(target=_run, args=(run, arguments, log, dict(environment)), daemon=True)
        self._process.start()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process if it still runs, and wait for its end."""
        self._process.kill()
        self._process.join(_TIMEOUT_S)

    async def exit_code(self) -> int | None:
        """Wait until the process has ended; its exit code."""
        await asyncio.to_thread(self._process.join, _TIMEOUT_S)
        return self._process.exitcode

    @property
    def log(self) -> str:
        """What the process has written to stderr so far."""
        return self._log.read_text()


def _run(run: Callable[..., None], arguments: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(log.parent)
    with log.open("wb") as output:
        os.dup2(output.fileno(), 2)
    run(*arguments)
