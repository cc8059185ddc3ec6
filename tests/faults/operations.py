"""Every operation of the engine for the fault sweeps: how its subject is prepared, and the call."""

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any

from flowfabric import Fabric
from flowfabric.engine.engine import Engine
from flowfabric.engine.operation import operation
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import FailureReason
from flowfabric.model.edge import Incoming
from flowfabric.model.execution import NewExecution
from flowfabric.model.grant import ResumeGrant, ResumeToken
from flowfabric.model.ids import LaneId
from flowfabric.model.stream import DurableSummary, Frame

from .attachment_operations import attachment_operations
from .budget_operations import budget_operations, budget_reads
from .flow_operations import flow_operations
from .operation import Call, Operation, Prepare
from .preparations import (
    LARGE_INPUT,
    claimed,
    completed,
    created,
    delayed,
    delayed_until,
    due,
    granted,
    in_ended_flow,
    in_flow,
    keyless,
    lease_expired,
    nothing,
    of_instance,
    past_deadline,
    past_lease,
    past_retention,
    past_timeout,
    past_wait_timeout,
    reclaim_granted,
    registered,
    registration,
    resumable,
    resume_granted,
    resumed,
    signalled,
    streaming,
    streaming_lease_expired,
    streaming_past_lease,
    suspend_args,
    suspended,
    tagged,
    waiting_for_run_signal,
    with_dependency,
    with_expired_stream,
    with_staged_edge,
    with_waitpoint,
)
from .quota_operations import quota_operations
from .scene import LEASE_MS, MINUTE, SECRET, WORKER, Subject

LARGE = {"input_payload": LARGE_INPUT}
FRAME = Frame(bytes=b"frame", correlation_id="c")
PATCH = Frame(bytes=b'{"b": 2}', mode=DurableSummary())
RAISED = FailureReason("x", error_type="ValueError", traceback="Traceback\n" * 500)


def public_operations() -> set[str]:
    """The names of the asynchronous operations of the engine."""
    return {
        name
        for name in dir(Engine)
        if not name.startswith("_")
        and (inspect.iscoroutinefunction(getattr(Engine, name)) or isinstance(vars(Engine).get(name), operation))
    }


# Calls that take more than one line.


def _create_many(engine: Engine, subject: Subject, **overrides: Any) -> Awaitable[object]:
    items = [subject.new(execution_id=f"{{fp:1}}:{one}", **overrides) for one in subject.ids]
    return engine.create_many([NewExecution(**item) for item in items])


def _create_without_ids(engine: Engine, subject: Subject, **overrides: Any) -> Awaitable[object]:
    return engine.create_many([NewExecution(**subject.new(**overrides)) for _ in range(3)])


def _resume_token(subject: Subject) -> ResumeToken:
    grant = subject.grant.grant
    return ResumeToken(
        grant=ResumeGrant(
            execution_id=grant.execution_id,
            partition_key=grant.partition_key,
            grant_key=grant.grant_key,
            expires_at_ms=grant.expires_at_ms,
            lane_id=LaneId(subject.lane_id),
        ),
        **WORKER,
        lease_ttl_ms=LEASE_MS,
    )


def _deliver(engine: Engine, subject: Subject, waitpoint_id: Any, token: Any) -> Awaitable[object]:
    return engine.deliver_signal(
        execution_id=subject.execution_id,
        waitpoint_id=waitpoint_id,
        waitpoint_token=token,
        signal_name="ready",
        payload=b"{}",
        idempotency_key=subject.name,
        signal_id=subject.ids[2],
    )


def _signal_run(engine: Engine, subject: Subject) -> Awaitable[object]:
    fabric = Fabric()
    fabric._engine, fabric._loop = engine, asyncio.get_running_loop()
    return fabric.run(subject.execution_id).signal("wait", {}, id=subject.name, timeout=0)


