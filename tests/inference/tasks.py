"""What type checkers infer about tasks and their runs.

Checked by mypy and pyright in strict mode, and never run. An ignore comment on a line without an error is itself an
error, so every such line states what must be refused.
"""

from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, Generic, TypeVar, assert_type

import pydantic

from flowfabric import Context, Fabric, Run
from flowfabric.policy import StreamPolicy
from flowfabric.streams import NULL, Durable, FrameKind, RunFrame
from flowfabric.worker.spending import Spend

Item = TypeVar("Item")

fabric = Fabric()


class Order(pydantic.BaseModel):
    """A model to pass."""

    number: int


class Box(pydantic.BaseModel, Generic[Item]):
    """A generic model."""

    item: Item


@fabric.task
async def add(a: int, b: int = 0) -> int:
    """Async, without options."""
    return a + b


@fabric.task(retries=3, timeout=timedelta(minutes=5))
async def ship(ctx: Context, order: Order, *, express: bool = False) -> Order | None:
    """Async, with a context and options."""
    return order if express and ctx.priority else None


@fabric.task
def count(words: list[str]) -> dict[str, int]:
    """Plain, without options."""
    return {word: words.count(word) for word in words}


@fabric.task(lane="slow")
def note(ctx: Context, text: str) -> None:
    """Plain, with a context and options."""
    ctx.from_thread(ctx.progress(message=text))


@fabric.task
async def unpack(box: Box[Order]) -> list[Box[int]]:
    """With generic types."""
    return [Box(item=box.item.number)]


@fabric.task
def later(a: int) -> Coroutine[Any, Any, str]:
    """Plain, and returns a coroutine."""

    async def wait() -> str:
        return str(a)

    return wait()


@fabric.task
async def numbers(*each: int, **named: float) -> tuple[int, ...]:
    """Any number of arguments."""
    return (*each, *map(int, named.values()))


@fabric.task
async def echo(value: object, times: int = 1) -> list[str]:
    """With a first parameter of type object, which is not a context."""
    return [str(value)] * times


@fabric.task
def keep(value: Any) -> str:
    """With a first parameter of type Any."""
    return str(value)


@fabric.task
def tick() -> int:
    """Without parameters."""
    return 1


@fabric.task
async def alone(ctx: Context) -> str:
    """With only a context."""
    return ctx.lane_id


async def results() -> None:
    """Await the result of each kind of task."""
    assert_type(await add.submit(1, b=2), Run[int])
    assert_type(await (await add.submit(1)).result(), int)
    assert_type(await (await ship.submit(Order(number=1), express=True)).result(timeout=5), Order | None)
    assert_type(await (await count.submit(["a"])).result(), dict[str, int])
    assert_type(await note.submit("done"), Run[None])
    assert_type(await (await unpack.submit(Box(item=Order(number=1)))).result(), list[Box[int]])
    assert_type(await (await later.submit(1)).result(), str)
    assert_type(await (await numbers.submit(1, 2, x=0.5)).result(), tuple[int, ...])
    assert_type(await (await echo.submit(1, times=2)).result(), list[str])
    await keep.submit(1)
    assert_type(await (await tick.submit()).result(), int)
    assert_type(await (await alone.submit()).result(), str)
    assert_type(await (await add.options(priority=5, stream=StreamPolicy(retention_maxlen=5)).submit(1)).result(), int)
    assert_type(await (await count.options(delay=1).submit(["a"])).result(), dict[str, int])
    assert_type(await add.run("{fp:0}:x").result(), int)
    assert_type(await count.run("{fp:0}:x").result(), dict[str, int])


async def wider(run: Run[int]) -> Run[int | None]:
    """A run is covariant in its result."""
    return run


async def calls(ctx: Context) -> None:
    """Call the functions themselves."""
    assert_type(await add(1, 2), int)
    assert_type(await ship(ctx, Order(number=1)), Order | None)
    assert_type(count(["a"]), dict[str, int])


async def waits(ctx: Context) -> None:
    """Wait for a signal with and without a type and a default."""
    assert_type(await ctx.wait_for_signal("n"), Any)
    assert_type(await ctx.wait_for_signal("n", timeout=1, default=None), Any)
    assert_type(await ctx.wait_for_signal("n", int), int)
    assert_type(await ctx.wait_for_signal("n", type=int, timeout=1), int)
    assert_type(await ctx.wait_for_signal("n", Order, timeout=1, default=None), Order | None)


llm = fabric.budget("llm", tokens=5, soft={"tokens": 4}, every=timedelta(days=1), on_breach="ask")


