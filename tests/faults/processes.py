"""The processes of a run: started, killed, stopped, and in the end told to go."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from .cluster import send
from .history import History
from .proxy_process import ROOT

START_SECONDS = 60
STOP_SECONDS = 25
"""How long a process may take to end after SIGTERM."""
Process = subprocess.Popen[bytes]


class Processes:
    """Processes by name, each with a role."""

    def __init__(self, url: str, folder: Path, roles: Mapping[str, int], seed: str, history: History) -> None:
        self._url = url
        self._folder = folder
        self._seed = seed
        self._history = history
        self._roles = {f"{role}-{nth}": role for role, count in roles.items() for nth in range(1, count + 1)}
        self._processes: dict[str, Process] = {}
        self._starts = 0
        self.stopped: set[str] = set()
        """Those that have SIGSTOP."""

    def start_all(self) -> None:
        """Start everybody."""
        for name in self._roles:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a process under its name, with another share of chance each time."""
        self._starts += 1
        seed = f"{self._seed} {name} {self._starts}"
        command = [
            sys.executable,
            "-m",
            "tests.faults.actor",
            self._roles[name],
            self._url,
            str(self._folder),
            name,
            seed,
        ]
        # The process inherits the mask: a SIGTERM waits until it is ready for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            with (self._folder / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ.copy()
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    async def ready(self) -> None:
        """Wait until everybody has reached the store."""
        deadline = time.monotonic() + START_SECONDS
        while any(not self._is_ready(name) for name in self._roles):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the processes were not ready within {START_SECONDS} s; see {self._folder}")
            await asyncio.sleep(0.05)

    def _is_ready(self, name: str) -> bool:
        path = self._folder / f"{name}.history"
        return path.exists() and '"ready"' in path.read_text()

    def living(self) -> list[str]:
        """The names of those that run or are stopped."""
        return [name for name, process in self._processes.items() if process.poll() is None]

    async def kill(self, name: str) -> None:
        """End a process with no chance to clean up."""
        self.stopped.discard(name)
        process = self._processes[name]
        send(process, signal.SIGKILL)
        await asyncio.to_thread(process.wait)

    def stop(self, name: str) -> Process:
        """Let a process stand still."""
        self.stopped.add(name)
        send(self._processes[name], signal.SIGSTOP)
        return self._processes[name]

    def resume(self) -> None:
        """Let everybody go on, and start anew who has died."""
        for name, process in self._processes.items():
            if process.poll() is None:
                send(process, signal.SIGCONT)
            else:
                self._history.tell("died", name=name, code=process.returncode)
                self.start(name)
        self.stopped.clear()

    async def end(self, *roles: str) -> None:
        """Tell processes to go, those of some roles or all, and wait; who does not go in time is killed."""
        names = [name for name in self._processes if not roles or self._roles[name] in roles]
        for name in names:
            send(self._processes[name], signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for name in names:
            process = self._processes.pop(name)
            try:
                await asyncio.to_thread(process.wait, max(0.1, deadline - time.monotonic()))
                self._history.tell("stopped", name=name, code=process.returncode)
            except subprocess.TimeoutExpired:
                self._history.tell("did not stop", name=name)
                process.kill()
                await asyncio.to_thread(process.wait)

    def kill_all(self) -> None:
        """End whatever is left."""
        for process in self._processes.values():
            process.kill()
            process.wait()
