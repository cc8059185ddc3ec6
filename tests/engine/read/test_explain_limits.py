"""Explain: the budgets and the quotas that hold an execution back, marked or not."""

import pytest

from engine.limit.budgets import DAY_MS, budget, report
from engine.limit.limits import limited, quota
from engine.state import claim
from engine.waits import suspend_args
from fixtures import Clock, Explain, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.explanation import (
    BudgetReason,
    Explanation,
    GrantedReason,
    LeaseLostReason,
    QueuedReason,
    QuotaReason,
    SignalsReason,
)
from flowfabric.model.text import shown_time

TENANT = "tag:app.tenant"


@pytest.fixture(autouse=True)
async def _served(given: Given, scans_are_free: None, consistent_rows: None) -> None:
    """A live worker serves the lane, so that no explanation lacks one."""
    await given.registered(worker_instance_id="any", liveness_ttl_ms=2**50)


def quotas(found: Explanation) -> list[QuotaReason]:
    """The quotas that hold an execution back."""
    return [reason for reason in found.reasons if isinstance(reason, QuotaReason)]


def budgets(found: Explanation) -> list[BudgetReason]:
    """The budgets that hold an execution back."""
    return [reason for reason in found.reasons if isinstance(reason, BudgetReason)]


async def test_an_execution_without_a_slot_is_rate_limited_whether_a_claim_has_marked_it_or_not(
    engine: Engine, given: Given, rows: Rows
) -> None:
    policy_id = await quota(engine, running=2, key_from=TENANT)
    options = {"policy": limited(policy_id), "tags": {"app.tenant": "acme"}}
    ids = [await given.created(**options) for _ in range(5)]
    other = await given.created(policy=limited(policy_id), tags={"app.tenant": "other"})
    assert (await engine.explain(ids[2])).summary == "waiting: 2 ahead of it on lane 'default'"
    assert len(await claim(engine, limit=2)) == 2
    before = await rows.snapshot()
    unmarked = await engine.explain(ids[2])
    expected = {
        "quota_policy_id": policy_id,
        "key": "acme",
        "key_from": TENANT,
        "limit_kind": "concurrency",
        "used": 2,
        "limit": 2,
    }
    assert quotas(unmarked) == [QuotaReason(**expected)]  # type: ignore[arg-type]
    words = f"quota {policy_id}: tenant 'acme' uses 2 of 2 slots"
    assert unmarked.summary == f"rate limited: {words}; 0 ahead of it on lane 'default'"
    assert unmarked.public_state == "rate_limited"
    assert unmarked.state_vector.public_state == "waiting"
    assert await rows.snapshot() == before
    assert [run.execution_id for run in await claim(engine)] == [other]
    marked = await engine.explain(ids[2])
    detail = f"quota {policy_id}: concurrency cap 2"
    assert quotas(marked) == [QuotaReason(**expected, detail=detail)]  # type: ignore[arg-type]
    assert (marked.summary, marked.public_state) == (unmarked.summary, "rate_limited")
    behind = await engine.explain(ids[4])
    assert behind.summary == f"rate limited: {words}; 2 ahead of it on lane 'default'"


async def test_the_next_slot_is_estimated_from_the_latest_runs_of_the_queue(
    engine: Engine, given: Given, clock: Clock
) -> None:
    policy = limited(await quota(engine, running=4))
    for _ in range(13):
        waiting = await given.created(policy=policy)
    for seconds in (20, 28):
        runs = await claim(engine)
        assert len(runs) == 4
        await clock.advance(seconds=seconds)
        await engine.complete_many([(run.handle, b"") for run in runs])
    assert len(await claim(engine)) == 4
    found = await engine.explain(waiting)
    assert [reason.retry_after_ms for reason in quotas(found)] == [6_000]
    assert "uses 4 of 4 slots, next in about 6 s" in found.summary


async def test_a_used_up_rate_says_when_the_oldest_token_leaves_the_window(
    engine: Engine, given: Given, clock: Clock
) -> None:
    policy_id = await quota(engine, rate=3, window=10)
    ids = [await given.created(policy=limited(policy_id)) for _ in range(5)]
    assert len(await claim(engine, limit=1)) == 1
    await clock.advance(seconds=4)
    assert len(await claim(engine)) == 2
    await clock.advance(ms=2500)
    found = await engine.explain(ids[4])
    (reason,) = quotas(found)
    assert (reason.limit_kind, reason.used, reason.limit) == ("rate", 3, 3)
    assert (reason.window_ms, reason.retry_after_ms) == (10_000, 3_500)
    assert f"quota {policy_id}: has used 3 of 3 starts per 10 s, next in 4 s; " in found.summary
    await clock.advance(ms=3500)
    assert quotas(await engine.explain(ids[4])) == []
    assert (await engine.explain(ids[4])).public_state == "waiting"


