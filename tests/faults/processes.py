"""The processes of a run: start, kill, stop, resume and end them."""

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

    def __init__(
        self, url: str, folder: Path, roles: Mapping[str, int], seed: str, lease_ms: int, history: History
    ) -> None:
        self._url = url
        self._folder = folder
        self._seed = seed
        self._lease_ms = lease_ms
        self._history = history
        self._roles = {f"{role}-{nth}": role for role, count in roles.items() for nth in range(1, count + 1)}
        self._processes: dict[str, Process] = {}
        self._starts = 0
        self.stopped: set[str] = set()
        """The names of the processes stopped by SIGSTOP."""

    def start_all(self) -> None:
        """Start every process."""
        for name in self._roles:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a process by name, with another seed each time."""
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
            str(self._lease_ms),
        ]
        # The process inherits the mask: a SIGTERM stays pending until its handler is installed.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            with (self._folder / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ.copy()
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    async def ready(self) -> None:
        """Wait until every process has connected."""
        deadline = time.monotonic() + START_SECONDS
        while any(not self._is_ready(name) for name in self._roles):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the processes did not connect within {START_SECONDS} s; see {self._folder}")
            await asyncio.sleep(0.05)

    def _is_ready(self, name: str) -> bool:
        path = self._folder / f"{name}.history"
        return path.exists() and '"ready"' in path.read_text()

    def living(self) -> list[str]:
        """The names of the processes that have not exited."""
        return [name for name, process in self._processes.items() if process.poll() is None]

    async def kill(self, name: str) -> None:
        """Kill a process with SIGKILL and wait for it."""
        self.stopped.discard(name)
        process = self._processes[name]
        send(process, signal.SIGKILL)
        await asyncio.to_thread(process.wait)

    def stop(self, name: str) -> Process:
        """Stop a process with SIGSTOP."""
        self.stopped.add(name)
        send(self._processes[name], signal.SIGSTOP)
        return self._processes[name]

    def resume(self) -> None:
        """Continue every stopped process, and restart those that have died."""
        for name, process in self._processes.items():
            if process.poll() is None:
                send(process, signal.SIGCONT)
            else:
                self._history.record("died", name=name, code=process.returncode)
                self.start(name)
        self.stopped.clear()

    async def end(self, *roles: str) -> None:
        """Send SIGTERM to the processes of these roles, or to all, and wait; kill those that do not exit in time."""
        names = [name for name in self._processes if not roles or self._roles[name] in roles]
        for name in names:
            send(self._processes[name], signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for name in names:
            process = self._processes.pop(name)
            try:
                await asyncio.to_thread(process.wait, max(0.1, deadline - time.monotonic()))
                self._history.record("stopped", name=name, code=process.returncode)
            except subprocess.TimeoutExpired:
                self._history.record("did not stop", name=name)
                process.kill()
                await asyncio.to_thread(process.wait)

    def kill_all(self) -> None:
        """Kill every process that is left."""
        for process in self._processes.values():
            process.kill()
            process.wait()
