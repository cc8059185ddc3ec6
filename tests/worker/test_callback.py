"""Callbacks: the URL and token for an outsider, and the check of a call to that URL."""

from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from faults.proxy import Proxy
from fixtures import Engines, Eventually, Given, Rows
from flowfabric.db import session as sessions
from flowfabric.engine.engine import Engine
from flowfabric.engine.wait.deliver import Signals
from flowfabric.model.condition import Single
from flowfabric.model.errors import InvalidInputError, TransportError, error
from flowfabric.model.handle import Handle
from flowfabric.model.ids import WaitpointId
from flowfabric.model.signal import Accepted, SignalDuplicate
from flowfabric.model.suspension import SuspendArgs, Suspended
from flowfabric.model.token import WaitpointToken
from flowfabric.model.waitpoint import Fresh
from flowfabric.settings import Settings
from flowfabric.worker.callback import (
    BackendError,
    Callback,
    CallbackError,
    TokenMismatch,
    UnknownWaitpoint,
    verify_and_deliver,
)
from flowfabric.worker.context import Context
from flowfabric.worker.running import Running

READY: Any = {"signal_name": "ready"}


async def wait(engine: Engine, given: Given) -> tuple[str, WaitpointId, WaitpointToken]:
    """A suspended execution, its waitpoint, and the token of that waitpoint."""
    return await wait_with(engine, await given.claimed())


async def wait_with(engine: Engine, handle: Handle) -> tuple[str, WaitpointId, WaitpointToken]:
    made = await engine.suspend(
        handle,
        SuspendArgs(
            suspension_id=uuid4(),
            waitpoints=(Fresh(waitpoint_id=WaitpointId(uuid4()), waitpoint_key="wp"),),
            resume_condition=Single(waitpoint_key="wp"),
            reason_code="waiting_for_callback",
        ),
    )
    assert isinstance(made, Suspended)
    return handle.execution_id, made.details.waitpoint_id, made.details.waitpoint_token


async def refused(kind: type[CallbackError], *arguments: Any) -> CallbackError:
    with pytest.raises(kind) as caught:
        await verify_and_deliver(*arguments)
    assert type(caught.value) is kind
    return caught.value


async def test_the_right_token_delivers(engine: Engine, given: Given) -> None:
    waits = [await wait(engine, given), await wait(engine, given)]
    for (run, point, token), is_text in zip(waits, (True, False), strict=True):
        presented = token.reveal() if is_text else token
        answer = await verify_and_deliver(engine, run, str(point), presented, READY)
        assert isinstance(answer, Accepted)
        assert answer.effect == "resume_condition_satisfied"


async def test_ids_and_token_in_the_signal_are_ignored(engine: Engine, given: Given) -> None:
    run, point, token = await wait(engine, given)
    other, elsewhere, _ = await wait(engine, given)
    carried: Any = {**READY, "execution_id": other, "waitpoint_id": elsewhere, "waitpoint_token": "k1:" + "0" * 64}
    await verify_and_deliver(engine, run, point, token, carried)
    assert await engine.read_execution_state(run) == "resumable"
    assert await engine.read_execution_state(other) == "suspended"


async def test_a_caller_cannot_tell_a_wrong_token_from_an_unknown_waitpoint(
    engine: Engine, given: Given, rows: Rows
) -> None:
    run, point, token = await wait(engine, given)
    over, closed, spent = await wait(engine, given)
    await verify_and_deliver(engine, over, closed, spent, READY)
    other = f"{{fp:3}}:{uuid4()}"
    large: Any = {**READY, "payload": b"x" * 65_537}
    errors = [
        await refused(TokenMismatch, engine, run, point, token.reveal()[:-1] + "x", READY),
        await refused(TokenMismatch, engine, run, point, spent, READY),
        await refused(TokenMismatch, engine, run, point, spent, large),
        await refused(TokenMismatch, engine, run, point, "", READY),
        await refused(TokenMismatch, engine, run, point, None, READY),
    ]
    await engine._services[Signals].drain()
    async with rows.unchanged():
        errors += [
            await refused(UnknownWaitpoint, engine, run, uuid4(), token, READY),
            await refused(UnknownWaitpoint, engine, run, uuid4(), token, large),
            await refused(UnknownWaitpoint, engine, other, point, token, READY),
            await refused(UnknownWaitpoint, engine, "nonsense", point, token, READY),
            await refused(UnknownWaitpoint, engine, run, "nonsense", token, READY),
        ]
    errors.append(await refused(UnknownWaitpoint, engine, over, closed, token, READY))
    assert {(error.code, error.http_status) for error in errors} == {("invalid_token", 401)}
    assert all(token.reveal() not in f"{error} {error!r}" for error in errors)


async def test_a_text_that_is_too_long_is_reported_only_to_a_caller_with_the_token(
    engine: Engine, given: Given, rows: Rows
) -> None:
    fields = ("signal_name", "source_identity", "correlation_id")
    waits = [await wait(engine, given) for _ in fields]
    for field, (run, point, token) in zip(fields, waits, strict=True):
        long: Any = {**READY, field: "x" * 1025}
        async with rows.unchanged():
            error = await refused(BackendError, engine, run, point, token, long)
            assert (error.code, error.http_status) == ("invalid_input", 400)
            assert f"{field}: " in str(error)
            assert "1025" in str(error)
            await refused(TokenMismatch, engine, run, point, "k1:" + "0" * 64, long)
            await refused(UnknownWaitpoint, engine, run, uuid4(), token, long)
        allowed: Any = {**READY, field: "x" * 1024}
        assert isinstance(await verify_and_deliver(engine, run, point, token, allowed), Accepted)


