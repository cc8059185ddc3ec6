"""The engine's answers and rows in the words of the model, so that both can be compared."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg

from flowfabric.model.errors import EngineError
from flowfabric.model.event import CompletionOutcome

from .model import Answer, Model
from .model_values import Execution, Refusal

Seen = dict[str, dict[str, Any]]
"""What is known of every execution, by its UUID."""

_CLOCK = """
create or replace function ff_now() returns bigint language sql volatile parallel safe
  return (select offset_ms from test_clock);
"""
_ROWS = """
select execution_id::text as id, concat_ws('/', lifecycle_phase, ownership_state, eligibility_state, blocking_reason,
       terminal_outcome, attempt_state, public_state) as vector,
       lease_epoch as epoch, attempt_count, retry_count as retries, reclaim_count as reclaims, delay_until,
       case when lifecycle_phase = 'active' then lease_expires_at end as lease_expires_at,
       case when lifecycle_phase = 'active' then attempt_timeout_at end as timeout_at,
       started_at, completed_at, last_transition_at as transition_at, last_mutation_at as mutation_at,
       case when lifecycle_phase = 'terminal' then coalesce(cancellation_reason, failure_reason) end as reason,
       cancelled_by, progress_pct as progress
  from execution_detail
"""
_ATTEMPTS = """
select execution_id::text as id, attempt_type, attempt_state, started_at, ended_at, failure_reason, failure_category,
       previous_attempt_index
  from attempt_all order by execution_id, attempt_index
"""
_EVENTS = "select execution_id::text as id, kind, reason, outcome, lease_epoch from event_each order by event_id, nth"
_GRANTS = """
select g.execution_id::text as id, g.kind, g.worker_id, g.expires_at
  from claim_grant g join execution e using (partition_key, execution_id)
 where g.expires_at > ff_now() and e.granted_until = g.expires_at
"""


class Stage:
    """The database of the test and a loop to talk to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.loop = asyncio.new_event_loop()
        self.connection = self.run(asyncpg.connect(url, server_settings={"search_path": "flowfabric"}))
        self.run(self.connection.execute(_CLOCK))

    def run(self, work: Awaitable[Any]) -> Any:
        """What async work comes to."""
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.connection.close())
        self.loop.close()


async def counted(work: Awaitable[int]) -> Answer:
    """The number of things a sweep did."""
    return "count", await work


def attempted(call: Callable[..., Answer], *arguments: object) -> Answer:
    """What a call on the model comes to, a refusal in words."""
    try:
        return call(*arguments)
    except Refusal as refusal:
        return "refused", refusal.code


def spoken(answer: Any) -> Answer:
    """An answer of the engine in the words of the model."""
    match answer:
        case tuple():
            return answer
        case None:
            return ("done",)
        case list():
            return tuple(spoken(one) for one in answer)
        case EngineError(code=code):
            return "refused", code
    kind = type(answer).__name__
    match kind:
        case "ClaimedExecution":
            handle = answer.handle
            return (
                handle.kind.value,
                answer.execution_id,
                answer.lease_epoch,
                answer.attempt_index,
                answer.attempt_type.value,
                answer.lease_expires_at,
            )
        case "GrantedClaim":
            return kind, answer.lease_epoch, answer.attempt_index
        case "Created":
            return kind, answer.execution_id, answer.public_state.value
        case "Renewed":
            return kind, answer.expires_at_ms, answer.lease_epoch
        case "RetryScheduled":
            return kind, answer.delay_until
        case "AlreadySatisfied":
            return kind, answer.reason
        case "Promoted":
            return kind, answer.public_state.value
        case "Granted":
            return kind, answer.grant.execution_id
    return (kind, answer.execution_id) if hasattr(answer, "execution_id") else (kind,)


def agree(expected: Any, got: Any) -> bool:
    """Whether two answers are the same; where the model leaves something open, any is."""
    match expected, got:
        case (("RetryScheduled", None), ("RetryScheduled", _)):
            return True
        case (("done",), ("Completed", _)):
            return True
        case (("refused", str(codes)), ("refused", str(code))) if " or " in codes:
            return code in codes.split(" or ")
        case ((("Fresh" | "Resumed"), _, epoch, index, _, _), ("GrantedClaim", got_epoch, got_index)):
            return (epoch, index) == (got_epoch, got_index)
    if isinstance(expected, tuple) and isinstance(got, tuple) and expected and isinstance(expected[0], tuple):
        return len(expected) == len(got) and all(agree(*pair) for pair in zip(expected, got, strict=True))
    return bool(expected == got)


def seen(model: Model) -> Seen:
    """Every execution of the model, as `observe` gives it."""
    return {one.name[-36:]: _seen(model, one) for one in model.executions.values()}


def _seen(model: Model, one: Execution) -> dict[str, Any]:
    grant = model.live_grant(one)
    is_active = one.phase == "active"
    return {
        "vector": one.vector,
        "epoch": one.epoch,
        "attempt_count": len(one.attempts),
        "retries": one.retries,
        "reclaims": one.reclaims,
        "delay_until": one.delay_until,
        "lease_expires_at": one.lease_expires_at if is_active else None,
        "timeout_at": one.timeout_at if is_active else None,
        "started_at": one.started_at,
        "completed_at": one.completed_at,
        "transition_at": one.transition_at,
        "mutation_at": one.mutation_at,
        "reason": one.reason,
        "cancelled_by": one.cancelled_by,
        "progress": one.progress,
        "attempts": [
            (run.type, run.state, run.started_at, run.ended_at, run.reason, run.category, run.previous)
            for run in one.attempts
        ],
        "events": one.events,
        "grant": None if grant is None else (grant.kind, grant.worker, grant.expires_at),
    }


async def observe(connection: asyncpg.Connection) -> Seen:
    """Every execution of the database."""
    found: Seen = {
        row["id"]: {**row, "attempts": [], "events": [], "grant": None} for row in await connection.fetch(_ROWS)
    }
    for row in await connection.fetch(_ATTEMPTS):
        found[row["id"]]["attempts"].append(tuple(row)[1:])
    for row in await connection.fetch(_EVENTS):
        found[row["id"]]["events"].append(_told(row))
    for row in await connection.fetch(_GRANTS):
        found[row["id"]]["grant"] = tuple(row)[1:]
    for row in found.values():
        del row["id"]
    return found


def _told(event: Any) -> str:
    outcome = "" if event["outcome"] is None else f">{CompletionOutcome(event['outcome']).literal}"
    if event["kind"] == "ended":
        return f"ended{outcome} in {event['lease_epoch']}"
    reason = "" if event["reason"] is None else f" {event['reason']}"
    return f"{event['kind']}{reason}{outcome} in {event['lease_epoch']}"


def differences(rows: Seen, expected: Seen) -> list[str]:
    """What of the rows is not as the model has it."""
    return [
        f"{name}.{field}: {rows.get(name, {}).get(field)!r}, the model has {value!r}"
        for name, fields in expected.items()
        for field, value in fields.items()
        if name not in rows or rows[name][field] != value
    ] + [f"{name}: unknown to the model" for name in rows.keys() - expected.keys()]
