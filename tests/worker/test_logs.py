"""What a worker logs, and the log fields that name the run a line is about."""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import asyncpg
import pytest

from fixtures import Clock, Engines, Eventually, Given, IsSuspended, StartWorker, Submit
from flowfabric import log_fields
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId
from flowfabric.model.text import shown_time
from flowfabric.worker.context import Context
from flowfabric.worker.logs import LogFields, add_fields_to_records, current_run
from flowfabric.worker.reports import Reports
from flowfabric.worker.running import Running
from flowfabric.worker.worker import Worker

from .test_callback import wait_with
from .waiting import LONG_TTL_MS, Waiting

logger = logging.getLogger("app.orders")

NO_RUN = (None, None, None)


def fields(record: logging.LogRecord) -> tuple[Any, Any, Any]:
    given: Any = record
    return given.ff_execution_id, given.ff_attempt, given.ff_task


def logged(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[tuple[str, str]]:
    """The lines that workers logged, from a level on."""
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name.startswith("flowfabric.worker") and record.levelno >= level
        # On a busy machine the last claim may not be answered in time.
        if not record.getMessage().startswith("a claim was not answered")
    ]


@pytest.fixture
def factory() -> Iterator[Callable[..., logging.LogRecord]]:
    """Python's own record factory, restored at the end of the test."""
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    yield logging.LogRecord
    logging.setLogRecordFactory(before)


# The lines of a worker.


