"""A process that cancels a flow in the store of FF_DATABASE_URL and then waits to be killed."""

import asyncio
from pathlib import Path

from flowfabric import Engine


def cancel_header(flow_id: str) -> None:
    """Cancel the header of a flow, create a file named `cancelled`, and wait."""
    asyncio.run(_cancel_header(flow_id))


def cancel_flow(flow_id: str) -> None:
    """Cancel a flow with its members, create a file named `cancelled` once that has begun, and wait."""
    asyncio.run(_cancel_flow(flow_id))


async def _cancel_header(flow_id: str) -> None:
    async with Engine.connect() as engine:
        await engine.cancel_flow_header(flow_id, reason="not wanted", cancellation_policy="cancel_all")
        await _wait()


async def _cancel_flow(flow_id: str) -> None:
    async with Engine.connect() as engine:
        await engine.cancel_flow(flow_id, reason="not wanted", cancellation_policy="cancel_all")
        await _wait()


async def _wait() -> None:
    Path("cancelled").touch()  # noqa: ASYNC240
    await asyncio.Event().wait()
