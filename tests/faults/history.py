"""Histories: what each process was answered, written to a file at once, so that a killed process loses no record."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a history."""

    event: str
    at: float
    actor: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)

    def __str__(self) -> str:
        fields = " ".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.at:.3f} {self.actor} {self.event} {fields}"


class History:
    """The history of one process; every record is appended with one write."""

    def __init__(self, path: Path, actor: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._actor = actor

    def record(self, event: str, **fields: object) -> None:
        """Append a record."""
        line = {"event": event, "at": time.time(), "actor": f"{self._actor}/{os.getpid()}", **fields}
        os.write(self._descriptor, json.dumps(line, default=str).encode() + b"\n")


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of these histories, ordered by time."""
    records = []
    for path in paths:
        for text in path.read_text().splitlines():
            fields = json.loads(text)
            records.append(Record(fields.pop("event"), fields.pop("at"), fields.pop("actor"), fields))
    return sorted(records, key=lambda record: record.at)