async def test_a_worker_logs_its_start_and_its_stop_but_not_each_success(
    engine: Engine, submit: Submit, caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None: ...

    caplog.set_level(logging.INFO)
    run = await submit()
    handlers = {"job": job, "mail": job}
    options: dict[str, Any] = {"concurrency": 7, "worker_instance_id": "w-1", "namespace": "tests"}
    async with Worker(engine, lanes=["default", "slow"], handlers=handlers, **options):
        await engine.wait_for_ending(run, timeout=60)
    begin, stops, stopped = logged(caplog)
    assert begin == ("INFO", "worker w-1 started: lanes default, slow; tasks job, mail; concurrency 7; namespace tests")
    assert stops == ("INFO", "worker w-1 stops: no handlers running")
    level, text = stopped
    assert (level, text.partition(" s: ")[2]) == ("INFO", "0 finished while it stopped, 0 handed back")
    caplog.clear()
    async with Worker(engine, lanes=["default"], handlers={f"task{n:02}": print for n in range(25)}):
        pass
    _, text = logged(caplog)[0]
    assert text.endswith("task18, task19 and 5 more; concurrency 64; every namespace")


async def test_the_start_and_the_end_of_each_run_are_logged_at_debug(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    is_suspended: IsSuspended,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def job() -> None: ...

    async def wait(ctx: Context) -> None:
        await ctx.suspend(keys=["ready"])

    caplog.set_level(logging.DEBUG, "flowfabric.worker")
    run, waiting = await submit(), await submit(kind="wait")
    worker = await start_worker({"job": job, "wait": wait})
    await engine.wait_for_ending(run, timeout=60)
    await is_suspended(waiting)
    await eventually(lambda: worker.running == 0)
    debug = [record for record in caplog.records if record.levelno == logging.DEBUG and fields(record) != NO_RUN]
    assert {fields(record) for record in debug} == {(run, 1, "job"), (waiting, 1, "wait")}
    texts = [record.getMessage() for record in debug]
    assert [text.partition(", ")[0] for text in texts if run in text] == [
        f"{run} (job) begins",
        f"{run} (job) succeeded in attempt 1",
    ]
    assert [text for text in texts if waiting in text] == [
        f"{waiting} (wait) begins, attempt 1",
        f"{waiting} (wait) is suspended in attempt 1",
    ]


async def test_a_takeover_is_a_warning_that_names_both_attempts(
    engine: Engine, start_worker: StartWorker, given: Given, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async def job(a: int) -> int:
        return a

    lost = await given.claimed(lease_ttl_ms=1000)
    await clock.advance(ms=1001)
    await start_worker({"job": job}, lease_ttl=LONG_TTL_MS / 1000)
    await engine.wait_for_ending(lost.execution_id, timeout=60)
    (record,) = [record for record in caplog.records if "is reclaimed" in record.getMessage()]
    text = f"{lost.execution_id} (job) is reclaimed as attempt 2: attempt 1 lost its lease"
    assert (record.levelname, record.getMessage()) == ("WARNING", text)
    assert fields(record) == (lost.execution_id, 2, "job")


async def test_an_attempt_that_was_handed_back_is_continued_without_a_warning(
    engine: Engine, given: Given, clock: Clock, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []
    gate = asyncio.Event()

    async def job(ctx: Context, a: int) -> int:
        attempts.append(ctx.attempt)
        await gate.wait()
        return a

    lost = await given.claimed(lease_ttl_ms=1000)
    await clock.advance(ms=1001)
    options: dict[str, Any] = {"lanes": ["default"], "handlers": {"job": job}, "lease_ttl": LONG_TTL_MS / 1000}
    async with Worker(engine, drain=0, **options):
        await eventually(lambda: attempts == [2])
    async with Worker(engine, **options):
        await eventually(lambda: attempts == [2, 2])
        gate.set()
        await engine.wait_for_ending(lost.execution_id, timeout=60)
    (warning,) = [text for level, text in logged(caplog) if level == "WARNING"]
    assert warning == f"{lost.execution_id} (job) is reclaimed as attempt 2: attempt 1 lost its lease"


async def test_a_retry_is_a_warning_with_its_time_and_a_failure_for_good_an_error(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    clock: Clock,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await clock.stop()
    retry_at = shown_time(await clock.now() + 60_000)

    def job() -> None:
        raise ValueError("no luck")

    async def is_delayed() -> bool:
        return await engine.read_execution_state(run) == "delayed"

    backoff = {"type": "fixed", "delay_ms": 60_000}
    run = await submit(policy={"retry_policy": {"max_retries": 1, "backoff": backoff}})
    worker = await start_worker({"job": job}, lease_ttl=LONG_TTL_MS / 1000)
    await eventually(is_delayed)
    await clock.advance(ms=60_001)
    await engine.wait_for_ending(run, timeout=60)
    await eventually(lambda: worker.running == 0)
    retried, failed = [record for record in caplog.records if "no luck" in record.getMessage()]
    assert (retried.levelname, retried.getMessage()) == (
        "WARNING",
        f"{run} (job) failed in attempt 1 and is retried at {retry_at}: ValueError: no luck",
    )
    assert (failed.levelname, failed.getMessage()) == (
        "ERROR",
        f"{run} (job) failed in attempt 2 for good: ValueError: no luck",
    )
    assert (fields(retried), fields(failed)) == ((run, 1, "job"), (run, 2, "job"))
    for record in (retried, failed):
        assert record.exc_info is not None
        assert record.exc_info[0] is ValueError
        assert (record.name, record.funcName) == ("flowfabric.worker.reports", "_log_failure")


async def test_the_log_says_whether_a_timed_out_attempt_is_retried(
    engine: Engine, start_worker: StartWorker, submit: Submit, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}
    timeout = {"timeout_policy": {"attempt_timeout_ms": 200}}
    retried, expired = await submit(kind="retried", policy={**timeout, **retry}), await submit(policy=timeout)
    handlers = {"retried": Waiting(), "job": Waiting()}
    worker = await start_worker(handlers, lease_ttl=LONG_TTL_MS / 1000, reconcile=False, poll_interval=0.05)
    for run in (retried, expired):
        await engine.wait_for_ending(run, timeout=60)
    await eventually(lambda: worker.running == 0)
    for run, kind, level, text in (
        (retried, "retried", "INFO", "is retried at 2"),
        (expired, "job", "ERROR", "has expired for good"),
    ):
        stopped, follows = [record for record in caplog.records if fields(record) == (run, 1, kind)]
        assert (stopped.levelname, stopped.getMessage()) == (
            "WARNING",
            f"{run} ({kind}) is stopped: its attempt timeout of 200 ms has passed",
        )
        assert follows.levelname == level
        assert follows.getMessage().startswith(f"{run} ({kind}) {text}")


async def test_a_lost_lease_is_a_warning_that_says_why(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    clock: Clock,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await clock.stop()
    waiting = Waiting()
    run = await submit()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False, concurrency=1)
    await eventually(lambda: waiting.contexts)
    await clock.advance(ms=LONG_TTL_MS + 1)
    assert await parts_of(engine).lease_expiry.mark_expired([run]) == 1
    await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
    (record,) = [record for record in caplog.records if "is stopped" in record.getMessage()]
    assert (record.levelname, record.getMessage()) == ("WARNING", f"{run} (job) is stopped: its lease has expired")
    assert fields(record) == (run, 1, "job")


async def test_a_cancel_during_a_suspend_is_no_warning(
    engine: Engine, engines: Engines, submit: Submit, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    async def cancel_and_wait(ctx: Context) -> None:
        await engine.cancel_execution(execution_id=ctx.execution_id, reason="no more")
        await ctx.wait_for_signal("go")

    # Without hints, the worker learns of the cancel only when it suspends.
    run, deaf = await submit(), await engines(listen=False)
    async with Worker(deaf, lanes=["default"], handlers={"job": cancel_and_wait}) as worker:
        await engine.wait_for_ending(run, timeout=60)
        await eventually(lambda: worker.running == 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_drain_logs_how_many_handlers_run_and_how_they_end(
    engine: Engine, submit: Submit, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gate = asyncio.Event()

    async def quick() -> None:
        await gate.wait()

    async def fail() -> None:
        await gate.wait()
        raise ValueError("no luck")

    waiting = Waiting()
    run = await submit()
    for kind in ("quick", "quick", "fail"):
        await submit(kind=kind)
    handlers: dict[str, Any] = {"job": waiting, "quick": quick, "fail": fail}
    worker = Worker(engine, lanes=["default"], handlers=handlers, drain=0.5, worker_instance_id="w-1")
    async with worker:
        await eventually(lambda: worker.running == 4)
        asyncio.get_running_loop().call_later(0.05, gate.set)
    _, *lines, stopped = [line for line in logged(caplog) if "no luck" not in line[1]]
    assert lines == [
        ("INFO", "worker w-1 stops: 4 handlers running, waiting up to 0.5 s"),
        ("INFO", "worker w-1 has waited 0.5 s: cancelling 1 handler"),
        ("INFO", f"{run} (job) is handed back: any worker can claim it now"),
    ]
    level, text = stopped
    assert (level, text.partition(" s: ")[2]) == ("INFO", "3 finished while it stopped, 1 handed back")
    (handed_back,) = [record for record in caplog.records if "handed back: any" in record.getMessage()]
    assert fields(handed_back) == (run, 1, "job")


async def test_a_line_has_the_fields_of_the_run_it_is_about_whichever_run_writes_it(
    engine: Engine, given: Given, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    writer, cancelled = await given.run(), await given.run()
    await engine.cancel_execution(execution_id=cancelled.execution_id, reason="not wanted")
    released: list[Running] = []
    reports = Reports(engine, released.append)
    add_fields_to_records()
    caplog.set_level(logging.INFO)
    before = current_run.set(writer)
    try:
        reports.complete(Running(writer, 0.0), b"1")
        reports.complete(Running(cancelled, 0.0), b"1")
        await eventually(lambda: len(released) == 2)
    finally:
        current_run.reset(before)
    (record,) = [record for record in caplog.records if "was refused" in record.getMessage()]
    assert (record.levelname, fields(record)) == ("INFO", (cancelled.execution_id, 1, "job"))


# The fields of a user's own lines.


async def test_the_log_lines_of_a_handler_name_its_run_wherever_its_code_runs(
    engine: Engine, start_worker: StartWorker, submit: Submit, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app")
    fields_of_run: list[LogFields] = []

    async def child() -> None:
        logger.info("in a child task")

    async def job() -> None:
        logger.info("in a handler")
        await asyncio.gather(child(), asyncio.to_thread(logger.info, "in a thread of asyncio"))
        # Fields of a user are never refused.
        logger.info("with an extra", extra={"execution_id": "mine", "attempt": "mine", "task": "mine"})

    def plain(ctx: Context) -> None:
        logger.info("in a plain function")
        fields_of_run.append(log_fields())
        ctx.from_thread(child())

    run, in_thread = await submit(), await submit(kind="plain")
    await start_worker({"job": job, "plain": plain}, reconcile=False)
    for each in (run, in_thread):
        assert (await engine.wait_for_ending(each, timeout=60)).outcome == "success"
    logger.info("outside")
    records = [record for record in caplog.records if record.name == "app.orders"]
    assert {(record.getMessage(), fields(record)) for record in records} == {
        ("in a handler", (run, 1, "job")),
        ("in a child task", (run, 1, "job")),
        ("in a thread of asyncio", (run, 1, "job")),
        ("with an extra", (run, 1, "job")),
        ("in a plain function", (in_thread, 1, "plain")),
        ("in a child task", (in_thread, 1, "plain")),
        ("outside", NO_RUN),
    }
    (extra,) = [record.__dict__ for record in records if record.getMessage() == "with an extra"]
    assert [extra[name] for name in ("execution_id", "attempt", "task")] == ["mine"] * 3
    assert fields_of_run == [{"ff_execution_id": in_thread, "ff_attempt": 1, "ff_task": "plain"}]
    assert set(log_fields().values()) == {None}


async def test_the_log_lines_of_concurrent_handlers_do_not_mix(
    engine: Engine, start_worker: StartWorker, submit: Submit, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app")
    barrier = asyncio.Barrier(8)

    async def job(ctx: Context) -> None:
        for _ in range(3):
            await barrier.wait()
            logger.info("%s", ctx.execution_id)

    runs = [await submit() for _ in range(8)]
    await start_worker({"job": job}, concurrency=8, reconcile=False)
    for run in runs:
        await engine.wait_for_ending(run, timeout=60)
    lines = [record for record in caplog.records if record.name == "app.orders"]
    assert sorted(record.getMessage() for record in lines) == sorted(runs * 3)
    assert all(fields(record) == (record.getMessage(), 1, "job") for record in lines)


async def test_context_variables_of_one_run_are_not_seen_by_the_next(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    bound = contextvars.ContextVar("bound", default="nothing")
    bound.set("of the application")
    seen: set[str] = set()

    async def job() -> None:
        seen.add(bound.get())
        bound.set("of a run")

    # A backlog of quick work: a run that ends starts the next one that was claimed ahead.
    runs = [await submit() for _ in range(100)]
    await start_worker({"job": job}, concurrency=1)
    for run in runs:
        await engine.wait_for_ending(run, timeout=60)
    assert seen == {"of the application"}


async def test_work_that_is_shared_between_runs_logs_without_a_run(
    engine: Engine,
    given: Given,
    start_worker: StartWorker,
    submit: Submit,
    connection: asyncpg.Connection,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiting, point, _ = await wait_with(engine, await given.claimed())
    await connection.execute("alter table execution add check (last_hmac_validation_failed_at is null)")

    async def job() -> str:
        try:
            await engine.deliver_signal(
                execution_id=waiting, waitpoint_id=point, waitpoint_token="k1:" + "0" * 64, signal_name="ready"
            )
        except EngineError as refused:
            return refused.code
        return "delivered"

    run = await submit()
    await start_worker({"job": job})
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'"invalid_token"'
    await eventually(lambda: "1 refused tokens could not be recorded" in caplog.text)
    (record,) = [record for record in caplog.records if "could not be recorded" in record.getMessage()]
    assert fields(record) == NO_RUN


# The factory of log records.


def test_a_format_that_names_the_fields_works_on_every_line(factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    add_fields_to_records()
    formatter = logging.Formatter("%(ff_execution_id)s %(ff_attempt)s %(ff_task)s %(message)s")
    logger.warning("outside")
    assert formatter.format(caplog.records[-1]) == "None None None outside"


def test_an_earlier_record_factory_is_kept(factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    def traced(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = logging.LogRecord(*args, **kwargs)
        record.__dict__["trace"] = "t-1"
        return record

    logging.setLogRecordFactory(traced)
    add_fields_to_records()
    logger.warning("traced")
    assert (caplog.records[-1].__dict__["trace"], fields(caplog.records[-1])) == ("t-1", NO_RUN)


def test_fields_are_added_once_if_several_workers_start_at_the_same_time(factory: Any) -> None:
    made = 0

    def counted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        nonlocal made
        made += 1
        return logging.LogRecord(*args, **kwargs)

    logging.setLogRecordFactory(counted)
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait(timeout=60)
        add_fields_to_records()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    installed: Any = logging.getLogRecordFactory()
    assert installed._make is counted
    add_fields_to_records()
    assert logging.getLogRecordFactory() is installed
    logging.makeLogRecord({})
    assert made == 1


async def test_a_worker_adds_the_fields_to_a_factory_that_was_set_later(
    factory: Any, engine: Engine, start_worker: StartWorker, submit: Submit, caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None:
        logger.warning("in a handler")

    await start_worker({"other": job})
    logging.setLogRecordFactory(logging.LogRecord)
    await start_worker({"job": job})
    run: ExecutionId = await submit()
    await engine.wait_for_ending(run, timeout=60)
    (record,) = [record for record in caplog.records if record.name == "app.orders"]
    assert fields(record) == (run, 1, "job")


def test_a_record_made_elsewhere_keeps_its_own_fields(factory: Any) -> None:
    add_fields_to_records()
    sent = {"ff_execution_id": "{fp:1}:x", "ff_attempt": 3, "ff_task": "mail", "msg": "from another process"}
    assert fields(logging.makeLogRecord(sent)) == ("{fp:1}:x", 3, "mail")
