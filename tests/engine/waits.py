"""For tests of waits: arguments of suspends, signing keys, and stored rows of a wait."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from fixtures import Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import ByName, Single, all_of_waitpoints
from flowfabric.model.handle import Handle
from flowfabric.model.ids import SuspensionId, WaitpointId, parse_execution_id
from flowfabric.model.key import SigningKey
from flowfabric.model.suspension import SuspendArgs, Suspended
from flowfabric.model.token import sign_token
from flowfabric.model.waitpoint import Fresh, PendingWaitpoint, UsePending

KID = "k1"
SECRET = "ab" * 32
KEY = SigningKey(kid=KID, secret=bytes.fromhex(SECRET))

SUSPENDED = "suspended/unowned/not_applicable/waiting_for_signal/none/attempt_interrupted/suspended"
EXPIRED = "terminal/unowned/not_applicable/none/expired/attempt_terminal/expired"


def fresh(key: str = "wait") -> Fresh:
    """A binding that creates a waitpoint."""
    return Fresh(waitpoint_id=WaitpointId(uuid4()), waitpoint_key=key)


def suspend_args(**overrides: Any) -> SuspendArgs:
    """The arguments of a suspend; by default on one waitpoint that waits for `ready`."""
    return SuspendArgs(
        **{
            "suspension_id": SuspensionId(uuid4()),
            "waitpoints": (fresh(),),
            "resume_condition": Single(waitpoint_key="wait", matcher=ByName("ready")),
            "reason_code": "waiting_for_signal",
            **overrides,
        }
    )


def on_all(*keys: str, **overrides: Any) -> SuspendArgs:
    """The arguments of a suspend that waits for all of several waitpoints."""
    return suspend_args(waitpoints=tuple(map(fresh, keys)), resume_condition=all_of_waitpoints(keys), **overrides)


def using(pending: PendingWaitpoint, **overrides: Any) -> SuspendArgs:
    """The arguments of a suspend on a waitpoint created in advance."""
    return suspend_args(waitpoints=(UsePending(waitpoint_id=pending.waitpoint_id),), **overrides)


def triple(handle: Handle) -> dict[str, Any]:
    """The execution and the fence (lease id, epoch, attempt id) of a handle, as arguments of a service operation."""
    return {
        "execution_id": handle.execution_id,
        "lease_id": handle.lease_id,
        "lease_epoch": handle.lease_epoch,
        "attempt_id": handle.attempt_id,
    }


Suspending = Callable[[Engine, Handle, SuspendArgs], Awaitable[object]]

FORMS: dict[str, Suspending] = {
    "suspend": lambda engine, handle, given: engine.suspend(handle, given),
    "suspend_by_triple": lambda engine, handle, given: engine.suspend_by_triple(**triple(handle), args=given),
}
"""Both forms of suspend."""

each_form = pytest.mark.parametrize("form", FORMS)


def token_of(execution_id: str, waitpoint_id: UUID) -> str:
    """The token of a waitpoint, signed with the installed key."""
    return sign_token(KEY, parse_execution_id(execution_id), WaitpointId(waitpoint_id)).reveal()


async def suspend_run(engine: Engine, handle: Handle, given: SuspendArgs | None = None, **overrides: Any) -> Suspended:
    """Suspend a run and return the outcome, which must be `Suspended`."""
    outcome = await engine.suspend(handle, given or suspend_args(**overrides))
    assert isinstance(outcome, Suspended), outcome
    return outcome


@asynccontextmanager
async def rewriting(connection: asyncpg.Connection, table: str, execution_id: str) -> AsyncIterator[None]:
    """Rewrite a row of an execution in a transaction that stays open inside the block, as a migration would."""
    async with connection.transaction():
        await connection.execute(
            f"update {table} set partition_key = partition_key where execution_id = $1", uuid_of(execution_id)
        )
        yield


async def suspension(rows: Rows, execution_id: str) -> dict[str, Any]:
    """The latest suspension of an execution."""
    latest = (await rows.execution(execution_id))["suspension_id"]
    (row,) = await rows.of("suspension", execution_id=uuid_of(execution_id), suspension_id=latest)
    return dict(row)


async def suspend_keys(rows: Rows) -> list[dict[str, Any]]:
    """The idempotency keys of suspends."""
    return [dict(row) for row in await rows.of("idempotency_key", operation="suspend")]


async def waitpoint(rows: Rows, waitpoint_id: UUID) -> dict[str, Any]:
    """The one row of a waitpoint."""
    (row,) = await rows.of("waitpoint", waitpoint_id=waitpoint_id)
    return dict(row)


async def waitpoints(rows: Rows, execution_id: str) -> list[dict[str, Any]]:
    """The waitpoints of an execution by key."""
    found = await rows.of("waitpoint", execution_id=uuid_of(execution_id))
    return sorted(found, key=lambda row: str(row["waitpoint_key"]))
