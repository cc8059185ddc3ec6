"""A worker on the embedded server of FF_HOME, in a process of its own: `python embedded_process.py <instance id>`."""

import logging
import sys

from flowfabric import Context, Fabric

fabric = Fabric()


@fabric.task
async def tell(ctx: Context, number: int) -> str:
    """Say who ran it."""
    return f"{number} by {ctx.worker_instance_id}"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    fabric.run_worker(worker_id="pool", worker_instance_id=sys.argv[1], lease_ttl=2)
