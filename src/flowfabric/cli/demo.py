"""`ff demo`: run tasks on three worker processes, kill one of them, and show that nothing is lost."""

import asyncio
import logging
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, TypedDict

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flowfabric.cli.errors import one_line_errors
from flowfabric.db.embedded import Embedded
from flowfabric.fabric.app import Fabric
from flowfabric.fabric.errors import RunError
from flowfabric.fabric.flow_run import FlowRun, FlowRunError
from flowfabric.fabric.node import all_of
from flowfabric.fabric.run import Run
from flowfabric.settings import Settings
from flowfabric.worker.context import Context

WORKERS = ("worker-1", "worker-2", "worker-3")
RUNS_PER_TASK = 100
FLOWS = 10
PARTS = 4
LEASE_SECONDS = 2
SLOTS = 3
TIMEOUT_SECONDS = 60

fabric = Fabric(lane="demo")


class Report(TypedDict):
    """The result of a task: who ran it and how often."""

    number: int
    worker: str
    attempts: int
    retries: int


def _report(ctx: Context, number: int) -> Report:
    return {
        "number": number,
        "worker": ctx.worker_instance_id,
        "attempts": ctx.attempt_index + 1,
        "retries": ctx.retry_count,
    }


@fabric.task
async def greet(ctx: Context, number: int) -> Report:
    """Return at once."""
    return _report(ctx, number)


@fabric.task
async def resize(ctx: Context, number: int) -> Report:
    """Take 0.1 to 0.3 seconds."""
    await asyncio.sleep(0.1 + number % 5 * 0.05)
    return _report(ctx, number)


@fabric.task(retries=5, backoff=0.2)
async def charge(ctx: Context, number: int) -> Report:
    """Fail once or twice before succeeding."""
    if ctx.retry_count <= number % 2:
        raise ConnectionError("the bank does not answer")
    return _report(ctx, number)


TASKS = (greet, resize, charge)


@fabric.task
async def extract(number: int) -> list[int]:
    """The first node of a flow."""
    return list(range(number))


@fabric.task
async def transform(rows: list[int], part: int) -> int:
    """Add up one part of the rows."""
    await asyncio.sleep(0.05)
    return sum(row for row in rows if row % PARTS == part)