async def _follow(engine: Engine, feed: str, subject: Subject) -> None:
    """Read a feed until it has delivered an event of the subject."""
    async with getattr(engine, feed)(subject.cursor) as events:
        async for event in events:
            if event.execution_id == subject.execution_id:
                return


def _followed(feed: str, prepare: Prepare) -> Prepare:
    """Prepare a subject whose events come after its cursor of a feed."""

    async def prepared(subject: Subject) -> None:
        async with getattr(subject.engine, feed)() as events:
            subject.cursor = events.cursor
        await prepare(subject)

    return prepared


def _claim(engine: Engine, subject: Subject) -> Awaitable[object]:
    return engine.claim(lane_id=subject.lane_id, **WORKER)


def _operations() -> list[Operation]:
    found: list[Operation] = []

    def add(name: str, prepare: Prepare, call: Call, variant: str = "", *, is_idempotent: bool = True) -> None:
        found.append(Operation(name=name, variant=variant, prepare=prepare, call=call, is_idempotent=is_idempotent))

    # Creating.
    add("create_execution", nothing, lambda e, s: e.create_execution(**s.new()), is_idempotent=False)
    add("create_execution", nothing, lambda e, s: e.create_execution(**s.new(idempotency_key=s.name)), "with a key")
    add(
        "create_execution",
        nothing,
        lambda e, s: e.create_execution(
            **s.new(
                execution_id=s.execution_id, idempotency_key=s.name, tags={"app.key": "value", "ff.instance_id": "one"}
            )
        ),
        "with an id, a key and tags",
    )
    add(
        "create_execution",
        nothing,
        lambda e, s: e.create_execution(**s.new(execution_id=s.execution_id, delay_until=delayed_until(s))),
        "with an id, delayed",
    )
    add(
        "create_execution",
        nothing,
        lambda e, s: e.create_execution(**s.new(execution_id=s.execution_id, delay_ms=MINUTE)),
        "with an id, delayed by a time",
    )
    add("create_many", nothing, _create_without_ids, "without ids", is_idempotent=False)
    add(
        "create_many",
        nothing,
        lambda e, s: _create_without_ids(e, s, **LARGE),
        "without ids, large inputs",
        is_idempotent=False,
    )
    add("create_many", nothing, lambda e, s: _create_many(e, s, **LARGE), "with ids, large inputs")
    add("create_many", nothing, lambda e, s: _create_many(e, s, tags={"app.key": "value"}), "with ids and tags")

    # Claiming.
    add("claim", created, _claim)
    add("claim", lease_expired, _claim, "an expired lease")
    add("claim_many", created, lambda e, s: e.claim_many(lanes=(s.lane_id,), limit=5, **WORKER))
    add("claim_many", created, lambda e, s: e.claim_many(lanes=(s.lane_id,), limit=5, slots=0, **WORKER), "ahead")
    add("claim_many", resumable, lambda e, s: e.claim_many(lanes=(s.lane_id,), limit=5, **WORKER), "resumed")
    add("claim_for_worker", created, lambda e, s: e.claim_for_worker(lane_id=s.lane_id, **WORKER))
    add("issue_claim_grant", created, lambda e, s: e.issue_claim_grant(**s.named, **WORKER))
    add("claim_execution", granted, lambda e, s: e.claim_execution(**s.named, **WORKER, lease_id=s.ids[0]))
    add(
        "claim_resumed_execution",
        resumable,
        lambda e, s: e.claim_resumed_execution(**s.named, **WORKER, lease_id=s.ids[0]),
    )
    add("claim_from_resume_grant", resume_granted, lambda e, s: e.claim_from_resume_grant(_resume_token(s)))
    add(
        "issue_grant_and_claim",
        created,
        lambda e, s: e.issue_grant_and_claim(**s.named, lease_duration_ms=LEASE_MS),
    )
    add("issue_reclaim_grant", lease_expired, lambda e, s: e.issue_reclaim_grant(**s.named, **WORKER))
    add("reclaim_execution", reclaim_granted, lambda e, s: e.reclaim_execution(**s.named, **WORKER))

    # Under a lease.
    # Every renewal writes an event.
    add("renew", claimed, lambda e, s: e.renew(s.handle), is_idempotent=False)
    add("renew_many", claimed, lambda e, s: e.renew_many([s.handle]), is_idempotent=False)
    add("renew_lease", claimed, lambda e, s: e.renew_lease(**s.fence, lease_ttl_ms=LEASE_MS), is_idempotent=False)
    add("progress", claimed, lambda e, s: e.progress(s.handle, percent=50, message="half"))
    add("complete", claimed, lambda e, s: e.complete(s.handle, b"x"))
    add("complete", claimed, lambda e, s: e.complete(s.handle, b"x" * 1500), "a large result")
    add("complete_many", claimed, lambda e, s: e.complete_many([(s.handle, b"x")]))
    add("complete_execution", claimed, lambda e, s: e.complete_execution(**s.fence, payload=b"x"))
    add("fail", claimed, lambda e, s: e.fail(s.handle, reason="x"))
    add("fail", claimed, lambda e, s: e.fail(s.handle, reason="x", classification="permanent"), "permanently")
    add("fail", claimed, lambda e, s: e.fail(s.handle, reason=RAISED), "with a traceback")
    add(
        "fail",
        claimed,
        lambda e, s: e.fail(s.handle, reason=RAISED, classification="permanent"),
        "permanently, with a traceback",
    )
    add("fail_execution", claimed, lambda e, s: e.fail_execution(**s.fence, failure_reason="x"))
    add("delay", claimed, lambda e, s: e.delay(s.handle, delayed_until(s)))
    add("wait_children", claimed, lambda e, s: e.wait_children(s.handle))
    add("wait_children", with_dependency, lambda e, s: e.wait_children(s.handle), "with a dependency")
    add("hand_back", claimed, lambda e, s: e.hand_back(s.handle))
    add("hand_back", claimed, lambda e, s: e.hand_back(s.handle, was_started=False), "not started")
    add("trim", past_retention, lambda e, _: parts_of(e).retention.trim_batch())
    add("trim_retention", past_retention, lambda e, _: e.trim_retention())
    add("bring_forward", delayed, lambda e, s: parts_of(e).delays.bring_forward(s.handle))
    add("cancel", claimed, lambda e, s: e.cancel(s.handle, "x"))
    add("suspend", claimed, lambda e, s: e.suspend(s.handle, suspend_args(s)))
    add("suspend_by_triple", claimed, lambda e, s: e.suspend_by_triple(**s.triple, args=suspend_args(s)))
    # Every call creates another waitpoint.
    add(
        "create_waitpoint",
        claimed,
        lambda e, s: e.create_waitpoint(s.handle, waitpoint_key="wait", expires_in_ms=MINUTE),
        is_idempotent=False,
    )
    found += flow_operations()
    found += budget_operations()
    found += attachment_operations()
    found += quota_operations()
    found += _streams()
    found += _service_operations()
    found += _reads()
    found += budget_reads()
    return found


