"""Every delivery that is not refused writes one event, with its effect and disposition."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

from engine.sending import Waiting, running, waiting
from engine.state import claim, refused
from engine.waits import on_all, suspend_args, suspend_run
from fixtures import Given, Rows
from flowfabric import Context, Fabric
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import AllOf, ByName, Count, CountKind, Single
from flowfabric.model.errors import EngineError
from flowfabric.model.signal import Accepted, SignalDuplicate

from .written import written

APPENDED = "appended_to_waitpoint"
SATISFIED = "resume_condition_satisfied"


async def details(rows: Rows, execution_id: str) -> list[dict[str, Any]]:
    """The details of the signal events of an execution in order."""
    return [event.details or {} for event in await written(rows, execution_id, "signal")]


def event_of(waitpoint_id: UUID, answer: Any, effect: str, disposition: str, source: str = "") -> dict[str, Any]:
    """The expected details of an event."""
    signal_id = answer.signal_id if isinstance(answer, Accepted) else answer.existing_signal_id
    return {
        "signal_id": str(signal_id),
        "waitpoint_id": str(waitpoint_id),
        "source_identity": source,
        "effect": effect,
        "disposition": disposition,
    }


async def test_an_event_tells_what_the_signal_did_and_why(engine: Engine, given: Given, rows: Rows) -> None:
    votes = Count(n=2, count_kind=CountKind.DISTINCT_SOURCES, matcher=ByName("vote"), waitpoints=("a",))
    both = AllOf(members=(votes, Single(waitpoint_key="b", matcher=ByName("go"))))
    wait = await waiting(engine, given, suspend_args(waitpoints=on_all("a", "b").waitpoints, resume_condition=both))
    a, b = wait.points["a"].waitpoint_id, wait.points["b"].waitpoint_id
    expected = []
    for key, name, source, effect, disposition in (
        ("a", "other", "ada", APPENDED, "signal_ignored_matcher_failed"),
        ("a", "vote", "ada", APPENDED, APPENDED),
        ("a", "vote", "ada", APPENDED, "appended_to_waitpoint_duplicate"),
        ("b", "go", "", APPENDED, APPENDED),
        ("a", "vote", "grace", "satisfied", SATISFIED),
    ):
        answer = await wait.send(name, key, source_identity=source)
        expected.append(event_of(a if key == "a" else b, answer, effect, disposition, source))
    assert await details(rows, wait.execution_id) == expected
    kinds = [(event.kind, event.outcome) for event in await written(rows, wait.execution_id)]
    # One completion event, after the signals.
    assert kinds == [("acquired", None), ("released", None), *[("signal", None)] * 5, ("ended", 6)]


async def test_an_ignored_signal_writes_an_event(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await waiting(engine, given)
    answer = await wait.send("other")
    assert await details(rows, wait.execution_id) == [
        event_of(wait.points["wait"].waitpoint_id, answer, APPENDED, "no_op")
    ]


async def test_a_buffered_signal_writes_an_event_when_it_is_delivered(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await running(engine, given)
    answer = await wait.send("ready", source_identity="ada")
    expected = event_of(
        wait.points["wait"].waitpoint_id, answer, "buffered", "buffered_for_pending_waitpoint", source="ada"
    )
    assert await details(rows, wait.execution_id) == [expected]
    await engine.complete(wait.handle)
    assert await details(rows, wait.execution_id) == [expected]


async def test_a_duplicate_writes_an_event_under_the_id_of_the_first_signal(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await waiting(engine, given)
    point = wait.points["wait"].waitpoint_id
    first = await wait.send("ready", idempotency_key="k", source_identity="ada")
    by_key = await wait.send("ready", idempotency_key="k", source_identity="grace")
    by_id = await wait.send("ready", signal_id=first.signal_id)
    (resumed,) = await claim(engine)
    await engine.complete(resumed.handle)
    after_end = await wait.send("ready", idempotency_key="k")
    assert by_key == by_id == after_end == SignalDuplicate(existing_signal_id=first.signal_id)
    assert await details(rows, wait.execution_id) == [
        event_of(point, first, "satisfied", SATISFIED, "ada"),
        event_of(point, by_key, "deduped", "deduped", "grace"),
        event_of(point, by_id, "deduped", "deduped"),
        event_of(point, after_end, "deduped", "deduped"),
    ]


async def test_an_approval_writes_an_event(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await waiting(engine, given, resume_condition=Single(waitpoint_key="wait", matcher=ByName("approved")))
    point = wait.points["wait"].waitpoint_id
    approval: dict[str, Any] = {
        "execution_id": wait.execution_id,
        "waitpoint_id": point,
        "signal_name": "approved",
        "idempotency_suffix": "1",
        "source_identity": "ada",
    }
    answer = await engine.deliver_approval_signal(**approval)
    again = await engine.deliver_approval_signal(**approval)
    assert await details(rows, wait.execution_id) == [
        event_of(point, answer, "satisfied", SATISFIED, "ada"),
        event_of(point, again, "deduped", "deduped", "ada"),
    ]


async def test_a_signal_of_a_run_writes_an_event_and_its_repeat_another(url: str, rows: Rows) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(ctx: Context) -> str:
        return await ctx.wait_for_signal("go", str)

    async with fabric, fabric.worker():
        run = await job.submit()
        await run.signal("go", "now", by="ada", id="1")
        await run.signal("go", "again", by="ada", id="1")
        assert await run.result(timeout=60) == "now"
        await run.signal("go", "late", by="grace", id="1")
    events = await details(rows, run.id)
    assert [(event["effect"], event["source_identity"]) for event in events] == [
        ("satisfied", "ada"),
        ("deduped", "ada"),
        ("deduped", "grace"),
    ]
    assert len({event["signal_id"] for event in events}) == 1


async def test_a_refused_signal_writes_no_event(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await waiting(engine, given, policy={"max_signals_per_execution": 1})
    await wait.send("other")
    closed = await waiting(engine, given, lane_id="x")
    await engine.cancel_execution(execution_id=closed.execution_id, reason="x")
    async with rows.unchanged(without=["execution"]):
        await refused(wait.send("ready"), "signal_limit_exceeded")
        await refused(wait.send(waitpoint_token="k1:" + "0" * 64), "invalid_token")
        await refused(wait.send(waitpoint_id=uuid4()), "invalid_token")
        await refused(wait.send(payload=b"x" * 65_537), "payload_too_large")
        await refused(closed.send("ready"), "target_not_signalable")
        await refused(wait.send(execution_id=f"{{fp:1}}:{uuid4()}"), "execution_not_found")


async def test_one_bad_signal_of_a_hundred_writes_no_event_and_the_others_one_each(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await waiting(engine, given)
    point = wait.points["wait"].waitpoint_id
    sent = [
        wait.send("other", source_identity=f"{at}", **({"waitpoint_token": "k1:" + "0" * 64} if at == 37 else {}))
        for at in range(100)
    ]
    answers = await asyncio.gather(*sent, return_exceptions=True)
    assert [at for at, answer in enumerate(answers) if isinstance(answer, EngineError)] == [37]
    assert await details(rows, wait.execution_id) == [
        event_of(point, answer, APPENDED, "no_op", f"{at}") for at, answer in enumerate(answers) if at != 37
    ]


async def test_signals_of_many_executions_write_each_its_own_event(engine: Engine, given: Given, rows: Rows) -> None:
    waits: list[Waiting] = []
    for at in range(10):
        handle = await given.claimed(namespace=f"tenant {at % 2}", tags={"app.customer": f"{at}"}, lane_id=f"{at}")
        waits.append(Waiting(engine, handle).on((await suspend_run(engine, handle)).details))
    # The same key twice in one batch: one is accepted, the other is a duplicate of it.
    answers = await asyncio.gather(*(wait.send("ready", idempotency_key="k") for wait in waits for _ in range(2)))
    for at, wait in enumerate(waits):
        point = wait.points["wait"].waitpoint_id
        first, second = answers[at * 2 : at * 2 + 2]
        assert await details(rows, wait.execution_id) == [
            event_of(point, first, "satisfied", SATISFIED),
            event_of(point, second, "deduped", "deduped"),
        ]
        (namespace,) = await rows.of("namespace", namespace=f"tenant {at % 2}")
        for event in await written(rows, wait.execution_id, "signal"):
            assert (event.namespace_no, event.tags) == (namespace["namespace_no"], {"app.customer": f"{at}"})
