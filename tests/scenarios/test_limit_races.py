"""However many claims, endings and changes of limits run at once, no key ever has more holders than its cap."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.limit.limits import limited, quota, used
from engine.state import IS_WHOLE, items, new
from fixtures import Clock, Eventually, Rows
from flowfabric import Fabric
from flowfabric.engine.engine import Engine
from flowfabric.model.lease import ClaimedExecution
from sessions import session

from . import worker_process
from .processes import Process, environment_for
from .races import HOUR_MS, Rivals, claim, rivals

__all__ = ["rivals"]

AT_ONCE = {"retry_policy": {"max_retries": 1000, "backoff": {"type": "fixed", "delay_ms": 0}}}
_HELD = """
select k.quota_policy_id, k.key, p.max_concurrent as cap, h.holders, k.taken - r.returned as used
  from (select s.quota_key_no, count(*) as holders
          from execution e cross join lateral unnest(e.slot_keys) as s(quota_key_no)
         where e.ownership_state = 'leased' group by 1) h
  join quota_key k on k.quota_key_no = h.quota_key_no
  join quota_policy p on p.quota_policy_id = k.quota_policy_id
 cross join lateral (
       select coalesce(sum(r.returned), 0) as returned from slot_return r where r.quota_key_no = k.quota_key_no) r
