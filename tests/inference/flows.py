"""What type checkers infer about flows, their nodes and their runs.

Checked by mypy and pyright in strict mode, and never run. An ignore comment on a line without an error is itself an
error, so every such line states what must be refused.
"""

from datetime import datetime
from typing import Any, assert_type

from flowfabric import (
    Context,
    Fabric,
    Flow,
    FlowRun,
    FlowRunStatus,
    FlowStatus,
    Run,
    all_of,
    any_of,
    quorum,
)
from flowfabric.flows import CancellationPolicy

fabric = Fabric()


@fabric.task
async def extract(source: str) -> list[str]:
    """Async, without a context."""
    return [source]


@fabric.task(retries=3)
def transform(ctx: Context, rows: list[str], *, part: int) -> dict[str, int]:
    """Plain, with a context and options."""
    return {row: part for row in rows if ctx.priority}


@fabric.task
async def load(parts: list[dict[str, int]], at: datetime | None = None) -> int:
    """With a default."""
    return len(parts) if at else 0


@fabric.task
async def note(text: str) -> None:
    """Without a result."""
    print(text)


@fabric.task
async def total(*numbers: int) -> int:
    """Any number of arguments."""
    return sum(numbers)


async def build() -> None:
    """A node has the type of the result of its task."""
    flow = fabric.flow("nightly", id="2026-01-31", tags={"app.team": "data"})
    assert_type(flow, Flow)
    assert_type(flow.id, str)
    rows = flow.add(extract, "orders")
    assert_type(rows, list[str])
    parts = [flow.add(transform.options(priority=5), rows, part=n) for n in range(5)]
    assert_type(parts, list[dict[str, int]])
    assert_type(all_of(parts), list[dict[str, int]])
    assert_type(any_of(parts, cancel_remaining=True), dict[str, int])
    assert_type(quorum(3, of=parts), list[dict[str, int]])
    loaded = flow.add(load, all_of(part for part in parts), at=None)
    assert_type(loaded, int)
    flow.add(load, quorum(3, of=parts, cancel_remaining=True))
    flow.add(load, [any_of(parts), *parts])
    assert_type(flow.add(total, loaded, 1, loaded), int)
    done = flow.add(note, "loaded")
    flow.after(done, loaded, all_of(parts))

    run = await flow.submit()
    assert_type(run, FlowRun)
    assert_type(run.run(rows), Run[list[str]])
    assert_type(await run.run(loaded).result(), int)
    assert_type(await run.runs(), list[Run[Any]])
    assert_type(await run.wait(timeout=5), FlowStatus)
    assert_type(await run.status(), FlowRunStatus)
    await run.result(timeout=5)
    await run.cancel("not wanted", policy="cancel_pending")
    await run.cancel(policy=CancellationPolicy.FLOW_ONLY)
    assert_type(await run.replay("repaired", by="ada"), list[Run[Any]])
    await run.run(loaded).replay("repaired", allow_cancelled_flow=True)
    assert_type(fabric.flow_run("0198c7a2-0000-7000-8000-000000000000"), FlowRun)


async def refused(flow: Flow, run: FlowRun) -> None:
    """Every line here is wrong."""
    rows = flow.add(extract, "orders")
    part = flow.add(transform, rows, part=1)
    flow.add(extract)  # type: ignore[call-overload]  # pyright: ignore
    flow.add(extract, 7)  # type: ignore[call-overload]  # pyright: ignore
    flow.add(extract, rows)  # type: ignore[call-overload]  # pyright: ignore
    flow.add(transform, rows, 1)  # type: ignore[call-overload]  # pyright: ignore
    flow.add(transform, rows, part="1")  # type: ignore[arg-type]  # pyright: ignore
    flow.add(transform, part, part=1)  # type: ignore[arg-type]  # pyright: ignore
    flow.add(transform, rows, part=1, rest=2)  # type: ignore[call-arg, arg-type]  # pyright: ignore
    flow.add(load, part)  # type: ignore[call-overload]  # pyright: ignore
    flow.add(load, any_of([part]))  # type: ignore[call-overload]  # pyright: ignore
    flow.add(load, all_of([rows]))  # type: ignore[call-overload]  # pyright: ignore
    flow.add(total, rows)  # type: ignore[call-overload]  # pyright: ignore
    flow.add(load.submit, [part])  # type: ignore[call-overload]  # pyright: ignore
    quorum("2", of=[part])  # type: ignore[arg-type]  # pyright: ignore
    quorum(2, [part])  # type: ignore[call-arg]  # pyright: ignore
    any_of([part], True)  # type: ignore[call-arg]  # pyright: ignore
    fabric.flow()  # type: ignore[call-arg]  # pyright: ignore
    fabric.flow("nightly", tags={"app.team": 5})  # type: ignore[dict-item]  # pyright: ignore
    text: str = await run.run(part).result()  # type: ignore[assignment]  # pyright: ignore
    await run.cancel(policy="nope")  # type: ignore[arg-type]  # pyright: ignore
    number: int = rows  # type: ignore[assignment]  # pyright: ignore
    print(text, number)
