"""The store under test, and its answers and rows in the form of the model, so that both can be compared."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg

from fixtures import uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.event import CompletionOutcome
from flowfabric.settings import Settings

from .model import Model
from .model_operators import Answer
from .model_values import Execution, Refusal

State = dict[str, dict[str, Any]]
"""The fields of every execution, by its UUID."""

_CLOCK = """
create or replace function ff_now() returns bigint language sql volatile parallel safe
  return (select offset_ms from test_clock);
"""
_ROWS = """
select execution_id::text as id, concat_ws('/', lifecycle_phase, ownership_state, eligibility_state, blocking_reason,
       terminal_outcome, attempt_state, public_state) as vector,
       lease_epoch as epoch, attempt_count, retry_count as retries, reclaim_count as reclaims,
       replay_count as replays, delay_until,
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


_DELETE_ALL = """
truncate execution, execution_input, execution_result, ready, timer, claim, retained, listed, execution_tag, attempt,
         event, idempotency_key, claim_grant
"""


class Store:
    """The database of the test, an engine on it, and the event loop that runs both."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.loop = asyncio.new_event_loop()
        self.connection = self.run(asyncpg.connect(url, server_settings={"search_path": "flowfabric"}))
        self.run(self.connection.execute(_CLOCK))
        self.run(self.open_engine())

    def run(self, work: Awaitable[Any]) -> Any:
        """Run a coroutine and return its result."""
        return self.loop.run_until_complete(work)

    async def open_engine(self) -> None:
        """Open an engine that has nothing in memory."""
        self._stack = AsyncExitStack()
        settings = Settings(database_url=self.url, database_pool_size=2, listen=False)
        self.engine = await self._stack.enter_async_context(Engine.connect(settings=settings))
        self.parts = parts_of(self.engine)
        # The machine runs the sweeps itself, so that a claim finds what the model finds.
        self.parts.catch_up.is_left_to_sweeps = True

    async def close_engine(self) -> None:
        await self._stack.aclose()

    def begin(self, now: int) -> None:
        """Delete all executions and set the clock."""
        self.run(self.connection.execute(_DELETE_ALL))
        self.set_clock(now)

    def set_clock(self, now: int) -> None:
        self.run(self.connection.execute("update test_clock set offset_ms = $1", now))
        # Watermarks expire by the time of the machine, which this clock does not change.
        self.parts.wakeups.watermarks.clear()

    def close(self) -> None:
        self.run(self.close_engine())
        self.run(self.connection.close())
        self.loop.close()


async def sweep_answer(work: Awaitable[int]) -> Answer:
    """The answer of a sweep in the form of the model."""
    return "count", await work


def model_answer(call: Callable[..., Answer], *arguments: object) -> Answer:
    """The answer of a call on the model; a refusal is returned, not raised."""
    try:
        return call(*arguments)
    except Refusal as refusal:
        return "refused", refusal.code


def engine_answer(answer: Any) -> Answer:
    """An answer of the engine in the form of the model."""
    match answer:
        case tuple():
            return answer
        case None:
            return ("done",)
        case list():
            return tuple(engine_answer(one) for one in answer)
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
    """Whether two answers are the same, except for what the model leaves open."""
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


def model_state(model: Model) -> State:
    """Every execution of the model, as `stored_state` returns it."""
    return {uuid_of(one.name): _fields(model, one) for one in model.executions.values()}


def _fields(model: Model, one: Execution) -> dict[str, Any]:
    grant = model.live_grant(one)
    is_active = one.phase == "active"
    return {
        "vector": one.vector,
        "epoch": one.epoch,
        "attempt_count": len(one.attempts),
        "retries": one.retries,
        "reclaims": one.reclaims,
        "replays": one.replays,
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


async def stored_state(connection: asyncpg.Connection) -> State:
    """Every execution of the database."""
    found: State = {
        row["id"]: {**row, "attempts": [], "events": [], "grant": None} for row in await connection.fetch(_ROWS)
    }
    for row in await connection.fetch(_ATTEMPTS):
        found[row["id"]]["attempts"].append(tuple(row)[1:])
    for row in await connection.fetch(_EVENTS):
        found[row["id"]]["events"].append(_event_text(row))
    for row in await connection.fetch(_GRANTS):
        found[row["id"]]["grant"] = tuple(row)[1:]
    for row in found.values():
        del row["id"]
    return found


def _event_text(event: Any) -> str:
    outcome = "" if event["outcome"] is None else f">{CompletionOutcome(event['outcome']).literal}"
    if event["kind"] == "ended":
        return f"ended{outcome} in {event['lease_epoch']}"
    reason = "" if event["reason"] is None else f" {event['reason']}"
    return f"{event['kind']}{reason}{outcome} in {event['lease_epoch']}"


def differences(rows: State, expected: State) -> list[str]:
    """The differences between the rows and the model."""
    return [
        f"{name}.{field}: {rows.get(name, {}).get(field)!r}, the model has {value!r}"
        for name, fields in expected.items()
        for field, value in fields.items()
        if name not in rows or rows[name][field] != value
    ] + [f"{name}: unknown to the model" for name in rows.keys() - expected.keys()]
