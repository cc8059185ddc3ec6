"""Which executions a worker claims, how it runs their handlers, and what becomes of their results and errors."""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fixtures import Attempts, Eventually, Given, Rows, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.states import TerminalOutcome
from flowfabric.worker.context import Context
from flowfabric.worker.outcome import NoRetry
from flowfabric.worker.worker import Worker

RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1}}}


async def test_a_result_is_stored_and_can_be_waited_for(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    async def add(a: int, b: int) -> int:
        return a + b

    runs = [await submit(a=n, b=n) for n in range(10)]
    await start_worker({"job": add})
    runs += [await submit(a=n, b=n) for n in range(10, 20)]
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs]
    assert [(one.outcome, one.result) for one in ended] == [
        (TerminalOutcome.SUCCESS, b"%d" % (2 * n)) for n in range(20)
    ]


async def test_a_worker_claims_only_into_free_slots(
    engine: Engine, start_worker: StartWorker, submit: Submit, rows: Rows
) -> None:
    gate, started = asyncio.Event(), asyncio.Semaphore(0)

    async def wait() -> None:
        started.release()
        await gate.wait()

    runs = [await submit() for _ in range(5)]
    worker = await start_worker({"job": wait}, concurrency=3, reconcile=False)
    for _ in range(3):
        await started.acquire()
    assert worker.running == len(await rows.of("execution", ownership_state="leased")) == 3
    gate.set()
    for run in runs:
        await engine.wait_for_ending(run, timeout=60)


async def test_plain_functions_run_side_by_side_in_threads(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    together = threading.Barrier(4)

    def meet(ctx: Context) -> str:
        together.wait(timeout=60)
        ctx.from_thread(ctx.progress(50, "half"))
        return threading.current_thread().name

    await start_worker({"job": meet}, concurrency=4, reconcile=False)
    runs = [await submit() for _ in range(4)]
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs]
    threads = {one.result or b"" for one in ended}
    assert len(threads) == 4
    assert all(name.startswith(b'"flowfabric-handler') for name in threads)


async def test_a_handler_sees_its_run(engine: Engine, start_worker: StartWorker, given: Given, rows: Rows) -> None:
    seen: list[Any] = []

    async def look(ctx: Context) -> None:
        await ctx.progress(40, "under way")
        seen.extend([ctx.execution_id, ctx.execution_kind, ctx.lane_id, ctx.attempt_index, ctx.attempt_type])
        seen.extend([ctx.retry_count, ctx.priority, ctx.tags, ctx.input_payload, ctx.lease_epoch])
        assert ctx.is_lease_healthy()
        assert ctx.consecutive_renewal_failures == 0
        assert ctx.fence.lease_epoch == ctx.lease_epoch
        assert ctx.worker_instance_id == "pool-1"

    run = await given.created(input_payload=b"\x00", tags={"app.a": "b"}, priority=3)
    await start_worker({"job": look}, worker_id="pool", worker_instance_id="pool-1")
    await engine.wait_for_ending(run, timeout=60)
    assert seen == [run, "job", "default", 0, "initial", 0, 3, {"app.a": "b"}, b"\x00", 1]
    row = await rows.execution(run)
    assert (row["progress_pct"], row["progress_message"]) == (40, "under way")


# Failures.


async def test_a_failed_attempt_is_retried(
    engine: Engine, start_worker: StartWorker, submit: Submit, attempts: Attempts
) -> None:
    async def third_time(ctx: Context) -> str:
        if ctx.retry_count < 2:
            raise ValueError("not yet")
        return f"{ctx.attempt_index} {ctx.attempt_type}"

    await start_worker({"job": third_time})
    run = await submit(policy=RETRIES)
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b'"2 retry"')
    stored = [(one["attempt_state"], one["failure_reason"], one["failure_category"]) for one in await attempts(run)]
    assert stored == [("ended_failure", "ValueError: not yet", "handler_error")] * 2 + [("ended_success", None, None)]


