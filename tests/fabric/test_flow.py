"""The values of flows: results become arguments, in every shape, and stay the same over retries and processes."""

import asyncio
import dataclasses
from collections import defaultdict
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import pydantic
import pytest
from typing_extensions import TypedDict

from fixtures import Clock, Eventually
from flowfabric import Context, Fabric, FlowRunFailed, FlowStatus, RunFailed, RunSkipped, all_of, any_of, quorum
from flowfabric.engine.read.upstreams import Upstreams
from flowfabric.errors import TransportError
from flowfabric.fabric.flow_run import FlowRun

TIMEOUT = 60


@dataclasses.dataclass
class Part:
    number: int
    weight: Decimal


class Report(pydantic.BaseModel):
    at: datetime
    parts: list[Part]


class Row(msgspec.Struct):
    text: str


class Pair(NamedTuple):
    left: int
    right: str


class Options(TypedDict):
    rows: list[int]
    raw: bytes


AT = datetime(2026, 1, 31, tzinfo=UTC)


async def finished(run: FlowRun) -> None:
    """Wait until a flow has completed."""
    await run.result(timeout=TIMEOUT)


async def test_results_of_every_shape_arrive_as_equal_values_in_every_place(url: str) -> None:
    fabric = Fabric(url)
    seen: dict[str, Any] = {}

    @fabric.task
    async def number(value: int = 3) -> int:
        return value

    @fabric.task
    def text() -> str:
        return 'a "quoted" \u00e9'

    @fabric.task
    async def part() -> Part:
        return Part(7, Decimal("1.50"))

    @fabric.task
    async def report(parts: list[Part]) -> Report:
        return Report(at=AT, parts=parts)

    @fabric.task
    def raw() -> bytes:
        return b'"\xff 1'

    @fabric.task
    async def nothing() -> None: ...

    @fabric.task
    async def row() -> Row:
        return Row("x")

    @fabric.task
    async def large() -> str:
        return "y" * 100_000

    @fabric.task
    def take(ctx: Context, name: str, value: Any, *rest: Any, **named: Any) -> str:
        seen[name] = (value, rest, named)
        return name

    @fabric.task
    async def typed(
        report: Report,
        data: bytes,
        pair: Pair,
        options: Options,
        *rest: bytes,
        none: int | None,
        rows: dict[str, Row],
        by_number: dict[int, list[bytes]],
        several: tuple[int, str] | None = None,
        **named: Part,
    ) -> str:
        seen["typed"] = (report, data, pair, options, rest, none, rows, by_number, several, named)
        return "typed"

    flow = fabric.flow("shapes")
    three, quoted, one_part, data = flow.add(number), flow.add(text), flow.add(part), flow.add(raw)
    made = flow.add(report, [one_part, Part(8, Decimal(2))])
    empty: Any = flow.add(nothing)
    flow.add(
        typed,
        made,
        data,
        Pair(three, quoted),
        {"rows": [1, three], "raw": data},
        b"\x00",
        data,
        none=empty,
        rows={"r": flow.add(row)},
        by_number={5: [data, b"\xfe"]},
        several=(three, quoted),
        p=one_part,
    )
    flow.add(take, "mixed", {"a": [three, {"b": [quoted, None]}], "c": 1.0}, three, "x", key=[quoted])
    flow.add(take, "large", flow.add(large), three)
    flow.add(take, "all", all_of([flow.add(number, n) for n in (5, 4, 6)]))
    async with fabric, fabric.worker():
        await finished(await flow.submit())
    whole = Report(at=AT, parts=[Part(7, Decimal("1.50")), Part(8, Decimal(2))])
    raw_data = b'"\xff 1'
    assert seen["typed"] == (
        whole,
        raw_data,
        Pair(3, 'a "quoted" \u00e9'),
        {"rows": [1, 3], "raw": raw_data},
        (b"\x00", raw_data),
        None,
        {"r": Row("x")},
        {5: [raw_data, b"\xfe"]},
        (3, 'a "quoted" \u00e9'),
        {"p": Part(7, Decimal("1.50"))},
    )
    quoted_text = 'a "quoted" \u00e9'
    assert seen["mixed"] == ({"a": [3, {"b": [quoted_text, None]}], "c": 1.0}, (3, "x"), {"key": [quoted_text]})
    assert seen["large"] == ("y" * 100_000, (3,), {})
    assert seen["all"] == ([5, 4, 6], (), {})


