"""`ff demo`: three worker processes, one of them killed on the way, and nothing lost."""

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

from flowfabric.cli.errors import told_in_one_line
from flowfabric.db.embedded import Embedded
from flowfabric.fabric.app import Fabric
from flowfabric.fabric.run import Run, RunError
from flowfabric.settings import Settings
from flowfabric.worker.context import Context

WORKERS = ("worker-1", "worker-2", "worker-3")
EACH = 100
LEASE_SECONDS = 2
SLOTS = 3
PATIENCE_SECONDS = 60

fabric = Fabric(lane="demo")


class Told(TypedDict):
    """What a run tells of itself when it ends."""

    number: int
    worker: str
    attempts: int
    retries: int


def _told(ctx: Context, number: int) -> Told:
    return {
        "number": number,
        "worker": ctx.worker_instance_id,
        "attempts": ctx.attempt_index + 1,
        "retries": ctx.retry_count,
    }


@fabric.task
async def greet(ctx: Context, number: int) -> Told:
    """Be done at once."""
    return _told(ctx, number)


@fabric.task
async def resize(ctx: Context, number: int) -> Told:
    """Take a tenth to three tenths of a second."""
    await asyncio.sleep(0.1 + number % 5 * 0.05)
    return _told(ctx, number)


@fabric.task(retries=5, backoff=0.2)
async def charge(ctx: Context, number: int) -> Told:
    """Fail once or twice before succeeding."""
    if ctx.retry_count <= number % 2:
        raise ConnectionError("the bank does not answer")
    return _told(ctx, number)


TASKS = (greet, resize, charge)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What became of one run, as the store says."""

    kind: str
    told: Told | None
    seconds: float
    problem: str | None = None

    @property
    def worker(self) -> str | None:
        """The name of the worker that told of the end."""
        return None if self.told is None else self.told["worker"].rpartition("-")[0]

    @property
    def recoveries(self) -> int:
        """How often another worker took the run over: the attempts that neither were the first nor follow a failure."""
        return 0 if self.told is None else self.told["attempts"] - 1 - self.told["retries"]


def demo(*, worker: Annotated[str | None, typer.Option(hidden=True)] = None) -> None:
    """Run 300 tasks on three worker processes, kill one of them, and show that nothing is lost."""
    with told_in_one_line():
        if worker is not None:
            logging.getLogger("flowfabric").setLevel(logging.ERROR)
            fabric.run_worker(worker_id="demo", worker_instance_id=worker, lease_ttl=LEASE_SECONDS, concurrency=SLOTS)
            return
        if asyncio.run(_demo(Console(highlight=False))):
            raise typer.Exit(1)


async def _demo(console: Console) -> bool:
    """Whether anything was lost."""
    settings = Settings()
    console.print("Starting an embedded Postgres ..." if settings.database_url is None else "Connecting ...")
    async with fabric:
        runs = [
            (task.name, run)
            for number in range(EACH)
            for task, run in zip(TASKS, [await task.submit(number) for task in TASKS], strict=True)
        ]
        console.print(f"Submitted {len(runs)} executions; starting {len(WORKERS)} worker processes.")
        with _worker_processes() as processes:
            endings, killed = await _watch(console, runs, processes)
    _show(console, endings, killed)
    lost = [ending for ending in endings if ending.told is None]
    for ending in lost[:5]:
        console.print(f"  {ending.kind}: {ending.problem}", soft_wrap=True)
    recovered = sum(ending.recoveries > 0 for ending in endings)
    if lost:
        console.print(f"LOST: {len(lost)} of {len(endings)} executions did not succeed.")
    else:
        console.print(
            f"Nothing was lost: {len(endings)} of {len(endings)} executions succeeded, "
            f"{recovered} of them taken over from the killed worker.",
            soft_wrap=True,
        )
    if settings.database_url is None:
        console.print(f"The data is kept in {Embedded.data_of(settings.home)}.", soft_wrap=True)
    return bool(lost)


@contextmanager
def _worker_processes() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The worker processes by name; they are gone when the block is left."""
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
    console: Console, runs: Sequence[tuple[str, Run[Told]]], processes: Mapping[str, subprocess.Popen[bytes]]
) -> tuple[list[Ending], str | None]:
    """Follow the runs to their ends, and kill the worker that ends one when a third of them has ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("executions", total=len(runs))
        waiting = {asyncio.create_task(_ending(kind, run)) for kind, run in runs}
        killed: str | None = None
        endings: list[Ending] = []
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            endings += [task.result() for task in done]
            progress.update(bar, completed=len(endings))
            # The others may not have begun yet; this one is at work.
            latest = endings[-1].worker
            if killed is None and latest is not None and len(endings) >= len(runs) // 3:
                killed, victim = latest, processes[latest]
                victim.kill()
                progress.console.print(
                    f"Killed {killed} (SIGKILL, process {victim.pid}) after {len(endings)} of {len(runs)}: "
                    f"its leases end within {LEASE_SECONDS} s, then the others take over.",
                    soft_wrap=True,
                )
    return endings, killed


async def _ending(kind: str, run: Run[Told]) -> Ending:
    try:
        told = await run.result(timeout=PATIENCE_SECONDS)
    except (RunError, TimeoutError) as error:
        return Ending(kind=kind, told=None, seconds=0, problem=str(error))
    status = await run.status()
    took = status.ended_at - status.started_at if status.ended_at and status.started_at else timedelta()
    return Ending(kind=kind, told=told, seconds=took.total_seconds())


def _show(console: Console, endings: Sequence[Ending], killed: str | None) -> None:
    # Narrow enough for 60 columns.
    looks: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    table = Table("task", title="What the store says", caption="p50: from the start to the end", **looks)
    for heading in ("done", "attempts", "retries", "recovered", "p50"):
        table.add_column(heading, justify="right")
    for task in TASKS:
        of_kind = [ending for ending in endings if ending.kind == task.name]
        told = [ending.told for ending in of_kind if ending.told is not None]
        table.add_row(
            task.name,
            f"{len(told)}/{len(of_kind)}",
            str(sum(one["attempts"] for one in told)),
            str(sum(one["retries"] for one in told)),
            str(sum(ending.recoveries for ending in of_kind)),
            f"{statistics.median([ending.seconds for ending in of_kind]):.3f} s",
        )
    console.print(table)
    by_worker = Counter(ending.worker for ending in endings)
    shares = [f"{name}{' (killed)' if name == killed else ''} {by_worker[name]}" for name in WORKERS]
    console.print(f"Ended by {', '.join(shares)}.")


if __name__ == "__main__":
    typer.run(demo)
