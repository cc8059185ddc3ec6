"""How the end of a run is written to the store."""

import asyncio
from typing import Any

import pytest

from fixtures import Attempts, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.attempt import FailureReason
from flowfabric.worker.outcome import Failure
from flowfabric.worker.reports import Reports
from flowfabric.worker.running import Running


class Slots:
    """Records which runs were released, and calls back for each."""

    def __init__(self) -> None:
        self.released: asyncio.Queue[Running] = asyncio.Queue()
        self.on_release: Any = None

    def release(self, running: Running) -> None:
        self.released.put_nowait(running)
        if self.on_release is not None:
            self.on_release(running)

    async def next(self) -> Running:
        return await asyncio.wait_for(self.released.get(), 60)


async def test_a_result_that_arrives_while_the_last_batch_is_written_is_written_too(
    engine: Engine, given: Given, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reports, "STREAMS", 1)
    first, second = Running(await given.run(), 0.0), Running(await given.run(), 0.0)
    slots = Slots()
    reports = Reports(engine, slots.release)

    def complete_second(running: Running) -> None:
        if running is first:
            asyncio.get_running_loop().call_soon(reports.complete, second, b"2")

    slots.on_release = complete_second
    reports.complete(first, b"1")
    assert [await slots.next(), await slots.next()] == [first, second]
    assert [(await engine.wait_for_ending(one.execution_id)).result for one in (first, second)] == [b"1", b"2"]


async def test_a_slot_becomes_free_when_the_end_of_its_run_is_committed(
    engine: Engine, given: Given, rows: Rows
) -> None:
    running = Running(await given.run(), 0.0)
    slots = Slots()
    Reports(engine, slots.release).complete(running, None)
    assert slots.released.empty()
    await slots.next()
    assert (await rows.execution(running.execution_id))["terminal_outcome"] == "success"


async def test_a_result_under_a_lost_lease_is_dropped_and_the_others_are_stored(
    engine: Engine, given: Given, rows: Rows
) -> None:
    runs = [Running(await given.run(), 0.0) for _ in range(3)]
    await engine.cancel_execution(execution_id=runs[1].execution_id, reason="not wanted")
    slots = Slots()
    reports = Reports(engine, slots.release)
    for running in runs:
        reports.complete(running, b"done")
    assert {await slots.next() for _ in runs} == set(runs)
    outcomes = [(await rows.execution(running.execution_id))["terminal_outcome"] for running in runs]
    assert outcomes == ["success", "cancelled", "success"]


async def test_a_result_that_the_store_refuses_fails_only_its_own_run(
    engine: Engine, given: Given, rows: Rows, attempts: Attempts
) -> None:
    wrong: Any = "no bytes"
    runs = [Running(await given.run(), 0.0) for _ in range(3)]
    slots = Slots()
    reports = Reports(engine, slots.release)
    for running, payload in zip(runs, (b"1", wrong, b"3"), strict=True):
        reports.complete(running, payload)
    assert {await slots.next() for _ in runs} == set(runs)
    outcomes = [(await rows.execution(running.execution_id))["terminal_outcome"] for running in runs]
    assert outcomes == ["success", "failed", "success"]
    (attempt,) = await attempts(runs[1].execution_id)
    assert attempt["failure_category"] == "result_refused"


async def test_a_failure_under_a_lost_lease_is_dropped(engine: Engine, given: Given, rows: Rows) -> None:
    running = Running(await given.run(), 0.0)
    await engine.cancel_execution(execution_id=running.execution_id, reason="not wanted")
    slots = Slots()
    await Reports(engine, slots.release).fail(running, Failure(FailureReason("no luck")))
    assert await slots.next() is running
    assert (await rows.execution(running.execution_id))["terminal_outcome"] == "cancelled"
