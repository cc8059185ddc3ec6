"""The operations on quotas and blocked executions for the fault sweeps."""

from typing import Any

from flowfabric.engine.parts import parts_of

from .operation import Call, Operation, Prepare
from .preparations import created, nothing
from .scene import MINUTE, Subject

LIMITS: dict[str, Any] = {"window_seconds": 60, "rate_limit": 5, "concurrency_cap": 5}


async def with_quota(subject: Subject) -> None:
    """A quota policy, and an execution that waits for a worker."""
    await created(subject)
    await subject.engine.create_quota_policy(subject.quota_policy_id, 60, 5, 5)


async def admitted(subject: Subject) -> None:
    """An execution that a quota has admitted."""
    await with_quota(subject)
    await subject.engine.check_admission(subject.quota_policy_id, execution_id=subject.execution_id, **LIMITS)


async def past_admission(subject: Subject) -> None:
    """An execution whose admission has expired."""
    await admitted(subject)
    await subject.clock.advance(ms=MINUTE)


async def past_rate_admission(subject: Subject) -> None:
    """An execution whose admission without a slot has expired."""
    await with_quota(subject)
    limits = {**LIMITS, "concurrency_cap": 0}
    await subject.engine.check_admission(subject.quota_policy_id, execution_id=subject.execution_id, **limits)
    await subject.clock.advance(ms=MINUTE)


async def blocked(subject: Subject) -> None:
    """An execution that a limit blocks which does not exist any more."""
    await created(subject)
    await subject.engine.block_execution_for_admission(subject.execution_id, "waiting_for_quota", "why")


def quota_operations() -> list[Operation]:
    """The operations that create, change and use quotas, and that block executions."""
    found: list[Operation] = []

    def add(name: str, prepare: Prepare, call: Call, *, is_read: bool = False) -> None:
        found.append(Operation(name=name, prepare=prepare, call=call, is_read=is_read))

    add("create_quota_policy", nothing, lambda e, s: e.create_quota_policy(s.quota_policy_id, 60, 5, 5))
    add("change_quota_policy", with_quota, lambda e, s: e.change_quota_policy(s.quota_policy_id, 1, 2, 3))
    add(
        "check_admission",
        with_quota,
        lambda e, s: e.check_admission(s.quota_policy_id, execution_id=s.execution_id, **LIMITS),
    )
    add("release_admission", admitted, lambda e, s: e.release_admission(s.quota_policy_id, s.execution_id))
    add("reconcile_quota_counters", past_admission, lambda e, _: e.reconcile_quota_counters())
    add("purge_guards", past_rate_admission, lambda e, _: parts_of(e).quotas.purge_guards())
    add(
        "block_execution_for_admission",
        created,
        lambda e, s: e.block_execution_for_admission(s.execution_id, "waiting_for_quota", "why"),
    )
    add("unblock_execution", blocked, lambda e, s: e.unblock_execution(s.execution_id))
    add("unblock_batch", blocked, lambda e, _: parts_of(e).unblocking.unblock_batch())
    add(
        "read_quota_policy_limits",
        with_quota,
        lambda e, s: e.read_quota_policy_limits(s.quota_policy_id),
        is_read=True,
    )
    return found
