"""Budgets in code: what handlers reserve and spend, and what a breach does to a run."""

import asyncio
from typing import Any

import pytest

from fixtures import Eventually
from flowfabric import BudgetExceeded, Context, Fabric, Run, RunCancelled, RunFailed
from flowfabric.errors import InvalidInputError
from flowfabric.worker.budget import Budget


@pytest.fixture
def fabric(url: str) -> Fabric:
    return Fabric(url)


async def used(budget: Budget, dimension: str = "tokens") -> tuple[int, int]:
    """What is used and what is reserved of a budget."""
    status = await budget.status()
    return status.usage.get(dimension, 0), status.reserved.get(dimension, 0)


async def is_asking(run: Run[Any], eventually: Eventually) -> str:
    """Wait until a run asks for more of a budget; return what it says about it."""

    async def is_suspended() -> bool:
        return (await run.status()).state == "suspended"

    await eventually(is_suspended)
    info = await run._fabric.engine.read_execution_info(run.id)
    assert info is not None
    assert info.state_vector.blocking_reason == "waiting_for_budget"
    return info.blocking_detail


async def test_a_block_counts_what_it_said_it_used_and_returns_the_rest(fabric: Fabric) -> None:
    budget = fabric.budget("llm", tokens=1000, usd_micros=50)

    @fabric.task
    async def ask(ctx: Context) -> list[tuple[int, int]]:
        seen = []
        async with ctx.reserve(budget, tokens=400, usd_micros=20) as spend:
            seen.append(await used(budget))
            spend.used(tokens=100)
            spend.used(tokens=300)
        seen.append(await used(budget))
        async with ctx.reserve(budget, tokens=400):
            pass
        seen.append(await used(budget))
        await ctx.spend(budget, tokens=7)
        return seen

    async with fabric, fabric.worker():
        assert await (await ask.submit()).result(timeout=60) == [(0, 400), (300, 0), (700, 0)]
        assert (await used(budget), await used(budget, "usd_micros")) == ((707, 0), (20, 0))


async def test_a_block_that_raises_counts_only_what_it_said(fabric: Fabric) -> None:
    budget = fabric.budget("llm", tokens=1000)

    @fabric.task
    async def ask(ctx: Context, said: int) -> None:
        async with ctx.reserve(budget, tokens=400) as spend:
            if said:
                spend.used(tokens=said)
            raise ValueError("no answer")

    async with fabric, fabric.worker():
        for said, counted in ((0, 0), (120, 120)):
            with pytest.raises(RunFailed, match="no answer"):
                await (await ask.submit(said)).result(timeout=60)
            assert await used(budget) == (counted, 0)


async def test_a_block_may_use_more_than_it_reserved(fabric: Fabric) -> None:
    budget = fabric.budget("llm", tokens=100)

    @fabric.task
    async def ask(ctx: Context) -> bool:
        async with ctx.reserve(budget, tokens=50) as spend:
            spend.used(tokens=130)
        return spend.is_over

    async with fabric, fabric.worker():
        assert await (await ask.submit()).result(timeout=60) is True
        assert await used(budget) == (130, 0)


async def test_a_handler_in_a_thread_reserves_with_a_plain_block(fabric: Fabric) -> None:
    budget = fabric.budget("llm", tokens=100)

    @fabric.task
    def ask(ctx: Context) -> str:
        with ctx.reserve(budget, tokens=60) as spend:
            spend.used(tokens=41)
        ctx.from_thread(ctx.spend(budget, tokens=1))
        try:
            with ctx.reserve(budget, tokens=60):
                return "went on"
        except BudgetExceeded as exceeded:
            return str(exceeded)

    async with fabric, fabric.worker():
        assert await (await ask.submit()).result(timeout=60) == "budget llm: tokens 42/100"
        assert await used(budget) == (42, 0)


async def test_a_refused_call_raises_an_error_that_the_handler_may_catch(fabric: Fabric) -> None:
    budget = fabric.budget("llm", tokens=100)

    @fabric.task
    async def ask(ctx: Context) -> list[Any]:
        try:
            await ctx.spend(budget, tokens=101)
        except BudgetExceeded as exceeded:
            return [exceeded.budget, exceeded.dimension, exceeded.used, exceeded.limit, exceeded.code]
        return []

    async with fabric, fabric.worker():
        assert await (await ask.submit()).result(timeout=60) == ["llm", "tokens", 0, 100, "budget_exceeded"]


