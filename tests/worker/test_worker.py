"""What a worker makes of executions and their handlers."""

import asyncio
import sys
import threading
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.states import TerminalOutcome
from flowfabric.worker.context import Context
from flowfabric.worker.outcome import NoRetry
from flowfabric.worker.worker import Worker

RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1}}}


async def test_a_result_is_kept_and_can_be_waited_for(engine: Engine, start_worker: Any, submit: Any) -> None:
    async def add(a: int, b: int) -> int:
        return a + b

    runs = [await submit(a=n, b=n) for n in range(20)]
    await start_worker({"job": add})
    runs += [await submit(a=n, b=n) for n in range(20, 40)]
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs]
    assert [(one.outcome, one.result) for one in ended] == [
        (TerminalOutcome.SUCCESS, b"%d" % (2 * n)) for n in range(40)
    ]


async def test_a_worker_claims_only_into_free_slots(engine: Engine, start_worker: Any, submit: Any, rows: Any) -> None:
    gate, started = asyncio.Event(), asyncio.Semaphore(0)

    async def wait() -> None:
        started.release()
        await gate.wait()

    runs = [await submit() for _ in range(10)]
    worker = await start_worker({"job": wait}, concurrency=3)
    for _ in range(3):
        await started.acquire()
    assert worker.running == len(await rows.of("execution", ownership_state="leased")) == 3
    gate.set()
    for run in runs:
        await engine.wait_for_ending(run, timeout=60)


async def test_a_plain_function_runs_in_a_thread(engine: Engine, start_worker: Any, submit: Any) -> None:
    def where(ctx: Context) -> str:
        ctx.from_thread(ctx.progress(50, "half"))
        return threading.current_thread().name

    await start_worker({"job": where})
    run = await submit()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert ended.result is not None
    assert ended.result.startswith(b'"flowfabric-handler')


async def test_plain_functions_run_side_by_side(engine: Engine, start_worker: Any, submit: Any) -> None:
    together = threading.Barrier(4)

    def meet() -> int:
        return together.wait(timeout=60)

    await start_worker({"job": meet}, concurrency=4)
    runs = [await submit() for _ in range(4)]
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs]
    assert sorted(one.result or b"" for one in ended) == [b"0", b"1", b"2", b"3"]


async def test_a_handler_sees_its_run(engine: Engine, start_worker: Any, given: Any, rows: Any) -> None:
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


async def test_a_failed_attempt_is_tried_again(engine: Engine, start_worker: Any, submit: Any, attempts: Any) -> None:
    async def third_time(ctx: Context) -> str:
        if ctx.retry_count < 2:
            raise ValueError("not yet")
        return f"{ctx.attempt_index} {ctx.attempt_type}"

    await start_worker({"job": third_time})
    run = await submit(policy=RETRIES)
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b'"2 retry"')
    told = [(one["attempt_state"], one["failure_reason"], one["failure_category"]) for one in await attempts(run)]
    assert told == [("ended_failure", "ValueError: not yet", "handler_error")] * 2 + [("ended_success", None, None)]


async def ended_badly(engine: Engine, attempts: Any, run: Any) -> tuple[Any, ...]:
    ended = await engine.wait_for_ending(run, timeout=60)
    assert ended.outcome is TerminalOutcome.FAILED
    tried = await attempts(run)
    return ended.reason, tried[-1]["failure_category"], len(tried)


async def test_a_failure_tells_its_causes(engine: Engine, start_worker: Any, submit: Any, attempts: Any) -> None:
    async def fall() -> None:
        raise RuntimeError("no luck") from KeyError("key")

    await start_worker({"job": fall})
    reason = "RuntimeError: no luck: KeyError: 'key'"
    assert await ended_badly(engine, attempts, await submit()) == (reason, "handler_error", 1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NoRetry("never"), "NoRetry: never"),
        (
            ExceptionGroup("several", [ValueError("no"), NoRetry("never")]),
            "ExceptionGroup: several: ValueError: no; NoRetry: never",
        ),
    ],
)
async def test_a_permanent_error_is_not_tried_again(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any, error: Exception, reason: str
) -> None:
    async def refuse() -> None:
        raise error

    await start_worker({"job": refuse})
    run = await submit(policy=RETRIES)
    assert await ended_badly(engine, attempts, run) == (reason, "permanent", 1)


