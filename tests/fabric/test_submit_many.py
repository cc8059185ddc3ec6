"""Submitting many calls of a task at once."""

import pytest

from flowfabric import Fabric, InvalidInputError
from flowfabric.errors import ConflictError, NotAllSubmitted


async def test_submit_many_returns_the_runs_in_the_order_of_the_calls(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def double(n: int, *, times: int = 2) -> int:
        return n * times

    async with fabric, fabric.worker(concurrency=200):
        # More than fit into one statement.
        runs = await double.submit_many(double.bind(n) for n in range(1001))
        assert len({run.id for run in runs}) == 1001
        assert [await runs[n].result(timeout=60) for n in (0, 7, 1000)] == [0, 14, 2000]
        assert await double.submit_many([]) == []


async def test_each_call_has_the_options_it_was_bound_with(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(n: int) -> None: ...

    async with fabric:
        urgent = job.options(priority=9, tags={"app.kind": "urgent"})
        runs = await job.submit_many([job.bind(1), urgent.bind(2)])
        infos = [await fabric.engine.read_execution_info(run.id) for run in runs]
        assert [info and info.priority for info in infos] == [0, 9]
        assert await fabric.engine.get_execution_tag(runs[1].id, "app.kind") == "urgent"


async def test_a_repeated_key_returns_the_first_run_also_within_one_batch(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(n: int) -> None: ...

    async with fabric:
        keyed = job.options(idempotency_key="k")
        first = await keyed.submit(1)
        again, new, repeat = await job.submit_many([keyed.bind(1), job.bind(2), keyed.bind(1)])
    assert (again.id, again.is_duplicate, new.is_duplicate, repeat.id) == (first.id, True, False, first.id)


async def test_one_refused_call_leaves_the_others_submitted(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(n: int) -> None: ...

    async with fabric:
        keyed = job.options(idempotency_key="k")
        await keyed.submit(0)
        calls = [*(job.bind(n) for n in range(5)), keyed.bind(1), *(job.bind(n) for n in range(4))]
        with pytest.raises(NotAllSubmitted, match=r"1 of 10 calls were not submitted.*idempotency_key 'k'") as some:
            await job.submit_many(calls)
        refused = [each for each in some.value.answers if isinstance(each, ConflictError)]
        runs = [each for each in some.value.answers if not isinstance(each, Exception)]
        assert (len(refused), len(runs), some.value.answers.index(refused[0])) == (1, 9, 5)
        states = [await fabric.engine.read_execution_state(run.id) for run in runs]
        assert states == ["waiting"] * 9


async def test_a_wrong_argument_is_refused_by_bind_and_nothing_is_submitted(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(n: int) -> None: ...

    @fabric.task
    async def other() -> None: ...

    @Fabric(url).task(name="job")
    async def same_name(n: int) -> None: ...

    async with fabric:
        with pytest.raises(InvalidInputError, match="task 'job', parameter 'n'"):
            await job.submit_many(job.bind(n) for n in (1, 2, "three"))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"expected calls made by job\.bind\(\.\.\.\), got 3"):
            await job.submit_many([job.bind(1), 3])  # type: ignore[list-item]
        with pytest.raises(
            TypeError, match=r"expected a list of calls, got one call; write job\.submit_many\(\[call\]\)"
        ):
            await job.submit_many(job.bind(1))  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="expected calls of task 'job', got one of 'other'"):
            await job.submit_many([job.bind(1), other.bind()])
        with pytest.raises(TypeError, match="a call of task 'job' was bound by another fabric"):
            await job.submit_many([same_name.bind(1)])
        page = await fabric.engine.list_executions()
        assert page.executions == []
