"""`python -m tests.faults --seed S --seconds N`: faults at random, and whether every promise held."""

import argparse
import asyncio
import random
import sys
from pathlib import Path

from .run import Plan, run, table


def main() -> int:
    """Run, print the table, and give 1 where an invariant does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seconds", type=float, default=60, help="how long faults strike")
    parser.add_argument("--no-standby", action="store_true", help="one server only, and no failover")
    parser.add_argument("--no-small-disk", action="store_true", help="the data on the disk of the folder for files")
    parser.add_argument("--keep", type=Path, help="a folder for the histories and the logs of the processes")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    plan = Plan(
        seed=given.seed, seconds=given.seconds, standby=not given.no_standby, small_disk=not given.no_small_disk
    )
    report = asyncio.run(run(plan, keep=given.keep))
    print(table(report))
    return int(report.has_violations)


if __name__ == "__main__":
    sys.exit(main())