async def test_a_key_names_one_call_of_a_run_and_a_reservation_one_block(fabric: Fabric) -> None:
    budget = fabric.budget("llm", tokens=100)

    @fabric.task
    async def ask(ctx: Context) -> list[str]:
        texts = []
        async with ctx.reserve(budget, tokens=1, key="a") as spend:
            try:
                await ctx.spend(budget, tokens=1, key="a")
            except InvalidInputError as refused:
                texts.append(str(refused))
        try:
            async with spend:
                pass
        except InvalidInputError as refused:
            texts.append(str(refused))
        return texts

    async with fabric, fabric.worker():
        repeated, reused = await (await ask.submit()).result(timeout=60)
        assert "key: 'a' names another call of this run" in repeated
        assert "one call of ctx.reserve is for one block" in reused
        assert await used(budget) == (1, 0)


async def test_what_every_attempt_has_spent_is_counted(fabric: Fabric) -> None:
    budget = fabric.budget("llm", tokens=100)

    @fabric.task(retries=2, backoff=0)
    async def ask(ctx: Context) -> int:
        await ctx.spend(budget, tokens=5)
        async with ctx.reserve(budget, tokens=10) as spend:
            spend.used(tokens=2)
            if ctx.attempt < 3:
                raise ValueError("again")
        return ctx.attempt

    async with fabric, fabric.worker():
        assert await (await ask.submit()).result(timeout=60) == 3
        assert await used(budget) == (21, 0)


async def test_the_policy_fail_fails_the_run_without_a_retry_whatever_it_catches(fabric: Fabric) -> None:
    budget = fabric.budget("llm", tokens=100, on_breach="fail")
    starts = []

    @fabric.task(retries=3, backoff=0)
    async def ask(ctx: Context) -> str:
        starts.append(ctx.attempt)
        try:
            await ctx.spend(budget, tokens=101)
        except BaseException:
            return "went on"
        return ""

    async with fabric, fabric.worker():
        with pytest.raises(RunFailed, match=r"BudgetExceeded: budget llm: tokens 0/100") as failed:
            await (await ask.submit()).result(timeout=60)
        assert failed.value.error_type == "flowfabric.worker.budget.BudgetExceeded"
        assert starts == [1]


async def test_the_policy_cancel_flow_cancels_the_flow_and_without_a_flow_the_run_fails(
    fabric: Fabric, eventually: Eventually
) -> None:
    budget = fabric.budget("llm", tokens=100, on_breach="cancel_flow")
    may_spend = asyncio.Event()

    @fabric.task
    async def ask(ctx: Context) -> None:
        await may_spend.wait()
        await ctx.spend(budget, tokens=101)

    @fabric.task
    async def other() -> None:
        await asyncio.Event().wait()

    async with fabric, fabric.worker():
        flow = fabric.flow("batch")
        nodes: list[Any] = [flow.add(ask), flow.add(other), flow.add(other)]
        flow.after(nodes[2], nodes[0])
        run = await flow.submit()
        may_spend.set()
        for each in [run.run(node) for node in nodes]:
            with pytest.raises(RunCancelled):
                await each.result(timeout=60)
        assert await used(budget) == (0, 0)
        with pytest.raises(RunFailed, match="BudgetExceeded"):
            await (await ask.submit()).result(timeout=60)