async def test_an_execution_that_has_its_token_already_is_not_held_back_by_the_rate(
    engine: Engine, given: Given, clock: Clock
) -> None:
    policy = limited(await quota(engine, rate=1, window=3600), retry_policy={"max_retries": 3})
    tried, other = await given.created(policy=policy), await given.created(policy=policy)
    (run,) = await claim(engine)
    await engine.fail(run.handle, reason="once more")
    await clock.advance(seconds=60)
    assert quotas(await engine.explain(tried)) == []
    assert len(quotas(await engine.explain(other))) == 1


async def test_an_execution_waits_for_as_many_tokens_as_it_weighs(engine: Engine, given: Given, rows: Rows) -> None:
    policy_id = await quota(engine, rate=4)
    await engine.change_quota_policy(
        policy_id, window_seconds=60, max_requests_per_window=4, max_concurrent=0, weight_from="payload:/size"
    )
    await given.created(policy=limited(policy_id), input_payload=b'{"size": 2}')
    assert len(await claim(engine)) == 1
    light = await given.created(policy=limited(policy_id), input_payload=b'{"size": 2}')
    heavy = await given.created(policy=limited(policy_id), input_payload=b'{"size": 3}')
    assert [len(quotas(await engine.explain(each))) for each in (light, heavy)] == [0, 1]


async def test_an_exhausted_budget_is_named_with_its_dimension_and_its_next_reset(
    engine: Engine, given: Given, clock: Clock
) -> None:
    resets = await clock.now() + DAY_MS
    budget_id = await budget(engine, hard={"tokens": 1000, "calls": 5}, reset_interval_ms=DAY_MS)
    endless = await budget(engine, hard={"cost": 10})
    policy = {"budget_ids": [str(budget_id), str(endless)]}
    first, second = await given.created(policy=policy), await given.created(policy=policy)
    await report(engine, budget_id, tokens=1000, calls=4)
    expected = BudgetReason(budget_id=budget_id, dimension="tokens", used=1000, limit=1000, next_reset_at=resets)  # type: ignore[arg-type]
    found = await engine.explain(first)
    assert budgets(found) == [expected]
    words = f"budget {budget_id}: tokens 1000 of 1000, resets at {shown_time(resets)}"
    assert found.summary == f"rate limited: {words}; 0 ahead of it on lane 'default'"
    assert await claim(engine) == []
    marked = await engine.explain(first)
    assert [reason.detail for reason in budgets(marked)] == [f"budget {budget_id}: tokens 1000/1000"]
    assert marked.summary == found.summary
    await report(engine, endless, cost=10)
    assert f"; budget {endless}: cost 10 of 10; 1 ahead" in (await engine.explain(second)).summary


async def test_every_limit_without_room_is_listed(engine: Engine, given: Given) -> None:
    policy_id, attached = await quota(engine, running=1, rate=1), await quota(engine, running=1)
    budget_id = await budget(engine, hard={"calls": 1})
    policy = limited(policy_id, budget_ids=[str(budget_id)])
    await given.created(policy=policy)
    waiting = await given.created(policy=policy)
    await engine.attach_quota("lane", "default", attached)
    assert len(await claim(engine)) == 1
    await report(engine, budget_id, calls=1)
    found = await engine.explain(waiting)
    assert [(reason.quota_policy_id, reason.limit_kind) for reason in quotas(found)] == [
        (policy_id, "rate"),
        (policy_id, "concurrency"),
        (attached, "concurrency"),
    ]
    assert [reason.budget_id for reason in budgets(found)] == [budget_id]
    assert isinstance(found.reasons[-1], QueuedReason)


async def test_a_marked_execution_whose_limits_have_room_is_about_to_be_released(engine: Engine, given: Given) -> None:
    policy_id = await quota(engine, running=1)
    await given.created(policy=limited(policy_id))
    waiting = await given.created(policy=limited(policy_id))
    (run,) = await claim(engine)
    assert await claim(engine) == []
    await engine.complete(run.handle, b"")
    found = await engine.explain(waiting)
    assert quotas(found) == [QuotaReason(detail=f"quota {policy_id}: concurrency cap 1")]
    words = "rate limited: about to be released: its quotas have room"
    assert found.summary == f"{words}; 0 ahead of it on lane 'default'"
    budget_id = await budget(engine, hard={"calls": 1})
    await report(engine, budget_id, calls=1)
    blocked = await given.created(policy={"budget_ids": [str(budget_id)]}, priority=9)
    await claim(engine)
    await engine.reset_budget(budget_id)
    found = await engine.explain(blocked)
    assert budgets(found) == [BudgetReason(detail=f"budget {budget_id}: calls 1/1")]
    assert found.summary.startswith("rate limited: about to be released: its budgets have room; ")


