"""awa: COPY into its queue storage, a worker of its Rust core with Python handlers."""
import os
from dataclasses import dataclass

import awa

from flowfabric.bench.subject import BATCH, CONNECTIONS, PAYLOAD, Drain, Figures, Task, rate, spread

W=int(os.environ.get("W","100"))
C=int(os.environ.get("C","2"))
CB=int(os.environ.get("CB","100"))
N=int(os.environ.get("N","10000"))

@dataclass
class Noop:
    text: str

async def measure(task: Task) -> Figures:
    client = awa.AsyncClient(task.url.replace("@/", "@localhost/", 1), max_connections=int(os.environ.get("MC","10")))
    await client.migrate()
    await client.install_queue_storage(schema="awa")
    single, many = task.count(800), task.count(N)
    noop = Noop(text=PAYLOAD.decode())
    submit = await rate(single, spread(single, among=CONNECTIONS, each=lambda: client.insert(noop, queue="single")))
    batch = [noop] * int(os.environ.get("B","100"))
    submit_batch = await rate(many, spread(many // len(batch), among=CONNECTIONS, each=lambda: client.enqueue_many_copy(batch, queue="bench")))
    drain = Drain(many)

    @client.task(Noop, queue="bench")
    async def run(job) -> None:
        drain.start()

    await client.start([{"name": "bench", "max_workers": W, "claimers": C, "claim_batch_size": CB}], poll_interval_ms=50)
    async def drained():
        for s in await client.queue_stats():
            if s.queue == "bench":
                print(s.queue, s.available, s.running, s.total_queued)
                return s.available + s.running == 0
        return True
    end_to_end = await drain.rate(drained)
    await client.shutdown(2000)
    await client.close()
    return {"awa_submit": submit, "awa_submit_batch": submit_batch, "awa_worker_end_to_end": end_to_end}
