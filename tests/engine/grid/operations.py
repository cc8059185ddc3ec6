"""The operations of the grid, which tests every operation in every state: their calls, and their answers as words."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec

from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.grant import ResumeGrant, ResumeToken
from flowfabric.model.handle import Handle
from flowfabric.model.lease import AlreadySatisfied, ClaimedExecution

from .states import GRANT_MS, LEASE_MS, MINUTE, OTHER, WORKER, Subject

Call = Callable[[Subject], Awaitable[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation of the grid, in one of its variants."""

    name: str
    variant: str = ""
    call: Call

    @property
    def title(self) -> str:
        """The operation with its variant."""
        return f"{self.name}, {self.variant}" if self.variant else self.name


def answer(value: object) -> str:
    """An answer as one word: its type, its reason, the kind of its handle, or the count of a sweep."""
    match value:
        case None | []:
            return "nothing"
        case [one]:
            return answer(one)
        case EngineError():
            raise value
        case Handle(kind=kind):
            return str(kind.value)
        case ClaimedExecution(handle=handle):
            return str(handle.kind.value)
        case AlreadySatisfied(reason=reason):
            return str(reason)
        case str():
            return "found"
        case int():
            return str(value)
        case _:
            return type(value).__name__


def _stale_handle(subject: Subject) -> Handle:
    """The handle with the epoch of another lease: the previous one, if there was one."""
    return msgspec.structs.replace(subject.handle, lease_epoch=_stale_epoch(subject))


def _stale_fence(subject: Subject) -> dict[str, Any]:
    return {**subject.fence, "lease_epoch": _stale_epoch(subject)}


def _stale_epoch(subject: Subject) -> int:
    return subject.handle.lease_epoch - 1 if subject.handle.lease_epoch else 1


async def _delay(subject: Subject, handle: Handle) -> None:
    await subject.engine.delay(handle, await subject.clock.now() + MINUTE)


HANDLE_CALLS: dict[str, Callable[[Subject, Handle], Awaitable[object]]] = {
    "renew": lambda s, handle: s.engine.renew(handle),
    "renew_many": lambda s, handle: s.engine.renew_many([handle]),
    "progress": lambda s, handle: s.engine.progress(handle, percent=50, message="half"),
    "complete": lambda s, handle: s.engine.complete(handle, b"x"),
    "complete_many": lambda s, handle: s.engine.complete_many([(handle, b"x")]),
    "fail": lambda s, handle: s.engine.fail(handle, reason="x"),
    "fail permanently": lambda s, handle: s.engine.fail(handle, reason="x", classification="permanent"),
    "delay": _delay,
    "wait_children": lambda s, handle: s.engine.wait_children(handle),
    "hand_back": lambda s, handle: s.engine.hand_back(handle),
    "cancel": lambda s, handle: s.engine.cancel(handle, "x"),
}
"""The calls of a worker, which holds a handle."""

SERVICE_CALLS: dict[str, Callable[[Subject, dict[str, Any]], Awaitable[object]]] = {
    "renew_lease": lambda s, fence: s.engine.renew_lease(**fence, lease_ttl_ms=LEASE_MS),
    "complete_execution": lambda s, fence: s.engine.complete_execution(**fence, payload=b"x"),
    "fail_execution": lambda s, fence: s.engine.fail_execution(**fence, failure_reason="x"),
    "fail_execution permanently": lambda s, fence: s.engine.fail_execution(
        **fence, failure_reason="x", failure_category="permanent"
    ),
}
"""The calls of a service that is not the worker and gives the fence of a lease."""


def _without_fence(subject: Subject) -> dict[str, Any]:
    return {"execution_id": subject.execution_id}


def _as_operator(subject: Subject) -> dict[str, Any]:
    return {"execution_id": subject.execution_id, "source": "operator_override"}


def _cancel_fence(fence: dict[str, Any]) -> dict[str, Any]:
    """The part of a fence that cancel_execution accepts."""
    return {name: fence[name] for name in ("execution_id", "lease_id", "lease_epoch", "attempt_id")}


async def _claim_from_resume_grant(subject: Subject) -> object:
    """Claim with the last grant of the subject, or with a well-formed grant that was never issued."""
    expires_at_ms = await subject.clock.now() + GRANT_MS
    granted = subject.grant.grant if subject.grant is not None else None
    key = f"pg:{subject.execution_id}:{expires_at_ms}:v1:{'0' * 64}" if granted is None else granted.grant_key
    grant = ResumeGrant(
        execution_id=subject.execution_id,
        partition_key="{fp:1}",
        grant_key=key,
        expires_at_ms=expires_at_ms if granted is None else granted.expires_at_ms,
        lane_id=subject.lane_id,
    )
    return await subject.engine.claim_from_resume_grant(ResumeToken(grant=grant, **WORKER, lease_ttl_ms=LEASE_MS))


async def _unblock(subject: Subject) -> int:
    """Run a batch of the sweep that unblocks."""
    return (await parts_of(subject.engine).unblocking.unblock_batch()).done


