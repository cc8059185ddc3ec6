"""What an attempt keeps of the exception its handler raised."""

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.attempt import MAX_TRACEBACK_BYTES, Attempt
from flowfabric.worker.context import Context
from flowfabric.worker.errors import MAX_FRAMES, traceback_of

RETRIES = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}


@pytest.fixture
def failed(engine: Engine, start_worker: Any, submit: Any) -> Callable[..., Any]:
    """Run a handler that fails, and give its attempts as they are read."""

    async def failed(handler: Callable[..., Any], *, policy: Any = None, **arguments: Any) -> list[Attempt]:
        await start_worker({"job": handler})
        run = await submit(policy=policy, **arguments)
        ended = await engine.wait_for_ending(run, timeout=60)
        attempts = await engine.list_attempts(run)
        last = attempts[-1]
        told = (last.failure_reason, last.error_type, last.traceback)
        assert (ended.outcome, (ended.reason, ended.error_type, ended.traceback)) == ("failed", told)
        return attempts

    return failed


def printed(error: BaseException) -> str:
    """An exception as Python prints it, without the frame of whoever caught it."""
    assert error.__traceback__ is not None
    return "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next))


def caught(function: Callable[[], object]) -> str:
    """What a call raises, as Python prints it."""
    try:
        function()
    except BaseException as error:
        return printed(error)
    raise AssertionError("nothing was raised")


async def caught_async(function: Callable[[], Any]) -> str:
    """What a coroutine raises, as Python prints it."""
    try:
        await function()
    except BaseException as error:
        return printed(error)
    raise AssertionError("nothing was raised")


def fall() -> NoReturn:
    raise ValueError("no luck")


def from_cause() -> NoReturn:
    try:
        fall()
    except ValueError as error:
        raise RuntimeError("outer") from error


def in_context() -> NoReturn:
    try:
        fall()
    except ValueError:
        raise RuntimeError("outer")  # noqa: B904


def without_context() -> NoReturn:
    try:
        fall()
    except ValueError:
        raise RuntimeError("outer") from None


def with_notes() -> NoReturn:
    error = KeyError("key")
    error.add_note("a note\nof two lines")
    raise error


def of_syntax() -> NoReturn:
    compile("1 +", "<given>", "exec")
    raise AssertionError


def in_a_loop() -> NoReturn:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    raise one


def a_group() -> NoReturn:
    found: list[Exception] = []
    for function in (fall, from_cause, with_notes):
        try:
            function()
        except Exception as error:
            found.append(error)
    raise ExceptionGroup("several", [*found, ExceptionGroup("within", [TypeError("never raised")])])


def a_wide_group() -> NoReturn:
    raise ExceptionGroup("many", [ValueError(str(nth)) for nth in range(100)])


SHAPES = [
    fall,
    from_cause,
    in_context,
    without_context,
    with_notes,
    of_syntax,
    in_a_loop,
    a_group,
    a_wide_group,
]


@pytest.mark.parametrize("function", SHAPES)
async def test_a_thread_leaves_the_traceback_that_python_prints_of_its_function(failed: Any, function: Any) -> None:
    (attempt,) = await failed(function)
    assert attempt.traceback == caught(function)


@pytest.mark.parametrize("function", SHAPES)
async def test_a_coroutine_leaves_the_traceback_that_python_prints_of_it(failed: Any, function: Any) -> None:
    async def handler() -> None:
        await asyncio.sleep(0)
        function()

    (attempt,) = await failed(handler)
    assert attempt.traceback == await caught_async(handler)
    assert "flowfabric" not in attempt.traceback


async def test_a_task_group_tells_all_that_failed(failed: Any) -> None:
    async def call(function: Callable[[], object]) -> None:
        function()

    async def handler() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(call(fall))
            group.create_task(call(with_notes))

    (attempt,) = await failed(handler)
    assert attempt.error_type == "ExceptionGroup"
    assert attempt.traceback.startswith("  + Exception Group Traceback (most recent call last):\n")
    for told in ("ValueError: no luck", "KeyError: 'key'", "of two lines", "in fall", "in with_notes", "in handler"):
        assert told in attempt.traceback


async def test_every_attempt_keeps_its_own_exception(failed: Any) -> None:
    async def handler(ctx: Context) -> None:
        if ctx.attempt_index == 0:
            raise ValueError("first")
        raise KeyError("second")

    first, second = await failed(handler, policy=RETRIES)
    assert (first.error_type, first.failure_reason) == ("ValueError", "ValueError: first")
    assert first.traceback.endswith("ValueError: first\n")
    assert (second.error_type, second.failure_reason) == ("KeyError", "KeyError: 'second'")
    assert second.traceback.endswith("KeyError: 'second'\n")