@fabric.task(max_running=5, rate="100/m", per="tenant", weight="size", budgets=[llm, llm.id, str(llm.id)])
async def limited(ctx: Context, tenant: str, size: int) -> bool:
    """With limits, and spending."""
    async with ctx.reserve(llm, tokens=1, key=tenant) as spend:
        assert_type(spend, Spend)
        spend.used(tokens=size)
    with ctx.reserve(llm.id, tokens=1) as plain:
        assert_type(plain, Spend)
    await ctx.spend(llm, tokens=1)
    return spend.is_over


async def budgets(run: Run[int]) -> None:
    """Read and change a budget, and answer a run."""
    assert_type((await llm.status()).usage["tokens"], int)
    await llm.raise_to(tokens=6)
    await run.approve_budget(raise_to={"tokens": 7}, by="ada")
    fabric.flow("batch", budgets=[llm])
    assert_type(await (await limited.options(parent=None, budgets=[llm]).submit("acme", 1)).result(), bool)


async def streams(ctx: Context, run: Run[int]) -> None:
    """Write to a stream and a summary, and read them."""
    await ctx.stream.write("token")
    await ctx.stream.write(b"token", kind=FrameKind.STDERR, mode=Durable(), flush=True)
    await ctx.stream.write("token", kind="stderr")
    assert_type(await ctx.summary.patch({"done": 3, "of": NULL, "by": None}), int)
    assert_type(ctx.from_thread(ctx.summary.patch({})), int)
    async for frame in run.stream(after="0:1-0", attempt=1):
        assert_type(frame, RunFrame)
        assert_type((frame.id, frame.attempt, frame.number, frame.payload), tuple[str, int, int, bytes])
    assert_type([frame async for frame in run.stream()], list[RunFrame])
    assert_type(await run.summary(), dict[str, Any] | None)


async def refused(ctx: Context) -> None:
    """Every line here is wrong."""
    await ctx.stream.write(7)  # type: ignore[arg-type]  # pyright: ignore
    fabric.budget("llm", tokens="5")  # type: ignore[arg-type]  # pyright: ignore
    fabric.budget("llm", tokens=5, on_breach="stop")  # type: ignore[arg-type]  # pyright: ignore
    await ctx.spend(llm, tokens="5")  # type: ignore[arg-type]  # pyright: ignore
    limited.options(max_running=3)  # type: ignore[call-arg]  # pyright: ignore
    await ctx.summary.patch(["done"])  # type: ignore[arg-type]  # pyright: ignore
    await add.submit()  # type: ignore[call-overload]  # pyright: ignore
    await add.submit("1")  # type: ignore[call-overload]  # pyright: ignore
    await add.submit(1, 2, 3)  # type: ignore[call-overload]  # pyright: ignore
    await add.submit(1, c=3)  # type: ignore[call-overload]  # pyright: ignore
    await add.submit(1, b=None)  # type: ignore[call-overload]  # pyright: ignore
    await ship.submit(ctx, Order(number=1))  # type: ignore[call-overload]  # pyright: ignore
    await ship.submit({"number": 1})  # type: ignore[call-overload]  # pyright: ignore
    await ship.submit(Order(number=1), True)  # type: ignore[call-overload]  # pyright: ignore
    await count.submit([1])  # type: ignore[list-item]  # pyright: ignore
    await unpack.submit(Box(item=1))  # type: ignore[arg-type]  # pyright: ignore
    await numbers.submit(1, x="y")  # type: ignore[call-overload]  # pyright: ignore
    await echo.submit()  # type: ignore[call-overload]  # pyright: ignore
    await tick.submit(1)  # type: ignore[call-arg]  # pyright: ignore
    await alone.submit(ctx)  # type: ignore[call-overload]  # pyright: ignore
    await add("1")  # type: ignore[arg-type]  # pyright: ignore
    count(words="a")  # type: ignore[arg-type]  # pyright: ignore
    add.options(prio=1)  # type: ignore[call-arg]  # pyright: ignore
    add.options(stream={"retention_maxlen": 5})  # type: ignore[arg-type]  # pyright: ignore
    add.options(retries="3")  # type: ignore[arg-type]  # pyright: ignore
    fabric.task(retires=1)  # type: ignore[call-overload]  # pyright: ignore
    await ctx.wait_for_signal("n", 5)  # type: ignore[call-overload]  # pyright: ignore
    await ctx.wait_for_signal("n", kind=int)  # type: ignore[call-overload]  # pyright: ignore
    text: str = await (await add.submit(1)).result()  # type: ignore[assignment]  # pyright: ignore
    word: str = await count.run("x").result()  # type: ignore[assignment]  # pyright: ignore
    print(text, word)
