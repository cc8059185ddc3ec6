"""What an attempt stores of the exception that its handler raised."""

import asyncio
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

import pytest

from fixtures import StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.model.attempt import MAX_TRACEBACK_BYTES, Attempt
from flowfabric.worker.context import Context
from flowfabric.worker.errors import MAX_FRAMES, error_type_of, traceback_of

RETRIES = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}

Failed = Callable[[Mapping[str, Callable[..., Any]]], Awaitable[dict[str, Attempt]]]


@pytest.fixture
def failed(engine: Engine, start_worker: StartWorker, submit: Submit) -> Failed:
    """Run handlers that fail, and return the attempt of each by its name."""

    async def failed(handlers: Mapping[str, Callable[..., Any]]) -> dict[str, Attempt]:
        await start_worker(handlers, reconcile=False)
        runs = {name: await submit(kind=name) for name in handlers}
        attempts: dict[str, Attempt] = {}
        for name, run in runs.items():
            ended = await engine.wait_for_ending(run, timeout=60)
            (attempts[name],) = await engine.list_attempts(run)
            stored = (attempts[name].failure_reason, attempts[name].error_type, attempts[name].traceback)
            assert (ended.outcome, (ended.reason, ended.error_type, ended.traceback)) == ("failed", stored)
        return attempts

    return failed


def printed(error: BaseException) -> str:
    """An exception as Python prints it, without the frame that caught it."""
    assert error.__traceback__ is not None
    return "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next))


def caught(function: Callable[[], object]) -> str:
    """The exception of a call, as Python prints it."""
    try:
        function()
    except BaseException as error:
        return printed(error)
    raise AssertionError("nothing was raised")


async def caught_async(function: Callable[[], Any]) -> str:
    """The exception of a coroutine, as Python prints it."""
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


async def test_an_attempt_stores_the_traceback_that_python_prints_of_its_handler(failed: Failed) -> None:
    def coroutine(function: Callable[[], object]) -> Callable[[], Any]:
        async def handler() -> None:
            await asyncio.sleep(0)
            function()

        return handler

    in_threads = {f"{function.__name__} in a thread": function for function in SHAPES}
    in_coroutines = {f"{function.__name__} in a coroutine": coroutine(function) for function in SHAPES}
    attempts = await failed({**in_threads, **in_coroutines})
    expected = {name: caught(function) for name, function in in_threads.items()}
    expected |= {name: await caught_async(handler) for name, handler in in_coroutines.items()}
    assert [name for name in expected if attempts[name].traceback != expected[name]] == []
    assert [name for name in in_coroutines if "flowfabric" in (attempts[name].traceback or "")] == []


