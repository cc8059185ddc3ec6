"""The limits of tasks: how their options become a quota policy, and what claims make of it."""

import asyncio
from typing import Any

import pytest

from fixtures import Clock, Eventually
from flowfabric import Context, Fabric
from flowfabric.errors import ConflictError, InvalidInputError
from flowfabric.fabric.limits import parse_rate, quota_policy_of


class Counted:
    """A handler that waits until the test lets it end; it counts how many run at a time."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.may_end = asyncio.Event()

    async def __call__(self, name: str) -> None:
        self.running.append(name)
        await self.may_end.wait()


async def is_limited(fabric: Fabric, eventually: Eventually, run: str) -> None:
    """Wait until a run waits for its quota."""

    async def has_state() -> bool:
        return await fabric.engine.read_execution_state(run) == "rate_limited"

    await eventually(has_state)


async def test_at_most_so_many_runs_of_a_task_run_at_a_time(url: str, eventually: Eventually) -> None:
    fabric, counted = Fabric(url), Counted()

    @fabric.task(max_running=2)
    async def job(name: str) -> None:
        await counted(name)

    async with fabric:
        runs = await job.submit_many(job.bind(str(n)) for n in range(5))
        async with fabric.worker(), fabric.worker():
            await is_limited(fabric, eventually, runs[2].id)
            assert sorted(counted.running) == ["0", "1"]
            counted.may_end.set()
            for run in runs:
                await run.result(timeout=60)


async def test_each_argument_has_the_limits_for_itself(url: str, eventually: Eventually) -> None:
    fabric, counted = Fabric(url), Counted()

    @fabric.task(max_running=1, per="name")
    async def by_argument(name: str) -> None:
        await counted(name)

    @fabric.task(max_running=1, per="tag:app.tenant")
    async def by_tag(name: str) -> None:
        await counted(name)

    async with fabric:
        runs = [await by_argument.submit(name) for name in ("a", "a", "b")]
        for name in ("c", "c", "d"):
            runs.append(await by_tag.options(tags={"app.tenant": name}).submit(name))
        async with fabric.worker():
            await is_limited(fabric, eventually, runs[1].id)
            await is_limited(fabric, eventually, runs[4].id)
            assert sorted(counted.running) == ["a", "b", "c", "d"]
            counted.may_end.set()
            for run in runs:
                await run.result(timeout=60)


async def test_a_task_starts_at_its_rate_and_heavy_runs_take_more_of_it(
    url: str, eventually: Eventually, clock: Clock
) -> None:
    fabric, counted = Fabric(url), Counted()
    counted.may_end.set()

    @fabric.task(rate="10/30s", weight="tokens")
    async def ask(name: str, tokens: int) -> None:
        await counted(name)

    await clock.stop()
    async with fabric:
        runs = [await ask.submit(name, tokens) for name, tokens in (("a", 6), ("b", 4), ("c", 1))]
        async with fabric.worker():
            await is_limited(fabric, eventually, runs[2].id)
            assert sorted(counted.running) == ["a", "b"]
            # A lease that the clock passed would be reclaimed, and its run take tokens again.
            for run in runs[:2]:
                await run.result(timeout=60)
            await clock.advance(seconds=31)
            await runs[2].result(timeout=60)


async def test_a_parked_run_needs_a_slot_again_but_no_token(url: str, eventually: Eventually, clock: Clock) -> None:
    fabric = Fabric(url)

    @fabric.task(max_running=1, rate="2/h")
    async def ask(ctx: Context) -> Any:
        return await ctx.wait_for_signal("answer")

    await clock.stop()
    async with fabric, fabric.worker():
        first, second = await ask.submit(), await ask.submit()
        await first.signal("answer", 1, timeout=60)
        await second.signal("answer", 2, timeout=60)
        assert [await first.result(timeout=60), await second.result(timeout=60)] == [1, 2]


async def limits_of(fabric: Fabric, task: str) -> Any:
    """The limits of a task's policy, None if it is not attached."""
    policy = quota_policy_of(task)
    if (await fabric.engine.list_attachments("kind", task)).quota_policy_id != policy:
        return None
    found = await fabric.engine.read_quota_policy_limits(policy)
    assert found is not None
    return found.active_concurrency_cap, found.max_requests_per_window, found.requests_per_window_seconds


async def test_the_worker_that_starts_last_decides_and_a_removed_option_ends(url: str) -> None:
    async def start(**options: Any) -> Any:
        fabric = Fabric(url)

        @fabric.task(**options)
        async def job() -> None: ...

        async with fabric, fabric.worker():
            return await limits_of(fabric, "job")

    assert await start(max_running=2) == (2, 0, 0)
    assert await start(max_running=3, rate="5/s") == (3, 5, 1)
    assert await start() is None
    assert await start(rate="7/m") == (0, 7, 60)
    assert await asyncio.gather(*(start(max_running=number) for number in (8, 9)))


async def test_a_submitter_creates_limits_and_changes_none(url: str) -> None:
    async def submit(**options: Any) -> Any:
        fabric = Fabric(url)

        @fabric.task(**options)
        async def job() -> None: ...

        async with fabric:
            await asyncio.gather(*(job.submit() for _ in range(3)))
            flow = fabric.flow("jobs")
            flow.add(job)
            await flow.submit()
            return await limits_of(fabric, "job")

    assert await submit(max_running=2) == (2, 0, 0)
    assert await submit(max_running=3) == (2, 0, 0)
    assert await submit() == (2, 0, 0)


