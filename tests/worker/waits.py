"""Signals for the handlers of tests."""

from typing import Any

from flowfabric.engine.engine import Engine
from flowfabric.model.ids import ExecutionId


async def signal(engine: Engine, run: ExecutionId, name: str = "ready", **overrides: Any) -> Any:
    """Signal the only open waitpoint of an execution."""
    (point,) = (await engine.list_pending_waitpoints(execution_id=run)).entries
    token = await engine.read_waitpoint_token(execution_id=run, waitpoint_id=point.waitpoint_id)
    return await engine.deliver_signal(
        execution_id=run, waitpoint_id=point.waitpoint_id, waitpoint_token=token, signal_name=name, **overrides
    )