async def test_a_node_that_only_waits_gets_no_results(url: str) -> None:
    fabric, order = Fabric(url), list[str]()

    @fabric.task
    async def note(name: str) -> str:
        order.append(name)
        return name

    flow = fabric.flow("ordered")
    first, second, last, most = (flow.add(note, name) for name in ("first", "second", "last", "most"))
    flow.after(first, second)
    flow.after(last, first, all_of([second]))
    flow.after(most, any_of([last]))
    async with fabric, fabric.worker():
        await finished(await flow.submit())
    assert order == ["second", "first", "last", "most"]


async def test_any_of_gives_the_winner_and_a_retry_sees_the_same(
    url: str, clock: Clock, eventually: Eventually
) -> None:
    fabric, gates, seen = Fabric(url), defaultdict[str, asyncio.Event](asyncio.Event), list[Any]()

    @fabric.task
    async def race(name: str) -> str:
        await gates[name].wait()
        return name

    @fabric.task(retries=3, backoff=0)
    async def take(ctx: Context, winner: str, several: list[str] | None = None) -> str:
        seen.append((winner, several))
        await gates["take"].wait()
        if ctx.attempt < 3:
            raise ValueError("again")
        return winner

    flow = fabric.flow("race")
    racers = [flow.add(race, name) for name in "abc"]
    winner = flow.add(take, any_of(racers))
    # Every edge is resolved at the same time, by the clock of the database.
    await clock.stop()
    async with fabric, fabric.worker():
        run = await flow.submit()
        gates["c"].set()
        await run.run(racers[2]).result(timeout=TIMEOUT)

        async def has_started() -> bool:
            return len(seen) == 1

        await eventually(has_started)
        for name in "ab":
            gates[name].set()
        for racer in racers:
            await run.run(racer).result(timeout=TIMEOUT)
        await eventually(lambda: settled(run))
        gates["take"].set()
        assert await run.run(winner).result(timeout=TIMEOUT) == "c"
        await finished(run)
    assert seen == [("c", None)] * 3


async def settled(run: FlowRun) -> bool:
    """Whether the cascade has resolved every edge of a flow, except those behind its last run."""
    fabric: Any = run._fabric
    found = await fabric.engine.describe_flow(run.id)
    return all(group.running_count == 0 for group in found.edge_groups)


async def test_quorum_gives_the_first_successes_in_their_order(url: str, eventually: Eventually) -> None:
    fabric, gates, seen = Fabric(url), defaultdict[int, asyncio.Event](asyncio.Event), list[list[int]]()

    @fabric.task
    async def judge(number: int) -> int:
        await gates[number].wait()
        if number == 1:
            raise ValueError("no verdict")
        return number

    @fabric.task
    async def decide(verdicts: list[int]) -> int:
        seen.append(verdicts)
        return len(verdicts)

    flow = fabric.flow("judges")
    judges = [flow.add(judge, n) for n in range(5)]
    verdict = flow.add(decide, quorum(3, of=judges))
    async with fabric, fabric.worker():
        run = await flow.submit()
        for number in (4, 1, 0):
            gates[number].set()
            with_error = run.run(judges[number]).result(timeout=TIMEOUT)
            await asyncio.gather(with_error, return_exceptions=True)
            await eventually(lambda number=number: is_resolved(run, judges[number]))
        gates[3].set()
        assert await run.run(verdict).result(timeout=TIMEOUT) == 3
        assert seen == [[4, 0, 3]]
        assert (await run.status()).state is FlowStatus.ACTIVE
        gates[2].set()
        # A failure that the quorum tolerates does not make the flow fail.
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.COMPLETED
        await run.result()
        assert (await run.status()).state is FlowStatus.COMPLETED
        assert (await run.status()).runs == {"completed": 5, "failed": 1}


async def test_successes_of_the_same_millisecond_count_in_the_order_of_their_edges(
    url: str, clock: Clock, eventually: Eventually
) -> None:
    fabric, gates = Fabric(url), defaultdict[str, asyncio.Event](asyncio.Event)

    @fabric.task
    async def race(name: str) -> str:
        await gates[name].wait()
        return name

    @fabric.task
    async def take(winners: list[str]) -> list[str]:
        return winners

    flow = fabric.flow("race")
    racers = {name: flow.add(race, name) for name in "abc"}
    first = flow.add(take, quorum(2, of=list(racers.values())))
    await clock.stop()
    async with fabric, fabric.worker():
        run = await flow.submit()
        for name in "ca":
            gates[name].set()
            await eventually(lambda name=name: is_resolved(run, racers[name]))
        assert await run.run(first).result(timeout=TIMEOUT) == ["a", "c"]
        gates["b"].set()
        await finished(run)