def _operations() -> Sequence[Operation]:
    def operation(name: str, call: Call, variant: str = "") -> Operation:
        return Operation(name=name, variant=variant, call=call)

    operations = [
        operation("create_execution", lambda s: s.create()),
        operation("claim", lambda s: s.engine.claim(lane_id=s.lane_id, **OTHER)),
        operation("claim_many", lambda s: s.engine.claim_many(lanes=(s.lane_id,), limit=5, **OTHER)),
        operation("claim_for_worker", lambda s: s.engine.claim_for_worker(lane_id=s.lane_id, **OTHER)),
        operation("scan_eligible_executions", lambda s: s.engine.scan_eligible_executions(lane_id=s.lane_id)),
        operation("issue_claim_grant", lambda s: s.engine.issue_claim_grant(**s.named, **WORKER)),
        operation("claim_execution", lambda s: s.engine.claim_execution(**s.named, **WORKER)),
        operation("claim_execution", lambda s: s.engine.claim_execution(**s.named, **OTHER), "another worker"),
        operation("claim_resumed_execution", lambda s: s.engine.claim_resumed_execution(**s.named, **WORKER)),
        operation(
            "claim_resumed_execution",
            lambda s: s.engine.claim_resumed_execution(**s.named, **OTHER),
            "another worker",
        ),
        operation("claim_from_resume_grant", _claim_from_resume_grant),
        operation(
            "issue_grant_and_claim",
            lambda s: s.engine.issue_grant_and_claim(**s.named, lease_duration_ms=LEASE_MS),
        ),
        operation("issue_reclaim_grant", lambda s: s.engine.issue_reclaim_grant(**s.named, **WORKER)),
        operation("reclaim_execution", lambda s: s.engine.reclaim_execution(**s.named, **WORKER)),
        operation("reclaim_execution", lambda s: s.engine.reclaim_execution(**s.named, **OTHER), "another worker"),
        operation("mark_lease_expired_if_due", lambda s: s.engine.mark_lease_expired_if_due(s.execution_id)),
        operation("revoke_lease", lambda s: s.engine.revoke_lease(s.execution_id, reason="x")),
        operation(
            "revoke_lease",
            lambda s: s.engine.revoke_lease(s.execution_id, expected_lease_id=UUID(int=1), reason="x"),
            "of another lease",
        ),
        operation(
            "revoke_lease",
            lambda s: s.engine.revoke_lease(s.execution_id, worker_instance_id="nobody-1", reason="x"),
            "of another worker",
        ),
        operation("change_priority", lambda s: s.engine.change_priority(s.execution_id, 7)),
        operation("promote_delayed", lambda s: s.engine.promote_delayed(s.execution_id)),
        operation(
            "expire_execution", lambda s: s.engine.expire_execution(s.execution_id, "attempt_timeout"), "timeout"
        ),
        operation(
            "expire_execution", lambda s: s.engine.expire_execution(s.execution_id, "execution_deadline"), "deadline"
        ),
        operation("cancel_execution", lambda s: s.engine.cancel_execution(execution_id=s.execution_id, reason="x")),
        operation(
            "cancel_execution",
            lambda s: s.engine.cancel_execution(**_cancel_fence(s.fence), reason="x", source="lease_holder"),
            "the holder",
        ),
        operation(
            "cancel_execution",
            lambda s: s.engine.cancel_execution(**_cancel_fence(_stale_fence(s)), reason="x", source="lease_holder"),
            "a previous holder",
        ),
        operation(
            "cancel_execution",
            lambda s: s.engine.cancel_execution(execution_id=s.execution_id, reason="x", source="lease_holder"),
            "a holder without a fence",
        ),
        operation(
            "block_execution_for_admission",
            lambda s: s.engine.block_execution_for_admission(s.execution_id, "waiting_for_quota"),
            "by a limit",
        ),
        operation(
            "block_execution_for_admission",
            lambda s: s.engine.block_execution_for_admission(s.execution_id, "paused_by_operator"),
            "by an operator",
        ),
        operation("unblock_execution", lambda s: s.engine.unblock_execution(s.execution_id)),
        operation(
            "unblock_execution",
            lambda s: s.engine.unblock_execution(s.execution_id, "waiting_for_budget"),
            "another reason",
        ),
        operation("replay_execution", lambda s: s.engine.replay_execution(execution_id=s.execution_id)),
        operation("set_execution_tag", lambda s: s.engine.set_execution_tag(s.execution_id, "app.key", "value")),
        operation("mark expired leases", lambda s: parts_of(s.engine).lease_expiry.sweep(), "sweep"),
        operation("promote delayed executions", lambda s: parts_of(s.engine).delays.promote_due(), "sweep"),
        operation("expire overdue executions", lambda s: parts_of(s.engine).timeouts.expire_due(), "sweep"),
        operation("unblock executions", _unblock, "sweep"),
    ]
    for name, by_handle in HANDLE_CALLS.items():
        operations.append(operation(name, lambda s, call=by_handle: call(s, s.handle)))  # type: ignore[misc]
        operations.append(operation(name, lambda s, call=by_handle: call(s, _stale_handle(s)), "a previous holder"))  # type: ignore[misc]
    for name, by_fence in SERVICE_CALLS.items():
        operations.append(operation(name, lambda s, call=by_fence: call(s, s.fence)))  # type: ignore[misc]
        operations.append(operation(name, lambda s, call=by_fence: call(s, _stale_fence(s)), "a previous fence"))  # type: ignore[misc]
    for name in ("complete_execution", "fail_execution"):
        by_fence = SERVICE_CALLS[name]
        operations.append(operation(name, lambda s, call=by_fence: call(s, _as_operator(s)), "an operator"))  # type: ignore[misc]
        operations.append(operation(name, lambda s, call=by_fence: call(s, _without_fence(s)), "without a fence"))  # type: ignore[misc]
    return operations


OPERATIONS = {operation.title: operation for operation in _operations()}
