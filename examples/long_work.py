"""Long work: a plain function in a thread that reports progress and checks its lease."""

import asyncio
import time
from dataclasses import dataclass

from flowfabric import Context, Fabric

fabric = Fabric()


@dataclass
class Report:
    """The result of the work."""

    pages: int
    fence: int


@fabric.task(timeout=60)
def print_report(ctx: Context, pages: int) -> Report:
    """Work in a thread, while the worker renews the lease in another thread."""
    for page in range(1, pages + 1):
        if not ctx.is_lease_healthy():
            raise RuntimeError("another worker may have taken over")
        time.sleep(0.02)
        ctx.from_thread(ctx.progress(page * 100 // pages, f"page {page}"))
    return Report(pages=pages, fence=ctx.lease_epoch)


async def main() -> None:
    """Submit a report and wait for it."""
    async with fabric, fabric.worker(lease_ttl=5):
        print(await (await print_report.submit(10)).result())


if __name__ == "__main__":
    asyncio.run(main())