async def test_another_quota_of_the_kind_is_a_conflict_that_names_the_task(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task(max_running=2)
    async def job() -> None: ...

    async with fabric:
        await fabric.engine.attach_quota("kind", "job", "01a1f699-7ccf-7777-8696-3ed79a473eab")
        with pytest.raises(ConflictError, match=r"task 'job' has max_running or rate, but another quota policy"):
            async with fabric.worker():
                pass


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_running": 0}, "max_running: must be a whole number from 1 to 9007199254740991, got 0"),
        ({"max_running": True}, "max_running: must be"),
        ({"rate": "100"}, r"rate: must be a number and a time, such as '100/m'.*, got '100'"),
        ({"rate": 100}, "rate: must be"),
        ({"rate": "0/m"}, "rate: must be"),
        ({"rate": "1.5/s"}, "rate: must be"),
        ({"rate": "5/w"}, "rate: must be"),
        ({"rate": "9999999999999999/s"}, "rate: is too large"),
        ({"per": "name"}, "per: has no effect without rate or max_running"),
        ({"weight": "tokens"}, "weight: has no effect without rate"),
        ({"max_running": 1, "weight": "tokens"}, "weight: has no effect without rate"),
        ({"max_running": 1, "per": "tenant"}, r"per: must be an argument of task 'job' \(name, tokens\) or a tag"),
        ({"max_running": 1, "per": "ctx"}, "per: must be an argument"),
        ({"max_running": 1, "per": len}, "per: must be an argument"),
        ({"max_running": 1, "per": "tag:tenant"}, "tenant"),
        ({"budgets": ["x"]}, r"budgets\[0\]"),
        ({"budgets": "x"}, "budgets: expected a list"),
        ({"quota": "x"}, "quota"),
    ],
)
def test_a_wrong_limit_is_refused_at_the_decorator(options: dict[str, Any], text: str) -> None:
    fabric = Fabric()
    with pytest.raises(InvalidInputError, match=text):

        @fabric.task(**options)
        async def job(ctx: Context, name: str, tokens: int) -> None: ...


def test_limits_belong_to_the_task_and_not_to_a_submission() -> None:
    fabric = Fabric()

    @fabric.task
    async def job() -> None: ...

    with pytest.raises(TypeError, match="max_running"):
        job.options(max_running=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_a_rate_has_a_window() -> None:
    rates = {"100/m": (100, 60), "5/s": (5, 1), "1000/h": (1000, 3600), "10/30s": (10, 30), "2/7d": (2, 604_800)}
    assert {text: parse_rate(text) for text in rates} == rates


# What a handler submits.


async def test_what_a_handler_submits_has_the_budgets_of_its_run_and_so_have_their_descendants(url: str) -> None:
    fabric = Fabric(url)
    budget = fabric.budget("all", tokens=100)
    other = fabric.budget("other", tokens=100)

    @fabric.task
    async def leaf() -> None: ...

    @fabric.task
    async def branch() -> str:
        flow = fabric.flow("leaves", budgets=[other])
        flow.add(leaf)
        return (await flow.submit()).id

    @fabric.task(budgets=[budget])
    async def root() -> list[str]:
        free = await branch.options(parent=None).submit()
        (many,) = await branch.submit_many([branch.bind()])
        return [(await branch.submit()).id, many.id, free.id]

    async def budgets_of(run: str) -> set[Any]:
        return set(await own_budgets(fabric, run))

    async with fabric, fabric.worker():
        run = await root.submit()
        one, many, free = await run.result(timeout=60)
        for child in (one, many):
            assert await budgets_of(child) == {budget.id}
            flow = fabric.flow_run(await branch.run(child).result(timeout=60))
            for grandchild in await flow.runs():
                assert await budgets_of(grandchild.id) == {budget.id, other.id}
                await grandchild.result(timeout=60)
        assert await budgets_of(free) == set()
        await branch.run(free).result(timeout=60)


async def own_budgets(fabric: Fabric, run: str) -> tuple[Any, ...]:
    """The budgets with which an execution was created."""
    from flowfabric.engine.parts import parts_of

    return (await parts_of(fabric.engine).limit_rules.look_up([run], ())).parents[run].budget_ids


async def test_a_handler_of_a_run_without_limits_submits_without_a_parent(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def leaf() -> None: ...

    @fabric.task
    async def root() -> str:
        return (await leaf.submit()).id

    async with fabric, fabric.worker():
        await leaf.run(await (await root.submit()).result(timeout=60)).result(timeout=60)


async def test_budgets_in_code_are_created_before_the_first_submit_that_names_them(url: str) -> None:
    fabric = Fabric(url)
    budget = fabric.budget("all", tokens=100)

    @fabric.task(budgets=[budget])
    async def job() -> None: ...

    async with fabric:
        await job.submit()
        assert (await fabric.engine.get_budget_status(budget.id)).hard_limits == {"tokens": 100}
        await fabric.engine.report_usage_admin(budget.id, dimensions=["tokens"], deltas=[100])
        async with fabric.worker():
            run = await job.submit()
            with pytest.raises(TimeoutError):
                await run.result(timeout=0.2)
            await budget.raise_to(tokens=101)
            await run.result(timeout=60)
