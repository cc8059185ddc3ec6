"""While another session locks a row, every operation fails in bounded time, names the execution and says what to do."""

from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from engine.state import all_cases
from fixtures import Engines, Given, Rows, uuid_of
from flowfabric.db import session as sessions
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import ByName, Single
from flowfabric.model.errors import ContentionError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import SuspensionId, WaitpointId, uuid7
from flowfabric.model.suspension import SuspendArgs
from flowfabric.model.waitpoint import Fresh


def suspend_args() -> SuspendArgs:
    """A wait for one signal."""
    return SuspendArgs(
        suspension_id=SuspensionId(uuid7()),
        waitpoints=(Fresh(waitpoint_id=WaitpointId(uuid7()), waitpoint_key="wait"),),
        resume_condition=Single(waitpoint_key="wait", matcher=ByName("ready")),
        reason_code="waiting_for_signal",
    )


def fence(handle: Handle) -> dict[str, Any]:
    """The arguments that name the execution and the lease of a handle."""
    return {
        "execution_id": handle.execution_id,
        "lease_id": handle.lease_id,
        "lease_epoch": handle.lease_epoch,
        "attempt_id": handle.attempt_id,
    }


Call = Callable[[Engine, Handle], Coroutine[Any, Any, Any]]

CALLS: dict[str, Call] = {
    "complete": lambda e, h: e.complete(h),
    "fail": lambda e, h: e.fail(h, reason="no luck"),
    "delay": lambda e, h: e.delay(h, delay_until=1),
    "cancel": lambda e, h: e.cancel(h, "not wanted"),
    "renew": lambda e, h: e.renew(h),
    "progress": lambda e, h: e.progress(h, percent=1),
    "suspend": lambda e, h: e.suspend(h, suspend_args()),
    "create_waitpoint": lambda e, h: e.create_waitpoint(h, waitpoint_key="w", expires_in_ms=1000),
    "close_waitpoint": lambda e, h: e.close_waitpoint(execution_id=h.execution_id, waitpoint_id=uuid7()),
    "cancel_execution": lambda e, h: e.cancel_execution(execution_id=h.execution_id, reason="not wanted"),
    "complete_execution": lambda e, h: e.complete_execution(**fence(h), attempt_index=0),
    "fail_execution": lambda e, h: e.fail_execution(
        **fence(h), attempt_index=0, failure_reason="x", failure_category="y"
    ),
    "renew_lease": lambda e, h: e.renew_lease(**fence(h), attempt_index=0, lease_ttl_ms=1000),
    "expire_execution": lambda e, h: e.expire_execution(execution_id=h.execution_id, phase="execution_deadline"),
    "mark_lease_expired_if_due": lambda e, h: e.mark_lease_expired_if_due(h.execution_id),
    "promote_delayed": lambda e, h: e.promote_delayed(h.execution_id),
    "resume_execution": lambda e, h: e.resume_execution(execution_id=h.execution_id),
    "expire_suspension": lambda e, h: e.expire_suspension(h.execution_id),
    "set_execution_tag": lambda e, h: e.set_execution_tag(h.execution_id, "app.key", "value"),
    "claim_execution": lambda e, h: e.claim_execution(
        execution_id=h.execution_id, lane_id="default", worker_id="w", worker_instance_id="w"
    ),
    "reclaim_execution": lambda e, h: e.reclaim_execution(
        execution_id=h.execution_id, lane_id="default", worker_id="w", worker_instance_id="w"
    ),
}


async def test_an_operation_on_a_locked_row_is_refused_names_the_execution_and_writes_nothing(
    engines: Engines, given: Given, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "10ms")
    engine = await engines()
    handle = await given.claimed()
    text = (
        f"retry_exhausted: execution {handle.execution_id} is locked by another session: 3 tries failed "
        "(canceling statement due to lock timeout); nothing was written, repeat the call"
    )
    async with connection.transaction():
        await connection.execute(
            "select from execution where execution_id = $1 for update", uuid_of(handle.execution_id)
        )
        # A renewal writes only this row.
        await connection.execute("select from claim for update")
        with all_cases() as case:
            for operation, call in CALLS.items():
                with case(operation):
                    async with rows.unchanged():
                        with pytest.raises(ContentionError) as refusal:
                            await call(engine, handle)
                    assert str(refusal.value) == text
                    assert refusal.value.retryable
