"""Shared by the tests of the engine: state vectors, events, calls under a lease, refusals and clocks."""

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import asyncpg
import pytest

from fixtures import Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.event import CompletionOutcome
from flowfabric.model.execution import Created, Duplicate, NewExecution
from flowfabric.model.handle import Handle
from flowfabric.model.ids import parse_execution_id
from flowfabric.model.lease import Revoked

WAITING = "runnable/unowned/eligible_now/waiting_for_worker/none/pending_first_attempt/waiting"
DELAYED = "runnable/unowned/not_eligible_until_time/waiting_for_delay/none/pending_first_attempt/delayed"
ACTIVE = "active/leased/not_applicable/none/none/running_attempt/active"
EXPIRED_LEASE = "active/lease_expired_reclaimable/not_applicable/waiting_for_worker/none/attempt_interrupted/active"
REVOKED = "active/lease_revoked/not_applicable/waiting_for_worker/none/attempt_interrupted/active"
COMPLETED = "terminal/unowned/not_applicable/none/success/attempt_terminal/completed"
FAILED = "terminal/unowned/not_applicable/none/failed/attempt_terminal/failed"
BACKING_OFF = "runnable/unowned/not_eligible_until_time/waiting_for_retry_backoff/none/pending_retry_attempt/delayed"
RETRYABLE = "runnable/unowned/eligible_now/waiting_for_worker/none/pending_retry_attempt/waiting"
PARKED = "runnable/unowned/not_eligible_until_time/waiting_for_delay/none/attempt_interrupted/delayed"
REPLAYED = "runnable/unowned/eligible_now/waiting_for_worker/none/pending_replay_attempt/waiting"
RESUMABLE = "runnable/unowned/eligible_now/waiting_for_worker/none/attempt_interrupted/resumable"
CANCELLED = "terminal/unowned/not_applicable/none/cancelled/attempt_terminal/cancelled"
CANCELLED_BEFORE_FIRST_ATTEMPT = "terminal/unowned/not_applicable/none/cancelled/pending_first_attempt/cancelled"

_DIMENSIONS = (
    "lifecycle_phase",
    "ownership_state",
    "eligibility_state",
    "blocking_reason",
    "terminal_outcome",
    "attempt_state",
    "public_state",
)

_LEASE = (
    "lease_id",
    "worker_no",
    "claimed_at",
    "lease_expires_at",
    "lease_renewed_at",
    "lease_expired_at",
    "lease_revoked_at",
    "lease_revoke_reason",
    "attempt_timeout_at",
    "granted_until",
)


def vector(row: dict[str, Any]) -> str:
    """The seven state dimensions of an execution's row, joined by slashes."""
    return "/".join(row[name] for name in _DIMENSIONS)


def lease_fields(row: dict[str, Any]) -> dict[str, Any]:
    """The lease columns that are not null: none after the lease was released."""
    return {name: row[name] for name in _LEASE if row[name] is not None}


async def event_texts(rows: Rows, execution_id: str) -> list[str]:
    """The events of an execution in order, as `kind reason>outcome` without the absent parts."""
    return [_event(row) for row in await rows.events(execution_id)]


def _event(row: dict[str, Any]) -> str:
    reason = "" if row["reason"] is None else f" {row['reason']}"
    outcome = "" if row["outcome"] is None else f">{CompletionOutcome(row['outcome']).literal}"
    return f"{row['kind']}{reason}{outcome}"


async def attempts(rows: Rows, execution_id: str) -> list[dict[str, Any]]:
    """The attempts of an execution in order."""
    found = await rows.of("attempt_all", execution_id=uuid_of(execution_id))
    return sorted(found, key=lambda row: int(row["attempt_index"]))


async def pending_fields(engine: Engine, execution_id: str) -> dict[str, str]:
    """The fields named `pending_…` about the next attempt, without that prefix and without those that are null."""
    names = ("retry_reason", "replay_reason", "replay_requested_by", "previous_attempt_index")
    fields = await engine.read_exec_core_fields(execution_id, [f"pending_{name}" for name in names])
    return {name: value for name in names if (value := fields[f"pending_{name}"]) is not None}


async def kept_until(rows: Rows, execution_id: str) -> int | None:
    """When an ended execution is deleted; None if it is not scheduled."""
    row = await rows.execution(execution_id)
    batches = await rows.of("retained", partition_key=row["partition_key"], ended_at=row["completed_at"])
    times = [batch["retain_until"] for batch in batches if row["execution_id"] in batch["execution_ids"]]
    assert len(times) <= 1, batches
    return times[0] if times else None


async def claim_rows(rows: Rows, execution_ids: Iterable[str] | None = None) -> dict[int, dict[str, Any]]:
    """The claims by number, each with its execution ids as text: those of the given executions, or all."""
    found = {}
    for row in await rows.of("claim"):
        held = sorted(f"{{fp:{row['partition_key']}}}:{uuid}" for uuid in row["execution_ids"])
        if execution_ids is None or set(held) & set(execution_ids):
            found[row["claim_no"]] = {**row, "execution_ids": held}
    return found


def new(**overrides: Any) -> dict[str, Any]:
    """The arguments of a create, with defaults."""
    return {
        "namespace": "tests",
        "lane_id": "default",
        "execution_kind": "job",
        "input_payload": b"{}",
        "priority": 0,
        "creator_identity": "test",
        **overrides,
    }