def _streams() -> list[Operation]:
    found: list[Operation] = []

    def add(name: str, prepare: Prepare, call: Call, variant: str = "", *, is_idempotent: bool = True) -> None:
        found.append(Operation(name=name, variant=variant, prepare=prepare, call=call, is_idempotent=is_idempotent))

    # Every call appends another frame.
    add("append_frame", claimed, lambda e, s: e.append_frame(s.handle, FRAME), "the first", is_idempotent=False)
    add("append_frame", streaming, lambda e, s: e.append_frame(s.handle, FRAME), "a further one", is_idempotent=False)
    add("append_frame", streaming, lambda e, s: e.append_frame(s.handle, PATCH), "a patch", is_idempotent=False)
    add(
        "append_frame",
        streaming,
        lambda e, s: asyncio.gather(*(e.append_frame(s.handle, each) for each in (FRAME, PATCH, FRAME))),
        "several",
        is_idempotent=False,
    )
    add("complete", streaming, lambda e, s: e.complete(s.handle, b"x"), "with a stream")
    add("fail", streaming, lambda e, s: e.fail(s.handle, reason="x"), "with a stream")
    add("suspend", streaming, lambda e, s: e.suspend(s.handle, suspend_args(s)), "with a stream")
    add(
        "mark_lease_expired_if_due",
        streaming_past_lease,
        lambda e, s: e.mark_lease_expired_if_due(s.execution_id),
        "with a stream",
    )
    add("claim", streaming_lease_expired, _claim, "an expired lease with a stream")
    add("expire_streams", with_expired_stream, lambda e, _: parts_of(e).stream_expiry.sweep_batch())
    return found