async def test_an_approved_run_goes_on_and_every_true_cost_is_counted_once(
    fabric: Fabric, eventually: Eventually
) -> None:
    budget = fabric.budget("llm", tokens=1000, on_breach="ask")
    paid: list[int] = []

    @fabric.task
    async def ask(ctx: Context) -> str:
        for cost in (300, 350):
            async with ctx.reserve(budget, tokens=600) as spend:
                paid.append(cost)
                spend.used(tokens=cost)
        return "done"

    # One slot: a run that asks holds none.
    async with fabric, fabric.worker(concurrency=1):
        await budget.status()
        await fabric.engine.report_usage_admin(budget.id, dimensions=["tokens"], deltas=[200])
        run = await ask.submit()
        detail = await is_asking(run, eventually)
        assert detail == "budget llm: tokens 500/1000, 600 more asked for"
        asks = "suspended until a signal reaches waitpoint 'paused_by_budget'"
        assert (await run.explain()).summary == f"{asks}, {detail}"
        assert (paid, await used(budget)) == ([300], (500, 0))
        await run.approve_budget(raise_to={"tokens": 5000}, by="ada")
        assert await run.result(timeout=60) == "done"
        # The handler ran again from its first line, and really paid again.
        assert paid == [300, 300, 350]
        assert await used(budget) == (200 + sum(paid), 0)
        assert (await budget.status()).hard_limits == {"tokens": 5000}


async def test_an_approval_without_a_ceiling_raises_it_by_what_the_run_needs(
    fabric: Fabric, eventually: Eventually
) -> None:
    budget = fabric.budget("llm", tokens=100, usd_micros=10, calls=1, on_breach="ask")

    @fabric.task
    async def ask(ctx: Context) -> None:
        async with ctx.reserve(budget, tokens=150, usd_micros=11, calls=1):
            pass

    async with fabric, fabric.worker():
        run = await ask.submit()
        await is_asking(run, eventually)
        await run.approve_budget(by="ada")
        await run.result(timeout=60)
        assert (await budget.status()).hard_limits == {"tokens": 150, "usd_micros": 11, "calls": 1}


async def test_a_run_asks_again_if_the_approved_ceiling_is_too_low(fabric: Fabric, eventually: Eventually) -> None:
    budget = fabric.budget("llm", tokens=100, on_breach="ask")

    @fabric.task
    async def ask(ctx: Context) -> None:
        await ctx.spend(budget, tokens=150)

    async with fabric, fabric.worker():
        run = await ask.submit()
        await is_asking(run, eventually)
        with pytest.raises(InvalidInputError, match=r"raise_to: budget llm has no hard limit of 'token' to raise"):
            await run.approve_budget(raise_to={"token": 120}, by="ada")
        with pytest.raises(InvalidInputError, match="by: "):
            await run.approve_budget(raise_to={"tokens": 120}, by=7)  # type: ignore[arg-type]
        assert (await budget.status()).hard_limits == {"tokens": 100}
        await run.approve_budget(raise_to={"tokens": 120}, by="ada")

        async def has_asked_again() -> bool:
            info = await fabric.engine.read_execution_info(run.id)
            return info is not None and "0/120" in info.blocking_detail

        await eventually(has_asked_again)
        await run.approve_budget(by="ada")
        await run.result(timeout=60)
        assert await used(budget) == (150, 0)


async def test_a_refused_run_gets_the_error_and_is_not_retried(fabric: Fabric, eventually: Eventually) -> None:
    budget = fabric.budget("llm", tokens=100, on_breach="ask")
    starts: list[int] = []

    @fabric.task(retries=3, backoff=0)
    async def ask(ctx: Context, caught: str) -> str:
        starts.append(ctx.attempt)
        try:
            await ctx.spend(budget, tokens=150)
        except BudgetExceeded:
            if not caught:
                raise
            await ctx.spend(budget, tokens=1)
            await ctx.wait_for_signal("more")
            return "cheaper"
        return "went on"

    async with fabric, fabric.worker():
        run = await ask.submit("")
        await is_asking(run, eventually)
        await run.reject_budget(by="ada")
        with pytest.raises(RunFailed, match="budget llm: tokens 0/100, and a person has refused more"):
            await run.result(timeout=60)
        assert starts == [1, 1]
        other = await ask.submit("caught")
        await is_asking(other, eventually)
        await other.reject_budget(by="ada")
        # The refusal holds whenever the handler runs again, also once there is more.
        await other.signal("more", timeout=60)
        assert await other.result(timeout=60) == "cheaper"


