"""Submitting tasks: arguments, idempotency keys, and what is refused."""

import asyncio
import pickle
from typing import Any

import pytest

from fixtures import Rows
from flowfabric import Fabric, PublicState
from flowfabric.fabric.task import Call
from flowfabric.model.errors import ConflictError, InvalidInputError


async def test_a_task_is_submitted_and_its_result_awaited(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def add(a: int, b: int) -> int:
        return a + b

    async with fabric, fabric.worker():
        runs = [await add.submit(n, b=1) for n in range(5)]
        assert [await run.result(timeout=60) for run in runs] == list(range(1, 6))
        assert (await runs[0].status()).state is PublicState.COMPLETED
        assert (await runs[0].status()).task == "add"


async def test_concurrent_submits_with_one_key_create_one_run(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def pay(amount: int) -> int:
        return amount

    async with fabric:
        keyed = pay.options(idempotency_key="invoice-7")
        first, second = await asyncio.gather(keyed.submit(1), keyed.submit(1))
        assert first.id == second.id
        assert sorted([first.is_duplicate, second.is_duplicate]) == [False, True]


async def test_the_same_key_with_other_arguments_is_a_conflict(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def pay(amount: int) -> int:
        return amount

    async with fabric:
        keyed = pay.options(idempotency_key="invoice-7")
        first = await keyed.submit(1)
        with pytest.raises(ConflictError) as refusal:
            await keyed.submit(2)
        assert refusal.value.code == "idempotency_conflict"
        assert str(refusal.value) == (
            f"idempotency_conflict: task 'pay': idempotency_key 'invoice-7' belongs to run {first.id}, which was "
            "submitted with other arguments; repeat the same call, or use another key"
        )
        assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)
        with pytest.raises(ConflictError, match=r"with other arguments and options \(retries, backoff, ") as refusal:
            await keyed.options(retries=1).submit(2)
        detail: Any = refusal.value.detail
        assert (detail["execution_id"], detail["idempotency_key"]) == (first.id, "invoice-7")
        assert type(refusal.value) is ConflictError
        again = await keyed.submit(1)
        assert (again.id, again.is_duplicate) == (first.id, True)


async def test_a_key_repeats_for_equal_arguments_however_they_are_written(url: str, rows: Rows) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(a: Any, b: float = 0, several: set[int] | None = None) -> None: ...

    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = [
        [((1,), {}), ((1, 0), {}), ((1,), {"b": 0.0, "several": None}), ((), {"a": 1})],
        [(({"x": 1, "y": {"p": 1, "q": 2}},), {}), (({"y": {"q": 2, "p": 1}, "x": 1}, 0), {})],
        # 0 and 8 share a slot of the hash table, so their order is the order of insertion.
        [((2, 0, {0, 8}), {}), ((2, 0, {8, 0}), {})],
    ]
    async with fabric:
        for at, alike in enumerate(calls):
            keyed = job.options(idempotency_key=f"key {at}")
            runs = [await keyed.submit(*args, **kwargs) for args, kwargs in alike]
            assert {run.id for run in runs} == {runs[0].id}
            assert [run.is_duplicate for run in runs] == [False] + [True] * (len(runs) - 1)
        stored = {row["input_payload"] for row in await rows.of("execution")}
        assert b'{"a":1,"b":0.0,"several":null}' in stored
        await job.submit(1)
        assert b'{"a":1}' in {row["input_payload"] for row in await rows.of("execution")}


async def test_tasks_of_one_lane_do_not_share_keys(url: str) -> None:
    fabric = Fabric(url)

    async def job() -> None: ...

    # Names and keys that would be the same text if they were simply joined.
    pairs = [("a", "b/c"), ("a/b", "c"), ("a%2Fb", "c"), ("a", "c"), ("ä ö", "c"), ("/", "c")]
    async with fabric:
        tasks = {name: fabric.task(name=name)(job) for name in {name for name, _ in pairs}}
        keyed = [tasks[name].options(idempotency_key=key) for name, key in pairs]
        assert [(await one.submit()).is_duplicate for one in keyed] == [False] * len(pairs)
        assert [(await one.submit()).is_duplicate for one in keyed] == [True] * len(pairs)


async def test_a_key_and_a_name_that_are_too_long_together_are_refused(url: str) -> None:
    fabric = Fabric(url)

    async def job() -> None: ...

    async with fabric:
        task = fabric.task(name="ä" * 100)(job)
        await task.options(idempotency_key="k" * (1023 - 600)).submit()
        with pytest.raises(InvalidInputError, match=r"idempotency_key: must be at most 1024 bytes .*, got 1025"):
            await task.options(idempotency_key="k" * (1024 - 600)).submit()
        with pytest.raises(InvalidInputError, match="idempotency_key: must be text"):
            await task.options(idempotency_key=5).submit()  # type: ignore[arg-type]


async def test_a_wrong_call_or_option_is_refused_at_once(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(a: int) -> None: ...

    @fabric.task
    async def bare(ctx, a): ...  # type: ignore[no-untyped-def]

    async with fabric:
        with pytest.raises(TypeError, match=r"task 'job': missing a required argument: 'a'$"):
            await job.submit()  # type: ignore[call-overload]
        for arguments in ({"a": 1}, {"ctx": 1}):
            with pytest.raises(
                TypeError, match=r"missing a required .*; parameter 'ctx' has no annotation: write `ctx: C"
            ):
                await bare.submit(**arguments)
        assert isinstance(bare.bind({}, 1), Call)
        with pytest.raises(
            InvalidInputError, match=r"parameter 'a', which has no annotation: \(1, 2\) .tuple. would co"
        ):
            await bare.submit(1, (1, 2))
        with pytest.raises(TypeError, match="task 'job': takes 1 positional argument, got 2; its arguments are: a"):
            await job.submit(1, 2)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"no such option: prio; .*; did you mean priority\?"):
            job.options(prio=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"max_running belongs to the task and is the same for all runs: @fabric"):
            job.options(max_running=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"no such option: retires; .*; did you mean retries\?"):
            fabric.task(retires=1)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="task 'job': no such argument: 'w'; its arguments are: a"):
            await job.submit(w=1)  # type: ignore[call-overload]
        with pytest.raises(InvalidInputError, match="lane: "):
            await job.options(lane="").submit(1)
        with pytest.raises(InvalidInputError, match="idempotency_key: must not be empty"):
            await job.options(idempotency_key="").submit(1)
        with pytest.raises(InvalidInputError, match="invalid_input: delay: "):
            await job.options(delay="soon").submit(1)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="tags: "):
            await job.options(tags="a.b").submit(1)  # type: ignore[arg-type]