@pytest.mark.parametrize("permanent", [False, True])
async def test_groups_within_groups_without_end_fail_the_attempt(
    engine: Engine,
    start_worker: Any,
    submit: Any,
    attempts: Any,
    permanent: bool,  # noqa: FBT001
) -> None:
    async def fall() -> None:
        error: Exception = NoRetry("never") if permanent else ValueError("no luck")
        for _ in range(5000):
            error = ExceptionGroup("within", [error])
        raise error

    await start_worker({"job": fall})
    reason, category, _ = await ended_badly(engine, attempts, await submit())
    assert reason.startswith("ExceptionGroup: within: ExceptionGroup: within: ")
    assert category == ("permanent" if permanent else "handler_error")


async def test_an_error_without_words_fails_too(engine: Engine, start_worker: Any, submit: Any, attempts: Any) -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    async def fall() -> None:
        raise Wordless

    await start_worker({"job": fall})
    assert await ended_badly(engine, attempts, await submit()) == ("Wordless", "handler_error", 1)


async def test_only_a_thread_may_wait_for_a_call(engine: Engine, start_worker: Any, submit: Any, attempts: Any) -> None:
    async def confuse(ctx: Context) -> None:
        ctx.from_thread(ctx.progress(1))

    await start_worker({"job": confuse})
    reason = "TypeError: from_thread: is for `def` handlers, which run in threads; here, await the call itself"
    assert await ended_badly(engine, attempts, await submit()) == (reason, "handler_error", 1)


async def test_a_kind_without_a_handler_stays_queued_for_a_worker_that_has_one(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any
) -> None:
    async def job() -> str:
        return "done"

    await start_worker({"job": job})
    newer = await submit(kind="newer")
    await engine.wait_for_ending(await submit(), timeout=60)
    assert await engine.read_execution_state(newer) == "waiting"
    assert await attempts(newer) == []
    kinds = [reason.kind for reason in (await engine.explain(newer)).reasons]
    assert kinds == ["queued", "no_worker"]
    await start_worker({"job": job, "newer": job})
    ended = await engine.wait_for_ending(newer, timeout=60)
    assert (ended.outcome, ended.result) == ("success", b'"done"')


