"""find_inconsistencies reports what no operation can have written about limits, and nothing else."""

import re
from dataclasses import dataclass

import asyncpg
import pytest

from engine.limit.budgets import budget, report
from engine.limit.limits import limited, quota
from engine.state import claim
from fixtures import Clock, Given, uuid_of
from flowfabric.engine.core.queues import WRONG_QUEUES
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read import limit_consistency
from flowfabric.model.budget import Reserved


@dataclass(frozen=True)
class Limits:
    """Limits that are in use, by a running execution that holds a slot and has reserved something."""

    quota: str
    budget: str
    running: str


@pytest.fixture
async def limits(engine: Engine, given: Given, clock: Clock, scans_are_free: None) -> Limits:
    """Limits in every use that a check looks at."""
    quota_id = await quota(engine, running=2, rate=9)
    budget_id = await budget(engine, hard={"calls": 100})
    policy = limited(quota_id, budget_ids=[str(budget_id)])
    for _ in range(4):
        await given.created(policy=policy)
    runs = await claim(engine, lease_ttl_ms=10**7)
    assert len(runs) == 2
    for amount in (5, 6):
        reserved = await engine.reserve(
            runs[0].handle, budget_id, amounts={"calls": amount}, reservation_key=str(amount)
        )
        assert isinstance(reserved, Reserved)
    await engine.record_spend(budget_id, runs[0].execution_id, deltas={"calls": 3})
    await report(engine, budget_id, calls=4)
    await engine.set_lane_fairness(lane_id="default", fair_by="namespace")
    return Limits(str(quota_id), str(budget_id), str(runs[0].execution_id))


async def test_no_operation_on_limits_leaves_an_inconsistency(
    engine: Engine, given: Given, clock: Clock, limits: Limits
) -> None:
    assert await engine.find_inconsistencies() == []
    other = await quota(engine, running=1)
    await engine.attach_quota("lane", "default", other)
    await engine.attach_budget("kind", "job", await budget(engine, hard={"calls": 1}))
    assert await engine.find_inconsistencies() == []
    await engine.check_admission(
        other, "x", execution_id=limits.running, window_seconds=1, rate_limit=2, concurrency_cap=1
    )
    granted = await given.created(lane_id="default", priority=9)
    await engine.issue_claim_grant(
        execution_id=granted, worker_id="w", worker_instance_id="w-1", grant_ttl_ms=1_000, lane_id="default"
    )
    assert await engine.find_inconsistencies() == []
    # An expired guard or grant holds its slot until a sweep returns it.
    await clock.advance(seconds=2)
    assert await engine.find_inconsistencies() == []
    await engine.reconcile_quota_counters()
    assert await engine.find_inconsistencies() == []
    await parts_of(engine).quotas.purge_guards()
    await clock.advance(seconds=10**7)
    for execution_id in [
        each.execution_id for each in (await engine.list_executions(public_state="active")).executions
    ]:
        await engine.mark_lease_expired_if_due(execution_id)
    await engine.reset_budget(limits.budget)
    await engine.detach_quota("lane", "default", other)
    await engine.set_lane_fairness(lane_id="default")
    found = [one.problem for one in await engine.find_inconsistencies()]
    assert found == []


_ORPHAN = "update execution set execution_id = gen_random_uuid() where {mine}"
_OTHER_LIMITS = "its limits are not its own and those attached to its lane, namespace and kind"
_SEEN = "claims without admission see it though it has limits or its lane is fair"

CORRUPTIONS = {
    "update quota_key set taken = taken + 1": "key 'default': its slots in use are 3, but 2 are held",
    "insert into slot_return select quota_key_no, 99, 1 from quota_key": "its slots in use are 1, but 2 are held",
    "update quota_key set window_tokens = '{}'": "its window has not as many times as tokens",
    "update quota_key set window_ats = '{9,8}', window_tokens = '{1,1}'": "the times of its window do not ascend",
    "update budget_usage set reserved = 12": "'calls': 12 is reserved, but the reservations are 11",
    "delete from budget_reservation where amount = 5": "11 is reserved, but the reservations are 6",
    "update budget_usage set used = 2": "'calls': 2 is used, but the ledgers have 3",
    "delete from budget_account": "it is counted without an account",
    _ORPHAN: "budget_reservation: its execution does not exist",
    "update budget_reservation set lease_epoch = lease_epoch + 1": "budget_reservation: its lease has ended",
    "update execution set attached = attached & ~16 where {mine}": "attached: the reservation bit is missing",
    "update queue set quota_key_nos = '{}'": _OTHER_LIMITS,
    "update queue set budget_ids = '{}'": _OTHER_LIMITS,
    "update capability_set set required = '{}'": _SEEN,
}


@pytest.mark.parametrize("command", CORRUPTIONS)
async def test_a_corrupt_limit_is_found(
    engine: Engine, limits: Limits, connection: asyncpg.Connection, command: str
) -> None:
    assert await engine.find_inconsistencies() == []
    await connection.execute(command.replace("{mine}", f"execution_id = '{uuid_of(limits.running)}'"))
    problems = [one.problem for one in await engine.find_inconsistencies()]
    assert any(CORRUPTIONS[command] in problem for problem in problems), problems
    assert await engine.find_inconsistencies(limit=1) == (await engine.find_inconsistencies())[:1]


def test_every_rule_about_limits_is_broken_by_a_test() -> None:
    count = 0
    for statement in (*limit_consistency.SQL, WRONG_QUEUES):
        values = statement.sql.split("lateral (values")[1].split(") as rule")[0]
        for rule in re.findall(r"^ {7}\((.+)", values, re.MULTILINE):
            words = max(re.findall(r"'([^']+)'", rule), key=len).strip()
            assert any(words in problem for problem in CORRUPTIONS.values()), words
            count += 1
    assert count == 11
