"""The limits of tasks, as their options say: one quota policy for each task, attached to the kind of its executions."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid5

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import ConflictError, error
from flowfabric.model.ids import QuotaPolicyId
from flowfabric.model.limit import check_source
from flowfabric.model.quota import MAX_LIMIT, MAX_WINDOW_SECONDS, QuotaCreated
from flowfabric.model.text import check_range, shown
from flowfabric.worker.context import Context

_SCOPE = UUID("4d6d0d0f-6c4b-5a55-8a7e-5f5a2f2f8f61")
"""The namespace of the ids of the quota policies of tasks."""
_RATE = re.compile(r"([1-9]\d{0,15})/([1-9]\d{0,11})?([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_KEYED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """How many runs of a task may run at a time and start in a window, counted for each key; 0 is no limit."""

    max_running: int
    rate: int
    window_seconds: int
    key_from: str | None
    weight_from: str | None

    @property
    def policy(self) -> dict[str, Any]:
        """The arguments with which the engine creates and changes the quota policy."""
        return {
            "window_seconds": self.window_seconds,
            "max_requests_per_window": self.rate,
            "max_concurrent": self.max_running,
            "key_from": self.key_from,
            "weight_from": self.weight_from,
        }


def limits_of(
    task: str, function: Callable[..., Any], *, max_running: object, rate: object, per: object, weight: object
) -> TaskLimits | None:
    """Return the limits that the options of a task describe, None if there are none; errors name the option."""
    if max_running is None and rate is None:
        for name, given in (("per", per), ("weight", weight)):
            if given is not None:
                raise error(
                    "invalid_input",
                    f"{name}: has no effect without rate{'' if name == 'weight' else ' or max_running'}",
                )
        return None
    if weight is not None and rate is None:
        raise error("invalid_input", "weight: has no effect without rate, whose tokens it counts")
    if max_running is None:
        max_running = 0
    else:
        check_range(max_running, "max_running", 1, MAX_LIMIT)
    assert isinstance(max_running, int)
    tokens, seconds = (0, 0) if rate is None else parse_rate(rate)
    return TaskLimits(
        max_running=max_running,
        rate=tokens,
        window_seconds=seconds,
        key_from=None if per is None else _source(task, function, per, "per"),
        weight_from=None if weight is None else _source(task, function, weight, "weight"),
    )


def parse_rate(rate: object) -> tuple[int, int]:
    """Return how many tokens a rate such as `100/m` or `10/30s` has, and the length of its window in seconds."""
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if found is None:
        raise error(
            "invalid_input",
            "rate: must be a number and a time, such as '100/m', '5/s', '1000/h', '500/d' or '10/30s', got "
            f"{shown(rate)}",
        )
    tokens, seconds = int(found[1]), int(found[2] or 1) * _SECONDS[found[3]]
    if tokens > MAX_LIMIT or seconds > MAX_WINDOW_SECONDS:
        most = f"at most {MAX_LIMIT} in at most {MAX_WINDOW_SECONDS} seconds"
        raise error("invalid_input", f"rate: is too large: must be {most}, got {shown(rate)}")
    return tokens, seconds


def _source(task: str, function: Callable[..., Any], given: object, option: str) -> str:
    """Return where the engine finds a key or a weight: in a tag, or in an argument by its name."""
    if isinstance(given, str) and given.startswith("tag:"):
        return check_source(given, option)
    names = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.kind in _KEYED and each.annotation not in (Context, Context.__name__)
    ]
    if not isinstance(given, str) or given not in names:
        raise error(
            "invalid_input",
            f"{option}: must be an argument of task {task!r} ({', '.join(names) or 'it has none'}) or a tag such as "
            f"'tag:app.tenant', got {shown(given)}",
        )
    # The payload of a call is an object of its arguments by name.
    return f"payload:/{given.replace('~', '~0').replace('/', '~1')}"


def quota_policy_of(task: str) -> QuotaPolicyId:
    """Return the id of the quota policy of a task; like the kind, it is the same in all namespaces."""
    return QuotaPolicyId(uuid5(_SCOPE, task))


async def define_limits(engine: Engine, task: str, limits: TaskLimits) -> None:
    """Create and attach the quota policy of a task before its first submit, unless that was done before.

    It changes nothing that exists: workers do.
    """
    policy = quota_policy_of(task)
    if isinstance(await engine.create_quota_policy(policy, **limits.policy), QuotaCreated):
        await _attach(engine, task, policy)


async def apply_limits(engine: Engine, tasks: Mapping[str, TaskLimits | None]) -> None:
    """Let the quota policies of tasks be what their options say: created, changed, attached, or detached."""
    attached = await parts_of(engine).attach.list_quotas_of_kinds(tuple(tasks))
    for task, limits in tasks.items():
        policy = quota_policy_of(task)
        if limits is None:
            if attached.get(task) == policy:
                await engine.detach_quota("kind", task, policy)
            continue
        if not isinstance(await engine.create_quota_policy(policy, **limits.policy), QuotaCreated):
            await engine.change_quota_policy(policy, **limits.policy)
        if attached.get(task) != policy:
            await _attach(engine, task, policy)


async def _attach(engine: Engine, task: str, policy: QuotaPolicyId) -> None:
    try:
        await engine.attach_quota("kind", task, policy)
    except ConflictError as refused:
        raise error(
            refused.code,
            f"task {task!r} has max_running or rate, but another quota policy is attached to its kind: "
            f"{refused.detail}; detach that one, or remove the options",
        ) from None
