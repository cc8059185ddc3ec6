"""A process that changes a flow in the store of FF_DATABASE_URL and then waits to be killed."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from flowfabric import Engine
from flowfabric.engine.core.wakeups import CascadeKey
from flowfabric.engine.parts import parts_of


def cancel_header(flow_id: str) -> None:
    """Cancel the header of a flow, create a file named `cancelled`, and wait."""
    asyncio.run(_cancel_header(flow_id))


def cancel_flow(flow_id: str) -> None:
    """Cancel a flow with its members, create a file named `cancelled` once that has begun, and wait."""
    asyncio.run(_cancel_flow(flow_id))


def fail_member(execution_id: str) -> None:
    """Fail a member of a flow, create a file named `settled` after the first hop of the cascade, and hang."""
    asyncio.run(_fail_member(execution_id))


async def _cancel_header(flow_id: str) -> None:
    async with Engine.connect() as engine:
        await engine.cancel_flow_header(flow_id, reason="not wanted", cancellation_policy="cancel_all")
        await _wait()


async def _cancel_flow(flow_id: str) -> None:
    async with Engine.connect() as engine:
        await engine.cancel_flow(flow_id, reason="not wanted", cancellation_policy="cancel_all")
        await _wait()


async def _fail_member(execution_id: str) -> None:
    async with Engine.connect() as engine:
        wakeups = parts_of(engine).wakeups
        settle = wakeups.on_members_ended
        assert settle is not None

        def hang(_: Sequence[CascadeKey]) -> None:
            Path("settled").touch()
            time.sleep(600)

        def settle_first(keys: Sequence[CascadeKey]) -> None:
            wakeups.on_members_ended = hang
            settle(keys)

        wakeups.on_members_ended = settle_first
        await engine.issue_grant_and_claim(execution_id=execution_id, lane_id="default", lease_duration_ms=30_000)
        await engine.fail_execution(
            execution_id=execution_id,
            source="operator_override",
            failure_reason="no luck",
            failure_category="permanent",
        )
        await asyncio.Event().wait()


async def _wait() -> None:
    Path("cancelled").touch()  # noqa: ASYNC240
    await asyncio.Event().wait()
