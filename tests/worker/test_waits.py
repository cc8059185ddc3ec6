"""The options of a wait: which of them go together, and what is refused before anything changes."""

from typing import Any

import pytest

from fixtures import Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import Single
from flowfabric.model.errors import InvalidInputError
from flowfabric.worker.context import Context
from flowfabric.worker.running import Running
from flowfabric.worker.waits import HandlerSuspended, suspend_args

NO_EFFECT = "invalid_input: timeout_behavior: has no effect without a timeout; add timeout="

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, TypeError, "suspend: nothing to wait for; pass condition= or keys="),
    ({"keys": ["a"], "condition": Single(waitpoint_key="a")}, TypeError, "suspend: pass condition= or keys=, not both"),
    ({"keys": ["a"], "until": 1}, TypeError, "suspend: no such option: until; the options are: condition, "),
    ({"keys": ["a"], "timeout_at": 1}, TypeError, "suspend: no such option: timeout_at"),
    ({"args": ["a"]}, TypeError, "suspend: pass either keyword options"),
    ({"keys": "answer"}, InvalidInputError, "invalid_input: keys: "),
    ({"keys": 5}, InvalidInputError, "invalid_input: keys: "),
    ({"keys": ["a"], "waitpoints": "a"}, InvalidInputError, "invalid_input: waitpoints: "),
    ({"keys": ["a"], "idempotency_key": 5}, InvalidInputError, "invalid_input: idempotency_key: "),
    ({"keys": ["a"], "timeout_behavior": "expire"}, InvalidInputError, NO_EFFECT),
    ({"keys": ["a"], "timeout_behavior": "fail"}, InvalidInputError, NO_EFFECT),
]


async def test_a_wrong_wait_is_refused_and_changes_nothing(engine: Engine, given: Given, rows: Rows) -> None:
    ctx = Context(Running(await given.run(policy={"suspension_policy": {"timeout_behavior": "cancel"}}), 0.0), engine)
    wrong = []
    async with rows.unchanged():
        for options, kind, text in REFUSED:
            with pytest.raises(kind) as refused:
                await ctx.suspend(**options)
            if not str(refused.value).startswith(text):
                wrong.append((options, str(refused.value)))
    assert wrong == []


async def test_a_timeout_behavior_needs_a_timeout_of_the_call_or_of_the_policy(
    engine: Engine, given: Given, rows: Rows
) -> None:
    default = {"suspension_policy": {"default_timeout_ms": 5000}}
    cases: list[tuple[Any, Any]] = [(None, {"timeout": 5}), (default, {})]
    for policy, timeout in cases:
        ctx = Context(Running(await given.run(policy=policy), 0.0), engine)
        with pytest.raises(HandlerSuspended):
            await ctx.suspend(keys=(key for key in ("a", "b")), timeout_behavior="expire", **timeout)
    timeouts = [row["timeout_at"] for row in await rows.of("suspension")]
    assert (len(timeouts), None in timeouts) == (2, False)


def test_an_idempotency_key_is_scoped_to_the_attempt_and_an_empty_one_is_none() -> None:
    for key, stored in (("", None), ("gate", "2:gate")):
        assert suspend_args(2, {"keys": ["a"], "idempotency_key": key}).idempotency_key == stored
