"""What the settling of edges tells: waiting claims, the loop that promotes delays, and the holders of lost leases."""

import asyncio
from collections.abc import Sequence

import pytest

from engine.flow.driving import DrivenFlow
from engine.flow.submitting import edges, node
from engine.state import FENCED_OPERATIONS, all_cases, refused
from fixtures import Engines, Eventually, Rows
from flowfabric.engine.core.wakeups import LostLease, LostReason
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of


@pytest.mark.usefixtures("hints_only")
@pytest.mark.parametrize("claimer", ["the same process", "another process"])
async def test_a_promoted_child_wakes_a_waiting_claim(
    engines: Engines, rows: Rows, eventually: Eventually, claimer: str
) -> None:
    engine = await engines()
    worker = engine if claimer == "the same process" else await engines()
    # The claims of another lane are not woken by the upstream execution.
    nodes = [node("a"), node("b", lane_id="later")]
    flow = await DrivenFlow.submit(engine, rows, nodes, edges("a>b"))
    await flow.claim("a")
    waiting = asyncio.create_task(
        worker.claim(lane_id="later", worker_id="w", worker_instance_id="w-1", max_wait_ms=60_000)
    )
    wakeups = parts_of(worker).wakeups
    await eventually(lambda: wakeups.hints.is_listening and wakeups._waiting.get("later"))
    await flow.succeed("a")
    async with asyncio.timeout(30):
        run = await waiting
    assert run is not None
    assert run.execution_id == flow.id("b")


async def test_a_promoted_child_with_a_delay_sets_the_next_timer_of_this_process(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, [node("a"), node("b", delay_ms=60_000)], edges("a>b"))
    await flow.claim("a")
    wakeups = parts_of(engine).wakeups
    wakeups.next_timer = float("inf")
    wakeups.timer_event.clear()
    await flow.succeed("a")
    assert wakeups.timer_event.is_set()
    assert wakeups.next_timer < float("inf")


async def test_the_holder_of_a_child_that_becomes_impossible_is_told_and_refused(
    engine: Engine, engines: Engines, rows: Rows, eventually: Eventually
) -> None:
    other = await engines()
    told: dict[str, list[LostLease]] = {"this process": [], "another process": []}
    for name, each in zip(told, (engine, other), strict=True):

        def tell(leases: Sequence[LostLease] | None, name: str = name) -> None:
            told[name].extend(leases or ())

        parts_of(each).wakeups.on_lost(tell)
    await parts_of(other).wakeups.hints.listen()
    await eventually(lambda: parts_of(other).wakeups.hints.is_listening)
    # Nobody holds the waiting child, so nobody is told about it.
    flow = await DrivenFlow.submit(engine, rows, "a held waiting", "a>waiting")
    handle = await flow.claim("held")
    await flow.connect("a>held")
    await flow.fail("a")
    assert await flow.states() == {"a": "failed", "held": "skipped", "waiting": "skipped"}
    lost = LostLease(flow.id("held"), handle.lease_epoch, LostReason.SKIPPED)
    assert told["this process"] == [lost]
    await eventually(lambda: told["another process"])
    assert told["another process"] == [lost]
    async with rows.unchanged():
        with all_cases() as case:
            for name, operation in FENCED_OPERATIONS.items():
                with case(name):
                    await refused(operation(engine, handle), "execution_not_active")