async def is_resolved(run: FlowRun, node: Any) -> bool:
    """Whether the edges that leave a node are resolved."""
    from flowfabric.model.edge import Outgoing

    fabric: Any = run._fabric
    edges = await fabric.engine.list_edges(run.id, Outgoing(from_node=run.run(node).id))
    return all(edge.last_resolved_at is not None for edge in edges)


async def test_cancel_remaining_cancels_the_others_and_the_flow_completes(url: str) -> None:
    fabric, cancelled = Fabric(url), list[int]()

    @fabric.task
    async def judge(number: int) -> int:
        if number:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(number)
                raise
        return number

    @fabric.task
    async def decide(verdict: int) -> str:
        return f"by {verdict}"

    flow = fabric.flow("judges")
    judges = [flow.add(judge, n) for n in range(3)]
    decided = flow.add(decide, any_of(judges, cancel_remaining=True))
    async with fabric, fabric.worker():
        run = await flow.submit()
        assert await run.run(decided).result(timeout=TIMEOUT) == "by 0"
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.COMPLETED
        assert (await run.status()).runs == {"cancelled": 2, "completed": 2}
    assert sorted(cancelled) == [1, 2]


async def test_a_failure_skips_what_depends_on_it_and_nothing_else(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def extract() -> int:
        raise ValueError("no source")

    @fabric.task
    def copy(value: int) -> int:
        return value

    flow = fabric.flow("nightly")
    broken = flow.add(extract)
    skipped = flow.add(copy, flow.add(copy, broken))
    alone = flow.add(copy, 5)
    async with fabric, fabric.worker():
        run = await flow.submit()
        with pytest.raises(FlowRunFailed) as failed:
            await run.result(timeout=TIMEOUT)
        assert await run.run(alone).result() == 5
        with pytest.raises(RunSkipped, match="was skipped"):
            await run.run(skipped).result()
        assert isinstance((await run.run(skipped).status()).error, RunSkipped)
        assert await run.wait() is FlowStatus.FAILED
        run_id = run.run(broken).id
    assert str(failed.value) == (
        f"flow {run.id} failed: 3 of 4 runs did not succeed: extract {run_id} failed: ValueError: no source"
    )
    (cause,) = failed.value.causes
    assert (type(cause), cause.execution_id) == (RunFailed, run_id)


async def test_a_fault_of_the_store_while_results_are_read_is_retried(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric, tries = Fabric(url), list[int]()

    @fabric.task
    async def one() -> int:
        return 1

    read = Upstreams.read_upstream_results

    async def fail_twice(self: Upstreams, *args: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise TransportError("transport", "connection lost")
        return await read(self, *args)

    @fabric.task
    async def add(a: int, b: int) -> int:
        return a + b

    monkeypatch.setattr(Upstreams, "read_upstream_results", fail_twice)
    flow = fabric.flow("sum")
    total = flow.add(add, flow.add(one), 1)
    async with fabric, fabric.worker():
        run = await flow.submit()
        assert await run.run(total).result(timeout=TIMEOUT) == 2
        assert (await run.run(total).status()).attempt == 1
    assert len(tries) == 3


async def test_workers_of_other_processes_and_fabrics_fill_in_the_results(url: str) -> None:
    """The worker that runs a node does not have the tasks of its upstream nodes."""
    first, second = Fabric(url, lane="first"), Fabric(url, lane="second")

    async def read() -> bytes:
        return b"\xff12"

    async def measure(data: bytes) -> int:
        return len(data)

    flow = first.flow("split")
    node = flow.add(first.task(lane="second")(measure), flow.add(first.task(read)))
    second.task(measure)
    # The fabric of the submitter runs only its own task.
    del first.tasks["measure"]
    async with first, second, first.worker(lanes=["first"]), second.worker():
        run = await flow.submit()
        assert await run.run(node).result(timeout=TIMEOUT) == 3


async def test_a_flow_of_a_thousand_nodes_runs_to_its_end(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def one(number: int, *before: int) -> int:
        return number + sum(before)

    @fabric.task
    async def total(numbers: list[int]) -> int:
        return sum(numbers)

    flow = fabric.flow("wide")
    start = flow.add(one, 1)
    middle = [flow.add(one, n, start) for n in range(998)]
    end = flow.add(total, all_of(middle))
    async with fabric, fabric.worker(concurrency=500):
        run = await flow.submit()
        assert await run.run(end).result(timeout=TIMEOUT) == sum(range(998)) + 998
        await finished(run)
        assert (await run.status()).runs == {"completed": 1000}
        assert await fabric.engine.find_inconsistencies() == []
