"""Preparations of subjects: each calls operations on an engine other than the one under test."""

from typing import Any
from uuid import UUID, uuid4

from flowfabric.engine.parts import parts_of
from flowfabric.model.condition import ByName, Single
from flowfabric.model.edge import AnyOfEdges, OnSatisfied
from flowfabric.model.grant import Granted
from flowfabric.model.ids import ExecutionId, FlowId, flow_partition, format_execution_id, split_execution_id
from flowfabric.model.stream import DurableSummary, Frame
from flowfabric.model.suspension import SuspendArgs, Suspended
from flowfabric.model.waitpoint import Fresh

from .scene import LEASE_MS, MINUTE, WORKER, Subject

LARGE_INPUT = b"x" * 300
"""An input too large for the row of its execution."""


async def nothing(subject: Subject) -> None:
    """No execution."""


async def keyless(subject: Subject) -> None:
    """A store without a signing key; no operation deletes the last one."""
    await subject.connection.execute("delete from signing_key")


async def created(subject: Subject, **overrides: Any) -> None:
    """An execution that waits for a worker."""
    await subject.engine.create_execution(**subject.new(execution_id=subject.execution_id, **overrides))


async def claimed(subject: Subject, *, lease_ttl_ms: int = LEASE_MS, **overrides: Any) -> None:
    """An execution that a worker has claimed."""
    await created(subject, **overrides)
    handle = await subject.engine.claim(lane_id=subject.lane_id, **WORKER, lease_ttl_ms=lease_ttl_ms)
    assert handle is not None
    assert handle.execution_id == subject.execution_id
    subject.handle = handle


async def in_flow(subject: Subject) -> None:
    """A member of a flow that waits for a worker."""
    await created(subject)
    await _add_to_flow(subject)


async def in_ended_flow(subject: Subject) -> None:
    """A flow whose only member is cancelled."""
    await in_flow(subject)
    await subject.engine.cancel_execution(execution_id=subject.execution_id, reason="x")
    assert await subject.engine.wait_for_flow(subject.flow_id, 30_000) is not None


async def running_in_flow(subject: Subject) -> None:
    """A member of a flow that a worker has claimed."""
    await claimed(subject)
    await _add_to_flow(subject)


async def owed(subject: Subject) -> None:
    """A member that its cancelled flow has still to cancel."""
    await in_flow(subject)
    await subject.engine.cancel_flow_header(subject.flow_id, reason="x", cancellation_policy="cancel_all")


async def beside_flow(subject: Subject) -> None:
    """An execution, and a flow that it may join."""
    await created(subject)
    await _create_flow(subject)


async def with_upstream(subject: Subject) -> None:
    """A member of a flow, and a second one."""
    await in_flow(subject)
    await _add_upstream(subject)


async def with_staged_edge(subject: Subject) -> None:
    """A member of a flow with an edge to it that is not applied."""
    await with_upstream(subject)
    await subject.engine.stage_dependency_edge(subject.flow_id, **subject.edge, expected_graph_revision=2)


async def with_ended_upstream(subject: Subject) -> None:
    """A member of a flow with an edge to it that is not applied, from a member that has succeeded."""
    await with_staged_edge(subject)
    await _succeed(subject, subject.upstream_id)
    await parts_of(subject.engine).cascade.drain()


async def with_dependency(subject: Subject) -> None:
    """A running member of a flow that depends on another member."""
    await running_in_flow(subject)
    await _add_upstream(subject)
    await subject.engine.stage_dependency_edge(subject.flow_id, **subject.edge, expected_graph_revision=2)
    await subject.engine.apply_dependency_to_child(subject.flow_id, **subject.edge, graph_revision=3)


async def with_unsettled_upstream(subject: Subject) -> None:
    """A member that waits for another member, whose success nobody has settled."""
    await with_upstream(subject)
    await _connect(subject, subject.ids[0], subject.upstream_id, revision=2)
    wakeups = parts_of(subject.engine).wakeups
    queue_entries, wakeups.on_members_ended = wakeups.on_members_ended, None
    try:
        await _succeed(subject, subject.upstream_id)
    finally:
        wakeups.on_members_ended = queue_entries
    subject.event_id = await subject.connection.fetchval(
        "select event_id from cascade_entry where flow_id = $1", subject.flow_id
    )
    subject.is_settled = False


async def with_lost_promotion(subject: Subject) -> None:
    """A member that waits although its dependency is satisfied, which only rows written by the test can show."""
    await with_unsettled_upstream(subject)
    await subject.connection.execute("update edge set state = 'satisfied' where flow_id = $1", subject.flow_id)
    await subject.connection.execute(
        "update edge_group set succeeded_count = 1, group_state = 'satisfied', satisfied_at = 1 where flow_id = $1",
        subject.flow_id,
    )


