"""Replays of runs and of flows: what did not succeed runs again, with the same arguments."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from fixtures import Eventually
from flowfabric import Fabric, FlowRunFailed, FlowStatus, RunCancelled, RunFailed, RunSkipped, any_of, quorum
from flowfabric.engine.parts import parts_of
from flowfabric.errors import InvalidInputError, NotFoundError, StateError

TIMEOUT = 60


class Source:
    """A task that fails until it is repaired, and counts of all calls."""

    def __init__(self, fabric: Fabric) -> None:
        self.calls = Counter[str]()
        self.is_broken = True

        @fabric.task
        async def extract(name: str) -> str:
            self.calls[f"extract {name}"] += 1
            if self.is_broken and name == "bad":
                raise ValueError("no source")
            return name

        @fabric.task
        async def copy(value: Any, name: str = "copy") -> Any:
            self.calls[name] += 1
            return value

        @fabric.task
        async def judge(number: int) -> int:
            self.calls[f"judge {number}"] += 1
            if self.is_broken:
                if number < 2:
                    raise ValueError("no opinion")
                await asyncio.Event().wait()
            return number

        self.extract, self.copy, self.judge = extract, copy, judge


async def test_a_run_is_replayed_with_the_same_arguments(url: str) -> None:
    fabric = Fabric(url)
    source = Source(fabric)
    async with fabric, fabric.worker():
        run = await source.extract.submit("bad")
        with pytest.raises(RunFailed):
            await run.result(timeout=TIMEOUT)
        source.is_broken = False
        await run.replay("repaired", by="ada")
        assert await run.result(timeout=TIMEOUT) == "bad"
        assert (await run.status()).attempt == 2
        await run.replay()
        assert await run.result(timeout=TIMEOUT) == "bad"
    assert source.calls == {"extract bad": 3}


async def test_a_replay_of_a_run_that_has_not_ended_or_does_not_exist_is_refused(url: str) -> None:
    fabric = Fabric(url)
    source = Source(fabric)
    async with fabric:
        run = await source.copy.submit(1)
        with pytest.raises(StateError, match="execution_not_terminal"):
            await run.replay()
        missing = fabric.run("{fp:0}:00000000-0000-7000-8000-000000000000")
        with pytest.raises(NotFoundError, match="it was not submitted to this store"):
            await missing.replay()
        with pytest.raises(InvalidInputError, match="reason: must be text, got 5"):
            await run.replay(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_found_by_id", [False, True])
async def test_a_replayed_flow_runs_only_what_did_not_succeed(url: str, *, is_found_by_id: bool) -> None:
    fabric = Fabric(url)
    source = Source(fabric)
    flow = fabric.flow("nightly", id="2026-01-31")
    good, bad = flow.add(source.extract, "good"), flow.add(source.extract, "bad")
    both = flow.add(source.copy, [good, bad], name="both")
    last = flow.add(source.copy, both, name="last")
    flow.add(source.copy, good, name="alone")
    async with fabric, fabric.worker():
        submitted = await flow.submit()
        run = fabric.flow_run(submitted.id) if is_found_by_id else submitted
        with pytest.raises(FlowRunFailed):
            await run.result(timeout=TIMEOUT)
        source.is_broken = False
        again = await run.replay("repaired")
        assert again[0].id == submitted.run(bad).id
        assert {each.id for each in again} == {submitted.run(node).id for node in (bad, both, last)}
        assert await submitted.run(last).result(timeout=TIMEOUT) == ["good", "bad"]
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.COMPLETED
        assert await run.replay() == []
    assert source.calls == {"extract good": 1, "extract bad": 2, "both": 1, "last": 1, "alone": 1}


async def test_a_replay_of_a_node_gets_the_same_results_and_misses_one_that_is_replayed(
    url: str, eventually: Eventually
) -> None:
    fabric = Fabric(url)
    source = Source(fabric)
    source.is_broken = False
    flow = fabric.flow("nightly")
    names = [flow.add(source.extract, name) for name in "abc"]
    winner = flow.add(source.copy, any_of(names))
    async with fabric:
        async with fabric.worker():
            run = await flow.submit()
            assert await run.wait(timeout=TIMEOUT) is FlowStatus.COMPLETED
            first = await run.run(winner).result()
            for _ in range(3):
                await run.run(winner).replay()
                assert await run.run(winner).result(timeout=TIMEOUT) == first
            loser = next(node for node, name in zip(names, "abc", strict=True) if name != first)
            await run.run(loser).replay()
            await run.run(loser).result(timeout=TIMEOUT)
            await run.run(winner).replay()
            assert await run.run(winner).result(timeout=TIMEOUT) == first
        winning = names["abc".index(first)]
        await run.run(winning).replay()
        await run.run(winner).replay()
        # Only a worker without the upstream task runs the node first.
        taken = fabric.tasks.pop("extract")
        async with fabric.worker():
            with pytest.raises(
                RunFailed, match=r"task 'extract' \(fp.*\), whose result is an argument, is waiting: it was"
            ):
                await run.run(winner).result(timeout=TIMEOUT)
        fabric.tasks["extract"] = taken


async def test_a_flow_that_does_not_exist_is_not_replayed(url: str) -> None:
    async with Fabric(url) as fabric:
        with pytest.raises(NotFoundError, match="it was not submitted to this store"):
            await fabric.flow_run("00000000-0000-7000-8000-000000000000").replay()


@pytest.mark.parametrize("is_found_by_id", [False, True])
async def test_a_replay_runs_the_siblings_that_an_impossible_quorum_has_cancelled(
    url: str, *, is_found_by_id: bool
) -> None:
    fabric = Fabric(url)
    source = Source(fabric)
    flow = fabric.flow("review")
    judges = [flow.add(source.judge, number) for number in range(5)]
    decision = flow.add(source.copy, quorum(4, of=judges, cancel_remaining=True))
    async with fabric, fabric.worker():
        submitted = await flow.submit()
        run = fabric.flow_run(submitted.id) if is_found_by_id else submitted
        with pytest.raises(FlowRunFailed):
            await run.result(timeout=TIMEOUT)
        source.is_broken = False
        again = await run.replay()
        assert {each.id for each in again} == {submitted.run(node).id for node in (*judges, decision)}
        assert len(await submitted.run(decision).result(timeout=TIMEOUT)) == 4
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.COMPLETED


async def test_a_replay_runs_a_cancelled_sibling_only_if_a_skipped_run_needs_it(url: str) -> None:
    fabric = Fabric(url)
    source = Source(fabric)

    async def submit(*, is_needed: bool) -> set[str]:
        """Return the calls of a replay whose flow has cancelled judge 3."""
        source.is_broken, source.calls = True, Counter()
        flow = fabric.flow("review")
        judge = flow.add(source.judge, 3)
        first = flow.add(source.copy, any_of([flow.add(source.extract, "good"), judge], cancel_remaining=True))
        flow.add(source.extract, "bad")
        if is_needed:
            flow.add(source.copy, judge, name="needs the judge")
        run = await flow.submit()
        with pytest.raises(FlowRunFailed):
            await run.result(timeout=TIMEOUT)
        assert await run.run(first).result() == "good"
        source.is_broken, source.calls = False, Counter()
        await run.replay()
        await run.result(timeout=TIMEOUT)
        return set(source.calls)

    async with fabric, fabric.worker():
        assert await submit(is_needed=False) == {"extract bad"}
        assert await submit(is_needed=True) == {"extract bad", "judge 3", "needs the judge"}


async def test_a_flow_in_which_nothing_failed_by_itself_names_what_was_skipped_and_cancelled(url: str) -> None:
    fabric = Fabric(url)
    source = Source(fabric)
    flow = fabric.flow("review")
    judge = flow.add(source.judge, 3)
    flow.add(source.copy, any_of([flow.add(source.extract, "good"), judge], cancel_remaining=True))
    second = flow.add(source.copy, judge)
    async with fabric, fabric.worker():
        run = await flow.submit()
        with pytest.raises(FlowRunFailed) as failed:
            await run.result(timeout=TIMEOUT)
        assert str(failed.value) == (
            f"flow {run.id} failed: 2 of 4 runs did not succeed: copy {run.run(second).id} was skipped: what it waits "
            f"for did not succeed; `await run.explain()` says what; judge {run.run(judge).id} was cancelled: enough of "
            "the runs that it was grouped with have succeeded without it"
        )
        assert [type(each) for each in failed.value.causes] == [RunSkipped, RunCancelled]
        assert failed.value.causes[0].reason == "dependency_impossible"


async def test_a_sweep_during_a_replay_skips_nothing_again(url: str) -> None:
    fabric = Fabric(url)
    source = Source(fabric)
    flow = fabric.flow("chain")
    nodes = [flow.add(source.copy, 1, name=str(number)) for number in range(40)]
    bad = flow.add(source.extract, "bad")
    # The first node waits for the second, and so on: the order of the nodes is not that of the edges.
    for node, upstream in pairwise([*nodes, bad]):
        flow.after(node, upstream)
    async with fabric:
        run = await flow.submit()
        async with fabric.worker():
            assert await run.wait(timeout=TIMEOUT) is FlowStatus.FAILED
        replayed = asyncio.create_task(run.replay())
        while not replayed.done():
            await parts_of(fabric.engine).blocked.reconcile()
        await replayed
        assert (await run.status()).runs == {"waiting": 1, "waiting_children": 40}