async def test_a_worker_without_handlers_takes_nothing(
    engine: Engine, start_worker: Any, submit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None: ...

    run = await submit()
    idle = await start_worker({})
    await engine.wait_for_ending(await submit_elsewhere(start_worker, submit, job), timeout=60)
    assert await engine.read_execution_state(run) == "waiting"
    assert f"worker {idle.worker_instance_id} has no handlers and takes no work" in caplog.messages
    assert (await engine.list_workers()).entries[0].kinds is not None


async def submit_elsewhere(start_worker: Any, submit: Any, job: Any) -> Any:
    """A run of another kind, which another worker takes."""
    await start_worker({"other": job})
    return await submit(kind="other")


@pytest.mark.parametrize("namespace", [None, "tests"])
async def test_a_worker_serves_its_namespace_or_all(
    engine: Engine, start_worker: Any, given: Any, namespace: str | None
) -> None:
    async def job(a: int) -> None: ...

    theirs = await given.created(namespace="theirs", priority=9)
    worker = await start_worker({"job": job}, namespace=namespace)
    await engine.wait_for_ending(await given.created(), timeout=60)
    assert (await engine.read_execution_state(theirs) == "waiting") == (namespace is not None)
    (entry,) = (await engine.list_workers()).entries
    assert (entry.worker_instance_id, entry.kinds) == (worker.worker_instance_id, ("job",))
    assert (entry.namespace, entry.serves_all_namespaces) == (namespace or "default", namespace is None)


async def test_a_payload_that_does_not_fit_fails(engine: Engine, start_worker: Any, submit: Any, attempts: Any) -> None:
    called = False

    async def count(a: int) -> None:
        nonlocal called
        called = True

    await start_worker({"job": count})
    reason, category, _ = await ended_badly(engine, attempts, await submit(a="one"))
    assert (reason, category) == (
        "InvalidInputError: invalid_input: task 'count', payload: does not fit its parameters: "
        "Expected `int`, got `str` - at `$.a`",
        "extractor_payload_decode",
    )
    assert not called


async def test_a_result_that_json_cannot_carry_fails(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any
) -> None:
    async def give() -> object:
        return object()

    await start_worker({"job": give})
    reason, category, _ = await ended_badly(engine, attempts, await submit())
    assert reason.startswith("task 'give', result: expected object, got <object object at ")
    assert reason.endswith("(object): Unable to serialize unknown type: <class 'object'>")
    assert category == "permanent"


def leave() -> None:
    sys.exit("enough")


async def leave_async() -> None:
    leave()


@pytest.mark.parametrize("handler", [leave, leave_async])
async def test_a_handler_cannot_end_the_worker(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any, handler: Any
) -> None:
    async def fine() -> None: ...

    await start_worker({"job": handler, "fine": fine})
    reason = "handler panicked: SystemExit: enough"
    assert await ended_badly(engine, attempts, await submit()) == (reason, "handler_panic", 1)
    ended = await engine.wait_for_ending(await submit(kind="fine"), timeout=60)
    assert ended.outcome is TerminalOutcome.SUCCESS


async def test_the_cancellation_of_something_else_is_a_failure(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any
) -> None:
    async def wait() -> None:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    await start_worker({"job": wait})
    assert await ended_badly(engine, attempts, await submit()) == ("CancelledError", "handler_error", 1)


async def test_several_lanes_are_served(engine: Engine, start_worker: Any, given: Any) -> None:
    async def lane(ctx: Context) -> str:
        return ctx.lane_id

    await start_worker({"job": lane}, lanes=["one", "two"])
    runs = [await given.created(lane_id=name) for name in ("one", "two")]
    assert [(await engine.wait_for_ending(run, timeout=60)).result for run in runs] == [b'"one"', b'"two"']


async def test_a_lane_that_is_not_served_is_left_alone(engine: Engine, start_worker: Any, given: Any) -> None:
    async def job() -> None: ...

    await start_worker({"job": job})
    other = await given.created(lane_id="other")
    await engine.wait_for_ending(await given.created(), timeout=60)
    assert await engine.read_execution_state(other) == "waiting"


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"threads": 0},
        {"poll_interval": 0},
        {"lanes": []},
        {"lanes": [f"lane-{n}" for n in range(65)]},
        {"lease_ttl": 0},
        {"concurrency": "4"},
        {"concurrency": True},
        {"threads": 1.5},
    ],
)
async def test_a_worker_that_cannot_work_is_refused(engine: Engine, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="at least "):
        Worker(engine, **{"lanes": ["default"], "handlers": {}, **wrong})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"lanes": "mail"}, "lanes: [^,]*, got 'mail'"),
        ({"lanes": None}, "lanes: "),
        ({"lanes": [5]}, "lane_id: must be text"),
        ({"capabilities": "gpu"}, "capabilities: [^,]*, got 'gpu'"),
        ({"handlers": [print]}, "handlers: expected functions by kind"),
        ({"handlers": {"job": "print"}}, "handlers: expected functions by kind"),
        ({"worker_id": 5}, "worker_id: must be text"),
        ({"namespace": 5}, "namespace: must be text"),
    ],
    ids=["lanes", "no lanes", "number", "capabilities", "list", "name", "worker_id", "namespace"],
)
async def test_a_worker_told_something_of_another_kind_is_refused(
    engine: Engine, wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"invalid_input: {told}"):
        Worker(engine, **{"lanes": ["default"], "handlers": {}, **wrong})
    with pytest.raises(InvalidInputError, match="drain: expected seconds"):
        Worker(engine, lanes=["default"], handlers={}, drain="30")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [list, tuple, set, iter], ids=["list", "tuple", "set", "iterator"])
async def test_lanes_and_capabilities_come_as_any_collection(engine: Engine, kind: Any) -> None:
    worker = Worker(engine, lanes=kind(["b", "a"]), capabilities=kind(["gpu", "cpu"]), handlers={})
    assert sorted(worker.lanes) == ["a", "b"]
    assert worker.capabilities == ("cpu", "gpu")


async def test_a_handler_whose_types_are_unknown_is_refused_at_the_start(engine: Engine) -> None:
    async def job(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(
        InvalidInputError, match=r"task 'job': an annotation cannot be resolved \(name 'Nowhere' is not"
    ):
        async with Worker(engine, lanes=["default"], handlers={"job": job}):
            pass


async def test_the_log_tells_of_a_retry_after_the_end_of_the_calendar(
    engine: Engine, start_worker: Any, submit: Any, eventually: Any, caplog: Any
) -> None:
    async def job() -> None:
        raise ValueError("no luck")

    backoff = {"type": "fixed", "delay_ms": 2**52}
    run = await submit(policy={"retry_policy": {"max_retries": 1, "backoff": backoff}})
    worker = await start_worker({"job": job})
    await eventually(lambda: f"{run} (job) failed in attempt 1 and is retried at " in caplog.text)
    await eventually(lambda: worker.running == 0)
    assert " ms since the epoch: ValueError: no luck" in caplog.text