@fabric.task
async def load(totals: list[int]) -> int:
    """The last node of a flow: add up the parts."""
    return sum(totals)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended, as the store reports it."""

    kind: str
    report: Report | None
    seconds: float
    problem: str | None = None

    @property
    def worker(self) -> str | None:
        """The name of the worker that finished the run."""
        return None if self.report is None else self.report["worker"].rpartition("-")[0]

    @property
    def recoveries(self) -> int:
        """How often another worker took over the run: the attempts that are neither the first nor a retry."""
        return 0 if self.report is None else self.report["attempts"] - 1 - self.report["retries"]


def demo(*, worker: Annotated[str | None, typer.Option(hidden=True)] = None) -> None:
    """Run 300 tasks and 10 flows on three worker processes, kill one of them, and show that nothing is lost."""
    with one_line_errors():
        if worker is not None:
            logging.getLogger("flowfabric").setLevel(logging.ERROR)
            fabric.run_worker(worker_id="demo", worker_instance_id=worker, lease_ttl=LEASE_SECONDS, concurrency=SLOTS)
            return
        if asyncio.run(_demo(Console(highlight=False))):
            raise typer.Exit(1)


async def _demo(console: Console) -> bool:
    """Run the demo; return whether anything was lost."""
    settings = Settings()
    console.print("Starting an embedded Postgres ..." if settings.database_url is None else "Connecting ...")
    async with fabric:
        runs = [
            (task.name, run)
            for number in range(RUNS_PER_TASK)
            for task, run in zip(TASKS, [await task.submit(number) for task in TASKS], strict=True)
        ]
        flows = [await _submit_flow(number) for number in range(FLOWS)]
        console.print(
            f"Submitted {len(runs)} executions and {FLOWS} flows of {PARTS + 2}; "
            f"starting {len(WORKERS)} worker processes.",
            soft_wrap=True,
        )
        with _worker_processes() as processes:
            outcomes, killed = await _watch(console, runs, processes)
            completed = sum(await asyncio.gather(*(_is_completed(*flow) for flow in flows)))
    _show(console, outcomes, killed)
    lost = [outcome for outcome in outcomes if outcome.report is None]
    for outcome in lost[:5]:
        console.print(f"  {outcome.kind}: {outcome.problem}", soft_wrap=True)
    recovered = sum(outcome.recoveries > 0 for outcome in outcomes)
    if lost:
        console.print(f"LOST: {len(lost)} of {len(outcomes)} executions did not succeed.")
    else:
        console.print(
            f"Nothing was lost: {len(outcomes)} of {len(outcomes)} executions succeeded, "
            f"{recovered} of them taken over from the killed worker.",
            soft_wrap=True,
        )
    console.print(
        f"{completed} of {FLOWS} flows completed: each extracted, transformed "
        f"{PARTS} parts at once, and loaded their sum.",
        soft_wrap=True,
    )
    if settings.database_url is None:
        console.print(f"The data is kept in {Embedded.data_of(settings.home)}.", soft_wrap=True)
    return bool(lost) or completed < FLOWS


async def _submit_flow(number: int) -> tuple[FlowRun, Run[int], int]:
    """Submit a flow; return it, its last run, and what that returns if every part is there once."""
    flow = fabric.flow("etl")
    rows = flow.add(extract, number)
    loaded = flow.add(load, all_of(flow.add(transform, rows, part) for part in range(PARTS)))
    flow_run = await flow.submit()
    return flow_run, flow_run.run(loaded), sum(range(number))


async def _is_completed(flow_run: FlowRun, last: Run[int], expected: int) -> bool:
    try:
        await flow_run.result(timeout=TIMEOUT_SECONDS)
        return await last.result() == expected
    except (FlowRunError, RunError, TimeoutError):
        return False


@contextmanager
def _worker_processes() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the worker processes, by name; stop them at the end of the block."""
    command = (sys.executable, "-m", "flowfabric.cli.demo", "--worker")
    processes = {name: subprocess.Popen([*command, f"{name}-{os.getpid()}"]) for name in WORKERS}
    try:
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _watch(
    console: Console, runs: Sequence[tuple[str, Run[Report]]], processes: Mapping[str, subprocess.Popen[bytes]]
) -> tuple[list[Outcome], str | None]:
    """Wait for all runs; after a third of them, kill the worker that finished the latest one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("executions", total=len(runs))
        waiting = {asyncio.create_task(_outcome(kind, run)) for kind, run in runs}
        killed: str | None = None
        outcomes: list[Outcome] = []
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            outcomes += [task.result() for task in done]
            progress.update(bar, completed=len(outcomes))
            # This worker is busy; the others may not have started yet.
            latest = outcomes[-1].worker
            if killed is None and latest is not None and len(outcomes) >= len(runs) // 3:
                killed, victim = latest, processes[latest]
                victim.kill()
                progress.console.print(
                    f"Killed {killed} (SIGKILL, process {victim.pid}) after {len(outcomes)} of {len(runs)}: "
                    f"its leases expire within {LEASE_SECONDS} s, then the others take over.",
                    soft_wrap=True,
                )
    return outcomes, killed


async def _outcome(kind: str, run: Run[Report]) -> Outcome:
    try:
        report = await run.result(timeout=TIMEOUT_SECONDS)
    except (RunError, TimeoutError) as error:
        return Outcome(kind=kind, report=None, seconds=0, problem=str(error))
    status = await run.status()
    took = status.ended_at - status.started_at if status.ended_at and status.started_at else timedelta()
    return Outcome(kind=kind, report=report, seconds=took.total_seconds())


def _show(console: Console, outcomes: Sequence[Outcome], killed: str | None) -> None:
    # The table fits into 60 columns.
    style: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    table = Table("task", title="Results in the store", caption="p50: median time from start to end", **style)
    for heading in ("done", "attempts", "retries", "recovered", "p50"):
        table.add_column(heading, justify="right")
    for task in TASKS:
        of_kind = [outcome for outcome in outcomes if outcome.kind == task.name]
        reports = [outcome.report for outcome in of_kind if outcome.report is not None]
        table.add_row(
            task.name,
            f"{len(reports)}/{len(of_kind)}",
            str(sum(report["attempts"] for report in reports)),
            str(sum(report["retries"] for report in reports)),
            str(sum(outcome.recoveries for outcome in of_kind)),
            f"{statistics.median([outcome.seconds for outcome in of_kind]):.3f} s",
        )
    console.print(table)
    by_worker = Counter(outcome.worker for outcome in outcomes)
    shares = [f"{name}{' (killed)' if name == killed else ''} {by_worker[name]}" for name in WORKERS]
    console.print(f"Finished by {', '.join(shares)}.")


if __name__ == "__main__":
    typer.run(demo)
