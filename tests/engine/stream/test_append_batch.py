"""Frames that share a transaction: one bad frame does not affect the others, and the order is kept."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from creates import new
from engine.state import claim, refused, rounds
from engine.stream.writing import (
    SUMMARY,
    append,
    code_of,
    frames,
    live,
    patch,
    payloads,
    read,
    stored,
    stored_frames,
)
from engine.waits import rewriting, suspend_args
from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.db import session as sessions
from flowfabric.db.database import Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream.frame_batch import FrameBatch, Writer
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, LeaseId
from flowfabric.model.stream import AppendFrameOutcome, Frame

pytestmark = pytest.mark.usefixtures("consistent_rows")

GOOD = 99
BAD = GOOD // 2


async def many(engine: Engine, count: int = GOOD + 1, *, has_streams: bool = True, **overrides: Any) -> list[Handle]:
    """The handles of running executions, each with a frame or without a stream."""
    await engine.create_many([new(**overrides) for _ in range(count)])
    handles = [run.handle for run in await claim(engine, limit=count)]
    if has_streams:
        await asyncio.gather(*(append(engine, handle, b"first") for handle in handles))
    return handles


def renamed(handle: Handle, **fields: Any) -> Handle:
    """A handle with other fields."""
    return Handle(**{name: getattr(handle, name) for name in Handle.__struct_fields__} | fields)


async def answers_of(calls: Sequence[Awaitable[object]]) -> list[Any]:
    """The outcomes of concurrent calls; a refusal is given as its code."""
    return [code_of(answer) for answer in await asyncio.gather(*calls, return_exceptions=True)]


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements of transactions, in the order they were run."""
    seen: list[str] = []
    fetch: Any = Transaction.fetch

    async def record(transaction: Transaction, statement: Statement, **values: object) -> Any:
        seen.append(statement.name)
        return await fetch(transaction, statement, **values)

    monkeypatch.setattr(Transaction, "fetch", record)
    return seen


# Order and cost.


