"""A worker on the embedded server of FF_HOME, for a process of its own."""

import logging

from flowfabric import Context, Fabric

LEASE_TTL_S = 1

fabric = Fabric()


@fabric.task
async def worker_of(ctx: Context, number: int) -> str:
    """Return the number and the worker that ran this."""
    return f"{number} by {ctx.worker_instance_id}"


def run(name: str) -> None:
    """Run a worker until it is told to stop."""
    logging.basicConfig(level=logging.INFO)
    fabric.run_worker(worker_id="pool", worker_instance_id=name, lease_ttl=LEASE_TTL_S)