async def with_pending_sibling(subject: Subject) -> None:
    """A member whose group is decided, and a sibling of the upstream execution that nobody has cancelled."""
    await with_upstream(subject)
    sibling = _sibling(subject)
    await subject.engine.create_execution(**subject.new(execution_id=sibling))
    await subject.engine.add_execution_to_flow(subject.flow_id, sibling)
    policy = AnyOfEdges(OnSatisfied.CANCEL_REMAINING)
    await subject.engine.set_edge_group_policy(subject.flow_id, subject.execution_id, policy)
    await _connect(subject, subject.ids[0], subject.upstream_id, revision=3)
    await _connect(subject, subject.ids[3], sibling, revision=4)
    await _decide(subject)


async def with_decided_group(subject: Subject) -> None:
    """A member whose group is decided and has no sibling to cancel."""
    await with_upstream(subject)
    policy = AnyOfEdges(OnSatisfied.CANCEL_REMAINING)
    await subject.engine.set_edge_group_policy(subject.flow_id, subject.execution_id, policy)
    await _connect(subject, subject.ids[0], subject.upstream_id, revision=2)
    await _decide(subject)


async def with_cancelled_sibling(subject: Subject) -> None:
    """A member whose group is decided, and a sibling that has ended before it could be cancelled."""
    await with_pending_sibling(subject)
    await subject.engine.cancel_execution(execution_id=_sibling(subject), reason="x")
    await parts_of(subject.engine).cascade.drain()


async def _decide(subject: Subject) -> None:
    parts = parts_of(subject.engine)
    start, parts.wakeups.on_siblings = parts.wakeups.on_siblings, None
    try:
        await _succeed(subject, subject.upstream_id)
        await parts.cascade.drain()
    finally:
        parts.wakeups.on_siblings = start


def _sibling(subject: Subject) -> ExecutionId:
    return format_execution_id(split_execution_id(subject.execution_id)[0], subject.ids[2])


async def _connect(subject: Subject, edge_id: UUID, upstream_id: ExecutionId, *, revision: int) -> None:
    edge: dict[str, Any] = {
        "edge_id": edge_id,
        "upstream_execution_id": upstream_id,
        "downstream_execution_id": subject.execution_id,
    }
    await subject.engine.stage_dependency_edge(subject.flow_id, **edge, expected_graph_revision=revision)
    await subject.engine.apply_dependency_to_child(subject.flow_id, **edge, graph_revision=revision + 1)


async def _succeed(subject: Subject, execution_id: ExecutionId) -> None:
    await subject.engine.issue_grant_and_claim(
        execution_id=execution_id, lane_id=subject.lane_id, lease_duration_ms=LEASE_MS
    )
    await subject.engine.complete_execution(execution_id=execution_id, payload=b"x", source="operator_override")


async def _add_upstream(subject: Subject) -> None:
    partition, _ = split_execution_id(subject.execution_id)
    subject.upstream_id = format_execution_id(partition, subject.ids[1])
    await subject.engine.create_execution(**subject.new(execution_id=subject.upstream_id))
    await subject.engine.add_execution_to_flow(subject.flow_id, subject.upstream_id)


async def _add_to_flow(subject: Subject) -> None:
    await _create_flow(subject)
    await subject.engine.add_execution_to_flow(subject.flow_id, subject.execution_id)


async def _create_flow(subject: Subject) -> None:
    partition, _ = split_execution_id(subject.execution_id)
    count = subject.engine.settings.flow_partitions
    subject.flow_id = next(
        flow_id for flow_id in iter(lambda: FlowId(uuid4()), None) if flow_partition(flow_id, count) == partition
    )
    await subject.engine.create_flow(subject.flow_id, flow_kind="dag", namespace="tests")


async def streaming(subject: Subject, **overrides: Any) -> None:
    """A running execution with a frame and a summary."""
    await claimed(subject, **overrides)
    await subject.engine.append_frame(subject.handle, Frame(bytes=b"first"))
    await subject.engine.append_frame(subject.handle, Frame(bytes=b'{"a": 1}', mode=DurableSummary()))


async def streaming_lease_expired(subject: Subject) -> None:
    """An execution with a stream whose lease is marked as expired."""
    await streaming(subject)
    await subject.clock.advance(ms=LEASE_MS)
    await subject.engine.mark_lease_expired_if_due(subject.execution_id)


async def streaming_past_lease(subject: Subject) -> None:
    """An execution with a stream past the end of its lease."""
    await streaming(subject)
    await subject.clock.advance(ms=LEASE_MS)


async def with_expired_stream(subject: Subject) -> None:
    """An execution whose closed stream has expired."""
    await streaming(subject, policy={"stream_policy": {"retention_ttl_ms": MINUTE}})
    await subject.engine.complete(subject.handle, b"done")
    await subject.clock.advance(ms=2 * MINUTE)


async def delayed(subject: Subject) -> None:
    """An execution that its worker has delayed."""
    await claimed(subject)
    await subject.engine.delay(subject.handle, delayed_until(subject))


async def tagged(subject: Subject) -> None:
    """An execution with a tag."""
    await created(subject, tags={"app.key": "value"})


async def of_instance(subject: Subject) -> None:
    """An execution with an instance tag."""
    await created(subject, tags={"ff.instance_id": "old", "app.key": "value"})


async def completed(subject: Subject) -> None:
    """An execution that ended in success."""
    await claimed(subject)
    await subject.engine.complete(subject.handle, b"done")