"""


class Watch:
    """What samples of the holders of slots have found."""

    def __init__(self) -> None:
        self.samples = 0
        self.most: Counter[UUID] = Counter()
        self.wrong: list[dict[str, Any]] = []


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[Watch]:
    """Sample the holders of slots until the block ends; a sample is one snapshot of the database."""
    connection = await session(url, "test watch")
    watch = Watch()

    async def sample() -> None:
        while True:
            for row in await connection.fetch(_HELD):
                watch.most[row["quota_policy_id"]] = max(watch.most[row["quota_policy_id"]], row["holders"])
                if row["cap"] and not row["holders"] == row["used"] <= row["cap"]:
                    watch.wrong.append(dict(row))
            watch.samples += 1

    task = asyncio.create_task(sample())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connection.close()
    assert watch.wrong == []
    assert watch.samples > 10


async def end(engine: Engine, run: ClaimedExecution, chance: random.Random) -> bool:
    """End a lease in a random way; return whether the execution has ended."""
    match chance.randrange(8):
        case 0:
            await engine.hand_back(run.handle)
        case 1:
            await engine.revoke_lease(run.execution_id, reason="x")
        case 2:
            await engine.fail(run.handle, reason="x")
        case 3:
            await engine.cancel_execution(execution_id=run.execution_id, reason="x")
            return True
        case _:
            await engine.complete(run.handle, b"x")
            return True
    return False


async def drain(engine: Engine, left: set[str], limit: int, chance: random.Random) -> None:
    """Claim and end until nothing is left."""
    while left:
        runs = await claim(engine, limit=chance.randint(1, limit), lease_ttl_ms=HOUR_MS)
        if not runs:
            await asyncio.sleep(0.001)
        chance.shuffle(runs)
        for run in runs:
            if await end(engine, run, chance):
                left.discard(run.execution_id)


async def submitted(engine: Engine, arguments: list[dict[str, Any]]) -> set[str]:
    """The ids of new executions."""
    return {each.execution_id for each in await engine.create_many(items(*arguments))}  # type: ignore[union-attr]


@pytest.mark.parametrize("cap", [1, 3, 50])
@pytest.mark.usefixtures("clock")
async def test_concurrent_claims_never_exceed_a_cap(url: str, rivals: Rivals, rows: Rows, cap: int) -> None:
    first, second = await rivals(2)
    slots = await quota(first, running=cap)
    count = 600 if IS_WHOLE else 150
    left = await submitted(first, [new(policy={**limited(slots), **AT_ONCE}) for _ in range(count)])
    async with watched(url) as watch:
        chances = [random.Random(seed) for seed in range(20)]
        await asyncio.gather(
            *(drain(first if nth % 2 else second, left, 10, chance) for nth, chance in enumerate(chances))
        )
    assert 1 <= watch.most[slots] <= cap
    assert await used(rows, slots) == 0
    assert (await first.reconcile_quota_counters()).errors == 0


@pytest.mark.usefixtures("clock")
async def test_claims_and_endings_with_many_keys_do_not_wait_for_each_other(
    url: str, rivals: Rivals, rows: Rows, eventually: Eventually
) -> None:
    engines = await rivals(2)
    keyed = await quota(engines[0], running=1, key_from="tag:app.key")
    shared = await quota(engines[0], running=30)
    rate = await quota(engines[0], rate=1_000_000)
    await engines[0].attach_quota("lane", "default", shared)
    await engines[0].attach_quota("kind", "job", rate)
    chance = random.Random(1)
    policy = {**limited(keyed), **AT_ONCE}
    arguments = [new(policy=policy, tags={"app.key": f"k{n % 100}"}) for n in range(800 if IS_WHOLE else 300)]
    chance.shuffle(arguments)
    left = await submitted(engines[0], arguments)

    async def batches(engine: Engine, chance: random.Random) -> None:
        while left:
            runs = await claim(engine, limit=20, lease_ttl_ms=HOUR_MS)
            if not runs:
                await asyncio.sleep(0.001)
                continue
            chance.shuffle(runs)
            for answer in await engine.complete_many([(run.handle, b"x") for run in runs]):
                assert not isinstance(answer, Exception), answer
            left.difference_update(run.execution_id for run in runs)

    async def change() -> None:
        budget = UUID(int=7)
        while left:
            await engines[1].attach_budget("lane", "default", budget)
            await engines[1].detach_quota("kind", "job", rate)
            await engines[1].change_quota_policy(shared, 60, 0, 30)
            await engines[1].attach_quota("kind", "job", rate)
            await engines[1].detach_budget("lane", "default", budget)

    async with watched(url) as watch:
        await asyncio.gather(
            change(),
            *(batches(engines[nth % 2], random.Random(nth)) for nth in range(6)),
            *(drain(engines[nth % 2], left, 20, random.Random(nth)) for nth in range(2)),
        )
    assert watch.most[keyed] == 1
    for row in await rows.of("quota_key"):
        returned = await rows.of("slot_return", quota_key_no=row["quota_key_no"])
        assert row["taken"] == sum(each["returned"] for each in returned), row


StartWorker = Callable[[str], Process]


@pytest.fixture
def start_worker(url: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Start worker processes; those that still run are killed after the test."""
    processes: list[Process] = []

    def start(name: str) -> Process:
        environment = environment_for(FF_DATABASE_URL=url)
        processes.append(Process(worker_process.run, name, log=tmp_path / f"{name}.log", environment=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
async def fabric(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    """The fabric of the worker processes, connected to the test's database."""
    monkeypatch.setenv("FF_DATABASE_URL", url)
    async with worker_process.fabric as fabric:
        yield fabric


async def test_worker_processes_never_exceed_a_cap(
    url: str, fabric: Fabric, start_worker: StartWorker, rows: Rows, clock: Clock, eventually: Eventually
) -> None:
    engine = fabric.engine
    shared, keyed = await quota(engine, running=5), await quota(engine, running=1, key_from="tag:app.key")
    await engine.attach_quota("lane", "default", shared)
    await engine.attach_quota("namespace", "default", keyed)
    count = 2000 if IS_WHOLE else 400
    tasks = [worker_process.pause.options(tags={"app.key": f"k{n % 50}"}).bind(0.002) for n in range(count)]
    runs = await worker_process.pause.submit_many(tasks)
    keys = {run.id[-36:]: f"k{n % 50}" for n, run in enumerate(runs)}
    async with watched(url) as watch:
        for nth in range(8):
            start_worker(f"worker-{nth}")

        async def have_ended() -> bool:
            return all(row["lifecycle_phase"] == "terminal" for row in await rows.of("execution_detail"))

        await eventually(have_ended, timeout=240)
    assert 1 <= watch.most[shared] <= 5
    assert watch.most[keyed] == 1
    check_events(await rows.of("event_each"), keys, cap=5)
    assert await used(rows, shared) == 0


def check_events(events: list[dict[str, Any]], keys: dict[str, str], *, cap: int) -> None:
    """Replay the events in order: never more leases at once than the cap, and one of each key."""
    held: set[str] = set()
    of_key: defaultdict[str, set[str]] = defaultdict(set)
    for event in sorted(events, key=lambda event: int(event["event_id"])):
        execution = str(event["execution_id"])
        if event["kind"] in ("acquired", "reclaimed"):
            held.add(execution)
            of_key[keys[execution]].add(execution)
        elif event["kind"] in ("released", "ended", "expired", "revoked"):
            held.discard(execution)
            of_key[keys[execution]].discard(execution)
        assert len(held) <= cap
        assert len(of_key[keys[execution]]) <= 1