async def test_every_attempt_stores_its_own_exception(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    async def handler(ctx: Context) -> None:
        if ctx.attempt_index == 0:
            raise ValueError("first")
        raise KeyError("second")

    await start_worker({"job": handler})
    run = await submit(policy=RETRIES)
    await engine.wait_for_ending(run, timeout=60)
    first, second = await engine.list_attempts(run)
    assert (first.error_type, first.failure_reason) == ("ValueError", "ValueError: first")
    assert (first.traceback or "").endswith("ValueError: first\n")
    assert (second.error_type, second.failure_reason) == ("KeyError", "KeyError: 'second'")
    assert (second.traceback or "").endswith("KeyError: 'second'\n")


class Wordless(Exception):
    """An exception that has no text."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Unprintable(Exception):
    """An exception that cannot be printed."""

    def __getattribute__(self, name: str) -> object:
        if name == "__notes__":
            raise ValueError("no notes")
        return super().__getattribute__(name)


async def in_a_task_group() -> None:
    async def call(function: Callable[[], object]) -> None:
        function()

    async with asyncio.TaskGroup() as group:
        group.create_task(call(fall))
        group.create_task(call(with_notes))


def with_a_local_secret() -> NoReturn:
    local = "hunter2" * 2
    raise ValueError(len(local))


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


def ping(depth: int) -> int:
    return pong(depth - 1)


def pong(depth: int) -> int:
    return ping(depth - 1) if depth > 0 else fall()


def deep() -> int:
    return ping(900)


async def nested_groups() -> None:
    error: Exception = ValueError("no luck")
    for _ in range(5000):
        error = ExceptionGroup("within", [error])
    raise error


async def wordless() -> None:
    raise Wordless


async def unprintable() -> None:
    raise Unprintable("no luck")


async def with_odd_text() -> None:
    odd = type("Odd", (Exception,), {"__module__": "app\0\ud800"})
    raise odd("nul \0, half \udfff")


def stop_iteration() -> None:
    next(iter(()))


def leave() -> None:
    sys.exit("enough")


async def with_a_parameter(a: int) -> None: ...


async def wrong_result() -> int:
    return "no number"  # type: ignore[return-value]


async def test_any_exception_is_stored_in_a_form_that_can_be_read(
    failed: Failed, caplog: pytest.LogCaptureFixture
) -> None:
    # The log is captured by another process, as UTF-8.
    caplog.set_level(logging.CRITICAL, logger="flowfabric.worker")
    unusual = "nul \N{REPLACEMENT CHARACTER}, half ?", "app\N{REPLACEMENT CHARACTER}?"
    too_deep = "... (max_group_depth is 10)"
    invalid = "flowfabric.model.errors.InvalidInputError"
    # The type, the begin of the reason, and texts of the traceback, of which the last one ends it.
    cases: dict[Callable[..., Any], tuple[str, str, tuple[str, ...]]] = {
        in_a_task_group: (
            "ExceptionGroup",
            "ExceptionGroup: ",
            (
                "ValueError: no luck",
                "KeyError: 'key'",
                "of two lines",
                "in fall",
                "in with_notes",
                "in in_a_task_group",
            ),
        ),
        recurse: ("RecursionError", "RecursionError: ", ("[Previous line repeated ", "depth exceeded\n")),
        nested_groups: ("ExceptionGroup", "ExceptionGroup: within: ExceptionGroup: within: ", (too_deep,)),
        wordless: (f"{__name__}.Wordless", "Wordless", (".Wordless: <exception str() failed>\n",)),
        with_odd_text: (
            f"{unusual[1]}.Odd",
            f"Odd: {unusual[0]}",
            (f"{unusual[1]}.Odd: {unusual[0]}\n",),
        ),
        stop_iteration: (
            "RuntimeError",
            "RuntimeError: the handler raised StopIteration",
            ("in stop_iteration\n", "RuntimeError: the handler raised StopIteration\n"),
        ),
        leave: ("SystemExit", "handler panicked: SystemExit: enough", ("SystemExit: enough\n",)),
        with_a_parameter: (invalid, "InvalidInputError: invalid_input: task ", (f"{invalid}: invalid_input: task ",)),
        wrong_result: (invalid, "task 'wrong_result', result: ", (f"{invalid}: invalid_input: task ",)),
        deep: ("ValueError", "ValueError: no luck", (" characters omitted ...\n", "ValueError: no luck\n")),
        with_a_local_secret: ("ValueError", "ValueError: 14", ("len(local)", "ValueError: 14\n")),
    }
    handlers: dict[str, Callable[..., Any]] = {function.__name__: function for function in (*cases, unprintable)}
    attempts = await failed(handlers)
    wrong = []
    for function, (error_type, reason, texts) in cases.items():
        attempt = attempts[function.__name__]
        printed_at = [(attempt.traceback or "").find(text) for text in texts]
        if (attempt.error_type, min(printed_at) >= 0) != (error_type, True):
            wrong.append((attempt.error_type, attempt.traceback))
        if not (attempt.failure_reason or "").startswith(reason):
            wrong.append((function.__name__, attempt.failure_reason))
        if texts[-1].endswith("\n") and not (attempt.traceback or "").endswith(texts[-1]):
            wrong.append((function.__name__, attempt.traceback))
    assert wrong == []
    shown = attempts["unprintable"]
    assert (shown.failure_reason, shown.traceback) == ("Unprintable: no luck", None)
    assert (shown.error_type or "").endswith(".Unprintable")
    long = attempts["deep"].traceback or ""
    assert MAX_TRACEBACK_BYTES - 8 <= len(long.encode()) <= MAX_TRACEBACK_BYTES
    assert long.startswith("Traceback (most recent call last):\n")
    assert "hunter2" not in (attempts["with_a_local_secret"].traceback or "")
    for name in ("stop_iteration", "in_a_task_group"):
        assert "flowfabric" not in (attempts[name].traceback or "")


def test_a_class_is_named_with_its_module() -> None:
    module = ModuleType("shop.errors")
    exec("class Declined(Exception):\n    class Inner(Exception): ...", vars(module))
    error = module.Declined.Inner("no")
    assert error_type_of(error) == "shop.errors.Declined.Inner"
    assert (traceback_of(error) or "").endswith("shop.errors.Declined.Inner: no\n")


def test_a_traceback_with_too_many_frames_shows_the_first_and_the_last() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 6000)
    try:
        ping(5000)
    except ValueError as error:
        text = traceback_of(error)
    finally:
        sys.setrecursionlimit(limit)
    assert text is not None
    # Besides them, the frame of this test and that of `fall`.
    assert text.count("in ping") + text.count("in pong") == MAX_FRAMES - 2
    assert f"  ... {5002 + 2 - MAX_FRAMES} frames omitted ...\n" in text
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: no luck\n")