class Wordless(Exception):
    """An exception that has no text."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Failing(NamedTuple):
    """A handler that fails, and how its run ends."""

    handler: Callable[..., Any]
    reason: str
    """The begin of the reason."""
    category: str
    policy: Any = None


def raising(error: Callable[[], BaseException]) -> Callable[[], Any]:
    async def handler() -> None:
        raise error()

    return handler


def nested(error: Exception) -> Exception:
    for _ in range(5000):
        error = ExceptionGroup("within", [error])
    return error


def with_cause() -> BaseException:
    error = RuntimeError("no luck")
    error.__cause__ = KeyError("key")
    return error


class Unreadable(Exception):
    """Its cause cannot be read."""

    @property
    def __cause__(self) -> BaseException | None:
        raise RuntimeError

    @__cause__.setter
    def __cause__(self, value: BaseException | None) -> None: ...


class UnreadableGroup(ExceptionGroup[Exception]):
    """Neither its message nor its members can be read."""

    @property
    def message(self) -> str:
        raise RuntimeError

    @property
    def exceptions(self) -> Any:
        raise RuntimeError


async def use_from_thread(ctx: Context) -> None:
    ctx.from_thread(ctx.progress(1))


async def cancel_something_else() -> None:
    inner = asyncio.ensure_future(asyncio.Event().wait())
    inner.cancel()
    await inner


async def return_an_object() -> object:
    return object()


def leave() -> None:
    sys.exit("enough")


async def leave_async() -> None:
    leave()


FAILING = {
    "with a cause": Failing(raising(with_cause), "RuntimeError: no luck: KeyError: 'key'", "handler_error"),
    "no retry": Failing(raising(lambda: NoRetry("never")), "NoRetry: never", "permanent", RETRIES),
    "no retry in a group": Failing(
        raising(lambda: ExceptionGroup("several", [ValueError("no"), NoRetry("never")])),
        "ExceptionGroup: several: ValueError: no; NoRetry: never",
        "permanent",
        RETRIES,
    ),
    "nested groups": Failing(
        raising(lambda: nested(ValueError("no luck"))), "ExceptionGroup: within: ExceptionGroup: ", "handler_error"
    ),
    "no retry in nested groups": Failing(
        raising(lambda: nested(NoRetry("never"))), "ExceptionGroup: within: ExceptionGroup: ", "permanent", RETRIES
    ),
    "an unreadable cause": Failing(raising(Unreadable), "Unreadable", "handler_error"),
    "an unreadable group": Failing(
        raising(lambda: UnreadableGroup("x", [ValueError()])), "UnreadableGroup", "handler_error"
    ),
    "without a text": Failing(raising(Wordless), "Wordless", "handler_error"),
    "from_thread in a coroutine": Failing(
        use_from_thread,
        "TypeError: from_thread: is for `def` handlers, which run in threads; here, await the call itself",
        "handler_error",
    ),
    "a cancellation that is not the worker's": Failing(cancel_something_else, "CancelledError", "handler_error"),
    "a result that JSON cannot represent": Failing(
        return_an_object, "task 'return_an_object', result: expected object, got <object object at ", "permanent"
    ),
    "exit in a thread": Failing(leave, "handler panicked: SystemExit: enough", "handler_panic"),
    "exit in a coroutine": Failing(
        leave_async,
        "handler panicked: SystemExit: enough (sys.exit ends the attempt, not the worker)",
        "handler_panic",
    ),
}


async def test_a_failure_stores_its_reason_and_leaves_the_worker_at_work(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    attempts: Attempts,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fine() -> None: ...

    worker = await start_worker(
        {"fine": fine, **{kind: case.handler for kind, case in FAILING.items()}}, reconcile=False
    )
    runs = {kind: await submit(kind=kind, policy=case.policy) for kind, case in FAILING.items()}
    wrong: list[Any] = []
    for kind, run in runs.items():
        ended = await engine.wait_for_ending(run, timeout=60)
        tried = await attempts(run)
        if (ended.outcome, tried[-1]["failure_category"], len(tried)) != ("failed", FAILING[kind].category, 1):
            wrong.append((kind, ended.outcome, tried))
        if not (ended.reason or "").startswith(FAILING[kind].reason):
            wrong.append((kind, ended.reason, FAILING[kind].reason))
    assert wrong == []
    ended = await engine.wait_for_ending(await submit(kind="fine"), timeout=60)
    assert ended.outcome is TerminalOutcome.SUCCESS
    await eventually(lambda: worker.running == 0)
    failed = [record.getMessage() for record in caplog.records if " failed in attempt 1 for good: " in record.message]
    assert len(failed) == len(FAILING)


async def test_a_run_whose_failure_cannot_be_logged_frees_its_worker(
    engine: Engine, start_worker: StartWorker, submit: Submit, eventually: Eventually
) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(f"no space left on device: {record}")

    async def fail() -> None:
        raise ValueError

    logger, broken = logging.getLogger("flowfabric.worker.reports"), Broken()
    worker = await start_worker({"job": fail}, concurrency=1)
    logger.addHandler(broken)
    try:
        for _ in range(2):
            assert (await engine.wait_for_ending(await submit(), timeout=60)).outcome is TerminalOutcome.FAILED
            await eventually(lambda: worker.running == 0, timeout=10)
    finally:
        logger.removeHandler(broken)


async def test_the_cancellation_inside_a_timeout_is_not_part_of_the_reason(
    engine: Engine, start_worker: Any, submit: Any
) -> None:
    async def time_out() -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    async def report_timeout() -> None:
        try:
            await time_out()
        except TimeoutError as late:
            raise RuntimeError("no luck") from late

    await start_worker({"job": time_out, "reported": report_timeout}, reconcile=False)
    runs = await submit(), await submit(kind="reported")
    reasons = [(await engine.wait_for_ending(run, timeout=60)).reason for run in runs]
    assert reasons == ["TimeoutError", "RuntimeError: no luck: TimeoutError"]


async def test_a_payload_that_does_not_fit_fails_without_calling_the_handler(
    engine: Engine, start_worker: StartWorker, submit: Submit, attempts: Attempts
) -> None:
    called = False

    async def count(a: int) -> None:
        nonlocal called
        called = True

    await start_worker({"job": count}, reconcile=False)
    run = await submit(a="one")
    ended = await engine.wait_for_ending(run, timeout=60)
    (attempt,) = await attempts(run)
    assert (ended.reason, attempt["failure_category"]) == (
        "InvalidInputError: invalid_input: task 'count', payload: does not fit its parameters: "
        "Expected `int`, got `str` - at `$.a`",
        "extractor_payload_decode",
    )
    assert not called


async def test_a_retry_after_the_year_9999_is_logged(
    engine: Engine, start_worker: StartWorker, submit: Submit, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None:
        raise ValueError("no luck")

    backoff = {"type": "fixed", "delay_ms": 2**52}
    run = await submit(policy={"retry_policy": {"max_retries": 1, "backoff": backoff}})
    worker = await start_worker({"job": job}, reconcile=False)
    await eventually(lambda: f"{run} (job) failed in attempt 1 and is retried at " in caplog.text)
    await eventually(lambda: worker.running == 0)
    assert " ms since the epoch: ValueError: no luck" in caplog.text


# What a worker claims.


async def test_a_kind_without_a_handler_stays_queued_for_a_worker_that_has_one(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    attempts: Attempts,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def job() -> str:
        return "done"

    newer = await submit(kind="newer")
    idle = await start_worker({}, reconcile=False)
    logged = f"worker {idle.worker_instance_id} has no handlers and claims nothing"
    await eventually(lambda: logged in caplog.messages)
    assert (await engine.list_workers()).entries[0].kinds == ()
    await start_worker({"job": job})
    await engine.wait_for_ending(await submit(), timeout=60)
    assert await engine.read_execution_state(newer) == "waiting"
    assert await attempts(newer) == []
    kinds = [reason.kind for reason in (await engine.explain(newer)).reasons]
    assert kinds == ["queued", "no_worker"]
    await start_worker({"job": job, "newer": job}, reconcile=False)
    ended = await engine.wait_for_ending(newer, timeout=60)
    assert (ended.outcome, ended.result) == ("success", b'"done"')


async def test_a_worker_claims_from_its_lanes_and_its_namespace(
    engine: Engine, start_worker: StartWorker, given: Given
) -> None:
    async def lane(ctx: Context) -> str:
        return ctx.lane_id

    theirs = await given.created(namespace="theirs", lane_id="one", priority=9)
    elsewhere = await given.created(lane_id="other", priority=9)
    worker = await start_worker({"job": lane}, lanes=["one", "two"], reconcile=False)
    runs = [await given.created(lane_id=name) for name in ("one", "two")]
    assert [(await engine.wait_for_ending(run, timeout=60)).result for run in runs] == [b'"one"', b'"two"']
    for run in (theirs, elsewhere):
        assert await engine.read_execution_state(run) == "waiting"
    every = await start_worker({"job": lane}, lanes=["one"], namespace=None, reconcile=False)
    assert (await engine.wait_for_ending(theirs, timeout=60)).outcome is TerminalOutcome.SUCCESS
    entries = {str(entry.worker_instance_id): entry for entry in (await engine.list_workers()).entries}
    listed = [entries[each.worker_instance_id] for each in (worker, every)]
    assert [entry.kinds for entry in listed] == [("job",), ("job",)]
    assert [(entry.namespace, entry.serves_all_namespaces) for entry in listed] == [("tests", False), ("default", True)]


# Options.

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"concurrency": 0}, "concurrency: must be a whole number of at least 1, got 0"),
    ({"concurrency": "4"}, "concurrency: must be a whole number of at least 1, got '4'"),
    ({"concurrency": True}, "concurrency: must be a whole number of at least 1, got True"),
    ({"threads": 0}, "threads: must be a whole number of at least 1, got 0"),
    ({"threads": 1.5}, "threads: must be a whole number of at least 1, got 1.5"),
    ({"poll_interval": 0}, "poll_interval: must be at least 0.001 seconds"),
    ({"lease_ttl": 0}, "lease_ttl: must be at least 0.001 seconds"),
    ({"drain": "30"}, "drain: expected seconds or a timedelta, got '30'"),
    ({"lanes": []}, "lanes: must name at least 1 and at most 64 lanes, got 0"),
    ({"lanes": [f"lane-{n}" for n in range(65)]}, "lanes: must name at least 1 and at most 64 lanes, got 65"),
    ({"lanes": "mail"}, "lanes: "),
    ({"lanes": None}, "lanes: "),
    ({"lanes": [5]}, "lane_id: "),
    ({"capabilities": "gpu"}, "capabilities: "),
    ({"handlers": [print]}, "handlers: expected functions by kind"),
    ({"handlers": {"job": "print"}}, "handlers: expected functions by kind"),
    ({"worker_id": 5}, "worker_id: "),
    ({"namespace": 5}, "namespace: "),
]


async def test_wrong_options_of_a_worker_are_refused(engine: Engine) -> None:
    accepted = []
    for options, text in WRONG:
        try:
            Worker(engine, **{"lanes": ["default"], "handlers": {}, **options})
        except InvalidInputError as refused:
            if str(refused).startswith(f"invalid_input: {text}"):
                continue
            accepted.append((options, str(refused)))
        else:
            accepted.append((options, "accepted"))
    assert accepted == []


async def test_lanes_and_capabilities_may_be_any_collection(engine: Engine) -> None:
    for kind in (list, tuple, set, iter):
        worker = Worker(engine, lanes=kind(["b", "a"]), capabilities=kind(["gpu", "cpu"]), handlers={})
        assert sorted(worker.lanes) == ["a", "b"]
        assert worker.capabilities == ("cpu", "gpu")


async def test_a_handler_with_an_undefined_annotation_is_refused_at_the_start(engine: Engine) -> None:
    async def job(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(
        InvalidInputError, match=r"task 'job': an annotation cannot be resolved \(name 'Nowhere' is not"
    ):
        async with Worker(engine, lanes=["default"], handlers={"job": job}):
            pass