async def test_frames_of_one_stream_are_stored_in_the_order_of_the_calls(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    answers = await asyncio.gather(*(append(engine, handle, b"%d" % nth) for nth in range(1_300)))
    assert [answer.frame_count for answer in answers] == [*range(1, 1_301)]
    found = await frames(engine, handle)
    assert [frame.payload for frame in found] == [b"%d" % nth for nth in range(1_300)]
    assert [frame.id for frame in found] == [answer.stream_id for answer in answers]
    positions = [frame.position for frame in found]
    assert positions == sorted(set(positions))


async def test_concurrent_frames_share_a_handful_of_statements(
    engine: Engine, given: Given, statements: list[str]
) -> None:
    handle = await given.claimed()
    await append(engine, handle)
    statements.clear()
    await asyncio.gather(*(append(engine, handle) for _ in range(FrameBatch.MAX_FRAMES)))
    assert statements == ["lock_streams", "insert_frames"]
    statements.clear()
    await asyncio.gather(*(append(engine, handle, b"{}", mode=SUMMARY) for _ in range(FrameBatch.MAX_FRAMES)))
    assert statements == ["lock_streams", "read_summaries", "insert_frames"]
    handles = await many(engine, 20, has_streams=False)
    statements.clear()
    await asyncio.gather(*(append(engine, each) for each in handles for _ in range(20)))
    assert statements == ["lock_streams", "open_streams", "insert_frames"]


async def test_large_frames_are_split_over_transactions(engine: Engine, given: Given, statements: list[str]) -> None:
    handles = await many(engine, 12)
    statements.clear()
    data = [bytes([nth]) * 65_536 for nth in range(16)]
    await asyncio.gather(*(append(engine, handle, each) for each in data for handle in handles))
    # 12 batches of 1 MiB, about four in each transaction.
    assert 3 <= statements.count("insert_frames") <= 4
    for handle in handles:
        assert (await payloads(engine, handle))[1:] == data


async def test_a_batch_of_several_modes_counts_like_single_frames(engine: Engine, given: Given, rows: Rows) -> None:
    one, other = await given.claimed(), await given.claimed()
    modes: list[Any] = [{"mode": live()}, {}, {"mode": SUMMARY}, {"mode": live(maxlen_floor=3, maxlen_ceiling=3)}]
    calls = [(b'{"%d": 1}' % nth, modes[nth % 4] if nth < 16 else modes[1]) for nth in range(20)]
    for data, fields in calls:
        await append(engine, one, data, **fields)
    await asyncio.gather(*(append(engine, other, data, **fields) for data, fields in calls))
    assert await payloads(engine, one) == await payloads(engine, other)
    varying = ("partition_key", "execution_id", "attempt_id", "sweep_at")
    first, second = [await stored(rows, handle) for handle in (one, other)]
    assert {**first, **dict.fromkeys(varying)} == {**second, **dict.fromkeys(varying)}
    summaries = [await engine.read_summary(handle.execution_id, 0) for handle in (one, other)]
    assert summaries[0] == summaries[1]


async def test_frames_that_are_hidden_at_once_are_not_stored(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed(policy={"stream_policy": {"retention_maxlen": 10}})
    await asyncio.gather(*(append(engine, handle, b"%d" % nth) for nth in range(400)))
    assert [row["payload"] for row in await stored_frames(rows, handle)] == [b"%d" % nth for nth in range(390, 400)]


# The worst members.


async def test_bad_frames_do_not_affect_the_good_ones_of_a_batch(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    expired = await given.claimed(lease_ttl_ms=1_000, lane_id="expired")
    await append(engine, expired)
    await clock.advance(ms=1_000)
    good = await many(engine, GOOD)
    completed = await given.claimed(lane_id="completed")
    await append(engine, completed)
    await engine.complete(completed, b"")
    parked = await given.claimed(lane_id="parked")
    await append(engine, parked)
    await engine.wait_children(parked)
    mixed = good[7]
    bad: dict[int, tuple[Awaitable[object], str]] = {
        1: (append(engine, completed), "stream_closed"),
        3: (append(engine, expired), "stale_owner_cannot_append"),
        5: (append(engine, renamed(good[0], lease_id=LeaseId(uuid4()))), "stale_owner_cannot_append"),
        7: (append(engine, mixed, b"[]", mode=SUMMARY), "invalid_input"),
        9: (append(engine, good[1], b"x" * 65_537), "retention_limit_exceeded"),
        11: (append(engine, renamed(good[2], execution_id=ExecutionId(f"{{fp:1}}:{uuid4()}"))), "execution_not_found"),
        13: (append(engine, parked), "stream_closed"),
    }
    calls: list[Awaitable[object]] = [append(engine, handle, b"good") for handle in good]
    for at, (call, _) in bad.items():
        calls.insert(at, call)
    answers = await answers_of(calls)
    refusals = {at: answer for at, answer in enumerate(answers) if not isinstance(answer, AppendFrameOutcome)}
    assert refusals == {at: code for at, (_, code) in bad.items()}
    for handle in good:
        assert await payloads(engine, handle) == [b"first", b"good"]
    for handle in (completed, expired, parked):
        assert await payloads(engine, handle) == [b"x"]
    assert (await stored(rows, mixed))["frame_count"] == 2


async def test_a_bad_patch_fails_alone_within_its_stream(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    texts = ['{"a": 1}', "[", '{"b": 2}', "null", '{"a": null}']
    answers = await answers_of([patch(engine, handle, text) for text in texts])
    assert [code if isinstance(code, str) else (code.frame_count, code.summary_version) for code in answers] == [
        (1, 1),
        "invalid_input",
        (2, 2),
        "invalid_input",
        (3, 3),
    ]
    summary = await engine.read_summary(handle.execution_id, 0)
    assert summary is not None
    assert summary.document == {"b": 2}


async def test_a_patch_that_makes_the_summary_too_large_fails_alone(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    large = "x" * 65_000
    answers = await answers_of([patch(engine, handle, f'{{"{nth}": "{large}"}}') for nth in range(20)])
    assert [answer if isinstance(answer, str) else answer.frame_count for answer in answers] == [
        *range(1, 17),
        *["retention_limit_exceeded"] * 4,
    ]
    async with rows.unchanged():
        text = f'{{"16": "{large}"}}'
        await refused(patch(engine, handle, text), "retention_limit_exceeded", "at most 1048576 bytes")
    assert (await patch(engine, handle, f'{{"0": null, "16": "{large}"}}')).summary_version == 17


async def test_a_fault_of_a_batch_is_raised_by_each_caller_as_its_own(engine: Engine, given: Given) -> None:
    batch = FrameBatch(Writer.of(await given.claimed()))
    waiting = [batch.add(Frame(bytes=b"")) for _ in range(2)]
    failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    failed.set_exception(StoreFault("contention", "locked for too long"))
    batch.answer(failed)
    first, second = await asyncio.gather(*waiting, return_exceptions=True)
    assert (str(first), str(second)) == ("locked for too long",) * 2
    assert first is not second


async def test_refused_patches_leave_the_summary_unchanged_although_other_frames_are_stored(
    engine: Engine, given: Given, clock: Clock
) -> None:
    handle = await given.claimed()
    await patch(engine, handle, '{"a": 1}')
    before = await engine.read_summary(handle.execution_id, 0)
    await clock.advance(ms=5)
    answers = await answers_of([patch(engine, handle, "[]"), append(engine, handle, b"stored")])
    assert (answers[0], answers[1].frame_count) == ("invalid_input", 2)
    assert await engine.read_summary(handle.execution_id, 0) == before


async def test_a_frame_that_the_store_rejects_fails_alone(engine: Engine, connection: asyncpg.Connection) -> None:
    handles = await many(engine, 10)
    await connection.execute("alter table stream_frame add constraint no_poison check (frame_type <> 'poison')")
    poisoned = handles[4]
    calls = [append(engine, handle, b"good") for handle in handles]
    calls[5:5] = [append(engine, poisoned, frame_type="poison"), append(engine, poisoned, b"after")]
    answers = await answers_of(calls)
    assert [at for at, answer in enumerate(answers) if not isinstance(answer, AppendFrameOutcome)] == [5]
    assert answers[5] == "other"
    assert await payloads(engine, poisoned) == [b"first", b"good", b"after"]
    for handle in handles:
        assert (await payloads(engine, handle))[:2] == [b"first", b"good"]


@pytest.mark.usefixtures("patient_with_locks")
@pytest.mark.parametrize(("table", "has_streams"), [("stream", True), ("execution", False)])
async def test_a_locked_row_delays_only_its_own_callers(
    engine: Engine, connection: asyncpg.Connection, table: str, *, has_streams: bool
) -> None:
    handles = await many(engine, 20, has_streams=has_streams)
    async with rewriting(connection, table, handles[BAD % 20].execution_id):
        tasks = [asyncio.create_task(append(engine, handle, b"good")) for handle in handles]
        async with asyncio.timeout(30):
            await asyncio.gather(*(task for at, task in enumerate(tasks) if at != BAD % 20))
        assert not tasks[BAD % 20].done()
    await tasks[BAD % 20]
    for handle in handles:
        assert (await payloads(engine, handle))[-1] == b"good"


async def test_a_row_locked_for_too_long_fails_only_its_own_callers(
    engines: Engines, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "60ms")
    engine = await engines()
    handles = await many(engine, 5)
    async with rewriting(connection, "stream", handles[2].execution_id):
        async with rows.unchanged():
            await refused(append(engine, handles[2]), "retry_exhausted", handles[2].execution_id)
        answers = await answers_of([append(engine, handle) for handle in handles])
    assert [at for at, answer in enumerate(answers) if not isinstance(answer, AppendFrameOutcome)] == [2]
    assert (await append(engine, handles[2])).frame_count == 2


async def test_a_cancelled_caller_does_not_cancel_the_others(engine: Engine, eventually: Eventually) -> None:
    handles = await many(engine, 20)
    shared = handles[0]
    calls = [append(engine, handle, b"good") for handle in handles]
    calls += [append(engine, shared, b"%d" % nth) for nth in range(10)]
    tasks = [asyncio.create_task(call) for call in calls]
    for _ in range(3):
        await asyncio.sleep(0)
    cancelled = [5, 24]
    for at in cancelled:
        tasks[at].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [at for at, answer in enumerate(answers) if not isinstance(answer, AppendFrameOutcome)] == cancelled

    async def is_stored() -> bool:
        return (await payloads(engine, handles[5]))[-1] == b"good"

    await eventually(is_stored)
    assert await payloads(engine, shared) == [b"first", b"good", *(b"%d" % nth for nth in range(10))]


async def test_a_closing_engine_finishes_running_appends(engines: Engines, given: Given) -> None:
    handle = await given.claimed()
    engine = await engines()
    tasks = [asyncio.create_task(append(engine, handle)) for _ in range(20)]
    await asyncio.sleep(0)
    await engine.shutdown_prepare(5_000)
    assert [answer.frame_count for answer in await asyncio.gather(*tasks)] == [*range(1, 21)]


async def test_a_renewal_in_progress_does_not_make_its_worker_stale(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed(lease_ttl_ms=1_000)
    await append(engine, handle)
    async with connection.transaction():
        # As a renewal does, not committed yet.
        await connection.execute("update claim set expires_at = expires_at + 5000, renewed_at = 1")
        await clock.advance(ms=1_000)
        appending = asyncio.create_task(append(engine, handle))
        await asyncio.wait((appending,), timeout=0.2)
        assert not appending.done()
    assert (await appending).frame_count == 2


# Several engines.


async def test_two_engines_keep_the_ids_of_one_stream_in_the_order_of_their_commits(
    engines: Engines, given: Given, clock: Clock
) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    both = [given.engine, await engines()]
    acknowledged: list[tuple[int, str]] = []

    async def write(nth: int, engine: Engine) -> None:
        for first in range(0, 200, 10):
            answers = await asyncio.gather(
                *(append(engine, handle, b"%d %d" % (nth, at)) for at in range(first, first + 10))
            )
            acknowledged.extend((nth, answer.stream_id) for answer in answers)

    seen: list[str] = []
    is_done = False

    async def tail() -> None:
        while not is_done or seen[-1:] != [frame.id for frame in (await frames(given.engine, handle))[-1:]]:
            found = await given.engine.tail_stream(handle.execution_id, 0, after=seen[-1] if seen else "0-0")
            seen.extend(frame.id for frame in found.frames)

    tailing = asyncio.create_task(tail())
    # The first frames compete to create the stream.
    await asyncio.gather(*(write(nth, engine) for nth, engine in enumerate(both)))
    is_done = True
    await tailing
    found = await frames(given.engine, handle)
    assert len(found) == 400
    # A reader that follows the stream has missed nothing, so no id appeared below one it had seen.
    assert seen == [frame.id for frame in found]
    assert sorted(each for _, each in acknowledged) == sorted(seen)
    for nth in (0, 1):
        own = [frame.payload for frame in found if frame.payload.startswith(b"%d " % nth)]
        assert own == [b"%d %d" % (nth, at) for at in range(200)]


async def test_two_engines_merge_patches_into_one_summary(engines: Engines, given: Given) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    both = [given.engine, await engines()]
    answers = await asyncio.gather(
        *(patch(both[nth % 2], handle, f'{{"{nth}": {{"by": {nth % 2}}}}}') for nth in range(200))
    )
    assert sorted(answer.summary_version or 0 for answer in answers) == [*range(1, 201)]
    summary = await given.engine.read_summary(handle.execution_id, 0)
    assert summary is not None
    assert summary.document == {str(nth): {"by": nth % 2} for nth in range(200)}


Ending = Callable[[Engine, Handle], Awaitable[object]]
ENDINGS: dict[str, Ending] = {
    "complete": lambda engine, handle: engine.complete(handle, b"done"),
    "fail": lambda engine, handle: engine.fail(handle, reason="no luck"),
    "cancel": lambda engine, handle: engine.cancel_execution(execution_id=handle.execution_id, reason="x"),
    "suspend": lambda engine, handle: engine.suspend(handle, suspend_args()),
    "hand_back": lambda engine, handle: engine.hand_back(handle),
    "delay": lambda engine, handle: engine.delay(handle, 2**60),
    "lose": lambda engine, handle: engine.mark_lease_expired_if_due(handle.execution_id),
    "reclaim": lambda engine, handle: engine.mark_lease_expired_if_due(handle.execution_id),
}
REASONS = {
    "complete": "attempt_success",
    "fail": "attempt_failure",
    "cancel": "attempt_cancelled",
    "lose": "lease_expired",
    "reclaim": "reclaimed",
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_no_frame_is_lost_or_stored_after_a_racing_end_of_the_lease(
    engines: Engines, given: Given, clock: Clock, rows: Rows, name: str
) -> None:
    other = await engines()
    refusals = 0
    is_lost = name in ("lose", "reclaim")
    for nth in rounds(12, whole=300):
        handle = await given.claimed(lane_id=f"lane{nth}", lease_ttl_ms=600_000)
        if nth % 3:
            await append(given.engine, handle, b"first")
        acknowledged: list[str] = []
        ended = asyncio.Event()

        async def write(handle: Handle, acknowledged: list[str], ended: asyncio.Event) -> str:
            while True:
                is_after = ended.is_set()
                answers = await answers_of([append(given.engine, handle, b"%d" % at) for at in range(5)])
                acknowledged += [each.stream_id for each in answers if isinstance(each, AppendFrameOutcome)]
                codes = {each for each in answers if isinstance(each, str)}
                # A worker that has lost its lease goes on.
                if codes and (is_after or not is_lost):
                    (code,) = codes
                    return str(code)

        writing = asyncio.create_task(write(handle, acknowledged, ended))
        for _ in range(nth % 7):
            await asyncio.sleep(0)
        if is_lost:
            await clock.advance(ms=600_000)
        await ENDINGS[name](other, handle)
        if name == "reclaim":
            await claim(other, f"lane{nth}", max_wait_ms=10_000)
        ended.set()
        after = [row["frame_no"] for row in await stored_frames(rows, handle)]
        assert await writing == ("stale_owner_cannot_append" if is_lost else "stream_closed")
        refusals += 1
        # No frame was committed after the end, and each one acknowledged is there.
        assert [row["frame_no"] for row in await stored_frames(rows, handle)] == after
        found = await read(given.engine, handle)
        assert {frame.id for frame in found.frames} >= set(acknowledged)
        if found.frames:
            assert found.closed_reason == REASONS.get(name)
        if found.closed_at is not None:
            assert (await stored(rows, handle))["closed_at"] >= found.frames[-1].ts
        # The bit of a lost lease stays until the reclaim.
        assert bool((await rows.execution(handle.execution_id))["attached"] & 4) == (
            bool(found.frames) and (found.closed_at is None or name == "lose")
        )
    assert refusals


async def test_no_frame_of_a_released_lease_follows_one_of_the_next_lease(
    engine: Engine, engines: Engines, given: Given
) -> None:
    other = await engines()
    # The last stream of a large batch is locked long after the statement began.
    handles = await many(engine, 300)
    victim = await given.claimed(lane_id="victim", lease_ttl_ms=600_000)
    await append(engine, victim, b"1")
    current = victim
    for nth in rounds(20, whole=400):
        calls = [append(engine, handle) for handle in handles]
        tasks = [asyncio.create_task(call) for call in (*calls, append(engine, current, b"%d" % current.lease_epoch))]
        for _ in range(nth % 10 * 5):
            await asyncio.sleep(0)
        await other.hand_back(current)
        (again,) = await claim(engine, "victim", lease_ttl_ms=600_000, max_wait_ms=10_000)
        current = again.handle
        await append(other, current, b"%d" % current.lease_epoch)
        *answers, last = await answers_of(tasks)
        assert {type(answer) for answer in answers} == {AppendFrameOutcome}
        assert isinstance(last, AppendFrameOutcome) or last in ("stream_closed", "stale_owner_cannot_append")
    epochs = [int(payload) for payload in await payloads(engine, victim)]
    assert epochs == sorted(epochs)
    assert epochs[-1] == current.lease_epoch


async def test_frames_of_different_leases_do_not_share_a_batch(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await append(engine, handle)
    await engine.hand_back(handle)
    resumed = (await given.claim()).handle
    answers = await answers_of([append(engine, each) for each in (handle, resumed, handle, resumed)])
    assert [code_of(each) if isinstance(each, str) else each.frame_count for each in answers] == [
        "stale_owner_cannot_append",
        2,
        "stale_owner_cannot_append",
        3,
    ]


async def test_an_append_wakes_a_tail_of_another_engine(engines: Engines, given: Given, eventually: Eventually) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    other = await engines()
    waiting = asyncio.create_task(other.tail_stream(handle.execution_id, 0, block_ms=30_000))
    await eventually(lambda: parts_of(other).wakeups.hints.is_listening)
    await given.engine.append_frame(handle, Frame(bytes=b"woken"))
    async with asyncio.timeout(4):
        found = await waiting
    assert [frame.payload for frame in found.frames] == [b"woken"]
