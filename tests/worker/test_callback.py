"""Callbacks: an address and a token for an outsider, and the check of what comes back."""

from typing import Any
from uuid import uuid4

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.conditions import Single
from flowfabric.model.ids import WaitpointId
from flowfabric.model.signals import Accepted, SignalDuplicate
from flowfabric.model.suspension import Fresh, SuspendArgs
from flowfabric.model.tokens import WaitpointToken
from flowfabric.model.waits import Suspended
from flowfabric.worker.callback import (
    BackendError,
    Callback,
    CallbackError,
    TokenMismatch,
    UnknownWaitpoint,
    verify_and_deliver,
)
from flowfabric.worker.context import Context, Running

READY: Any = {"signal_name": "ready"}


async def wait(engine: Engine, given: Any) -> tuple[str, WaitpointId, WaitpointToken]:
    """A suspended execution, its waitpoint and that waitpoint's token."""
    handle = await given.claimed()
    made = await engine.suspend(
        handle,
        SuspendArgs(
            suspension_id=uuid4(),  # type: ignore[arg-type]
            waitpoints=(Fresh(waitpoint_id=WaitpointId(uuid4()), waitpoint_key="wp"),),
            resume_condition=Single(waitpoint_key="wp"),
            reason_code="waiting_for_callback",  # type: ignore[arg-type]
        ),
    )
    assert isinstance(made, Suspended)
    return handle.execution_id, made.details.waitpoint_id, made.details.waitpoint_token


async def refused(kind: type[CallbackError], *arguments: Any) -> CallbackError:
    with pytest.raises(kind) as caught:
        await verify_and_deliver(*arguments)
    assert type(caught.value) is kind
    return caught.value


async def test_the_right_token_delivers(engine: Engine, given: Any) -> None:
    waits = [await wait(engine, given), await wait(engine, given)]
    for (run, point, token), is_text in zip(waits, (True, False), strict=True):
        presented = token.reveal() if is_text else token
        answer = await verify_and_deliver(engine, run, str(point), presented, READY)
        assert isinstance(answer, Accepted)
        assert answer.effect == "resume_condition_satisfied"


async def test_what_the_signal_carries_of_ids_and_token_is_overruled(engine: Engine, given: Any) -> None:
    run, point, token = await wait(engine, given)
    other, elsewhere, _ = await wait(engine, given)
    carried: Any = {**READY, "execution_id": other, "waitpoint_id": elsewhere, "waitpoint_token": "k1:" + "0" * 64}
    await verify_and_deliver(engine, run, point, token, carried)
    assert await engine.read_execution_state(run) == "resumable"
    assert await engine.read_execution_state(other) == "suspended"


async def test_outside_a_wrong_token_and_an_unknown_waitpoint_are_the_same(
    engine: Engine, given: Any, rows: Any
) -> None:
    run, point, token = await wait(engine, given)
    over, closed, spent = await wait(engine, given)
    await verify_and_deliver(engine, over, closed, spent, READY)
    other = f"{{fp:3}}:{uuid4()}"
    large: Any = {**READY, "payload": b"x" * 65_537}
    told = [
        await refused(TokenMismatch, engine, run, point, token.reveal()[:-1] + "x", READY),
        await refused(TokenMismatch, engine, run, point, spent, READY),
        await refused(TokenMismatch, engine, run, point, spent, large),
        await refused(TokenMismatch, engine, run, point, "", READY),
        await refused(TokenMismatch, engine, run, point, None, READY),
    ]
    async with rows.unchanged():
        told += [
            await refused(UnknownWaitpoint, engine, run, uuid4(), token, READY),
            await refused(UnknownWaitpoint, engine, run, uuid4(), token, large),
            await refused(UnknownWaitpoint, engine, other, point, token, READY),
            await refused(UnknownWaitpoint, engine, "nonsense", point, token, READY),
            await refused(UnknownWaitpoint, engine, run, "nonsense", token, READY),
        ]
    told.append(await refused(UnknownWaitpoint, engine, over, closed, token, READY))
    assert {error.code for error in told} == {"invalid_token"}
    assert all(token.reveal() not in f"{error} {error!r}" for error in told)


async def test_a_forgery_at_the_bridge_is_noted_on_the_execution(engine: Engine, given: Any, rows: Any) -> None:
    run, point, token = await wait(engine, given)
    await refused(TokenMismatch, engine, run, point, "k1:" + "0" * 64, READY)
    assert (await rows.execution(run))["last_hmac_validation_failed_at"] is not None
    await verify_and_deliver(engine, run, point, token, READY)


async def test_a_new_signal_for_a_waitpoint_that_is_over_finds_none(engine: Engine, given: Any, rows: Any) -> None:
    run, point, token = await wait(engine, given)
    await verify_and_deliver(engine, run, point, token, READY)
    async with rows.unchanged():
        await refused(UnknownWaitpoint, engine, run, point, token, READY)


async def test_a_repeat_of_the_signal_that_closed_the_waitpoint_is_a_duplicate(
    engine: Engine, given: Any, rows: Any
) -> None:
    run, point, token = await wait(engine, given)
    keyed: Any = {**READY, "idempotency_key": "delivery-1"}
    first = await verify_and_deliver(engine, run, point, token, keyed)
    assert isinstance(first, Accepted)
    async with rows.unchanged():
        again = await verify_and_deliver(engine, run, point, token.reveal(), keyed)
        assert again == SignalDuplicate(existing_signal_id=first.signal_id)
        named: Any = {**READY, "signal_id": first.signal_id}
        assert await verify_and_deliver(engine, run, point, token, named) == again
    # Whoever does not hold the token learns nothing by repeating it.
    await refused(UnknownWaitpoint, engine, run, point, "k1:" + "0" * 64, keyed)


async def test_what_the_engine_refuses_is_told_as_such(engine: Engine, given: Any, rows: Any) -> None:
    run, point, token = await wait(engine, given)
    async with rows.unchanged():
        error = await refused(BackendError, engine, run, point, token, {**READY, "payload": b"x" * 65_537})
    assert isinstance(error, BackendError)
    assert (error.code, error.error.code) == ("payload_too_large", "payload_too_large")
    assert error.__cause__ is error.error


async def test_a_callback_is_an_address_and_a_token_that_does_not_show(engines: Any, given: Any) -> None:
    engine = await engines(callback_url="https://app.example/callbacks/")
    run = await given.run()
    ctx = Context(Running(run, 0.0), engine)
    point = await ctx.create_waitpoint("wp", expires_in_ms=1000)
    callback = ctx.callback(point)
    partition, _, name = run.execution_id[1:].partition("}:")
    assert callback.url == (
        f"https://app.example/callbacks/%7B{partition.replace(':', '%3A')}%7D%3A{name}/{point.waitpoint_id}"
    )
    assert callback.token == point.hmac_token
    secret = point.hmac_token.reveal().partition(":")[2]
    assert secret not in f"{callback} {callback!r} {callback.url}"
    assert "<REDACTED:len=64>" in repr(callback)
    assert ctx.callback(point, base_url="http://other").url.startswith("http://other/%7B")


async def test_a_callback_needs_an_address(engine: Engine, given: Any) -> None:
    ctx = Context(Running(await given.run(), 0.0), engine)
    point = await ctx.create_waitpoint("wp", expires_in_ms=1000)
    with pytest.raises(ValueError, match="FF_CALLBACK_URL"):
        ctx.callback(point)
    with pytest.raises(ValueError, match="FF_CALLBACK_URL"):
        Callback.of(None, ctx.execution_id, point.waitpoint_id, point.hmac_token)
