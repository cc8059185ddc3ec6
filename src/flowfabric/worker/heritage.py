"""The limits that executions get from the run whose handler submits them."""

from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.limits import NOTHING, Inherited
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import ExecutionId
from flowfabric.worker import presence
from flowfabric.worker.logs import current_run


async def parent_of(engine: Engine) -> ExecutionId | None:
    """Return the run whose handler makes this call, if it has limits for what it submits to this store."""
    claimed = current_run.get()
    if claimed is None or await heritage_of(engine) == NOTHING:
        return None
    return claimed.execution_id


async def heritage_of(engine: Engine) -> Inherited:
    """Return the limits of the run whose handler makes this call; they are read once."""
    claimed, parts = current_run.get(), parts_of(engine)
    running = None if claimed is None else presence.latest(parts.store_key, claimed.execution_id)
    if running is None:
        return NOTHING
    if running.heritage is None:
        text = str(running.execution_id)
        running.heritage = (await parts.limit_rules.look_up([text], ())).parents.get(text, NOTHING)
    return running.heritage
