"""A short run of processes under faults, whose histories must agree with the store."""

import pytest

from .run import Plan, run, table

SHORT = Plan(
    seed=7,
    seconds=0,
    pace=0.3,
    lease_ms=1_000,
    standby=False,
    small_disk=False,
    roles={"submitter": 1, "worker": 1, "claimer": 1, "signaller": 1, "operator": 1},
)
"""Every kind of fault that one server allows, once."""

ALWAYS_CHECKED = {
    "an acknowledged submission is stored",
    "an execution ends once",
    "a lease has one run",
    "every execution ends after the faults are healed",
    "a call returns or raises an error of the engine",
    "the rows are consistent",
}
"""The invariants that even a short run checks; the calls of others are too rare."""


@pytest.mark.timeout(180)
async def test_the_store_agrees_with_the_histories_of_processes_under_faults() -> None:
    report = await run(SHORT)
    assert not report.has_violations, "\n" + table(report)
    assert sum(report.faults.values()) >= 10
    assert {one.invariant for one in report.verdicts if one.checked} >= ALWAYS_CHECKED
