"""Measure every subject in every round, each in its own process and database."""

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
from flowfabric.bench.without import OPTIMISATIONS
from flowfabric.version import __version__

SUBJECT_TIMEOUT_S = 300
SOAK = "soak"
ONCE = frozenset({"idle", "backlog", "counts", "streams", "feeds", "flows", "limits", "limits_pinned", "neighbour"})
"""Subjects that take many samples, or long: they are measured in one round."""
THOROUGH = frozenset(
    {
        "result",
        "cost",
        "renew",
        "queues",
        "counts",
        "pinned",
        "dead_rows",
        "streams",
        "feeds",
        "flows",
        "limits",
        "limits_pinned",
        "neighbour",
    }
)
"""Subjects that a quick run measures only if they are named."""
OURS = (
    "submit",
    "work",
    "suspend",
    "idle",
    "backlog",
    "result",
    "cost",
    "renew",
    "queues",
    "pinned",
    "dead_rows",
    "streams",
    "feeds",
    "flows",
    "limits",
    "limits_pinned",
    "neighbour",
)
DISTRIBUTIONS = ("asyncpg", "uvloop", "pgqueuer", "awa-pg", "absurd-sdk", "procrastinate", "dbos")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The number of rounds, the share of the full load, and the time limit of the whole run in seconds."""

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
    """The median of every figure and ratio, and the errors of subjects without figures."""

    environment: dict[str, Any]
    figures: Figures
    ratios: dict[str, float]
    errors: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        """The results as JSON text."""
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
    """Measure the soak alone; its process reports progress on stderr."""
    conditions = await environment(server, plan)
    figures: Figures = {}
    errors: dict[str, str] = {}
    try:
        figures = await measure_one(
            server, Variant(subject=SOAK), scale=plan.scale, timeout_s=plan.seconds, shows_stderr=True
        )
    except SubjectError as error:
        errors[SOAK] = str(error)
    return Results(environment=conditions, figures=figures, ratios=ratios([figures]), errors=errors)


async def measure_all(
    server: Server,
    plan: Plan,
    *,
    report: Callable[[str], None],
    beside: Path | None = None,
    only: Sequence[str] = (),
) -> Results:
    """Measure every subject in every round, so that a temporary disturbance of the machine affects all of them.

    With another checkout in `beside`, the peers are left out and each subject of FlowFabric is measured twice in a row,
    on the package of this checkout and on that of the other.
    """
    conditions = await environment(server, plan)
    subjects = only or [
        subject
        for subject in (SUBJECTS if beside is None else OURS)
        if subject != SOAK and not (plan.is_quick and subject in THOROUGH)
    ]
    if beside is None:
        variants = [Variant(subject=subject) for subject in subjects]
        rounds, errors = await measure_rounds(server, plan, variants, report=report, once=ONCE)
        wanted: Mapping[str, tuple[str, str]] = RATIOS
    else:
        conditions["beside"] = checkout(beside / "src" / "flowfabric" / "version.py")
        with overlaid(beside) as source:
            variants = [
                variant
                for subject in subjects
                for variant in (Variant(subject=subject), Variant(subject=subject, prefix=BEFORE, source=source))
            ]
            rounds, errors = await measure_rounds(server, plan, variants, report=report)
        wanted = ratios_of_versions(rounds)
    return Results(environment=conditions, figures=medians(rounds), ratios=ratios(rounds, wanted), errors=errors)


async def measure_without(
    server: Server, plan: Plan, names: Sequence[str], *, report: Callable[[str], None]
) -> Results:
    """Measure the subject of each optimisation with and without it, in the same rounds."""
    conditions = await environment(server, plan)
    entries = {name: OPTIMISATIONS[name] for name in names}
    variants: list[Variant] = []
    for subject in dict.fromkeys(entry.subject for entry in entries.values()):
        variants.append(Variant(subject=subject))
        variants += [
            Variant(subject=subject, prefix=f"without_{name}:", without=name)
            for name, entry in entries.items()
            if entry.subject == subject
        ]
    rounds, errors = await measure_rounds(server, plan, variants, report=report)
    pairs = {
        f"{figure}/without_{name}": (figure, f"without_{name}:{figure}")
        for name, entry in entries.items()
        for figure in entry.figures
    }
    shown = {figure for pair in pairs.values() for figure in pair}
    figures = {name: figure for name, figure in medians(rounds).items() if name in shown}
    return Results(environment=conditions, figures=figures, ratios=ratios(rounds, pairs), errors=errors)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A subject measured on one package and perhaps without an optimisation."""

    subject: str
    prefix: str = ""
    """The prefix of the names of its figures."""
    source: Path | None = None
    """The folder of another package to put on PYTHONPATH."""
    without: str | None = None

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.prefix}{self.subject}"


