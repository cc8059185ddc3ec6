"""What a run spends when answers are lost, when its lease is, and when it suspends in a block."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fixtures import Eventually, IsSuspended, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import TransportError
from flowfabric.model.ids import uuid7
from flowfabric.worker.budget import Budget, BudgetExceeded
from flowfabric.worker.context import Context

from .waits import signal


@pytest.fixture
def budget(engine: Engine) -> Budget:
    return declared(engine)


def declared(engine: Engine, **options: Any) -> Budget:
    """A budget of 100 tokens."""
    given: dict[str, Any] = {"limits": {"tokens": 100}, "soft": None, "every": None, "on_breach": "refuse", "id": None}
    return Budget(lambda: engine, "llm", namespace="tests", **{**given, **options})


async def counted(budget: Budget) -> tuple[int, int]:
    """What is used and what is reserved."""
    status = await budget.status()
    return status.usage.get("tokens", 0), status.reserved.get("tokens", 0)


def lose_each_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Let the connection break after the commit of the first call of each operation; return the list of those lost."""
    lost: list[str] = []

    def losing(name: str, operation: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            answer = await operation(*args, **kwargs)
            if name not in lost:
                lost.append(name)
                raise TransportError
            return answer

        return call

    for name in names:
        monkeypatch.setattr(engine, name, losing(name, getattr(engine, name)))
    return lost


async def test_a_call_whose_answer_is_lost_counts_once(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    budget: Budget,
    submit: Submit,
    start_worker: StartWorker,
) -> None:
    names = ["create_budget", "reserve", "settle", "record_spend", "release_reservation"]
    lost = lose_each_answer(engine, monkeypatch, *names)

    async def job(ctx: Context) -> None:
        async with ctx.reserve(budget, tokens=40) as spend:
            spend.used(tokens=30)
        await ctx.spend(budget, tokens=5)
        async with ctx.reserve(budget, tokens=40) as spend:
            spend.used(tokens=0)

    await start_worker({"job": job})
    await engine.wait_for_ending(await submit(), timeout=60)
    assert sorted(lost) == sorted(names)
    assert await counted(budget) == (35, 0)


async def test_a_run_that_loses_its_lease_returns_what_it_has_reserved_and_counts_what_it_said(
    engine: Engine, budget: Budget, submit: Submit, start_worker: StartWorker, eventually: Eventually
) -> None:
    has_reserved = asyncio.Event()

    async def job(ctx: Context) -> int:
        if ctx.attempt > 1:
            return ctx.attempt
        async with ctx.reserve(budget, tokens=40), ctx.reserve(budget, tokens=50) as spend:
            spend.used(tokens=11)
            has_reserved.set()
            await asyncio.Event().wait()
        return 0

    await start_worker({"job": job})
    run = await submit()
    await has_reserved.wait()
    assert await counted(budget) == (0, 90)
    await engine.revoke_lease(run, reason="test")
    await engine.wait_for_ending(run, timeout=60)

    async def is_settled() -> bool:
        return await counted(budget) == (11, 0)

    await eventually(is_settled)


async def test_a_run_that_waits_in_a_block_holds_no_reservation_meanwhile(
    engine: Engine, budget: Budget, submit: Submit, start_worker: StartWorker, eventually: Eventually
) -> None:
    async def job(ctx: Context) -> None:
        async with ctx.reserve(budget, tokens=40) as spend:
            if not ctx.is_resumed:
                spend.used(tokens=3)
            await ctx.wait_for_signal("ready")
            spend.used(tokens=10)

    await start_worker({"job": job})
    run = await submit()

    async def is_settled() -> bool:
        return await engine.read_execution_state(run) == "suspended" and await counted(budget) == (3, 0)

    await eventually(is_settled)
    await signal(engine, run)
    await engine.wait_for_ending(run, timeout=60)
    assert await counted(budget) == (13, 0)


async def test_a_suspend_whose_answer_is_lost_asks_once(
    engine: Engine, submit: Submit, start_worker: StartWorker, is_suspended: IsSuspended, lose_answers: None
) -> None:
    budget = declared(engine, on_breach="ask")

    async def job(ctx: Context) -> None:
        await ctx.spend(budget, tokens=150)

    await start_worker({"job": job})
    run = await submit()
    await is_suspended(run)
    await signal(engine, run, "approve", payload=b'{"tokens": 200}')
    await engine.wait_for_ending(run, timeout=60)
    assert await counted(budget) == (150, 0)


@pytest.mark.parametrize(
    ("name", "payload"), [("hello", b"null"), ("approve", b'{"calls": 5}'), ("approve", b'{"tokens": 120}')]
)
async def test_a_run_asks_again_after_an_answer_that_does_not_help(
    engine: Engine,
    submit: Submit,
    start_worker: StartWorker,
    eventually: Eventually,
    is_suspended: IsSuspended,
    name: str,
    payload: bytes,
) -> None:
    budget, starts = declared(engine, on_breach="ask"), list[int]()

    async def job(ctx: Context) -> None:
        starts.append(ctx.attempt)
        await ctx.spend(budget, tokens=150)

    await start_worker({"job": job})
    run = await submit()
    await is_suspended(run)
    await signal(engine, run, name, payload=payload)

    async def has_asked_again() -> bool:
        return len(starts) == 2 and await engine.read_execution_state(run) == "suspended"

    await eventually(has_asked_again)
    await signal(engine, run, "approve", payload=b"null")
    await engine.wait_for_ending(run, timeout=60)
    assert (await counted(budget), starts) == ((150, 0), [1, 1, 1])


async def test_a_run_that_an_operator_resumes_asks_again_unless_there_is_room(
    engine: Engine, submit: Submit, start_worker: StartWorker, is_suspended: IsSuspended
) -> None:
    budget = declared(engine, on_breach="ask")

    async def job(ctx: Context) -> None:
        await ctx.spend(budget, tokens=150)

    await start_worker({"job": job})
    run = await submit()
    await is_suspended(run)
    await budget.raise_to(tokens=150)
    await engine.resume_execution(execution_id=run)
    await engine.wait_for_ending(run, timeout=60)
    assert await counted(budget) == (150, 0)


async def test_a_budget_known_by_its_id_has_the_policy_it_was_created_with(
    engine: Engine, submit: Submit, start_worker: StartWorker
) -> None:
    policies = {name: uuid7() for name in ("warn", "refuse", "fail")}
    for name, budget_id in policies.items():
        await engine.create_budget(
            budget_id,
            scope_type="flow",
            scope_id="x",
            enforcement_mode="strict",
            on_hard_limit=name,
            on_soft_limit="warn",
            dimensions=["tokens"],
            hard_limits=[10],
            soft_limits=[0],
        )

    async def job(ctx: Context, name: str) -> str:
        try:
            await ctx.spend(str(policies[name]), tokens=11)
        except BudgetExceeded as exceeded:
            return exceeded.budget
        return ""

    await start_worker({"job": job})
    for name, outcome in (("warn", "success"), ("refuse", "success"), ("fail", "failed")):
        ended = await engine.wait_for_ending(await submit(name=name), timeout=60)
        assert ended.outcome == outcome


async def test_the_soft_limit_of_a_budget_is_logged(
    engine: Engine, submit: Submit, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    budget = declared(engine, soft={"tokens": 50})

    async def job(ctx: Context) -> None:
        await ctx.spend(budget, tokens=51)

    await start_worker({"job": job})
    await engine.wait_for_ending(await submit(), timeout=60)
    assert "budget llm: tokens is at 51, above its soft limit 50" in caplog.text
