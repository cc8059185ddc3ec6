"""The operations on limits for the fault sweeps."""

from collections.abc import Awaitable
from uuid import UUID, uuid4

from flowfabric.engine.engine import Engine
from flowfabric.model.ids import FlowId, flow_partition, split_execution_id

from .operation import Call, Operation, Prepare
from .preparations import created, delayed_until, nothing
from .scene import LEASE_MS, POLICY, WORKER, Subject

LIMITED = {"budget_ids": [str(UUID(int=1))], "quota_policy_id": str(UUID(int=2))}
"""A policy with limits; the same for every subject, as a digest of it is stored."""
QUOTA = UUID(int=3)
"""A quota with a key for each subject."""


async def attached(subject: Subject) -> None:
    """A lane with a queued execution, a budget and a quota."""
    await queued(subject)
    await subject.engine.attach_budget("lane", subject.name, subject.ids[0])
    await subject.engine.attach_quota("lane", subject.name, subject.ids[0])


async def queued(subject: Subject) -> None:
    """An execution on a lane of its own."""
    await created(subject)
    await subject.engine.create_execution(**subject.new(lane_id=subject.name))


async def limited(subject: Subject) -> None:
    """Two executions of a quota that lets one of them run."""
    await subject.engine.create_quota_policy(QUOTA, 60, 10, 1, key_from="tag:app.subject")
    options = {"policy": {**POLICY, "quota_policy_id": str(QUOTA)}, "tags": {"app.subject": subject.name}}
    await created(subject, **options)
    await subject.engine.create_execution(**subject.new(**options))


async def limited_claimed(subject: Subject) -> None:
    """A claimed execution of a quota, and one that it keeps from running."""
    await limited(subject)
    await _claim_first(subject)
    assert await subject.engine.claim(lane_id=subject.lane_id, **WORKER) is None


async def limited_lease_expired(subject: Subject) -> None:
    """An execution of a quota whose lease is marked as expired, and one that it keeps from running."""
    await limited_claimed(subject)
    await subject.clock.advance(ms=LEASE_MS + 1)
    await subject.engine.mark_lease_expired_if_due(subject.execution_id)


async def limited_checked(subject: Subject) -> None:
    """Two executions of a quota, of which the second was admitted by a check."""
    await limited(subject)
    await subject.engine.check_admission(
        QUOTA, subject.name, execution_id=subject.execution_id, window_seconds=60, rate_limit=10, concurrency_cap=1
    )


async def _claim_first(subject: Subject) -> None:
    handle = await subject.engine.claim(lane_id=subject.lane_id, **WORKER)
    assert handle is not None
    assert handle.execution_id == subject.execution_id
    subject.handle = handle


async def beside_limited_flow(subject: Subject) -> None:
    """A claimable execution, and a flow with a budget of which it can be a member."""
    await created(subject)
    partition, _ = split_execution_id(subject.execution_id)
    count = subject.engine.settings.flow_partitions
    subject.flow_id = next(
        flow_id for flow_id in iter(lambda: FlowId(uuid4()), None) if flow_partition(flow_id, count) == partition
    )
    await subject.engine.create_flow(
        subject.flow_id, flow_kind=subject.name, namespace="tests", budget_ids=[subject.ids[0]]
    )


def _claim(engine: Engine, subject: Subject) -> Awaitable[object]:
    return engine.claim(lane_id=subject.lane_id, **WORKER)


def attachment_operations() -> list[Operation]:
    """The operations that attach limits, and those that create executions with limits."""
    found: list[Operation] = []

    def add(
        name: str, prepare: Prepare, call: Call, variant: str = "", *, is_idempotent: bool = True, is_read: bool = False
    ) -> None:
        found.append(
            Operation(
                name=name, variant=variant, prepare=prepare, call=call, is_idempotent=is_idempotent, is_read=is_read
            )
        )

    add("attach_budget", queued, lambda e, s: e.attach_budget("lane", s.name, s.ids[0]))
    add("attach_quota", queued, lambda e, s: e.attach_quota("lane", s.name, s.ids[0]))
    add("detach_budget", attached, lambda e, s: e.detach_budget("lane", s.name, s.ids[0]))
    add("detach_quota", attached, lambda e, s: e.detach_quota("lane", s.name, s.ids[0]))
    add("set_lane_fairness", queued, lambda e, s: e.set_lane_fairness(lane_id=s.name, fair_by="namespace"))
    add("list_attachments", attached, lambda e, s: e.list_attachments("lane", s.name), is_read=True)
    add(
        "create_execution",
        nothing,
        lambda e, s: e.create_execution(**s.new(idempotency_key=s.name, policy=LIMITED)),
        "with limits",
    )
    add(
        "add_execution_to_flow",
        beside_limited_flow,
        lambda e, s: e.add_execution_to_flow(s.flow_id, s.execution_id),
        "with limits",
    )
    # A second call marks the other execution as blocked.
    again: dict[str, bool] = {"is_idempotent": False}
    add("claim", limited, _claim, "with limits", **again)
    add("claim", limited_checked, _claim, "with a checked admission", **again)
    add("claim", limited_lease_expired, _claim, "an expired lease with limits", **again)
    add("claim_many", limited, lambda e, s: e.claim_many(lanes=(s.lane_id,), limit=5, **WORKER), "with limits", **again)
    add("claim_for_worker", limited, lambda e, s: e.claim_for_worker(lane_id=s.lane_id, **WORKER), "limited", **again)
    add("issue_claim_grant", limited, lambda e, s: e.issue_claim_grant(**s.named, **WORKER), "with limits")
    add(
        "issue_grant_and_claim",
        limited,
        lambda e, s: e.issue_grant_and_claim(**s.named, lease_duration_ms=LEASE_MS),
        "with limits",
    )
    add("complete", limited_claimed, lambda e, s: e.complete(s.handle, b"x"), "with limits")
    add("fail", limited_claimed, lambda e, s: e.fail(s.handle, reason="x"), "with limits")
    add("delay", limited_claimed, lambda e, s: e.delay(s.handle, delayed_until(s)), "with limits")
    return found