def _service_operations() -> list[Operation]:
    found: list[Operation] = []

    def add(name: str, prepare: Prepare, call: Call, variant: str = "", *, is_idempotent: bool = True) -> None:
        found.append(Operation(name=name, variant=variant, prepare=prepare, call=call, is_idempotent=is_idempotent))

    add("cancel_execution", claimed, lambda e, s: e.cancel_execution(execution_id=s.execution_id, reason="x"))
    add(
        "cancel_execution",
        suspended,
        lambda e, s: e.cancel_execution(execution_id=s.execution_id, reason="x"),
        "while suspended",
    )
    add("promote_delayed", due, lambda e, s: e.promote_delayed(s.execution_id))
    add("expire_execution", past_timeout, lambda e, s: e.expire_execution(s.execution_id, "attempt_timeout"), "timeout")
    add(
        "expire_execution",
        past_deadline,
        lambda e, s: e.expire_execution(s.execution_id, "execution_deadline"),
        "deadline",
    )
    add("revoke_lease", claimed, lambda e, s: e.revoke_lease(s.execution_id, reason="x"))
    add("revoke_lease", streaming, lambda e, s: e.revoke_lease(s.execution_id, reason="x"), "with a stream")
    add("revoke_lease", past_lease, lambda e, s: e.revoke_lease(s.execution_id, reason="x"), "of an expired lease")
    add("change_priority", created, lambda e, s: e.change_priority(s.execution_id, 7))
    add("project_flow_summary", in_flow, lambda e, s: e.project_flow_summary(s.flow_id))
    add("project_due", in_flow, lambda e, _: parts_of(e).flow_summaries.project_due())
    add("mark_lease_expired_if_due", past_lease, lambda e, s: e.mark_lease_expired_if_due(s.execution_id))
    add("set_execution_tag", created, lambda e, s: e.set_execution_tag(s.execution_id, "app.key", "value"))
    add(
        "set_execution_tag",
        of_instance,
        lambda e, s: e.set_execution_tag(s.execution_id, "ff.instance_id", "new"),
        "that changes the instance",
    )
    add(
        "set_execution_tags",
        created,
        lambda e, s: e.set_execution_tags(s.execution_id, {"app.key": "value", "app.other": "word"}),
    )
    add("deliver_signal", suspended, lambda e, s: _deliver(e, s, s.wait.waitpoint_id, s.wait.waitpoint_token))
    add(
        "deliver_signal",
        with_waitpoint,
        lambda e, s: _deliver(e, s, s.pending.waitpoint_id, s.pending.hmac_token),
        "ahead of the wait",
    )
    add("deliver_signal", waiting_for_run_signal, _signal_run, "by a run")
    add(
        "deliver_approval_signal",
        suspended,
        lambda e, s: e.deliver_approval_signal(
            execution_id=s.execution_id,
            waitpoint_id=s.wait.waitpoint_id,
            signal_name="approved",
            idempotency_suffix=s.name,
        ),
    )
    add(
        "replay_execution",
        completed,
        lambda e, s: e.replay_execution(execution_id=s.execution_id, reason="x", requested_by="ada"),
    )
    add("cancel_matching", created, lambda e, s: e.cancel_matching(lane_id=s.lane_id, reason="x"))
    add("replay_matching", completed, lambda e, s: e.replay_matching(lane_id=s.lane_id, public_state="completed"))
    add("change_priority_matching", created, lambda e, s: e.change_priority_matching(lane_id=s.lane_id, new_priority=7))
    add("resume_execution", suspended, lambda e, s: e.resume_execution(execution_id=s.execution_id))
    add("expire_suspension", past_wait_timeout, lambda e, s: e.expire_suspension(s.execution_id))
    add(
        "close_waitpoint",
        with_waitpoint,
        lambda e, s: e.close_waitpoint(execution_id=s.execution_id, waitpoint_id=s.pending.waitpoint_id),
    )
    add("register_worker", nothing, lambda e, s: e.register_worker(**registration(s)), is_idempotent=False)
    add(
        "heartbeat_worker",
        registered,
        lambda e, s: e.heartbeat_worker(worker_instance_id=s.name, namespace="tests"),
    )
    add(
        "mark_worker_dead",
        registered,
        lambda e, s: e.mark_worker_dead(worker_instance_id=s.name, namespace="tests", reason="x"),
    )
    add(
        "seed_waitpoint_hmac_secret",
        keyless,
        lambda e, s: e.seed_waitpoint_hmac_secret(kid=s.name, secret_hex=SECRET),
    )
    add(
        "rotate_waitpoint_hmac_secret_all",
        nothing,
        lambda e, s: e.rotate_waitpoint_hmac_secret_all(new_kid=s.name, new_secret_hex=SECRET, grace_ms=100),
    )
    add("set_lane_state", created, lambda e, s: e.set_lane_state(s.lane_id, "paused"))
    add("prepare", nothing, lambda e, _: e.prepare())
    return found


