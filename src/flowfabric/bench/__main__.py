"""Measure FlowFabric, plain Postgres and other task queues: `python -m flowfabric.bench`."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flowfabric.bench.plot import draw
from flowfabric.bench.report import show
from flowfabric.bench.run import SUBJECTS
from flowfabric.bench.server import serve
from flowfabric.bench.suite import (
    FULL,
    LONG_SOAK,
    OURS,
    QUICK,
    SHORT_SOAK,
    SOAK,
    Plan,
    Results,
    measure_all,
    measure_soak,
    measure_without,
)
from flowfabric.bench.without import OPTIMISATIONS

ALL = "all"
CHOICES = [subject for subject in SUBJECTS if subject != SOAK]
CHOSEN_RUN_S = 6 * 3600
"""The time limit of a run with chosen rounds, subjects or variants."""


def main() -> None:
    """Measure and write the results; a quick run only prints them."""
    parser = argparse.ArgumentParser(prog="python -m flowfabric.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round at a fifth of the load, in under a minute")
    parser.add_argument(
        "--soak",
        action="store_true",
        help="run for ten minutes at full rate on a store with many ended executions instead",
    )
    parser.add_argument("--json", action="store_true", help="print only the results, as JSON, on stdout")
    parser.add_argument("--url", help="the Postgres server to use instead of an embedded one")
    parser.add_argument(
        "--output", type=Path, default=Path("bench"), help="the folder for results.json and results.png"
    )
    parser.add_argument("--beside", type=Path, help="another checkout of this project to compare with in the same run")
    parser.add_argument("--only", nargs="+", choices=CHOICES, default=(), help="measure only these subjects")
    parser.add_argument(
        "--without",
        nargs="+",
        choices=[*OPTIMISATIONS, ALL],
        metavar="NAME",
        help=f"measure with and without an optimisation instead: {', '.join(OPTIMISATIONS)}, or {ALL}",
    )
    parser.add_argument("--rounds", type=int, help="how many times each subject is measured")
    options = parser.parse_args()
    if options.soak and options.beside:
        parser.error("--beside cannot be combined with --soak")
    if options.beside and (others := set(options.only) - set(OURS)):
        parser.error(
            f"--beside measures only FlowFabric, not {', '.join(sorted(others))}; choose --only from {', '.join(OURS)}"
        )
    if options.without and (options.soak or options.beside or options.only):
        parser.error("--without cannot be combined with --soak, --beside or --only")
    plan = QUICK if options.quick else FULL
    if options.rounds is not None or options.only or options.beside or options.without:
        plan = replace(plan, rounds=options.rounds or plan.rounds, seconds=CHOSEN_RUN_S)
    if options.soak:
        results = asyncio.run(soak(options.url, SHORT_SOAK if options.quick else LONG_SOAK))
    else:
        without = [*OPTIMISATIONS] if options.without and ALL in options.without else options.without or ()
        results = asyncio.run(measure(options.url, plan, options.beside, options.only, without))
    if not options.quick:
        kinds = {"soak": options.soak, "without": options.without, "beside": options.beside, "only": options.only}
        name = next((kind for kind, is_chosen in kinds.items() if is_chosen), "results")
        write(results, options.output / f"{name}.json")
        if name == "results":
            draw(results, options.output / "results.png")
    if options.json:
        print(results.as_json())
    else:
        show(results, Console())


def write(results: Results, path: Path) -> None:
    """Write the results to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.as_json() + "\n")


async def soak(url: str | None, plan: Plan) -> Results:
    """Run the soak and return its results."""
    async with serve(url) as server:
        return await measure_soak(server, plan)


async def measure(
    url: str | None, plan: Plan, beside: Path | None, only: Sequence[str], without: Sequence[str]
) -> Results:
    """Run the measurements, report progress on stderr and return the results."""
    console = Console(stderr=True)
    with console.status("starting Postgres") as status:

        def report(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False)

        async with serve(url) as server:
            if without:
                return await measure_without(server, plan, list(dict.fromkeys(without)), report=report)
            return await measure_all(server, plan, report=report, beside=beside, only=only)


if __name__ == "__main__":
    main()
