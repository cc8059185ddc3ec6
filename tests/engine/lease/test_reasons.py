"""The reason of a cancel or of a failure must be text."""

from collections.abc import Awaitable, Callable
from typing import Any

from engine.cases import Cases, in_turn
from engine.state import refused
from engine.waits import triple
from fixtures import Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.attempt import FailureReason
from flowfabric.model.handle import Handle

CallWithReason = Callable[[Engine, Handle, Any], Awaitable[object]]

CALLS: dict[str, tuple[str, CallWithReason]] = {
    "cancel": ("reason", lambda engine, handle, reason: engine.cancel(handle, reason)),
    "cancel_execution": (
        "reason",
        lambda engine, handle, reason: engine.cancel_execution(execution_id=handle.execution_id, reason=reason),
    ),
    "fail": ("reason", lambda engine, handle, reason: engine.fail(handle, reason=reason)),
    "fail, message": (
        "reason.message",
        lambda engine, handle, reason: engine.fail(handle, reason=FailureReason(reason)),
    ),
    "fail_execution": (
        "failure_reason",
        lambda engine, handle, reason: engine.fail_execution(**triple(handle), failure_reason=reason),
    ),
    "fail_execution, category": (
        "failure_category",
        lambda engine, handle, reason: engine.fail_execution(
            **triple(handle), failure_reason="x", failure_category=reason
        ),
    ),
}
"""By name: the argument that must be text, and the call."""
NOT_TEXT = (None, 3, 1.5, True, b"bytes", ["text"], {"a": 1}, ValueError("text"), object)


async def test_a_reason_must_be_text(engine: Engine, given: Given, rows: Rows) -> None:
    handles = {name: await given.claimed(policy={"retry_policy": {"max_retries": 1}}) for name in CALLS}
    with Cases() as cases:
        async with rows.unchanged():
            for name, (field, call) in CALLS.items():
                for wrong in NOT_TEXT:
                    with cases((name, wrong)):
                        refusal = await refused(call(engine, handles[name], wrong), "invalid_input")
                        assert str(refusal.detail).startswith(f"{field}: must be text")
                        assert str(refusal.detail).endswith(f"got {wrong!r}")
        for name, (_, call) in CALLS.items():
            with cases(name):
                await call(engine, handles[name], "a text")


async def test_the_category_and_the_exception_of_a_failure_must_be_text(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    wrong: Any
    with Cases() as cases:
        async with rows.unchanged():
            for wrong in (3, ["text"], object()):
                with cases(("detail", wrong)):
                    call = engine.fail(handle, reason=FailureReason("x", detail=wrong))
                    await refused(call, "invalid_input", "reason.detail: must be text or bytes, got ")
            for field in ("error_type", "traceback"):
                for wrong in NOT_TEXT[1:]:
                    with cases((field, wrong)):
                        argument: Any = {field: wrong}
                        detail = f"{field}: must be text, got {wrong!r}"
                        call = engine.fail(handle, reason=FailureReason("x", **argument))
                        await refused(call, "invalid_input", f"reason.{detail}")
                        call = engine.fail_execution(**triple(handle), failure_reason="x", **argument)
                        refusal = await refused(call, "invalid_input", detail)
                        assert str(refusal.detail).startswith(field)


@in_turn("name", ["cancel", "cancel_execution"])
async def test_the_reason_of_a_cancel_must_be_storable(engine: Engine, given: Given, rows: Rows, name: str) -> None:
    handle = await given.claimed()
    _, call = CALLS[name]
    async with rows.unchanged():
        await refused(call(engine, handle, "a\0b"), "invalid_input", "reason: must not contain NUL")
        await refused(call(engine, handle, "half \ud800"), "invalid_input", "reason: is not valid Unicode")
    await call(engine, handle, "")
    assert (await rows.execution(handle.execution_id))["cancellation_reason"] == ""
