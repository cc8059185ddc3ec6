"""Measure the cost of work on the server: bytes of write-ahead log and CPU time."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowfabric.bench.observer import SQL, Observer
from flowfabric.bench.subject import Figure, Figures

PROC = Path("/proc")
_PARENT, _USER, _SYSTEM, _USER_OF_CHILDREN, _SYSTEM_OF_CHILDREN = 1, 11, 12, 13, 14
"""Fields of /proc/<pid>/stat, counted from the field after the process name."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The log position and the CPU seconds of the server at one time."""

    log: int
    cpu: float | None


class Meter:
    """Reads the log position and, if the server runs on this machine under Linux, its CPU time."""

    def __init__(self, observer: Observer, postmaster: int | None) -> None:
        self._observer = observer
        self._postmaster = postmaster

    @classmethod
    async def of(cls, observer: Observer) -> "Meter":
        """A meter for the server of this observer."""
        (backend,) = await observer.read(SQL.read_backend)
        return cls(observer, postmaster_of(backend))

    async def read(self) -> Reading:
        """The current reading."""
        (log,) = await self._observer.read(SQL.read_position)
        return Reading(log=log, cpu=None if self._postmaster is None else cpu_seconds(self._postmaster))

    async def since(self, before: Reading, *, count: int, name: str, suffix: str = "") -> Figures:
        """The cost per execution since a reading, as the figures `wal_<name><suffix>` and `cpu_<name><suffix>`."""
        now = await self.read()
        figures = {f"wal_{name}{suffix}": Figure(value=(now.log - before.log) / count, unit="bytes")}
        if now.cpu is not None and before.cpu is not None:
            figures[f"cpu_{name}{suffix}"] = Figure(value=(now.cpu - before.cpu) / count * 1e6, unit="µs")
        return figures


def postmaster_of(backend: int) -> int | None:
    """The parent of a server process, or None if the process is not a Postgres on this machine."""
    try:
        if b"postgres" not in (PROC / str(backend) / "cmdline").read_bytes():
            return None
        return int(fields_of(PROC / str(backend))[_PARENT])
    except OSError:
        return None


def cpu_seconds(postmaster: int) -> float:
    """The CPU time of a server: of its running processes and of those that have exited."""
    ticks = 0
    for process, fields in processes():
        if process == postmaster:
            ticks += sum(int(fields[at]) for at in (_USER, _SYSTEM, _USER_OF_CHILDREN, _SYSTEM_OF_CHILDREN))
        elif int(fields[_PARENT]) == postmaster:
            ticks += int(fields[_USER]) + int(fields[_SYSTEM])
    return ticks / os.sysconf("SC_CLK_TCK")


def processes() -> Iterator[tuple[int, list[str]]]:
    """The processes of this machine, each with the fields of its stat file."""
    for folder in PROC.glob("[0-9]*"):
        try:
            yield int(folder.name), fields_of(folder)
        except OSError:
            # The process exited after the folder was listed.
            continue


def fields_of(folder: Path) -> list[str]:
    """The fields of a stat file after the process name, which may contain spaces and parentheses."""
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