def _reads() -> list[Operation]:
    found: list[Operation] = []

    def add(name: str, prepare: Prepare, call: Call, variant: str = "") -> None:
        found.append(Operation(name=name, variant=variant, prepare=prepare, call=call, is_read=True))

    add("scan_eligible_executions", created, lambda e, s: e.scan_eligible_executions(lane_id=s.lane_id))
    add("describe_flow", with_staged_edge, lambda e, s: e.describe_flow(s.flow_id))
    add("describe_edge", with_staged_edge, lambda e, s: e.describe_edge(s.flow_id, s.ids[0]))
    add("list_edges", with_staged_edge, lambda e, s: e.list_edges(s.flow_id, Incoming(s.execution_id)))
    add("list_flows", in_flow, lambda e, _: e.list_flows(tag=("app.key", "value")))
    add("get_flow_tag", in_flow, lambda e, s: e.get_flow_tag(s.flow_id, "app.key"))
    add(
        "evaluate_flow_eligibility",
        with_staged_edge,
        lambda e, s: e.evaluate_flow_eligibility(s.execution_id),
    )
    add("list_expired_leases", lease_expired, lambda e, _: e.list_expired_leases())
    add(
        "read_waitpoint_token",
        suspended,
        lambda e, s: e.read_waitpoint_token(execution_id=s.execution_id, waitpoint_id=s.wait.waitpoint_id),
    )
    add("list_pending_waitpoints", suspended, lambda e, s: e.list_pending_waitpoints(execution_id=s.execution_id))
    add("list_suspended", suspended, lambda e, _: e.list_suspended())
    add("observe_signals", suspended, lambda e, s: e.observe_signals(s.handle))
    add("read_stream", streaming, lambda e, s: e.read_stream(s.execution_id, 0))
    add("tail_stream", streaming, lambda e, s: e.tail_stream(s.execution_id, 0, block_ms=1000))
    add(
        "tail_stream",
        streaming,
        lambda e, s: e.tail_stream(s.execution_id, 0, after="9999999999999-0", block_ms=50),
        "until the end of its wait",
    )
    add("read_summary", streaming, lambda e, s: e.read_summary(s.execution_id, 0))
    add("get_execution_tag", tagged, lambda e, s: e.get_execution_tag(s.execution_id, "app.key"))
    add("explain", created, lambda e, s: e.explain(s.execution_id))
    add("list_waitpoint_hmac_kids", nothing, lambda e, _: e.list_waitpoint_hmac_kids())
    add("list_workers", registered, lambda e, _: e.list_workers())
    add("read_execution_state", created, lambda e, s: e.read_execution_state(s.execution_id))
    add("read_execution_info", created, lambda e, s: e.read_execution_info(s.execution_id))
    add("read_execution_status", completed, lambda e, s: e.read_execution_status(s.execution_id))
    add("get_execution_result", completed, lambda e, s: e.get_execution_result(s.execution_id))
    add("describe_execution", claimed, lambda e, s: e.describe_execution(s.execution_id))
    add("read_execution_context", claimed, lambda e, s: e.read_execution_context(s.execution_id))
    add("read_current_attempt_index", claimed, lambda e, s: e.read_current_attempt_index(s.execution_id))
    add("read_total_attempt_count", claimed, lambda e, s: e.read_total_attempt_count(s.execution_id))
    add("read_exec_core_fields", created, lambda e, s: e.read_exec_core_fields(s.execution_id, ["lane_id"]))
    add("resolve_execution_flow_id", created, lambda e, s: e.resolve_execution_flow_id(s.execution_id))
    add("get_execution_namespace", created, lambda e, s: e.get_execution_namespace(s.execution_id))
    add("list_attempts", completed, lambda e, s: e.list_attempts(s.execution_id))
    add("list_executions", created, lambda e, s: e.list_executions(lane_id=s.lane_id))
    add("count_executions", completed, lambda e, s: e.count_executions(lane_id=s.lane_id))
    add("find_inconsistencies", completed, lambda e, _: e.find_inconsistencies())
    add("read_flow_summary", in_flow, lambda e, s: e.read_flow_summary(s.flow_id))
    add("wait_for_flow", in_ended_flow, lambda e, s: e.wait_for_flow(s.flow_id, 10_000))
    add("wait_for_flow", in_flow, lambda e, s: e.wait_for_flow(s.flow_id, 50), "until the end of its wait")
    add("wait_for_ending", completed, lambda e, s: e.wait_for_ending(s.execution_id, timeout=10))
    for feed, prepare in {
        "subscribe_completion": completed,
        "subscribe_lease_history": completed,
        "subscribe_signal_delivery": signalled,
        "subscribe_operator_events": resumed,
        "subscribe_instance_tags": of_instance,
    }.items():
        add(feed, _followed(feed, prepare), lambda e, s, feed=feed: _follow(e, feed, s))  # type: ignore[misc]
    add("list_lanes", nothing, lambda e, _: e.list_lanes())
    add("server_time_ms", nothing, lambda e, _: e.server_time_ms())
    add("ping", nothing, lambda e, _: e.ping())
    add("shutdown_prepare", nothing, lambda e, _: e.shutdown_prepare(1000))
    return found


OPERATIONS = {operation.title: operation for operation in _operations()}


def groups(*, is_whole: bool) -> dict[str, list[Operation]]:
    """The operations that one test sweeps on one engine: a single write in a whole sweep, several in a sampled one."""
    writes = [operation for operation in OPERATIONS.values() if not operation.is_read]
    reads = [operation for operation in OPERATIONS.values() if operation.is_read]
    if is_whole:
        write_groups = {operation.title: [operation] for operation in writes}
    else:
        write_groups = {f"writes {nth + 1}": writes[nth::6] for nth in range(6)}
    return {**write_groups, **{f"reads {nth + 1}": reads[nth::4] for nth in range(4)}}
