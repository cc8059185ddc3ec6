"""The operations on limits for the fault sweeps."""

from uuid import UUID, uuid4

from flowfabric.model.ids import FlowId, flow_partition, split_execution_id

from .operation import Call, Operation, Prepare
from .preparations import created, nothing
from .scene import Subject

LIMITED = {"budget_ids": [str(UUID(int=1))], "quota_policy_id": str(UUID(int=2))}
"""A policy with limits; the same for every subject, as a digest of it is stored."""


async def attached(subject: Subject) -> None:
    """A lane with a queued execution, a budget and a quota."""
    await queued(subject)
    await subject.engine.attach_budget("lane", subject.name, subject.ids[0])
    await subject.engine.attach_quota("lane", subject.name, subject.ids[0])


async def queued(subject: Subject) -> None:
    """An execution on a lane of its own."""
    await created(subject)
    await subject.engine.create_execution(**subject.new(lane_id=subject.name))


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
    return found
