"""Measure one subject in this process: `python -m flowfabric.bench.run <subject> --url …` prints its figures."""

import argparse
import asyncio
import gc
import importlib
import json
import logging
import os
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from flowfabric.bench.subject import Measure, Task
from flowfabric.bench.without import OPTIMISATIONS, switch_off

Answer = TypeVar("Answer")

SUBJECTS = {
    "raw": "flowfabric.bench.raw",
    "submit": "flowfabric.bench.ours_submit",
    "work": "flowfabric.bench.ours_work",
    "suspend": "flowfabric.bench.ours_suspend",
    "pgqueuer": "flowfabric.bench.peer_pgqueuer",
    "awa": "flowfabric.bench.peer_awa",
    "absurd": "flowfabric.bench.peer_absurd",
    "procrastinate": "flowfabric.bench.peer_procrastinate",
    "dbos": "flowfabric.bench.peer_dbos",
    "idle": "flowfabric.bench.ours_idle",
    "backlog": "flowfabric.bench.ours_backlog",
    "result": "flowfabric.bench.ours_result",
    "cost": "flowfabric.bench.ours_cost",
    "renew": "flowfabric.bench.ours_renew",
    "queues": "flowfabric.bench.ours_queues",
    "counts": "flowfabric.bench.ours_counts",
    "pinned": "flowfabric.bench.ours_pinned",
    "dead_rows": "flowfabric.bench.ours_dead_rows",
    "streams": "flowfabric.bench.ours_streams",
    "feeds": "flowfabric.bench.ours_feeds",
    "flows": "flowfabric.bench.ours_flows",
    "limits": "flowfabric.bench.ours_limits",
    "limits_pinned": "flowfabric.bench.ours_limits_pinned",
    "neighbour": "flowfabric.bench.ours_neighbour",
    "soak": "flowfabric.bench.soak",
}


def main() -> None:
    """Print the figures of the subject, or the error, as JSON; nothing else goes to stdout."""
    parser = argparse.ArgumentParser(prog="python -m flowfabric.bench.run")
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--url", required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--without", choices=OPTIMISATIONS)
    options = parser.parse_args()
    with os.fdopen(os.dup(1), "w") as answer:
        # What a peer prints goes to stderr.
        os.dup2(2, 1)
        logging.disable(logging.ERROR)
        try:
            if options.without is not None:
                switch_off(options.without)
            measure: Measure = importlib.import_module(SUBJECTS[options.subject]).measure
            # The garbage collector skips the objects of the imports during the measurement.
            gc.collect()
            gc.freeze()
            figures = on_loop(measure(Task(url=options.url, scale=options.scale)))
            json.dump({"figures": {name: asdict(figure) for name, figure in figures.items()}}, answer)
        except Exception as error:
            json.dump({"error": f"{type(error).__name__}: {error}"}, answer)
            raise
    sys.stdout.flush()


def on_loop(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Run a coroutine on uvloop if it is installed, so that every subject uses the same event loop."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


if __name__ == "__main__":
    main()
