"""Calls that issue grants and that claim a given execution, with default arguments."""

from typing import Any

from fixtures import Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.grant import Granted

SECRET = "ab" * 32
KID = "k1"


def worker(name: str = "pool", **overrides: Any) -> dict[str, Any]:
    """Arguments that name a worker and a lane."""
    return {"worker_id": name, "worker_instance_id": f"{name}-1", "lane_id": "default", **overrides}


async def register_workers(engine: Engine, *names: str) -> None:
    """Store the ids of workers, by default of `worker`; a claim of theirs that finds nothing then writes nothing."""
    for name in names or ("worker",):
        await parts_of(engine).lifecycle.store.worker_no(name, f"{name}-1")


async def issue_grant(engine: Engine, execution_id: str, name: str = "pool", **overrides: Any) -> Granted:
    """Issue a claim grant for this execution to a worker."""
    return await engine.issue_claim_grant(execution_id=execution_id, **worker(name, **overrides))


async def issue_reclaim_grant(engine: Engine, execution_id: str, name: str = "pool", **overrides: Any) -> Any:
    """Request a reclaim grant for this execution for a worker."""
    return await engine.issue_reclaim_grant(execution_id=execution_id, **worker(name, **overrides))


async def grant_for_worker(engine: Engine, name: str = "pool", **overrides: Any) -> Granted:
    """Issue a grant for any claimable execution to a worker, by `claim_for_worker`."""
    answer = await engine.claim_for_worker(**worker(name, **overrides))
    assert isinstance(answer, Granted), answer
    return answer


async def claim_granted(engine: Engine, execution_id: str, name: str = "pool", **overrides: Any) -> Any:
    """Claim an execution that is granted to the worker."""
    return await engine.claim_execution(execution_id=execution_id, **worker(name, **overrides))


async def claim_resumed(engine: Engine, execution_id: str, name: str = "pool", **overrides: Any) -> Any:
    """Claim an execution whose attempt was interrupted."""
    return await engine.claim_resumed_execution(execution_id=execution_id, **worker(name, **overrides))


async def reclaim(engine: Engine, execution_id: str, name: str = "pool", **overrides: Any) -> Any:
    """Reclaim an execution with a worker's grant."""
    return await engine.reclaim_execution(execution_id=execution_id, **worker(name, **overrides))


async def resumable(given: Given, **overrides: Any) -> str:
    """An execution with an interrupted attempt that can be claimed at once."""
    handle = await given.claimed(**overrides)
    await given.engine.wait_children(handle)
    return str(handle.execution_id)
