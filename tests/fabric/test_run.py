"""Runs: their status, their results and errors, and signals to them."""

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fixtures import Clock, Eventually
from flowfabric import (
    Context,
    Fabric,
    InvalidInputError,
    PublicState,
    Run,
    RunCancelled,
    RunError,
    RunExpired,
    RunFailed,
)
from flowfabric.errors import ContentionError, NotFoundError, StateError, UnreadableResult
from flowfabric.fabric import run as runs
from flowfabric.ids import plain_id
from flowfabric.outcomes import TerminalOutcome

UNKNOWN = "{fp:0}:00000000-0000-7000-8000-000000000000"


@dataclass
class Report:
    pages: int


class CardDeclined(Exception): ...


async def test_the_status_of_a_waiting_run_has_neither_result_nor_error(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        before = datetime.now(UTC) - timedelta(minutes=1)
        run = await job.submit()
        status = await run.status()
    assert (status.id, status.task, status.state) == (run.id, "job", PublicState.WAITING)
    assert (status.attempt, status.progress, status.message, status.retry_at) == (0, None, None, None)
    assert (status.result, status.error, status.last_failure, status.has_ended) == (None, None, None, False)
    assert before < status.created_at < before + timedelta(minutes=2)
    assert (status.started_at, status.ended_at) == (None, None)


async def test_the_status_follows_a_run_from_its_progress_to_its_result(url: str, eventually: Eventually) -> None:
    fabric, gate = Fabric(url), asyncio.Event()

    @fabric.task
    async def write(ctx: Context) -> Report:
        await ctx.progress(40, "halfway")
        await gate.wait()
        return Report(pages=3)

    async with fabric, fabric.worker():
        run = await write.submit()

        async def has_progress() -> bool:
            return (await run.status()).progress is not None

        await eventually(has_progress)
        running = await run.status()
        gate.set()
        assert await run.result(timeout=timedelta(seconds=60)) == Report(pages=3)
        ended = await run.status()
    assert (running.state, running.attempt, running.progress, running.message) == ("active", 1, 40, "halfway")
    assert (ended.state, ended.result, ended.error, ended.has_ended) == ("completed", Report(pages=3), None, True)
    assert ended.started_at is not None
    assert ended.ended_at is not None
    assert ended.created_at <= ended.started_at <= ended.ended_at


async def test_progress_is_a_whole_number_of_percent(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def report(ctx: Context) -> list[str]:
        refused = []
        wrong: list[Any] = [50.5, "50", 101, 255, -1, True]
        for percent in wrong:
            with pytest.raises(InvalidInputError) as refusal:
                await ctx.progress(percent)
            refused.append(str(refusal.value))
        await ctx.progress(0)
        await ctx.progress(100)
        return refused

    async with fabric, fabric.worker():
        run = await report.submit()
        refused = await run.result(timeout=60)
        assert refused[0] == "invalid_input: percent: must be a whole number from 0 to 100, got 50.5"
        assert {text.partition(", got ")[0] for text in refused} == {refused[0].partition(", got ")[0]}
        assert (await run.status()).progress == 100


async def test_a_failed_run_keeps_the_type_message_and_traceback_of_its_exception(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task(retries=1, backoff=0.001)
    async def charge(ctx: Context, card: str) -> None:
        raise CardDeclined(f"card {card}, attempt {ctx.attempt}")

    async with fabric, fabric.worker():
        run = await charge.submit("4242")
        with pytest.raises(RunFailed) as failed:
            await run.result(timeout=60)
        status = await run.status()
    error = failed.value
    assert str(error) == f"{run.id} failed: CardDeclined: card 4242, attempt 2"
    assert (error.execution_id, error.reason) == (run.id, "CardDeclined: card 4242, attempt 2")
    assert error.outcome is TerminalOutcome.FAILED
    assert error.error_type is not None
    assert error.error_type.endswith("CardDeclined")
    shown = "".join(traceback.format_exception(error))
    assert 'raise CardDeclined(f"card {card}, attempt {ctx.attempt}")' in shown
    assert isinstance(status.error, RunFailed)
    assert (str(status.error), status.error.traceback) == (str(error), error.traceback)
    assert status.last_failure is not None
    assert (status.state, status.last_failure.message) == ("failed", "CardDeclined: card 4242, attempt 2")


async def test_the_status_shows_the_last_failure_while_the_retry_is_due(url: str, eventually: Eventually) -> None:
    fabric = Fabric(url)

    @fabric.task(retries=1, backoff=timedelta(hours=1))
    def flaky() -> None:
        raise ValueError("no luck")

    async with fabric, fabric.worker():
        run = await flaky.submit()

        async def is_delayed() -> bool:
            return (await run.status()).state == "delayed"

        await eventually(is_delayed)
        status = await run.status()
    assert status.error is None
    assert status.last_failure is not None
    assert (status.attempt, status.last_failure.message) == (1, "ValueError: no luck")
    assert status.retry_at is not None
    assert timedelta(minutes=50) < status.retry_at - datetime.now(UTC) < timedelta(minutes=70)


async def test_a_run_that_did_not_succeed_says_how_it_ended(url: str, clock: Clock) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        cancelled = await job.submit()
        await cancelled.cancel("changed my mind")
        expired = await job.options(deadline=10).submit()
        await clock.advance(seconds=11)
        await fabric.engine.expire_execution(expired.id, "execution_deadline")
        with pytest.raises(RunCancelled, match="was cancelled: changed my mind") as first:
            await cancelled.result(timeout=60)
        with pytest.raises(RunExpired, match="expired") as second:
            await expired.result(timeout=60)
        statuses = [await run.status() for run in (cancelled, expired)]
    assert [status.state for status in statuses] == ["cancelled", "expired"]
    assert [type(status.error) for status in statuses] == [RunCancelled, RunExpired]
    assert [str(status.error) for status in statuses] == [str(first.value), str(second.value)]
    assert all(isinstance(each.value, RunError) for each in (first, second))


async def test_any_run_can_be_found_by_its_id_in_either_form(url: str) -> None:
    fabric, other = Fabric(url), Fabric(url)

    @fabric.task
    async def write() -> Report:
        return Report(pages=3)

    async with fabric, other, fabric.worker():
        run = await write.submit()
        assert await write.run(run.id).result(timeout=60) == Report(pages=3)
        # A fabric that has the task returns its type, another one plain JSON.
        assert await fabric.run(run.id).result(timeout=60) == Report(pages=3)
        assert await other.run(run.plain_id).result(timeout=60) == {"pages": 3}
        assert (await other.run(run.plain_id).status()).result == {"pages": 3}
    assert run.plain_id == plain_id(run.id)
    assert "{" not in run.plain_id


async def test_a_result_of_an_unknown_task_that_is_not_json_is_returned_as_bytes(url: str) -> None:
    fabric, other = Fabric(url), Fabric(url)

    @fabric.task
    async def image() -> bytes:
        return b"\xff\xd8"

    @fabric.task
    async def nothing() -> None: ...

    async with fabric, other, fabric.worker():
        runs = [await image.submit(), await nothing.submit()]
        results = [await other.run(run.id).result(timeout=60) for run in runs]
    assert results == [b"\xff\xd8", None]


async def test_a_run_of_another_task_is_refused_with_the_name_of_its_task(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def a() -> None: ...

    @fabric.task
    async def b() -> None: ...

    async with fabric:
        run = await a.submit()
        with pytest.raises(InvalidInputError, match=r"is a run of task 'a', not of 'b'; .*, or fabric\.run\(id\)"):
            await b.run(run.id).status()
        await run.cancel()
        with pytest.raises(InvalidInputError, match="is a run of task 'a'"):
            await b.run(run.id).result(timeout=60)


async def test_a_run_that_does_not_exist_is_not_found(url: str) -> None:
    fabric = Fabric(url)
    async with fabric:
        run = fabric.run(UNKNOWN)
        text = f"not found: execution {run.id}: it was not submitted to this store, or its retention is over"
        for ask in (run.status, run.explain, run.result, run.cancel, lambda: run.signal("x")):
            with pytest.raises(NotFoundError) as missing:
                await ask()
            assert (missing.value.code, str(missing.value)) == ("execution_not_found", text)
    with pytest.raises(InvalidInputError, match=r"'x' is not an execution id; write \{fp:<number>\}:<uuid> or "):
        fabric.run("x")


async def test_a_wait_for_a_result_that_times_out_names_the_state(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        run = await job.submit()
        with pytest.raises(TimeoutError) as late:
            await run.result(timeout=timedelta(milliseconds=10))
        explanation = await run.explain()
        with pytest.raises(InvalidInputError, match="timeout: expected seconds or a timedelta, got 'soon'"):
            await run.result(timeout="soon")  # type: ignore[arg-type]
    assert str(late.value) == f"{run.id} has not ended within 0.01 s: it is waiting; `await run.explain()` says why"
    assert (explanation.execution_id, explanation.public_state) == (run.id, PublicState.WAITING)


async def test_a_wait_for_a_run_that_no_worker_can_run_logs_a_warning(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runs, "UNSERVED_SECONDS", 0.05)
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        run = await job.submit()
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.15 s: it is waiting"):
            await run.result(timeout=0.15)
        async with fabric.worker():
            await run.result()
    (warning,) = (each.message for each in caplog.records if each.name == runs.__name__)
    waiting = "waiting: 0 ahead of it on lane 'default'; no live worker serves lane 'default'"
    assert warning == f"{run.id} has not started: {waiting}"


async def test_a_signal_is_delivered_as_soon_as_the_run_waits_for_it(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def deploy(ctx: Context, version: str) -> list[str]:
        first = await ctx.wait_for_signal("approval", str)
        second = await ctx.wait_for_signal("approval", str)
        return [version, first, second, *(signal.source_identity for signal in ctx.resumed_signals())]

    async with fabric, fabric.worker():
        run = await deploy.submit("v42")
        await run.signal("approval", "yes", by="ada")
        await run.signal("approval", "go", by="grace")
        assert await run.result(timeout=60) == ["v42", "yes", "go", "grace"]
        with pytest.raises(StateError, match="is completed and accepts no more signals"):
            await run.signal("approval", "late")


async def test_a_signal_that_the_run_does_not_wait_for_times_out(url: str, eventually: Eventually) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(ctx: Context) -> None:
        await ctx.wait_for_signal("go")

    async with fabric:
        run = await job.submit()
        with pytest.raises(TimeoutError, match=r"did not wait for signal 'stop' within 0\.05 s: it is waiting; "):
            await run.signal("stop", timeout=0.05)
        async with fabric.worker():

            async def is_suspended() -> bool:
                return (await run.status()).state is PublicState.SUSPENDED

            await eventually(is_suspended)
        with pytest.raises(TimeoutError, match=r"did not wait for signal 'stop' within 0\.05 s: it waits for 'go'$"):
            await run.signal("stop", timeout=0.05)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda run: run.signal(""), "name: must not be empty"),
        (lambda run: run.signal(5), "name: must be text, got 5"),
        (lambda run: run.signal("go", by=5), "by: must be text, got 5"),
        (lambda run: run.signal("go", id=""), "id: must not be empty; leave it out"),
        (
            lambda run: run.signal("go", object()),
            r"signal 'go': the payload <object object.*> cannot be sent as JSON: ",
        ),
    ],
)
async def test_a_signal_with_a_wrong_argument_is_refused_at_once(
    url: str, call: Callable[[Run[object]], Awaitable[None]], text: str
) -> None:
    fabric = Fabric(url)
    async with fabric:
        with pytest.raises(InvalidInputError, match=text):
            await call(fabric.run(UNKNOWN))


async def test_a_signal_under_the_same_id_counts_once_in_a_run(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def pair(ctx: Context) -> list[int]:
        return [await ctx.wait_for_signal("n", int), await ctx.wait_for_signal("n", int)]

    async with fabric, fabric.worker():
        run, other = await pair.submit(), await pair.submit()
        # At the same wait, while the next one is awaited, and after the end.
        await asyncio.gather(*(run.signal("n", 1, id="first") for _ in range(5)))
        await run.signal("n", 1, id="first")
        await run.signal("n", 2, id="second")
        assert await run.result(timeout=60) == [1, 2]
        await run.signal("n", 1, id="first")
        await other.signal("n", 7, id="first")
        await other.signal("n", 8, id="second")
        assert await other.result(timeout=60) == [7, 8]


async def test_a_signal_reaches_a_wait_whose_signing_key_has_expired(url: str, eventually: Eventually) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(ctx: Context) -> list[str]:
        return [await ctx.wait_for_signal("a", str), await ctx.wait_for_signal("b", str)]

    async with fabric, fabric.worker():
        run = await job.submit()

        async def is_suspended() -> bool:
            return (await run.status()).state is PublicState.SUSPENDED

        await eventually(is_suspended)
        await fabric.engine.rotate_waitpoint_hmac_secret_all(new_kid="next", new_secret_hex="cd" * 32, grace_ms=0)
        # An id counts for the name of its signal.
        await run.signal("a", "first", id="1")
        await run.signal("b", "second", id="1")
        assert await run.result(timeout=60) == ["first", "second"]


async def test_a_delay_beyond_the_last_date_is_shown_as_the_last_date(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task(delay=10**12)
    async def job() -> None: ...

    async with fabric:
        assert (await (await job.submit()).status()).retry_at == datetime.max.replace(tzinfo=UTC)


async def test_signals_sent_at_once_end_one_wait_each(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def triple(ctx: Context) -> list[int]:
        return sorted([await ctx.wait_for_signal("n", int) for _ in range(3)])

    async with fabric, Fabric(url) as other, fabric.worker():
        for _ in range(10):
            run = await triple.submit()
            senders = (run, run, other.run(run.id))
            await asyncio.gather(*(each.signal("n", number) for number, each in enumerate(senders)))
            assert await run.result(timeout=60) == [0, 1, 2]


async def test_a_run_that_has_ended_cannot_be_cancelled(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric, fabric.worker():
        run = await job.submit()
        await run.result(timeout=60)
        with pytest.raises(ContentionError) as refused:
            await run.cancel()
    assert str(refused.value) == f"execution_not_active: {run.id} has already ended with outcome success"


async def test_a_status_shows_a_result_that_no_longer_fits_as_an_error(url: str) -> None:
    fabric, changed = Fabric(url), Fabric(url)

    @fabric.task(name="job")
    async def old() -> str:
        return "text"

    @changed.task(name="job")
    async def new() -> int:
        return 1

    async with fabric, changed, fabric.worker():
        run = await old.submit()
        assert await run.result(timeout=60) == "text"
        status = await new.run(run.id).status()
    assert (status.state, status.result) == (PublicState.COMPLETED, None)
    assert isinstance(status.error, UnreadableResult)


async def test_two_handles_of_one_execution_are_equal(url: str) -> None:
    fabric = Fabric(url)
    one, same, other = fabric.run(UNKNOWN), fabric.run(plain_id(UNKNOWN)), fabric.run(UNKNOWN[:-1] + "1")
    assert (one == same, one == other, one == UNKNOWN, {one, same, other}) == (True, False, False, {one, other})