async def test_a_wrong_token_is_recorded_on_the_execution(
    engine: Engine, given: Given, rows: Rows, eventually: Eventually
) -> None:
    run, point, token = await wait(engine, given)
    await refused(TokenMismatch, engine, run, point, "k1:" + "0" * 64, READY)

    async def is_noted() -> bool:
        return (await rows.execution(run))["last_hmac_validation_failed_at"] is not None

    await eventually(is_noted)
    await verify_and_deliver(engine, run, point, token, READY)


async def test_a_new_signal_for_a_closed_waitpoint_is_refused(engine: Engine, given: Given, rows: Rows) -> None:
    run, point, token = await wait(engine, given)
    await verify_and_deliver(engine, run, point, token, READY)
    async with rows.unchanged():
        await refused(UnknownWaitpoint, engine, run, point, token, READY)


async def test_a_repeat_of_the_signal_that_closed_the_waitpoint_is_a_duplicate(
    engine: Engine, given: Given, rows: Rows
) -> None:
    run, point, token = await wait(engine, given)
    keyed: Any = {**READY, "idempotency_key": "delivery-1"}
    first = await verify_and_deliver(engine, run, point, token, keyed)
    assert isinstance(first, Accepted)
    async with rows.unchanged(without=["event"]):
        again = await verify_and_deliver(engine, run, point, token.reveal(), keyed)
        assert again == SignalDuplicate(existing_signal_id=first.signal_id)
        named: Any = {**READY, "signal_id": first.signal_id}
        assert await verify_and_deliver(engine, run, point, token, named) == again
    # A caller without the token learns nothing by repeating it.
    await refused(UnknownWaitpoint, engine, run, point, "k1:" + "0" * 64, keyed)


async def test_a_caller_at_fault_gets_a_4xx_status_and_the_text_says_why(
    engine: Engine, given: Given, rows: Rows
) -> None:
    run, point, token = await wait(engine, given)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"payload": b"x" * 65_537}, 413, "payload_too_large"),
        ({"signal_name": ""}, 400, "invalid_input: signal_name: "),
        ({"source_type": 5}, 400, "invalid_input: source_type: "),
    ]
    async with rows.unchanged():
        for fields, status, text in cases:
            error = await refused(BackendError, engine, run, point, token, {**READY, **fields})
            assert isinstance(error, BackendError)
            assert (error.http_status, error.code) == (status, error.error.code)
            assert str(error).startswith(text)
            assert str(error).endswith(f" at {run} {point}")
            assert error.__cause__ is error.error
            assert token.reveal().partition(":")[2] not in f"{error} {error!r}"


async def test_a_caller_is_asked_to_retry_while_the_store_is_unavailable(
    engine: Engine, url: str, given: Given
) -> None:
    run, point, token = await wait(engine, given)
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url)) as cut:
        proxy.refuses = True
        proxy.cut()
        error = await refused(BackendError, cut, run, point, token, READY)
    assert isinstance(error, BackendError)
    assert isinstance(error.error, TransportError)
    assert error.http_status == 503
    assert str(error.error) in str(error)


async def test_a_repeat_that_meets_a_locked_execution_is_asked_to_retry(
    engines: Engines, given: Given, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "60ms")
    engine = await engines()
    run, point, token = await wait(engine, given)
    keyed: Any = {**READY, "idempotency_key": "delivery-1"}
    first = await verify_and_deliver(engine, run, point, token, keyed)
    assert isinstance(first, Accepted)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", run[-36:])
        # Not "no such waitpoint": the signal may be the one that closed it.
        errors = await refused(BackendError, engine, run, point, token, keyed)
    assert (errors.code, errors.http_status) == ("retry_exhausted", 503)
    again = await verify_and_deliver(engine, run, point, token, keyed)
    assert again == SignalDuplicate(existing_signal_id=first.signal_id)


def test_only_an_error_that_may_go_away_asks_the_caller_to_retry() -> None:
    statuses = {
        "retry_exhausted": 503,
        "resource_exhausted": 503,
        "hmac_secret_not_initialized": 503,
        "corruption": 500,
        "internal": 500,
        "token_expired": 400,
        "signal_limit_exceeded": 400,
    }
    assert {code: BackendError("run", "point", error(code)).http_status for code in statuses} == statuses


async def test_a_callback_prints_without_its_token(engines: Engines, given: Given) -> None:
    engine = await engines(callback_url="https://app.example/callbacks/")
    run = await given.run()
    ctx = Context(Running(run, 0.0), engine)
    point = await ctx.create_waitpoint("wp", expires_in=1)
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


async def test_a_callback_needs_a_waitpoint_and_a_base_url(engine: Engine, given: Given) -> None:
    ctx = Context(Running(await given.run(), 0.0), engine)
    point = await ctx.create_waitpoint("wp", expires_in=1)
    with pytest.raises(ValueError, match="pass base_url='https://…' or set FF_CALLBACK_URL"):
        ctx.callback(point)
    with pytest.raises(ValueError, match="FF_CALLBACK_URL"):
        Callback.of(None, ctx.execution_id, point.waitpoint_id, point.hmac_token)
    wrong: list[tuple[Any, Any]] = [("wp", "https://app.example"), (point, 5), (point.waitpoint_id, None)]
    for waitpoint, base_url in wrong:
        with pytest.raises(InvalidInputError, match=r"invalid_input: (waitpoint|base_url): "):
            ctx.callback(waitpoint, base_url=base_url)
