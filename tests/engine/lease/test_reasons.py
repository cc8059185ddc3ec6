"""Reasons of cancels and failures must be text."""

from collections.abc import Awaitable, Callable
from typing import Any

from engine.cases import Cases, in_turn
from engine.state import refused
from engine.waits import triple
from fixtures import Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.attempt import FailureReason
from flowfabric.model.handle import Handle

Saying = Callable[[Engine, Handle, Any], Awaitable[object]]

CALLS: dict[str, tuple[str, Saying]] = {
    "cancel": ("reason", lambda engine, handle, said: engine.cancel(handle, said)),
    "cancel_execution": (
        "reason",
        lambda engine, handle, said: engine.cancel_execution(execution_id=handle.execution_id, reason=said),
    ),
    "fail": ("reason", lambda engine, handle, said: engine.fail(handle, reason=said)),
    "fail, in words": ("reason.message", lambda engine, handle, said: engine.fail(handle, reason=FailureReason(said))),
    "fail_execution": (
        "failure_reason",
        lambda engine, handle, said: engine.fail_execution(**triple(handle), failure_reason=said),
    ),
    "fail_execution, category": (
        "failure_category",
        lambda engine, handle, said: engine.fail_execution(**triple(handle), failure_reason="x", failure_category=said),
    ),
}
NO_TEXTS = (None, 3, 1.5, True, b"bytes", ["text"], {"a": 1}, ValueError("as it came"), object)


async def test_a_reason_must_be_text(engine: Engine, given: Given, rows: Rows) -> None:
    handles = {call: await given.claimed(policy={"retry_policy": {"max_retries": 1}}) for call in CALLS}
    with Cases() as cases:
        async with rows.unchanged():
            for call, (field, say) in CALLS.items():
                for said in NO_TEXTS:
                    with cases((call, said)):
                        refusal = await refused(say(engine, handles[call], said), "invalid_input")
                        assert str(refusal.detail).startswith(f"{field}: must be text")
                        assert str(refusal.detail).endswith(f"got {said!r}")
        for call, (_, say) in CALLS.items():
            with cases(call):
                await say(engine, handles[call], "a text")


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
                for wrong in NO_TEXTS[1:]:
                    with cases((field, wrong)):
                        given_field: Any = {field: wrong}
                        detail = f"{field}: must be text, got {wrong!r}"
                        call = engine.fail(handle, reason=FailureReason("x", **given_field))
                        await refused(call, "invalid_input", f"reason.{detail}")
                        service = engine.fail_execution(**triple(handle), failure_reason="x", **given_field)
                        refusal = await refused(service, "invalid_input", detail)
                        assert str(refusal.detail).startswith(field)


@in_turn("call", ["cancel", "cancel_execution"])
async def test_the_reason_of_a_cancel_must_be_storable(engine: Engine, given: Given, rows: Rows, call: str) -> None:
    handle = await given.claimed()
    _, say = CALLS[call]
    async with rows.unchanged():
        await refused(say(engine, handle, "a\0b"), "invalid_input", "reason: must not contain NUL")
        await refused(say(engine, handle, "half \ud800"), "invalid_input", "reason: is not valid Unicode")
    await say(engine, handle, "")
    assert (await rows.execution(handle.execution_id))["cancellation_reason"] == ""