async def test_another_limit_than_the_one_that_marked_an_execution_may_hold_it_back_by_now(
    engine: Engine, given: Given
) -> None:
    policy_id, budget_id = await quota(engine, running=1), await budget(engine, hard={"calls": 1})
    policy = limited(policy_id, budget_ids=[str(budget_id)])
    await given.created(policy=policy)
    waiting = await given.created(policy=policy)
    (run,) = await claim(engine)
    assert await claim(engine) == []
    await report(engine, budget_id, calls=1)
    await engine.complete(run.handle, b"")
    found = await engine.explain(waiting)
    assert (quotas(found), len(budgets(found))) == ([], 1)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("paused_by_operator", "waiting: paused by operator, look first"),
        ("paused_by_policy", "waiting: paused by policy, look first"),
        ("waiting_for_capable_worker", "waiting: about to be released: a live worker offers all it requires"),
        (
            "waiting_for_budget",
            "rate limited: about to be released: its budgets have room; 0 ahead of it on lane 'default'",
        ),
        (
            "waiting_for_quota",
            "rate limited: about to be released: its quotas have room; 0 ahead of it on lane 'default'",
        ),
    ],
)
async def test_a_block_by_a_caller_is_explained(
    engine: Engine, given: Given, explain: Explain, reason: str, words: str
) -> None:
    execution_id = await given.created()
    await engine.block_execution_for_admission(execution_id, reason, "look first")
    assert (await explain(execution_id)).summary == words


async def test_a_limited_execution_shows_no_reserved_capability(engine: Engine, given: Given) -> None:
    policy = limited(await quota(engine, running=1))
    needing = policy | {"routing_requirements": {"required_capabilities": ["gpu"]}}
    found = await engine.explain(await given.created(policy=needing))
    assert "limited claims" not in repr(found)
    assert found.summary == (
        "waiting: 0 ahead of it on lane 'default'; no live worker of its lane, namespace and kind offers gpu"
    )


async def test_a_granted_execution_is_not_held_back_by_limits(engine: Engine, given: Given) -> None:
    policy_id = await quota(engine, running=1)
    await given.created(policy=limited(policy_id))
    reserved = await given.created(policy=limited(policy_id))
    assert len(await claim(engine)) == 1
    await engine.issue_claim_grant(
        execution_id=reserved, worker_id="w", worker_instance_id="any", grant_ttl_ms=60_000, lane_id="default"
    )
    found = await engine.explain(reserved)
    assert [type(reason) for reason in found.reasons] == [GrantedReason]
    assert found.public_state == "waiting"


async def test_a_lost_lease_is_reclaimed_only_with_a_free_slot(engine: Engine, given: Given, clock: Clock) -> None:
    policy = limited(await quota(engine, running=1))
    await given.created(policy=policy)
    waiting = await given.created(policy=policy)
    (run,) = await claim(engine)
    await clock.advance(seconds=31)
    await engine.mark_lease_expired_if_due(run.execution_id)
    await engine.issue_grant_and_claim(execution_id=waiting, lane_id="default", lease_duration_ms=60_000)
    found = await engine.explain(run.execution_id)
    assert [type(reason) for reason in found.reasons] == [LeaseLostReason, QuotaReason, QueuedReason]
    assert found.public_state == "active"


async def test_only_its_own_queue_is_ahead_of_an_execution_of_a_fair_lane(engine: Engine, given: Given) -> None:
    for namespace in ("a", "b", "a", "b", "b"):
        last = await given.created(namespace=namespace, lane_id="fair")
    await given.registered(lanes=["fair"], worker_instance_id="fair")
    assert (await engine.explain(last)).summary.startswith("waiting: 4 ahead of it on lane 'fair'")
    await engine.set_lane_fairness(lane_id="fair", fair_by="namespace")
    found = await engine.explain(last)
    (reason, *_) = found.reasons
    assert isinstance(reason, QueuedReason)
    assert (reason.ahead, reason.is_in_turns) == (2, True)
    assert found.summary.startswith("waiting: 2 ahead of it in its queue, one of those in turns on lane 'fair'")


async def test_a_run_that_waits_for_an_approval_because_of_a_budget_names_the_budget(
    engine: Engine, given: Given
) -> None:
    budget_id = await budget(engine, hard={"calls": 1})
    run = await given.claimed(policy={"budget_ids": [str(budget_id)]})
    await report(engine, budget_id, calls=1)
    await engine.suspend(run, suspend_args(reason_code="paused_by_budget"))
    found = await engine.explain(run.execution_id)
    assert [type(reason) for reason in found.reasons] == [SignalsReason, BudgetReason]
    assert found.summary.startswith("suspended until ")
    assert found.summary.endswith(f"; budget {budget_id}: calls 1 of 1")
    assert found.public_state == "suspended"