async def measure_rounds(
    server: Server,
    plan: Plan,
    variants: Sequence[Variant],
    *,
    report: Callable[[str], None],
    once: Container[str] = (),
) -> tuple[list[Figures], dict[str, str]]:
    """The figures of each round, and the errors; subjects in `once` are measured only in the first round."""
    rounds: list[Figures] = []
    errors: dict[str, str] = {}
    ends_at = time.monotonic() + plan.seconds
    for number in range(plan.rounds):
        figures: Figures = {}
        # Every other round is reversed, so that neither of two versions is always measured first.
        for variant in variants if number % 2 == 0 else reversed(variants):
            if number and variant.subject in once:
                continue
            report(f"round {number + 1} of {plan.rounds}: {variant.name}")
            started = time.monotonic()
            try:
                timeout_s = min(SUBJECT_TIMEOUT_S, ends_at - started)
                found = await measure_one(server, variant, scale=plan.scale, timeout_s=timeout_s)
                figures |= {f"{variant.prefix}{name}": figure for name, figure in found.items()}
                report(f"{variant.name} took {time.monotonic() - started:.1f} s")
            except SubjectError as error:
                errors[variant.name] = str(error)
                report(f"{variant.name}: {error}")
        rounds.append(figures)
    return rounds, errors


class SubjectError(Exception):
    """A subject could not be measured."""


async def measure_one(
    server: Server, variant: Variant, *, scale: float, timeout_s: float, shows_stderr: bool = False
) -> Figures:
    """Measure one subject in a new process and a new database, and return its figures."""
    if timeout_s < 1:
        raise SubjectError("the time limit of the run was reached before it started")
    async with server.database(f"bench_{variant.subject}") as url:
        command = [sys.executable, "-m", "flowfabric.bench.run", variant.subject, "--url", url, "--scale", str(scale)]
        if variant.without is not None:
            command += ["--without", variant.without]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if shows_stderr else asyncio.subprocess.PIPE,
            start_new_session=True,
            env=None if variant.source is None else {**os.environ, "PYTHONPATH": str(variant.source)},
        )
        try:
            out, errors = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            raise SubjectError(f"no result within {timeout_s:.0f} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    try:
        answer = json.loads(out)
    except ValueError:
        raise SubjectError(f"exit {process.returncode}: {last_line(errors or b'')}") from None
    if "error" in answer:
        raise SubjectError(answer["error"])
    return {name: Figure(**figure) for name, figure in answer["figures"].items()}


def last_line(output: bytes) -> str:
    """The last line that a process wrote to stderr."""
    return (output.decode(errors="replace").strip().splitlines() or ["nothing on stderr"])[-1]


async def environment(server: Server, plan: Plan) -> dict[str, Any]:
    """The versions, the machine and the settings that affect the figures."""
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
    """The commit of a module and whether the checkout has changes; both None if it is not in a checkout."""

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(module.parent), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", module.name)
        return {"commit": git("rev-parse", "HEAD"), "is_changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "is_changed": None}


def installed(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
