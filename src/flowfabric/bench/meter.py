"""What work costs the server: bytes of write-ahead log and processor time."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowfabric.bench.observer import SQL, Observer
from flowfabric.bench.subject import Figure, Figures

PROC = Path("/proc")
_PARENT, _USER, _SYSTEM, _USER_OF_DEAD, _SYSTEM_OF_DEAD = 1, 11, 12, 13, 14
"""Fields of /proc/<pid>/stat, counted from the one after the name."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Where the log and the clocks of the server stand."""

    log: int
    cpu: float | None


class Meter:
    """Reads what the server has used; processor time only where it runs on this machine, under Linux."""

    def __init__(self, observer: Observer, postmaster: int | None) -> None:
        self._observer = observer
        self._postmaster = postmaster

    @classmethod
    async def of(cls, observer: Observer) -> "Meter":
        """A meter for the server this observer is connected to."""
        (backend,) = await observer.read(SQL.read_backend)
        return cls(observer, postmaster_of(backend))

    async def read(self) -> Reading:
        """What was used so far."""
        (log,) = await self._observer.read(SQL.read_position)
        return Reading(log=log, cpu=None if self._postmaster is None else cpu_seconds(self._postmaster))

    async def since(self, before: Reading, *, count: int, name: str, suffix: str = "") -> Figures:
        """What each of `count` executions has cost since then: `wal_<name>` and `cpu_<name>`, before the suffix."""
        now = await self.read()
        figures = {f"wal_{name}{suffix}": Figure(value=(now.log - before.log) / count, unit="bytes")}
        if now.cpu is not None and before.cpu is not None:
            figures[f"cpu_{name}{suffix}"] = Figure(value=(now.cpu - before.cpu) / count * 1e6, unit="µs")
        return figures


def postmaster_of(backend: int) -> int | None:
    """The parent of a server process, where it is a process of this machine."""
    try:
        if b"postgres" not in (PROC / str(backend) / "cmdline").read_bytes():
            return None
        return int(fields_of(PROC / str(backend))[_PARENT])
    except OSError:
        return None


def cpu_seconds(postmaster: int) -> float:
    """The processor time of a server: of its processes, and of those that have ended."""
    ticks = 0
    for process, fields in processes():
        if process == postmaster:
            ticks += sum(int(fields[at]) for at in (_USER, _SYSTEM, _USER_OF_DEAD, _SYSTEM_OF_DEAD))
        elif int(fields[_PARENT]) == postmaster:
            ticks += int(fields[_USER]) + int(fields[_SYSTEM])
    return ticks / os.sysconf("SC_CLK_TCK")


def processes() -> Iterator[tuple[int, list[str]]]:
    """The processes of this machine with the fields of each."""
    for folder in PROC.glob("[0-9]*"):
        try:
            yield int(folder.name), fields_of(folder)
        except OSError:
            # It has ended since the folder was listed.
            continue


def fields_of(folder: Path) -> list[str]:
    """The fields after the name, which may hold spaces and brackets of its own."""
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
