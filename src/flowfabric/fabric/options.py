"""The policy that the options of a task describe; errors name the option and its value."""

from collections.abc import Iterable
from uuid import UUID

from flowfabric.model.duration import milliseconds
from flowfabric.model.errors import error
from flowfabric.model.ids import parse_uuid
from flowfabric.model.limit import check_budget_ids
from flowfabric.model.policy import (
    Backoff,
    ExecutionPolicy,
    ExponentialBackoff,
    FixedBackoff,
    RetryPolicy,
    RoutingRequirements,
    StreamPolicy,
    TimeoutPolicy,
)
from flowfabric.model.policy_checks import INT32
from flowfabric.model.text import check_items, shown
from flowfabric.worker.budget import Budget


def policy_of(
    *,
    retries: object,
    backoff: object,
    timeout: object,
    deadline: object,
    capabilities: Iterable[str] | None,
    stream: object,
    budgets: object = None,
    quota: object = None,
) -> ExecutionPolicy | None:
    """Return the policy for these options, or None if none of them is given."""
    max_retries = 0 if retries is None else _checked_retries(retries)
    checked_backoff = _backoff_of(backoff)
    required = tuple(capabilities or ())
    policy = ExecutionPolicy(
        retry_policy=RetryPolicy(max_retries=max_retries, backoff=checked_backoff) if max_retries else None,
        timeout_policy=None
        if timeout is None and deadline is None
        else TimeoutPolicy(
            attempt_timeout_ms=None
            if timeout is None
            else milliseconds(timeout, "timeout", least=1, advice="; leave it out for no limit"),
            execution_deadline_ms=None if deadline is None else milliseconds(deadline, "deadline"),
        ),
        routing_requirements=RoutingRequirements(required_capabilities=required) if required else None,
        stream_policy=_stream_policy_of(stream),
        budget_ids=tuple(map(str, budget_ids_of(budgets))),
        quota_policy_id=None if quota is None else str(parse_uuid(quota, "quota")),
    )
    return None if policy == ExecutionPolicy() else policy


def budget_ids_of(budgets: object) -> tuple[UUID, ...]:
    """Return the ids of budgets, which are given as they are or by their ids."""
    given = () if budgets is None else check_items(budgets, "budgets")
    return check_budget_ids([each.id if isinstance(each, Budget) else each for each in given], "budgets")


def budgets_in(budgets: Iterable[object] | None) -> tuple[Budget, ...]:
    """Return those budgets that are declared in code, which their first use creates."""
    return tuple(each for each in budgets or () if isinstance(each, Budget))


def _checked_retries(retries: object) -> int:
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= INT32:
        raise error("invalid_input", f"retries: must be a whole number from 0 to {INT32}, got {shown(retries)}")
    return retries


def _backoff_of(backoff: object) -> Backoff:
    match backoff:
        case None:
            return ExponentialBackoff()
        case FixedBackoff() | ExponentialBackoff():
            return backoff
        case _:
            return FixedBackoff(delay_ms=milliseconds(backoff, "backoff"))


def _stream_policy_of(stream: object) -> StreamPolicy | None:
    if not isinstance(stream, StreamPolicy | None):
        raise error("invalid_input", f"stream: must be StreamPolicy(...), got {shown(stream)}")
    # The default policy is not stored, so that a task that names it has the same policy as one that does not.
    return None if stream == StreamPolicy() else stream