async def past_retention(subject: Subject) -> None:
    """An ended execution past its retention, with a tag, a large input, a large result and a stream."""
    await streaming(
        subject,
        policy={"stream_policy": {"retention_ttl_ms": MINUTE}},
        tags={"app.key": "value"},
        input_payload=LARGE_INPUT,
    )
    await subject.engine.complete(subject.handle, b"x" * 1500)
    await subject.clock.advance(ms=2 * MINUTE)


async def due(subject: Subject) -> None:
    """A delayed execution that is due."""
    await created(subject, delay_until=await subject.clock.now() + MINUTE)
    await subject.clock.advance(ms=MINUTE)


async def past_timeout(subject: Subject) -> None:
    """An execution whose attempt is past its timeout."""
    await claimed(subject, lease_ttl_ms=120 * MINUTE)
    await subject.clock.advance(ms=60 * MINUTE)


async def past_deadline(subject: Subject) -> None:
    """A waiting execution past its deadline."""
    await created(subject, execution_deadline_at=await subject.clock.now() + MINUTE)
    await subject.clock.advance(ms=MINUTE)


async def past_lease(subject: Subject) -> None:
    """An execution past the end of its lease."""
    await claimed(subject)
    await subject.clock.advance(ms=LEASE_MS)


async def lease_expired(subject: Subject) -> None:
    """An execution whose lease is marked as expired."""
    await past_lease(subject)
    await subject.engine.mark_lease_expired_if_due(subject.execution_id)


async def granted(subject: Subject) -> None:
    """An execution granted to the worker."""
    await created(subject)
    subject.grant = await subject.engine.issue_claim_grant(**subject.named, **WORKER)


async def reclaim_granted(subject: Subject) -> None:
    """An execution with an expired lease, granted to the worker."""
    await lease_expired(subject)
    grant = await subject.engine.issue_reclaim_grant(**subject.named, **WORKER)
    assert isinstance(grant, Granted)
    subject.grant = grant


async def resumable(subject: Subject) -> None:
    """An execution that is ready to resume its attempt."""
    await claimed(subject)
    await subject.engine.wait_children(subject.handle)


async def resume_granted(subject: Subject) -> None:
    """An execution that is ready to resume its attempt, granted to the worker."""
    await resumable(subject)
    subject.grant = await subject.engine.issue_claim_grant(**subject.named, **WORKER)


async def suspended(subject: Subject, **overrides: Any) -> None:
    """An execution that waits for the signal `ready`."""
    await claimed(subject)
    outcome = await subject.engine.suspend(subject.handle, suspend_args(subject, **overrides))
    assert isinstance(outcome, Suspended)
    subject.wait = outcome.details
    subject.handle = outcome.handle


async def signalled(subject: Subject) -> None:
    """An execution whose wait a signal has satisfied."""
    await suspended(subject)
    await subject.engine.deliver_signal(
        execution_id=subject.execution_id,
        waitpoint_id=subject.wait.waitpoint_id,
        waitpoint_token=subject.wait.waitpoint_token,
        signal_name="ready",
    )


async def resumed(subject: Subject) -> None:
    """An execution that an operator has resumed."""
    await suspended(subject)
    await subject.engine.resume_execution(execution_id=subject.execution_id)


async def waiting_for_run_signal(subject: Subject) -> None:
    """An execution that waits for a signal with the name of its wait, as `ctx.wait_for_signal` does."""
    await suspended(subject, resume_condition=Single(waitpoint_key="wait", matcher=ByName("wait")))


async def past_wait_timeout(subject: Subject) -> None:
    """A suspended execution past the timeout of its wait."""
    await suspended(subject, timeout_at=await subject.clock.now() + MINUTE)
    await subject.clock.advance(ms=MINUTE)


async def with_waitpoint(subject: Subject) -> None:
    """A running execution with a waitpoint created ahead of the wait."""
    await claimed(subject)
    subject.pending = await subject.engine.create_waitpoint(
        subject.handle, waitpoint_key="wait", expires_in_ms=10 * MINUTE
    )


async def registered(subject: Subject) -> None:
    """A live worker with the name of the subject."""
    await subject.engine.register_worker(**registration(subject))


def registration(subject: Subject) -> dict[str, Any]:
    """The arguments that register a worker with the name of the subject."""
    return {
        "worker_id": "worker",
        "worker_instance_id": subject.name,
        "lanes": (subject.lane_id,),
        "liveness_ttl_ms": MINUTE,
        "namespace": "tests",
    }


def suspend_args(subject: Subject, **overrides: Any) -> SuspendArgs:
    """The arguments of a suspend, the same for repeated calls."""
    return SuspendArgs(
        **{
            "suspension_id": subject.ids[0],
            "waitpoints": (Fresh(waitpoint_id=subject.ids[1], waitpoint_key="wait"),),
            "resume_condition": Single(waitpoint_key="wait", matcher=ByName("ready")),
            "reason_code": "waiting_for_signal",
            "idempotency_key": subject.name,
            **overrides,
        }
    )


def delayed_until(subject: Subject) -> int:
    """A time far after the preparation."""
    return subject.began + 200 * MINUTE
