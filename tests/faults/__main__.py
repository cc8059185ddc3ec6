"""`python -m tests.faults --seed S --seconds N`: inject random faults and check every invariant."""

import argparse
import asyncio
import random
import sys
from pathlib import Path

from .run import Plan, run, table


def main() -> int:
    """Run and print the report; return 1 if an invariant is violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seconds", type=float, default=60, help="how long faults are injected")
    parser.add_argument("--no-standby", action="store_true", help="run one server and inject no failover")
    parser.add_argument(
        "--no-small-disk", action="store_true", help="keep the data in the temporary folder and inject no full disk"
    )
    parser.add_argument("--keep", type=Path, help="keep the histories and logs of the processes in this folder")
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
