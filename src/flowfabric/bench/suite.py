"""The run: every subject in turn, round after round, each in a process and a database of its own."""

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from flowfabric.bench.overlay import overlaid
from flowfabric.bench.ratios import BEFORE, RATIOS, medians, ratios, ratios_of_versions
from flowfabric.bench.run import SUBJECTS
from flowfabric.bench.server import Server
from flowfabric.bench.subject import Figure, Figures
from flowfabric.bench.without import TABLE
from flowfabric.version import __version__

PATIENCE_S = 300
SOAK = "soak"
ONCE = frozenset({"idle", "backlog", "counts"})
"""Subjects that take medians of their own, and need no further round."""
THOROUGH = frozenset({"result", "cost", "renew", "queues", "counts", "pinned", "dead_rows"})
"""Subjects that a quick run measures only where they are named."""
OURS = ("submit", "work", "suspend", "idle", "backlog", "result", "cost", "renew", "queues", "pinned", "dead_rows")
DISTRIBUTIONS = ("asyncpg", "uvloop", "pgqueuer", "awa-pg", "absurd-sdk", "procrastinate", "dbos")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How often each subject is measured, at which share of its full load, and how long all of it may take."""

    rounds: int
    scale: float
    seconds: float
    is_quick: bool = False


FULL = Plan(rounds=3, scale=1.0, seconds=3_600)
QUICK = Plan(rounds=1, scale=0.2, seconds=51, is_quick=True)
LONG_SOAK = Plan(rounds=1, scale=1.0, seconds=3_600)
SHORT_SOAK = Plan(rounds=1, scale=0.1, seconds=600, is_quick=True)


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a run found: the median of every figure and ratio, and why a subject has none."""

    environment: dict[str, Any]
    figures: Figures
    ratios: dict[str, float]
    errors: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        """The results as written to disk and printed."""
        return json.dumps(
            {
                "environment": self.environment,
                "figures": {
                    name: {"value": round(each.value, 3), "unit": each.unit} for name, each in self.figures.items()
                },
                "ratios": {name: round(value, 4) for name, value in self.ratios.items()},
                "errors": self.errors,
            },
            indent=2,
        )


async def measure_soak(server: Server, plan: Plan) -> Results:
    """Measure the soak alone; it tells its progress on stderr by itself."""
    surroundings = await environment(server, plan)
    figures: Figures = {}
    errors: dict[str, str] = {}
    try:
        figures = await measure_one(server, Piece(subject=SOAK), scale=plan.scale, patience=plan.seconds, is_heard=True)
    except SubjectError as error:
        errors[SOAK] = str(error)
    return Results(environment=surroundings, figures=figures, ratios=ratios([figures]), errors=errors)


async def measure_all(
    server: Server,
    plan: Plan,
    *,
    tell: Callable[[str], None],
    beside: Path | None = None,
    only: Sequence[str] = (),
) -> Results:
    """Measure every subject in every round: what disturbs the machine for a while disturbs all of them.

    Beside another checkout of this project the peers are left out, and each subject of ours is measured twice in a row,
    on the package of this checkout and on that of the other.
    """
    surroundings = await environment(server, plan)
    subjects = only or [
        subject
        for subject in (SUBJECTS if beside is None else OURS)
        if subject != SOAK and not (plan.is_quick and subject in THOROUGH)
    ]
    if beside is None:
        pieces = [Piece(subject=subject) for subject in subjects]
        rounds, errors = await measure_rounds(server, plan, pieces, tell=tell, once=ONCE)
        wanted: Mapping[str, tuple[str, str]] = RATIOS
    else:
        surroundings["beside"] = checkout(beside / "src" / "flowfabric" / "version.py")
        with overlaid(beside) as source:
            pieces = [
                piece
                for subject in subjects
                for piece in (Piece(subject=subject), Piece(subject=subject, prefix=BEFORE, source=source))
            ]
            rounds, errors = await measure_rounds(server, plan, pieces, tell=tell)
        wanted = ratios_of_versions(rounds)
    return Results(environment=surroundings, figures=medians(rounds), ratios=ratios(rounds, wanted), errors=errors)