async def test_a_class_is_told_with_its_module(failed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shop.errors")
    exec("class Declined(Exception):\n    class Inner(Exception): ...", vars(module))
    monkeypatch.setitem(sys.modules, "shop.errors", module)

    async def handler() -> None:
        raise module.Declined.Inner("no")

    (attempt,) = await failed(handler)
    assert (attempt.error_type, attempt.failure_reason) == ("shop.errors.Declined.Inner", "Inner: no")
    assert attempt.traceback.endswith("\nshop.errors.Declined.Inner: no\n")


async def test_a_traceback_shows_no_values_of_variables(failed: Any) -> None:
    async def handler(secret: str) -> None:
        local = secret * 2
        raise ValueError(len(local))

    (attempt,) = await failed(handler, secret="hunter2")
    assert "len(local)" in attempt.traceback
    assert "hunter2" not in attempt.traceback


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


def ping(depth: int) -> int:
    return pong(depth - 1)


def pong(depth: int) -> int:
    return ping(depth - 1) if depth > 0 else fall()


async def test_a_recursion_without_end_is_told(failed: Any) -> None:
    (attempt,) = await failed(recurse)
    assert attempt.error_type == "RecursionError"
    assert "[Previous line repeated " in attempt.traceback
    assert attempt.traceback.endswith("RecursionError: maximum recursion depth exceeded\n")


async def test_a_long_traceback_keeps_its_beginning_and_its_end(failed: Any) -> None:
    (attempt,) = await failed(lambda: ping(900))
    assert MAX_TRACEBACK_BYTES - 8 <= len(attempt.traceback.encode()) <= MAX_TRACEBACK_BYTES
    assert attempt.traceback.startswith("Traceback (most recent call last):\n")
    assert " characters left out ...\n" in attempt.traceback
    assert attempt.traceback.endswith("ValueError: no luck\n")


def test_of_too_many_frames_the_first_and_the_last_are_told() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 6000)
    try:
        ping(5000)
    except ValueError as error:
        text = traceback_of(error)
    finally:
        sys.setrecursionlimit(limit)
    assert text is not None
    # Besides them, this test's frame and that of what they end in.
    assert text.count("in ping") + text.count("in pong") == MAX_FRAMES - 2
    assert f"  ... {5002 + 2 - MAX_FRAMES} frames left out ...\n" in text
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: no luck\n")


async def test_groups_within_groups_are_told_to_a_depth(failed: Any) -> None:
    async def handler() -> None:
        error: Exception = ValueError("no luck")
        for _ in range(5000):
            error = ExceptionGroup("within", [error])
        raise error

    (attempt,) = await failed(handler)
    assert attempt.error_type == "ExceptionGroup"
    assert "... (max_group_depth is 10)" in attempt.traceback


async def test_an_exception_without_words_has_a_traceback(failed: Any) -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    async def handler() -> None:
        raise Wordless

    (attempt,) = await failed(handler)
    assert attempt.error_type.endswith(".<locals>.Wordless")
    assert attempt.failure_reason == "Wordless"
    assert attempt.traceback.endswith(".<locals>.Wordless: <exception str() failed>\n")


async def test_an_exception_that_cannot_be_printed_fails_the_attempt(failed: Any) -> None:
    class Unprintable(Exception):
        def __getattribute__(self, name: str) -> object:
            if name == "__notes__":
                raise ValueError("no notes")
            return super().__getattribute__(name)

    async def handler() -> None:
        raise Unprintable("no luck")

    (attempt,) = await failed(handler)
    assert (attempt.failure_reason, attempt.traceback) == ("Unprintable: no luck", None)
    assert attempt.error_type.endswith(".<locals>.Unprintable")


async def test_text_the_store_cannot_hold_is_replaced(failed: Any, caplog: pytest.LogCaptureFixture) -> None:
    # What is captured of the log has to reach another process as UTF-8.
    caplog.set_level(logging.CRITICAL, logger="flowfabric.worker")

    async def handler() -> None:
        odd = type("Odd", (Exception,), {"__module__": "app\0\ud800"})
        raise odd("nul \0, half \udfff")

    (attempt,) = await failed(handler)
    told, module = "nul \N{REPLACEMENT CHARACTER}, half ?", "app\N{REPLACEMENT CHARACTER}?"
    assert (attempt.error_type, attempt.failure_reason) == (f"{module}.Odd", f"Odd: {told}")
    assert attempt.traceback.endswith(f"{module}.Odd: {told}\n")


async def test_a_stop_of_an_iteration_in_a_thread_tells_where(failed: Any) -> None:
    def handler() -> None:
        next(iter(()))

    (attempt,) = await failed(handler)
    assert attempt.error_type == "RuntimeError"
    assert "in handler\n" in attempt.traceback
    assert attempt.traceback.endswith("RuntimeError: the handler raised StopIteration\n")
    assert "flowfabric" not in attempt.traceback


async def test_a_panic_keeps_its_exception(failed: Any) -> None:
    def handler() -> None:
        sys.exit("enough")

    (attempt,) = await failed(handler)
    assert (attempt.error_type, attempt.failure_reason) == ("SystemExit", "handler panicked: SystemExit: enough")
    assert attempt.traceback.endswith("SystemExit: enough\n")


async def test_a_payload_and_a_result_that_do_not_fit_keep_the_exception_without_frames_of_the_worker(
    failed: Any,
) -> None:
    async def handler(a: int) -> None: ...

    async def give() -> int:
        return "no number"  # type: ignore[return-value]

    for attempts in (await failed(handler, a="one"), await failed(give)):
        (attempt,) = attempts
        assert attempt.error_type == "flowfabric.model.errors.InvalidInputError"
        assert attempt.traceback.startswith("flowfabric.model.errors.InvalidInputError: invalid_input: task ")
