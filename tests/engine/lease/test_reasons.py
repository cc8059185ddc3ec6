"""The reasons of cancels and failures are texts; what is none is refused before anything is written."""

from collections.abc import Awaitable, Callable
from typing import Any

from engine.cases import in_turn
from engine.state import refused
from engine.waits import triple
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


@in_turn("call", CALLS)
async def test_a_reason_that_is_no_text_is_refused(engine: Engine, given: Any, rows: Any, call: str) -> None:
    handle = await given.claimed(policy={"retry_policy": {"max_retries": 1}})
    field, say = CALLS[call]
    async with rows.unchanged():
        for said in NO_TEXTS:
            refusal = await refused(say(engine, handle, said), "invalid_input")
            assert str(refusal.detail).startswith(f"{field}: must be text")
            assert str(refusal.detail).endswith(f"got {said!r}")
    await say(engine, handle, "as it should be")


@in_turn("detail", [3, ["text"], object()])
async def test_the_category_of_a_failure_is_text_or_bytes(engine: Engine, given: Any, rows: Any, detail: Any) -> None:
    handle = await given.claimed()
    async with rows.unchanged():
        wrong = engine.fail(handle, reason=FailureReason("x", detail=detail))
        await refused(wrong, "invalid_input", "reason.detail: must be text or bytes, got ")


@in_turn("field", ["error_type", "traceback"])
async def test_what_a_failure_tells_of_its_exception_is_text(engine: Engine, given: Any, rows: Any, field: str) -> None:
    handle = await given.claimed()
    async with rows.unchanged():
        for said in NO_TEXTS[1:]:
            wrong: Any = {field: said}
            told = f"reason.{field}: must be text, got {said!r}"
            await refused(engine.fail(handle, reason=FailureReason("x", **wrong)), "invalid_input", told)
            told = f"{field}: must be text, got {said!r}"
            refusal = await refused(
                engine.fail_execution(**triple(handle), failure_reason="x", **wrong), "invalid_input", told
            )
            assert str(refusal.detail).startswith(field)


@in_turn("call", ["cancel", "cancel_execution"])
async def test_the_reason_of_a_cancel_is_one_the_store_can_hold(
    engine: Engine, given: Any, rows: Any, call: str
) -> None:
    handle = await given.claimed()
    _, say = CALLS[call]
    async with rows.unchanged():
        await refused(say(engine, handle, "a\0b"), "invalid_input", "reason: must not contain NUL")
        await refused(say(engine, handle, "half \ud800"), "invalid_input", "reason: is not valid Unicode")
    await say(engine, handle, "")
    assert (await rows.execution(handle.execution_id))["cancellation_reason"] == ""
