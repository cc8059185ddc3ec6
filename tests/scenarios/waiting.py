"""Support for tests of suspended executions: suspend, signal, resume, and the rows and answers to expect."""

from collections.abc import Awaitable, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

from fixtures import Rows, uuid_of
from flowfabric import Engine, EngineError
from flowfabric.conditions import ByName, Fresh, Single, SuspendArgs
from flowfabric.outcomes import Handle, SuspendDetails, Suspended, WaitpointToken

A, B, C = "aa" * 32, "bb" * 32, "cc" * 32
"""Secrets of signing keys."""

READY = Single(waitpoint_key="wp", matcher=ByName("ready"))
APPENDED = "appended_to_waitpoint"
SATISFIED = "resume_condition_satisfied"
BUFFERED = "buffered_for_pending_waitpoint"
HOUR_MS = 3_600_000
THREE = ("a", "b", "c")
"""The keys of a wait on three waitpoints."""

RESUMABLE = ("runnable", "unowned", "eligible_now", "waiting_for_worker", "none", "attempt_interrupted", "resumable")
VECTOR = (
    "lifecycle_phase",
    "ownership_state",
    "eligibility_state",
    "blocking_reason",
    "terminal_outcome",
    "attempt_state",
    "public_state",
)


def args(condition: Any = None, *, keys: Sequence[str] = ("wp",), **overrides: Any) -> SuspendArgs:
    """The arguments of a suspend, by default one waitpoint that any signal satisfies."""
    return SuspendArgs(
        **{
            "suspension_id": uuid4(),
            "waitpoints": [Fresh(waitpoint_id=uuid4(), waitpoint_key=key) for key in keys],
            "resume_condition": Single(waitpoint_key=keys[0]) if condition is None else condition,
            "reason_code": "waiting_for_signal",
            **overrides,
        }
    )


class Waiting:
    """A suspended execution, with the tokens of its waitpoints by key."""

    def __init__(self, engine: Engine, held: Handle, details: SuspendDetails, handle: Handle | None = None) -> None:
        self.engine = engine
        self.held = held
        """The handle under which the run was suspended."""
        self.handle = handle
        """The handle that the suspend returned."""
        self.details = details
        self.execution_id = held.execution_id
        bound: list[Any] = [details, *details.additional_waitpoints]
        self.points: dict[str, tuple[UUID, WaitpointToken]] = {
            each.waitpoint_key: (each.waitpoint_id, each.waitpoint_token) for each in bound
        }

    async def signal(self, name: str = "ready", key: str = "wp", **overrides: Any) -> Any:
        """Send a signal to a waitpoint and return the answer."""
        waitpoint_id, token = self.points[key]
        return await self.engine.deliver_signal(
            **{
                "execution_id": self.execution_id,
                "waitpoint_id": waitpoint_id,
                "waitpoint_token": token,
                "signal_name": name,
                **overrides,
            }
        )

    async def effect(self, name: str = "ready", key: str = "wp", **overrides: Any) -> tuple[str, str]:
        """Send a signal and return its effect and disposition."""
        answer = await self.signal(name, key, **overrides)
        return str(answer.effect), str(answer.disposition)

    async def claim(self, **overrides: Any) -> Any:
        """Claim the resumed execution by its id."""
        return await claim_resumed(self.engine, self.execution_id, **overrides)


async def suspended(engine: Engine, handle: Handle, condition: Any = None, **overrides: Any) -> Waiting:
    """Suspend a run and return it as a suspended execution."""
    outcome = await engine.suspend(handle, args(condition, **overrides))
    assert isinstance(outcome, Suspended), outcome
    return Waiting(engine, handle, outcome.details, outcome.handle)


async def claim_resumed(engine: Engine, execution_id: str, **overrides: Any) -> Any:
    """Claim an execution whose attempt can be resumed."""
    return await engine.claim_resumed_execution(
        **{
            "execution_id": execution_id,
            "worker_id": "other",
            "worker_instance_id": "other-1",
            "lane_id": "default",
            **overrides,
        }
    )


async def refused(call: Awaitable[Any], code: str, detail: str = "") -> EngineError:
    """Return the error of a call that must be refused with this code."""
    with pytest.raises(EngineError) as caught:
        await call
    assert caught.value.code == code, caught.value
    assert detail in str(caught.value.detail or ""), caught.value
    return caught.value


async def vector(rows: Rows, execution_id: Any) -> tuple[str, ...]:
    """The seven state dimensions of an execution."""
    row = await rows.execution(execution_id)
    return tuple(row[name] for name in VECTOR)


async def waitpoint_rows(rows: Rows, execution_id: str) -> list[dict[str, Any]]:
    """The stored waitpoints of an execution."""
    found = await rows.of("waitpoint", execution_id=uuid_of(execution_id))
    return sorted(found, key=lambda row: (row["created_at"], str(row["waitpoint_key"])))


async def completions(rows: Rows, execution_id: Any) -> list[int]:
    """The outcomes of an execution in the completion feed."""
    return [row["outcome"] for row in await rows.events(execution_id) if row["outcome"] is not None]


async def waitpoint_states(rows: Rows, wait: Waiting) -> list[tuple[str, str | None]]:
    """The states and close reasons of the waitpoints of a wait."""
    return [(row["state"], row["close_reason"]) for row in await waitpoint_rows(rows, wait.execution_id)]