def items(*arguments: dict[str, Any]) -> list[NewExecution]:
    """Arguments of creates as items of create_many."""
    return [NewExecution(**argument) for argument in arguments]


Creating = Callable[..., Awaitable[Created | Duplicate]]


async def create_one(engine: Engine, **arguments: Any) -> Created | Duplicate:
    """Create through the single call."""
    return await engine.create_execution(**arguments)


async def create_in_many(engine: Engine, **arguments: Any) -> Created | Duplicate:
    """Create through the batch form; a refusal is raised as the single call raises it."""
    (verdict,) = await engine.create_many(items(arguments))
    if isinstance(verdict, EngineError):
        raise verdict
    return verdict


CREATES: dict[str, Creating] = {"one": create_one, "many": create_in_many}
"""The single create and the batch form."""


Fenced = Callable[[Engine, Handle], Awaitable[object]]


def _value(verdicts: Sequence[object]) -> object:
    (verdict,) = verdicts
    if isinstance(verdict, EngineError):
        raise verdict
    return verdict


async def _renew_many(engine: Engine, handle: Handle) -> object:
    return _value(await engine.renew_many([handle]))


async def _complete_many(engine: Engine, handle: Handle) -> object:
    return _value(await engine.complete_many([(handle, b"x")]))


FENCED_OPERATIONS: dict[str, Fenced] = {
    "renew": lambda engine, handle: engine.renew(handle),
    "renew_many": _renew_many,
    "progress": lambda engine, handle: engine.progress(handle, percent=50, message="half"),
    "complete": lambda engine, handle: engine.complete(handle, b"x"),
    "complete_many": _complete_many,
    "fail": lambda engine, handle: engine.fail(handle, reason="x"),
    "cancel": lambda engine, handle: engine.cancel(handle, "x"),
    "delay": lambda engine, handle: engine.delay(handle, 0),
    "wait_children": lambda engine, handle: engine.wait_children(handle),
    "hand_back": lambda engine, handle: engine.hand_back(handle),
}
"""Every operation that a worker calls under its lease; a refused item of a batch form is raised."""

each_fenced = pytest.mark.parametrize("operation", FENCED_OPERATIONS)


IS_WHOLE = os.environ.get("FF_TEST_SWEEP") == "whole"
"""Whether races and sweeps run in full."""


def rounds(sample: int, *, whole: int) -> range:
    """The rounds of a race: a sample, or all of them with `FF_TEST_SWEEP=whole`."""
    return range(whole if IS_WHOLE else sample)


Case = Callable[[str], AbstractContextManager[None]]


@contextmanager
def all_cases() -> Iterator[Case]:
    """Run every case of a loop, and fail at the end with those that failed: `with case("name"): ...`."""
    failures: list[str] = []

    @contextmanager
    def case(name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as failure:
            failures.append(f"{name}: {type(failure).__name__}: {failure}")

    yield case
    assert not failures, "\n".join(failures)


async def revoke(engine: Engine, execution_id: str) -> None:
    """Revoke a lease as an operator."""
    assert isinstance(await engine.revoke_lease(execution_id, reason="test"), Revoked)


async def block(connection: asyncpg.Connection, execution_id: str, eligibility: str, reason: str) -> None:
    """Block a waiting execution for another reason; no operation of this version does."""
    await connection.execute(
        """with blocked as (
             update execution
                set eligibility_state = $2::text::eligibility_state, blocking_reason = $3::text::blocking_reason,
                    blocking_detail = 'why', last_transition_at = ff_now(), last_mutation_at = null
              where execution_id = $1 and eligibility_state = 'eligible_now'
             returning *
           ),
           unqueued as (delete from ready r using blocked b where r.queue_no = b.queue_no and r.place = b.place)
           insert into listed select partition_key, execution_id, public_state, last_transition_at from blocked""",
        uuid_of(execution_id),
        eligibility,
        reason,
    )


async def refused(call: Awaitable[object], code: str, detail: str | None = None) -> EngineError:
    """Return the error of a call that must be refused with this code and, if given, this text in its detail.

    An error about an absent execution must name it.
    """
    with pytest.raises(EngineError) as caught:
        await call
    refusal: EngineError = caught.value
    assert refusal.code == code, refusal
    if code == "execution_not_found":
        parse_execution_id(refusal.detail)
    assert detail is None or detail in str(refusal.detail), refusal
    return refusal


async def claim(engine: Engine, *lanes: str, **overrides: Any) -> list[Any]:
    """Claim up to ten executions of these lanes, by default of `default`."""
    return list(
        await engine.claim_many(
            **{
                "lanes": lanes or ("default",),
                "worker_id": "worker",
                "worker_instance_id": "worker-1",
                "limit": 10,
                **overrides,
            }
        )
    )


def ids(claimed: Iterable[Any]) -> list[str]:
    """The execution ids of claims."""
    return [one.execution_id for one in claimed]


async def made(engine: Engine, *arguments: dict[str, Any]) -> list[str]:
    """The ids of new executions, created in one call."""
    return [one.execution_id for one in await engine.create_many(items(*arguments))]  # type: ignore[union-attr]


class HandClock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
