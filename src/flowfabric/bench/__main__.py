"""The benchmark against the raw limit and the peers: `python -m flowfabric.bench`."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flowfabric.bench.plot import draw
from flowfabric.bench.report import show
from flowfabric.bench.server import serve
from flowfabric.bench.suite import FULL, LONG_SOAK, OURS, QUICK, SHORT_SOAK, Plan, Results, measure_all, measure_soak


def main() -> None:
    """Measure, then write the results; a quick run prints them only."""
    parser = argparse.ArgumentParser(prog="python -m flowfabric.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round at a smaller load, in under a minute")
    parser.add_argument("--soak", action="store_true", help="full rate for ten minutes on a store with a past, instead")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and nothing else, on stdout")
    parser.add_argument("--url", help="a Postgres server to use instead of an embedded one")
    parser.add_argument("--output", type=Path, default=Path("bench"), help="where results.json and results.png go")
    parser.add_argument("--beside", type=Path, help="another checkout of this project, to compare with in one run")
    parser.add_argument("--only", nargs="+", choices=OURS, default=(), help="with --beside: only these subjects")
    parser.add_argument("--rounds", type=int, help="how often each subject is measured")
    options = parser.parse_args()
    if options.soak and options.beside:
        parser.error("--beside does not go with --soak")
    if options.only and not options.beside:
        parser.error("--only goes with --beside")
    plan = QUICK if options.quick else FULL
    if options.rounds is not None:
        plan = replace(plan, rounds=options.rounds, seconds=FULL.seconds)
    if options.soak:
        results = asyncio.run(soak(options.url, SHORT_SOAK if options.quick else LONG_SOAK))
    else:
        results = asyncio.run(measure(options.url, plan, options.beside, options.only))
    if not options.quick:
        name = "soak" if options.soak else "beside" if options.beside else "results"
        write(results, options.output / f"{name}.json")
        if name == "results":
            draw(results, options.output / "results.png")
    if options.json:
        print(results.as_json())
    else:
        show(results, Console())


def write(results: Results, path: Path) -> None:
    """Leave the results in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.as_json() + "\n")


async def soak(url: str | None, plan: Plan) -> Results:
    """The results of a soak."""
    async with serve(url) as server:
        return await measure_soak(server, plan)


async def measure(url: str | None, plan: Plan, beside: Path | None = None, only: Sequence[str] = ()) -> Results:
    """The results of a whole run, its progress told on stderr."""
    console = Console(stderr=True)
    with console.status("starting Postgres") as status:

        def tell(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False)

        async with serve(url) as server:
            return await measure_all(server, plan, tell=tell, beside=beside, only=only)


if __name__ == "__main__":
    main()
