"""Checks of the options of a task; errors name the option and its value."""

import re
from collections.abc import Iterable, Mapping

from flowfabric.model.duration import milliseconds
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import MAX_LANE_BYTES, LaneId, check_lane_id
from flowfabric.model.policy import (
    Backoff,
    ExecutionPolicy,
    ExponentialBackoff,
    FixedBackoff,
    RetryPolicy,
    RoutingRequirements,
    TimeoutPolicy,
)
from flowfabric.model.policy_checks import INT32
from flowfabric.model.tag import check_tag_key
from flowfabric.model.text import check_text, shown


def checked_lane(lane: object) -> LaneId:
    """Return the lane if it is valid."""
    try:
        return check_lane_id(lane)
    except EngineError:
        raise error(
            "invalid_input",
            f"lane: must be a string of 1 to {MAX_LANE_BYTES} printable ASCII characters, got {shown(lane)}",
        ) from None


def checked_tags(tags: object) -> dict[str, str] | None:
    """Return a copy of the tags if they are valid."""
    if tags is None:
        return None
    if not isinstance(tags, Mapping):
        raise error(
            "invalid_input", f"tags: must be a dict of strings, such as {{'app.customer': '42'}}, got {shown(tags)}"
        )
    checked: dict[str, str] = {}
    for key, value in tags.items():
        try:
            name = check_tag_key(key)
        except EngineError:
            example = f"app.{key}" if isinstance(key, str) and re.fullmatch("[a-z0-9_]{1,64}", key) else "app.name"
            raise error(
                "invalid_tag_key",
                f"tags: key {shown(key)} must be namespaced, such as {example!r}: a lower-case letter, then lower-case "
                "letters, digits or _, then a dot, then lower-case letters, digits, _ or dots",
            ) from None
        checked[name] = check_text(value, f"tags: the value of {name!r}")
    return checked


def policy_of(
    *,
    retries: object,
    backoff: object,
    timeout: object,
    deadline: object,
    capabilities: Iterable[str] | None,
) -> ExecutionPolicy | None:
    """Return the policy for these options, or None if all of them are left out."""
    most = 0 if retries is None else _checked_retries(retries)
    pause = _backoff_of(backoff)
    required = tuple(capabilities or ())
    code = "invalid_policy_json"
    policy = ExecutionPolicy(
        retry_policy=RetryPolicy(max_retries=most, backoff=pause) if most else None,
        timeout_policy=None
        if timeout is None and deadline is None
        else TimeoutPolicy(
            attempt_timeout_ms=None if timeout is None else milliseconds(timeout, "timeout", least=1, code=code),
            execution_deadline_ms=None if deadline is None else milliseconds(deadline, "deadline", code=code),
        ),
        routing_requirements=RoutingRequirements(required_capabilities=required) if required else None,
    )
    return None if policy == ExecutionPolicy() else policy


def _checked_retries(retries: object) -> int:
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= INT32:
        raise error("invalid_policy_json", f"retries: must be a whole number from 0 to {INT32}, got {shown(retries)}")
    return retries


def _backoff_of(backoff: object) -> Backoff:
    match backoff:
        case None:
            return ExponentialBackoff()
        case FixedBackoff() | ExponentialBackoff():
            return backoff
        case _:
            return FixedBackoff(delay_ms=milliseconds(backoff, "backoff", code="invalid_policy_json"))