async def test_an_operator_may_approve_with_an_operation_of_the_engine(fabric: Fabric, eventually: Eventually) -> None:
    budget = fabric.budget("llm", tokens=100, on_breach="ask")

    @fabric.task
    async def ask(ctx: Context) -> str:
        try:
            await ctx.spend(budget, tokens=150)
        except BudgetExceeded:
            return "refused"
        return "went on"

    async with fabric, fabric.worker():
        for name, answer in (("approve", "went on"), ("reject", "refused")):
            run = await ask.submit()
            await is_asking(run, eventually)
            (point,) = (await fabric.engine.list_pending_waitpoints(execution_id=run.id)).entries
            await fabric.engine.deliver_approval_signal(
                execution_id=run.id,
                waitpoint_id=point.waitpoint_id,
                signal_name=name,
                idempotency_suffix="1",
                source_identity="ada",
            )
            assert await run.result(timeout=60) == answer
        assert await used(budget) == (150, 0)


async def test_a_run_whose_own_budget_is_used_up_goes_on_once_it_is_approved(
    fabric: Fabric, eventually: Eventually
) -> None:
    budget = fabric.budget("llm", tokens=100, on_breach="ask")

    @fabric.task(budgets=[budget])
    async def ask(ctx: Context) -> str:
        if not ctx.is_resumed:
            await ctx.spend(budget, tokens=100)
        await ctx.spend(budget, tokens=50, key="more")
        return "done"

    async with fabric, fabric.worker():
        run = await ask.submit()
        await is_asking(run, eventually)
        # Nobody claims a run whose budget is used up, so the approval itself must raise it.
        await run.approve_budget(by="ada")
        assert await run.result(timeout=60) == "done"
        assert await used(budget) == (150, 0)


async def test_two_calls_that_ask_at_the_same_time_do_not_disturb_each_other(
    fabric: Fabric, eventually: Eventually
) -> None:
    budget = fabric.budget("llm", tokens=100, on_breach="ask")

    @fabric.task
    async def ask(ctx: Context) -> None:
        await asyncio.gather(ctx.spend(budget, tokens=150, key="a"), ctx.spend(budget, tokens=1000, key="b"))

    async with fabric, fabric.worker():
        run = await ask.submit()

        async def is_approved() -> bool:
            # How often it asks depends on which of the two calls spends first.
            state = (await run.status()).state
            if state == "suspended":
                await run.approve_budget(by="ada", timeout=60)
            return state == "completed"

        await is_asking(run, eventually)
        await eventually(is_approved)
        assert (await used(budget))[0] >= 1150


async def test_a_budget_is_created_once_and_code_does_not_change_it(fabric: Fabric, url: str) -> None:
    async with fabric:
        budget = fabric.budget("llm", tokens=100, soft={"tokens": 80, "calls": 3}, every=60, on_breach="ask")
        status = await budget.status()
        assert (status.on_hard_limit, status.reset_interval_ms, status.scope_id) == ("ask", 60_000, "llm")
        assert status.hard_limits == {"tokens": 100, "calls": 0}
        assert status.soft_limits == {"tokens": 80, "calls": 3}
        await budget.raise_to(tokens=500)
        await budget.raise_to(tokens=200)
        with pytest.raises(InvalidInputError, match=r"raise_to: budget .* has no hard limit of 'calls' to"):
            await budget.raise_to(tokens=600, calls=7)
        other = Fabric(url)
        async with other:
            again = other.budget("llm", tokens=1)
            assert again.id == budget.id
            assert (await again.status()).hard_limits == {"tokens": 500, "calls": 0}
        await fabric.engine.report_usage_admin(budget.id, dimensions=["tokens"], deltas=[9])
        await budget.reset()
        assert await used(budget) == (0, 0)
        assert fabric.budget("other", tokens=1).id != budget.id
        assert Fabric(url, namespace="eu").budget("llm", tokens=1).id != budget.id


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokens": 0}, r"limits\['tokens'\]"),
        ({"tokens": 1.5}, r"limits\['tokens'\]"),
        ({"tokens": 1, "on_breach": "stop"}, "on_breach: must be one of refuse, fail, cancel_flow, ask, got 'stop'"),
        ({"tokens": 1, "soft": {"tokens": -1}}, r"soft\['tokens'\]"),
        ({"tokens": 1, "every": -1}, "every: must be"),
        ({"tokens": 1, "id": "x"}, "id: "),
    ],
)
def test_a_wrong_option_of_a_budget_is_named(fabric: Fabric, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        fabric.budget("llm", **options)
