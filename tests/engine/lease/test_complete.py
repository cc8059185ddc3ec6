"""Complete a run, and repeat the call."""

from typing import Any

from engine.cases import in_turn
from engine.state import COMPLETED, attempts, claim, event_texts, kept_until, lease_fields, refused, vector
from fixtures import Clock, Engines, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.handle import Handle
from flowfabric.model.lease import Completed
from flowfabric.model.states import PublicState

RETAINED_MS = 86_400_000


async def complete_one(engine: Engine, handle: Handle, payload: bytes | None) -> None:
    """Complete through the single call."""
    await engine.complete(handle, payload)


async def complete_in_many(engine: Engine, handle: Handle, payload: bytes | None) -> None:
    """Complete through the batch form."""
    expected = Completed(execution_id=handle.execution_id, public_state=PublicState.COMPLETED)
    assert await engine.complete_many([(handle, payload)]) == [expected]


both = in_turn("complete", [complete_one, complete_in_many])


@both
async def test_a_completed_run_ends_its_execution(
    engine: Engine, given: Given, rows: Rows, clock: Clock, complete: Any
) -> None:
    began = await clock.now()
    policy = {"timeout_policy": {"attempt_timeout_ms": 5000}}
    claimed = await given.run(policy=policy, tags={"ff.instance_id": "i-1"}, execution_deadline_at=began + 60_000)
    worker_no = (await rows.execution(claimed.execution_id))["worker_no"]
    now = await clock.advance(seconds=1)
    await complete(engine, claimed.handle, b"\x00result")
    row = await rows.execution(claimed.execution_id)
    assert vector(row) == COMPLETED
    assert {row[stamp] for stamp in ("completed_at", "last_transition_at", "last_mutation_at")} == {now}
    assert (row["started_at"], await kept_until(rows, claimed.execution_id)) == (began, now + RETAINED_MS)
    assert (row["lease_epoch"], row["attempt_id"], row["attempt_count"]) == (1, claimed.attempt_id, 1)
    assert (row["attempt_timeout_at"], row["delay_until"], lease_fields(row)) == (None, None, {})
    assert (await rows.of("timer"), await rows.of("ready"), await rows.of("listed")) == ([], [], [])
    assert (row["blocking_detail"], row["failure_reason"], row["cancelled_by"]) == (None, None, None)
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_index"], attempt["attempt_type"]) == (0, "initial")
    assert (attempt["attempt_state"], row["result_payload"]) == ("ended_success", b"\x00result")
    assert (attempt["attempt_id"], attempt["lease_id"]) == (claimed.attempt_id, claimed.lease_id)
    assert (attempt["lease_epoch"], attempt["worker_no"]) == (1, worker_no)
    assert (attempt["started_at"], attempt["ended_at"]) == (began, now)
    assert (attempt["failure_reason"], attempt["failure_category"]) == (None, None)
    assert await event_texts(rows, claimed.execution_id) == ["tag_attached", "acquired", "released completed>success"]
    event = (await rows.events(claimed.execution_id))[2]
    assert (event["lease_id"], event["lease_epoch"], event["attempt_index"]) == (claimed.lease_id, 1, 0)
    assert (event["at"], event["worker_no"], event["instance_tag"]) == (now, worker_no, "i-1")
    assert event["namespace_no"] == row["namespace_no"]


@both
async def test_a_result_of_two_megabytes_is_returned_unchanged(engine: Engine, given: Given, complete: Any) -> None:
    handle = await given.claimed()
    await complete(engine, handle, b"\xff" * 2_000_000)
    assert await engine.get_execution_result(handle.execution_id) == b"\xff" * 2_000_000


@both
async def test_the_policy_or_the_settings_decide_the_retention(
    engines: Engines, given: Given, rows: Rows, clock: Clock, complete: Any
) -> None:
    now = await clock.now()
    brief = await engines(retention_ms=1000)
    policy = {"stream_policy": {"retention_ttl_ms": 7}}
    for handle, kept_ms in ((await given.claimed(), 1000), (await given.claimed(policy=policy), 7)):
        await complete(brief, handle, None)
        assert await kept_until(rows, handle.execution_id) == now + kept_ms


async def test_a_completion_does_not_repeat_another_ending(engine: Engine, given: Given, rows: Rows) -> None:
    failed, cancelled = await given.claimed(), await given.claimed()
    await engine.fail(failed, reason="no", classification="permanent")
    await engine.cancel_execution(execution_id=cancelled.execution_id, reason="no")
    async with rows.unchanged():
        for handle, outcome in ((failed, "failed"), (cancelled, "cancelled")):
            refusal = await refused(engine.complete(handle), "execution_not_active")
            assert refusal.detail["terminal_outcome"] == outcome  # type: ignore[index]
            (verdict,) = await engine.complete_many([(handle, None)])
            assert getattr(verdict, "code", None) == "execution_not_active"


async def test_a_stale_attempt_cannot_repeat_the_completion_of_another(
    engine: Engine, given: Given, rows: Rows
) -> None:
    stale = await given.reclaimable()
    (taken,) = await claim(engine)
    await engine.complete(taken.handle, b"mine")
    async with rows.unchanged():
        await refused(engine.complete(stale, b"theirs"), "lease_conflict")
    assert await engine.get_execution_result(stale.execution_id) == b"mine"


async def test_complete_many_answers_in_order(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    good = [await given.claimed() for _ in range(3)]
    done = await given.claimed()
    await engine.complete(done, b"before")
    stale = await given.claimed(lease_ttl_ms=1)
    await clock.advance(ms=1)
    given_items = [(good[0], b"0"), (stale, b"1"), (good[1], None), (done, b"3"), (good[2], b"4"), (good[0], b"5")]
    verdicts = await engine.complete_many(given_items)
    assert [getattr(verdict, "code", "completed") for verdict in verdicts] == [
        "completed",
        "lease_expired",
        "completed",
        "completed",
        "completed",
        "completed",
    ]
    expected = [Completed(execution_id=h.execution_id, public_state=PublicState.COMPLETED) for h, _ in given_items]
    assert [verdicts[at] for at in (0, 2, 3, 4, 5)] == [expected[at] for at in (0, 2, 3, 4, 5)]
    results = [await engine.get_execution_result(handle.execution_id) for handle in (*good, done, stale)]
    assert results == [b"0", None, b"4", b"before", None]
    for handle in (*good, done):
        assert await event_texts(rows, handle.execution_id) == ["acquired", "released completed>success"]


async def test_wrong_results_and_batch_sizes_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    wrong: tuple[Any, ...] = ("text", 5, {"a": 1}, [1])
    async with rows.unchanged():
        await refused(engine.complete_many([]), "invalid_input", "must have 1 to 1000 items, got 0")
        await refused(
            engine.complete_many([(handle, None)] * 1001), "invalid_input", "must have 1 to 1000 items, got 1001"
        )
        for payload in wrong:
            await refused(engine.complete(handle, payload), "invalid_input", "payload: must be bytes")
            (verdict,) = await engine.complete_many([(handle, payload)])
            assert getattr(verdict, "code", None) == "invalid_input"
    await engine.complete(handle)
