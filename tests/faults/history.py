"""What processes were told, written down as they are told it: a process that is killed loses no line."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a history: what happened to whom, and everything else that was said."""

    what: str
    at: float
    actor: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)

    def __str__(self) -> str:
        said = " ".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.at:.3f} {self.actor} {self.what} {said}"


class History:
    """The history of one process; every line is one write to the end of the file."""

    def __init__(self, path: Path, actor: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._actor = actor

    def tell(self, what: str, **fields: object) -> None:
        """Write a line."""
        line = {"what": what, "at": time.time(), "actor": f"{self._actor}/{os.getpid()}", **fields}
        os.write(self._descriptor, json.dumps(line, default=str).encode() + b"\n")


def read(paths: Iterable[Path]) -> list[Line]:
    """The lines of some histories in the order of time."""
    lines = []
    for path in paths:
        for text in path.read_text().splitlines():
            said = json.loads(text)
            lines.append(Line(said.pop("what"), said.pop("at"), said.pop("actor"), said))
    return sorted(lines, key=lambda line: line.at)
