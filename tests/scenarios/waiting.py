"""Executions that wait for signals, and what tests of them say."""

from collections.abc import Awaitable, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

from fixtures import Rows
from flowfabric import Engine, EngineError
from flowfabric.conditions import ByName, Fresh, Single, SuspendArgs
from flowfabric.outcomes import Handle, SuspendDetails, Suspended, WaitpointToken

A, B, C = "aa" * 32, "bb" * 32, "cc" * 32
"""Secrets."""

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
    """What is asked for: any signal on one waitpoint, and nothing else, unless said."""
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
    """A suspended execution and the tokens of its waitpoints by key."""

    def __init__(self, engine: Engine, held: Handle, details: SuspendDetails, handle: Handle | None = None) -> None:
        self.engine = engine
        self.held = held
        """The handle the run was suspended with."""
        self.handle = handle
        """The handle the suspend answered with."""
        self.details = details
        self.execution_id = held.execution_id
        bound: list[Any] = [details, *details.additional_waitpoints]
        self.points: dict[str, tuple[UUID, WaitpointToken]] = {
            each.waitpoint_key: (each.waitpoint_id, each.waitpoint_token) for each in bound
        }

    async def signal(self, name: str = "ready", key: str = "wp", **overrides: Any) -> Any:
        """What a signal on a waitpoint came to."""
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

    async def said(self, name: str = "ready", key: str = "wp", **overrides: Any) -> tuple[str, str]:
        """The effect of a signal, and why."""
        answer = await self.signal(name, key, **overrides)
        return str(answer.effect), str(answer.disposition)

    async def claim(self, **overrides: Any) -> Any:
        """The claim by name that goes on with it."""
        return await claim_resumed(self.engine, self.execution_id, **overrides)


async def suspended(engine: Engine, handle: Handle, condition: Any = None, **overrides: Any) -> Waiting:
    """Suspend a run."""
    outcome = await engine.suspend(handle, args(condition, **overrides))
    assert isinstance(outcome, Suspended), outcome
    return Waiting(engine, handle, outcome.details, outcome.handle)


async def claim_resumed(engine: Engine, execution_id: str, **overrides: Any) -> Any:
    """Claim an execution whose attempt may go on."""
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
    """The error a call must end in."""
    with pytest.raises(EngineError) as caught:
        await call
    assert caught.value.code == code, caught.value
    assert detail in str(caught.value.detail or ""), caught.value
    return caught.value


async def vector(rows: Rows, execution_id: Any) -> tuple[str, ...]:
    """The seven dimensions of an execution."""
    row = await rows.execution(execution_id)
    return tuple(row[name] for name in VECTOR)


async def waitpoint_rows(rows: Rows, execution_id: str) -> list[dict[str, Any]]:
    """The waitpoints of an execution as they are stored."""
    found = await rows.of("waitpoint", execution_id=execution_id[-36:])
    return sorted(found, key=lambda row: (row["created_at"], str(row["waitpoint_key"])))


async def completions(rows: Rows, execution_id: Any) -> list[int]:
    """The outcomes the completion feed tells of an execution, as they are stored."""
    return [row["outcome"] for row in await rows.events(execution_id) if row["outcome"] is not None]


async def closed(rows: Rows, wait: Waiting) -> list[tuple[str, str | None]]:
    """How the waitpoints of a wait stand, and why."""
    return [(row["state"], row["close_reason"]) for row in await waitpoint_rows(rows, wait.execution_id)]