async def measure_without(server: Server, plan: Plan, names: Sequence[str], *, tell: Callable[[str], None]) -> Results:
    """Measure what each of these optimisations is worth: its subject with it and without it, in the same round."""
    surroundings = await environment(server, plan)
    entries = {name: TABLE[name] for name in names}
    pieces: list[Piece] = []
    for subject in dict.fromkeys(entry.subject for entry in entries.values()):
        pieces.append(Piece(subject=subject))
        pieces += [
            Piece(subject=subject, prefix=f"without_{name}:", without=name)
            for name, entry in entries.items()
            if entry.subject == subject
        ]
    rounds, errors = await measure_rounds(server, plan, pieces, tell=tell)
    pairs = {
        f"{figure}/without_{name}": (figure, f"without_{name}:{figure}")
        for name, entry in entries.items()
        for figure in entry.figures
    }
    shown = {figure for pair in pairs.values() for figure in pair}
    figures = {name: figure for name, figure in medians(rounds).items() if name in shown}
    return Results(environment=surroundings, figures=figures, ratios=ratios(rounds, pairs), errors=errors)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One subject as it is measured in every round: on which package, and without which optimisation."""

    subject: str
    prefix: str = ""
    """What the names of its figures begin with."""
    source: Path | None = None
    """The folder of another package to put on PYTHONPATH."""
    without: str | None = None

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"{self.prefix}{self.subject}"


async def measure_rounds(
    server: Server,
    plan: Plan,
    pieces: Sequence[Piece],
    *,
    tell: Callable[[str], None],
    once: Container[str] = (),
) -> tuple[list[Figures], dict[str, str]]:
    """The figures of each round, and why pieces have none; subjects of `once` are measured in the first round only."""
    rounds: list[Figures] = []
    errors: dict[str, str] = {}
    ends_at = time.monotonic() + plan.seconds
    for number in range(plan.rounds):
        figures: Figures = {}
        # Of two versions, neither is always measured first.
        for piece in pieces if number % 2 == 0 else reversed(pieces):
            if number and piece.subject in once:
                continue
            tell(f"round {number + 1} of {plan.rounds}: {piece.name}")
            started = time.monotonic()
            try:
                found = await measure_one(server, piece, scale=plan.scale, patience=min(PATIENCE_S, ends_at - started))
                figures |= {f"{piece.prefix}{name}": figure for name, figure in found.items()}
                tell(f"{piece.name} took {time.monotonic() - started:.1f} s")
            except SubjectError as error:
                errors[piece.name] = str(error)
                tell(f"{piece.name}: {error}")
        rounds.append(figures)
    return rounds, errors


class SubjectError(Exception):
    """A subject could not be measured."""


async def measure_one(
    server: Server, piece: Piece, *, scale: float, patience: float, is_heard: bool = False
) -> Figures:
    """The figures of one subject from a process and a database that exist for it alone."""
    if patience < 1:
        raise SubjectError("no time is left for it")
    async with server.database(f"bench_{piece.subject}") as url:
        command = [sys.executable, "-m", "flowfabric.bench.run", piece.subject, "--url", url, "--scale", str(scale)]
        if piece.without is not None:
            command += ["--without", piece.without]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if is_heard else asyncio.subprocess.PIPE,
            start_new_session=True,
            env=None if piece.source is None else {**os.environ, "PYTHONPATH": str(piece.source)},
        )
        try:
            out, noise = await asyncio.wait_for(process.communicate(), patience)
        except TimeoutError:
            raise SubjectError(f"no answer within {patience:.0f} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    try:
        answer = json.loads(out)
    except ValueError:
        raise SubjectError(f"exit {process.returncode}: {last_line(noise or b'')}") from None
    if "error" in answer:
        raise SubjectError(answer["error"])
    return {name: Figure(**figure) for name, figure in answer["figures"].items()}


def last_line(noise: bytes) -> str:
    """The end of what a process said on stderr."""
    return (noise.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


async def environment(server: Server, plan: Plan) -> dict[str, Any]:
    """What the figures depend on."""
    settings = await server.settings()
    return {
        "version": __version__,
        **checkout(Path(__file__)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": plan.is_quick,
        "rounds": plan.rounds,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "postgres": settings.pop("server_version"),
        **settings,
        "versions": {name: version for name in DISTRIBUTIONS if (version := installed(name))},
    }


def checkout(module: Path) -> dict[str, Any]:
    """The commit a module is from, and whether anything was changed since; nothing where it is not from a checkout."""

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(module.parent), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", module.name)
        return {"commit": git("rev-parse", "HEAD"), "is_changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "is_changed": None}


def installed(distribution: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
