"""What a handler says of its wait: what goes together, and what is refused before anything changes."""

from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.condition import Single
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.states import TerminalOutcome
from flowfabric.worker.context import Context
from flowfabric.worker.running import Running
from flowfabric.worker.waits import HandlerSuspended, suspend_args


async def test_arguments_that_do_not_go_together_fail_the_handler(
    engine: Engine, start_worker: Any, submit: Any
) -> None:
    async def wrong(ctx: Context, nth: int) -> None:
        options: list[dict[str, Any]] = [
            {},
            {"keys": ["a"], "condition": Single(waitpoint_key="a")},
            {"keys": ["a"], "timeout_at": 1},
            {"keys": ["a"], "until": 1},
            {"args": ["a"]},
        ]
        await ctx.suspend(**options[nth])

    await start_worker({"job": wrong})
    for nth in range(5):
        ended = await engine.wait_for_ending(await submit(nth=nth), timeout=60)
        assert ended.outcome is TerminalOutcome.FAILED
        assert "TypeError: " in (ended.reason or "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keys": "answer"}, "keys: "),
        ({"keys": ["a"], "idempotency_key": 5}, "idempotency_key: must be text"),
        ({"keys": 5}, "keys: "),
        ({"keys": ["a"], "waitpoints": "a"}, "waitpoints: "),
        ({"keys": ["a"], "timeout_behavior": "expire"}, "timeout_behavior: has no effect without a timeout"),
        ({"keys": ["a"], "timeout_behavior": "fail"}, "timeout_behavior: has no effect without a timeout"),
    ],
    ids=["text", "key", "number", "waitpoints", "expire", "fail"],
)
async def test_a_wait_that_is_not_meant_so_is_refused(
    engine: Engine, given: Any, rows: Any, options: dict[str, Any], told: str
) -> None:
    ctx = Context(Running(await given.run(policy={"suspension_policy": {"timeout_behavior": "cancel"}}), 0.0), engine)
    async with rows.unchanged():
        with pytest.raises(InvalidInputError, match=f"invalid_input: {told}"):
            await ctx.suspend(**options)


@pytest.mark.parametrize("policy", [None, {"suspension_policy": {"default_timeout_ms": 5000}}], ids=["call", "policy"])
async def test_what_a_timeout_does_is_said_where_there_is_one(
    engine: Engine, given: Any, rows: Any, policy: Any
) -> None:
    ctx = Context(Running(await given.run(policy=policy), 0.0), engine)
    timeout: Any = {} if policy else {"timeout": 5}
    with pytest.raises(HandlerSuspended):
        await ctx.suspend(keys=(key for key in ("a", "b")), timeout_behavior="expire", **timeout)
    (row,) = await rows.of("suspension")
    assert row["timeout_at"] is not None


@pytest.mark.parametrize(("given_key", "kept"), [("", None), ("gate", "2:gate")])
def test_an_empty_idempotency_key_is_none(given_key: str, kept: str | None) -> None:
    args = suspend_args(2, {"keys": ["a"], "idempotency_key": given_key})
    assert args.idempotency_key == kept
