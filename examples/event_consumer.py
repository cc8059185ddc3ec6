"""A service that invoices the finished runs of a customer: it reads a feed of events and survives its own restarts."""

import asyncio
import json
import tempfile
import uuid
from pathlib import Path

from flowfabric import Fabric
from flowfabric.feeds import OLDEST, CompletionEvent, ScannerFilter

fabric = Fabric(lane="renders")


@fabric.task
async def render(pages: int) -> int:
    """Do the work that customers pay for."""
    return pages


class Invoices:
    """What the service remembers, in a file that stands for its database."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.cursor = OLDEST
        self.runs: list[str] = []
        if file.exists():
            cursor, self.runs = json.loads(file.read_text())
            self.cursor = bytes.fromhex(cursor)

    def add(self, event: CompletionEvent) -> None:
        """Store an invoice and the position after its event in one step; an event that comes again changes nothing."""
        if event.outcome == "success" and event.execution_id not in self.runs:
            self.runs.append(event.execution_id)
        self.cursor = event.cursor
        self._file.write_text(json.dumps([self.cursor.hex(), self.runs]))


async def invoice(file: Path, customer: str, *, until: int) -> list[str]:
    """Read the events of a customer from where the last process stopped; this one stops after some invoices."""
    invoices = Invoices(file)
    of_customer = ScannerFilter(instance_tag=("renders.customer", customer))
    async with fabric.engine.subscribe_completion(invoices.cursor, of_customer) as events:
        async for event in events:
            invoices.add(event)
            if len(invoices.runs) >= until:
                break
    return invoices.runs


async def submit_for(customer: str, count: int) -> list[str]:
    """Run some work for a customer, and return the ids of the runs."""
    task = render.options(tags={"renders.customer": customer})
    runs = [await task.submit(pages) for pages in range(count)]
    for run in runs:
        await run.result(timeout=30)
    return [run.id for run in runs]


async def main() -> None:
    """Invoice the runs of one of two customers with a service that is restarted in between."""
    # New customers every time: the feed still has the runs of earlier starts of this program.
    acme, globex = (f"{name}-{uuid.uuid4()}" for name in ("acme", "globex"))
    async with fabric, fabric.worker():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "acme.json"
            runs = await submit_for(acme, 3)
            await submit_for(globex, 2)
            print(f"invoiced before the restart: {len(await invoice(file, acme, until=2))}")
            runs += await submit_for(acme, 2)  # while the service is down
            invoiced = await invoice(file, acme, until=5)
            print(f"invoiced after it: {len(invoiced)}, every run of acme once: {sorted(invoiced) == sorted(runs)}")


if __name__ == "__main__":
    asyncio.run(main())
