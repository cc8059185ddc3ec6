"""The run: every subject in turn, round after round, each in a process and a database of its own."""

import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from flowfabric.bench.run import SUBJECTS
from flowfabric.bench.server import Server
from flowfabric.bench.subject import Figure, Figures
from flowfabric.version import __version__

PATIENCE_S = 300
SOAK = "soak"
ONCE = frozenset({"idle", "backlog"})
"""Subjects that take medians of their own, and need no further round."""
PEERS = ("pgqueuer", "awa", "absurd", "procrastinate", "dbos")
OURS = ("submit", "work", "suspend", "idle", "backlog")
BEFORE = "before:"
"""What the figures of another checkout are named with."""
DISTRIBUTIONS = ("asyncpg", "uvloop", "pgqueuer", "awa-pg", "absurd-sdk", "procrastinate", "dbos")

RATIOS = {
    **{f"worker_end_to_end/{peer}": ("worker_end_to_end", f"{peer}_worker_end_to_end") for peer in PEERS},
    **{f"submit_batch/{peer}": ("submit_batch", f"{peer}_submit_batch") for peer in PEERS},
    "worker_end_to_end/pgqueuer_batch500": ("worker_end_to_end", "pgqueuer_worker_end_to_end_batch500"),
    "worker_end_to_end/raw_claim100_complete100": ("worker_end_to_end", "raw_claim100_complete100"),
    "engine_claim_finish/raw_claim100_complete100": ("engine_claim_finish", "raw_claim100_complete100"),
    "engine_claim_finish_100/raw_claim100_complete100": ("engine_claim_finish_100", "raw_claim100_complete100"),
    "submit_batch/raw_insert100": ("submit_batch", "raw_insert100"),
    "submit_batch_100/raw_insert100": ("submit_batch_100", "raw_insert100"),
    "submit_batch_1500b_tag/raw_insert100_1500b": ("submit_batch_1500b_tag", "raw_insert100_1500b"),
    "signal_resume_burst/complete_burst": ("signal_resume_burst", "complete_burst"),
    "signal_resume_burst/engine_claim_finish": ("signal_resume_burst", "engine_claim_finish"),
    "soak_last_tenth/soak_first_tenth": ("soak_last_tenth", "soak_first_tenth"),
    **{f"claim_{size}/claim_20k": (f"claim_{size}", "claim_20k") for size in ("1m", "100k")},
    **{f"claim_{size}_mixed/claim_20k_mixed": (f"claim_{size}_mixed", "claim_20k_mixed") for size in ("1m", "100k")},
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How often each subject is measured, at which share of its full load, and how long all of it may take."""

    rounds: int
    scale: float
    seconds: float


FULL = Plan(rounds=3, scale=1.0, seconds=3_600)
QUICK = Plan(rounds=1, scale=0.2, seconds=51)
LONG_SOAK = Plan(rounds=1, scale=1.0, seconds=3_600)
SHORT_SOAK = Plan(rounds=1, scale=0.1, seconds=600)


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
        figures = await measure_one(server, SOAK, scale=plan.scale, patience=plan.seconds, is_heard=True)
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

    Beside another checkout of this project the peers are left out, and each subject of ours is measured twice in a row:
    as it is here, and as it is there.
    """
    surroundings = await environment(server, plan)
    if beside is not None:
        surroundings["beside"] = checkout(beside / "src" / "flowfabric" / "version.py")
    subjects: list[tuple[str, str, Path | None]] = []
    for subject in only or (OURS if beside is not None else SUBJECTS):
        if subject != SOAK:
            subjects.append(("", subject, None))
        if beside is not None:
            subjects.append((BEFORE, subject, beside / "src"))
    rounds: list[Figures] = []
    errors: dict[str, str] = {}
    ends_at = time.monotonic() + plan.seconds
    for number in range(plan.rounds):
        figures: Figures = {}
        # Neither of two versions is always the first.
        for mark, subject, source in subjects if number % 2 == 0 else reversed(subjects):
            if number and subject in ONCE and beside is None:
                continue
            tell(f"round {number + 1} of {plan.rounds}: {mark}{subject}")
            started = time.monotonic()
            patience = min(PATIENCE_S, ends_at - started)
            try:
                found = await measure_one(server, subject, scale=plan.scale, patience=patience, source=source)
                figures |= {f"{mark}{name}": figure for name, figure in found.items()}
                tell(f"{mark}{subject} took {time.monotonic() - started:.1f} s")
            except SubjectError as error:
                errors[f"{mark}{subject}"] = str(error)
                tell(f"{mark}{subject}: {error}")
        rounds.append(figures)
    return Results(
        environment=surroundings,
        figures=medians(rounds),
        ratios=ratios(rounds, RATIOS if beside is None else ratios_of_versions(rounds)),
        errors=errors,
    )


class SubjectError(Exception):
    """A subject could not be measured."""


async def measure_one(
    server: Server,
    subject: str,
    *,
    scale: float,
    patience: float,
    is_heard: bool = False,
    source: Path | None = None,
) -> Figures:
    """The figures of one subject from a process and a database that exist for it alone.

    `source` is the folder of another version of this package to measure instead.
    """
    if patience < 1:
        raise SubjectError("no time is left for it")
    async with server.database(f"bench_{subject}") as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flowfabric.bench.run", subject, "--url", url, "--scale", str(scale)),
            stdout=asyncio.subprocess.PIPE,
            stderr=None if is_heard else asyncio.subprocess.PIPE,
            start_new_session=True,
            env=None if source is None else {**os.environ, "PYTHONPATH": str(source)},
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


def medians(rounds: list[Figures]) -> Figures:
    """The median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    found = {name: [figures[name] for figures in rounds if name in figures] for name in names}
    return {
        name: Figure(value=statistics.median(each.value for each in figures), unit=figures[0].unit)
        for name, figures in found.items()
    }


def ratios_of_versions(rounds: list[Figures]) -> dict[str, tuple[str, str]]:
    """Every figure over that of the other version."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {f"{name}/before": (name, f"{BEFORE}{name}") for name in names if f"{BEFORE}{name}" in names}


def ratios(rounds: list[Figures], wanted: Mapping[str, tuple[str, str]] = RATIOS) -> dict[str, float]:
    """The median of each ratio over the rounds that have both its figures: a round is compared with itself."""
    found: dict[str, float] = {}
    for name, (above, below) in wanted.items():
        values = [each[above].value / each[below].value for each in rounds if above in each and below in each]
        if values:
            found[name] = statistics.median(values)
    return found


async def environment(server: Server, plan: Plan) -> dict[str, Any]:
    """What the figures depend on."""
    settings = await server.settings()
    return {
        "version": __version__,
        **checkout(Path(__file__)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": plan in (QUICK, SHORT_SOAK),
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
