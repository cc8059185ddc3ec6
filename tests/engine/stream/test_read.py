"""read_stream and read_summary: which frames a reader sees, and how a closed stream is marked."""

from typing import Any

import asyncpg
import pytest

from engine.state import all_cases, refused
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.ids import plain_id
from flowfabric.model.stream import ClosedReason, Durable, Frame, StreamFrames

from .writing import SUMMARY, append_each, append_in_modes, ids, live, texts

ABSENT = "{fp:0}:11111111-1111-1111-1111-111111111111"


async def test_frames_are_read_in_their_order_with_their_fields(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    await append_each(engine, handle, "one")
    await clock.advance(ms=5)
    await append_each(engine, handle, "two", frame_type="token", correlation_id="c-1")
    await append_each(engine, handle, '{"a":1}', mode=SUMMARY)
    await append_each(engine, handle, "live", mode=live())
    now = await clock.now()
    found = await engine.read_stream(handle.execution_id, 0)
    assert (found.closed_at, found.closed_reason) == (None, None)
    assert ids(found) == [f"{now - 5}-0", f"{now}-0", f"{now}-1", f"{now}-2"]
    assert [dict(frame.fields) for frame in found.frames] == [
        {
            "encoding": "utf8",
            "frame_type": "event",
            "mode": "durable",
            "payload": "one",
            "source": "worker",
            "ts": str(now - 5),
        },
        {
            "correlation_id": "c-1",
            "encoding": "utf8",
            "frame_type": "token",
            "mode": "durable",
            "payload": "two",
            "source": "worker",
            "ts": str(now),
        },
        {
            "encoding": "utf8",
            "frame_type": "event",
            "mode": "summary",
            "payload": '{"a":1}',
            "source": "worker",
            "summary_version": "1",
            "ts": str(now),
        },
        {
            "encoding": "utf8",
            "frame_type": "event",
            "mode": "best_effort",
            "payload": "live",
            "source": "worker",
            "ts": str(now),
            "ttl_ms": "10000",
        },
    ]
    assert all(list(frame.fields) == sorted(frame.fields) for frame in found.frames)


async def test_both_bounds_are_inclusive_and_a_millisecond_is_whole(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    await append_each(engine, handle, "a", "b", "c")
    now = await clock.advance(ms=1)
    await append_each(engine, handle, "d", "e")
    before = now - 1
    cases = {
        ("start", "end"): "abcde",
        (f"{before}-1", f"{now}-0"): "bcd",
        (f"{before}-1", f"{before}-1"): "b",
        (f"{before}", f"{before}"): "abc",
        (f"{now}", f"{now}"): "de",
        (f"{now}", "end"): "de",
        (f"{before}-3", f"{before}-9"): "",
        (f"{before}-3", "end"): "de",
        (f"{now}-1", f"{before}-1"): "",
        ("start", f"{before - 1}"): "",
        ("0", f"{before}-18446744073709551615"): "abc",
        ("end", "end"): "",
        ("start", "start"): "",
    }
    with all_cases() as case:
        for (from_, to), expected in cases.items():
            with case(f"{from_} to {to}"):
                found = await engine.read_stream(handle.execution_id, 0, from_=from_, to=to)
                assert "".join(texts(found)) == expected


async def test_a_reader_pages_by_starting_after_the_last_id(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    for at in range(7):
        await append_each(engine, handle, f"{at}")
        await clock.advance(ms=at % 2)
    found, from_, pages = [], "start", []
    while (page := await engine.read_stream(handle.execution_id, 0, from_=from_, count_limit=3)).frames:
        pages.append(len(page.frames))
        found += texts(page)
        ms, seq = page.frames[-1].position
        from_ = f"{ms}-{seq + 1}"
    assert pages == [3, 3, 1]
    assert found == [f"{at}" for at in range(7)]


@pytest.mark.parametrize("operation", ["read_stream", "tail_stream"])
async def test_an_answer_has_at_most_10000_frames(engine: Engine, given: Given, operation: str) -> None:
    handle = await given.claimed()
    await append_each(engine, handle, "a", "b")
    call = getattr(engine, operation)
    assert texts(await call(handle.execution_id, 0, count_limit=10_000)) == ["a", "b"]
    assert texts(await call(handle.execution_id, 0, count_limit=1)) == ["a"]
    for count in (0, -1):
        await refused(
            call(handle.execution_id, 0, count_limit=count), "invalid_input", f"count_limit must be >= 1, got {count}"
        )
    for wrong in (True, "5", 1.0, None):
        await refused(
            call(handle.execution_id, 0, count_limit=wrong),
            "invalid_input",
            f"count_limit: must be a whole number from 1 to 10000, got {wrong!r}",
        )
    await refused(
        call(handle.execution_id, 0, count_limit=10_001),
        "invalid_input",
        "count_limit_exceeds_hard_cap: at most 10000 frames in one call, got 10001; read the others in further calls",
    )


async def test_malformed_arguments_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    await append_each(engine, handle, "a")
    named = handle.execution_id
    forms = "write 'start', 'end', '<ms>' or '<ms>-<seq>'"
    tail_forms = "write '<ms>' or '<ms>-<seq>', or '0-0' to start from the beginning"
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("read_stream", {"from_": ""}, f"from_: must not be empty; {forms}"),
        ("read_stream", {"from_": "-"}, "from_: bare '-' is not a cursor; write 'start'"),
        ("read_stream", {"to": "+"}, "to: bare '+' is not a cursor; write 'end'"),
        ("read_stream", {"to": "1-2-3"}, f"to: malformed cursor '1-2-3'; {forms}"),
        ("read_stream", {"to": None}, f"to: malformed cursor None; {forms}"),
        ("tail_stream", {"after": ""}, f"after: must not be empty; {tail_forms}"),
        ("tail_stream", {"after": "x"}, f"after: malformed cursor 'x'; {tail_forms}"),
        (
            "tail_stream",
            {"after": "start"},
            "after: must be the id of a frame, got 'start'; write '0-0' to start from the beginning",
        ),
        (
            "tail_stream",
            {"after": "end"},
            "after: must be the id of a frame, got 'end'; write '0-0' to start from the beginning",
        ),
        ("tail_stream", {"block_ms": 30_001}, "block_ms: must be a whole number from 0 to 30000, got 30001"),
        ("tail_stream", {"block_ms": -1}, "block_ms: must be a whole number from 0 to 30000, got -1"),
        ("tail_stream", {"block_ms": 1.5}, "block_ms: must be a whole number from 0 to 30000, got 1.5"),
        (
            "tail_stream",
            {"visibility": "durable"},
            "visibility: must be '' for all frames or 'exclude_best_effort', got 'durable'",
        ),
        *(
            (
                operation,
                {"attempt_index": value},
                f"attempt_index: must be a whole number from 0 to 2147483647, got {value!r}",
            )
            for operation in ("read_stream", "tail_stream", "read_summary")
            for value in (-1, 2**31, "0", True)
        ),
        *(
            (operation, {"execution_id": "nonsense"}, "MissingTag")
            for operation in ("read_stream", "tail_stream", "read_summary")
        ),
    ]
    with all_cases() as case:
        for operation, wrong, detail in cases:
            with case(f"{operation} {wrong}"):
                arguments = {"execution_id": named, "attempt_index": 0, **wrong}
                async with rows.unchanged():
                    await refused(getattr(engine, operation)(**arguments), "invalid_input", detail)


async def test_a_stream_that_was_never_written_looks_open_and_empty(engine: Engine, given: Given) -> None:
    written = await given.claimed()
    await append_each(engine, written, "a")
    unwritten = await given.created()
    for execution_id, attempt_index in ((ABSENT, 0), (unwritten, 0), (written.execution_id, 1)):
        assert await engine.read_stream(execution_id, attempt_index) == StreamFrames(frames=[])
        assert await engine.tail_stream(execution_id, attempt_index) == StreamFrames(frames=[])
        assert await engine.read_summary(execution_id, attempt_index) is None


async def test_a_reader_may_name_the_execution_in_its_plain_form(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await append_each(engine, handle, '{"a":1}', mode=SUMMARY)
    plain = plain_id(handle.execution_id)
    assert texts(await engine.read_stream(plain, 0)) == ['{"a":1}']
    assert texts(await engine.tail_stream(plain, 0)) == ['{"a":1}']
    assert (await engine.read_summary(plain, 0)) is not None


async def test_payloads_come_back_byte_by_byte(engine: Engine, given: Given) -> None:
    payloads = [
        b"",
        b"\0",
        b"a\0b",
        "äöü €".encode(),
        b"\xff\xfe\x00",
        b"\xed\xa0\x80",
        bytes(range(256)) * 256,
        b"x" * 65_536,
        "\ufeff\u2028".encode(),
    ]
    handle = await given.claimed()
    await append_each(engine, handle, *payloads)
    for found in (await engine.read_stream(handle.execution_id, 0), await engine.tail_stream(handle.execution_id, 0)):
        assert [frame.payload for frame in found.frames] == payloads
        encodings = [frame.fields["encoding"] for frame in found.frames]
        assert encodings == ["utf8", "utf8", "utf8", "utf8", "base64", "base64", "base64", "utf8", "utf8"]


async def test_a_reader_sees_the_newest_frames_that_the_policy_keeps(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed(policy={"stream_policy": {"retention_maxlen": 3}})
    await append_each(engine, handle, *"abcde")
    assert texts(await engine.read_stream(handle.execution_id, 0)) == ["c", "d", "e"]
    assert texts(await engine.tail_stream(handle.execution_id, 0, count_limit=2)) == ["c", "d"]
    # Deleting is lazy.
    assert len(await rows.of("stream_frame")) == 5


async def test_an_expired_live_stream_is_hidden(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    await append_each(engine, handle, "a", "b", mode=live())
    await clock.advance(ms=19_999)
    assert texts(await engine.read_stream(handle.execution_id, 0)) == ["a", "b"]
    await clock.advance(ms=1)
    assert await engine.read_stream(handle.execution_id, 0) == StreamFrames(frames=[])
    assert await engine.tail_stream(handle.execution_id, 0) == StreamFrames(frames=[])
    await append_each(engine, handle, "c", mode=live())
    assert texts(await engine.read_stream(handle.execution_id, 0)) == ["c"]


async def test_a_stream_with_a_durable_frame_never_expires(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    await append_in_modes(engine, handle, [("a", live()), ("b", Durable()), ("c", live())])
    await clock.advance(seconds=300)
    assert texts(await engine.read_stream(handle.execution_id, 0)) == ["a", "b", "c"]


async def test_a_summary_is_the_result_of_its_patches(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    assert await engine.read_summary(handle.execution_id, 0) is None
    began = await clock.now()
    await append_each(engine, handle, '{"a":1,"b":{"c":2}}', mode=SUMMARY)
    await clock.advance(ms=10)
    await append_each(engine, handle, '{"a":null,"b":{"d":3}}', '{"x":"__ff_null__"}', mode=SUMMARY)
    summary = await engine.read_summary(handle.execution_id, 0)
    assert summary is not None
    assert summary.document == {"b": {"c": 2, "d": 3}, "x": None}
    assert summary.document_json == b'{"b":{"c":2,"d":3},"x":null}'
    assert (summary.version, summary.patch_kind) == (3, "json-merge-patch")
    assert (summary.first_applied_ms, summary.last_updated_ms) == (began, began + 10)
    await refused(
        engine.append_frame(handle, Frame(bytes=b"[1]", mode=SUMMARY)), "invalid_input", "patch must be a JSON object"
    )
    assert await engine.read_summary(handle.execution_id, 0) == summary


async def test_frames_that_are_trimmed_stay_part_of_the_summary(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    for at in range(70):
        await append_each(engine, handle, f'{{"k{at}":{at}}}', mode=SUMMARY)
    assert len((await engine.read_stream(handle.execution_id, 0)).frames) == 64
    summary = await engine.read_summary(handle.execution_id, 0)
    assert summary is not None
    assert (summary.version, len(summary.document)) == (70, 70)


async def close_as_by_the_previous_version(connection: asyncpg.Connection, execution_id: str) -> None:
    """Leave the streams of an execution open, as the previous version does when it ends an attempt."""
    await connection.execute(
        "update stream set closed_at = null, closed_reason = null, expires_at = null where execution_id = $1",
        uuid_of(execution_id),
    )


@pytest.mark.usefixtures("altered_rows")
async def test_a_stream_of_an_ended_execution_reads_as_closed_although_it_was_left_open(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    async def complete(handle: Any) -> None:
        await engine.complete(handle, b"")

    async def fail(handle: Any) -> None:
        await engine.fail(handle, reason="x", classification="permanent")

    async def cancel(handle: Any) -> None:
        await engine.cancel_execution(execution_id=handle.execution_id, reason="x")

    async def expire(handle: Any) -> None:
        await clock.advance(seconds=30)
        await engine.expire_execution(handle.execution_id, "attempt_timeout")

    cases = {
        complete: ClosedReason.ATTEMPT_SUCCESS,
        fail: ClosedReason.ATTEMPT_FAILURE,
        cancel: ClosedReason.ATTEMPT_CANCELLED,
        expire: ClosedReason.EXPIRED,
    }
    for end, reason in cases.items():
        handle = await given.claimed(lease_ttl_ms=600_000, policy={"timeout_policy": {"attempt_timeout_ms": 30_000}})
        await append_each(engine, handle, "a")
        await end(handle)
        await close_as_by_the_previous_version(connection, handle.execution_id)
        ended_at = await clock.now()
        await clock.advance(seconds=1)
        found = await engine.read_stream(handle.execution_id, 0)
        assert (texts(found), found.closed_at, found.closed_reason) == (["a"], ended_at, reason)
        assert await engine.tail_stream(handle.execution_id, 0, block_ms=30_000) == found


@pytest.mark.usefixtures("altered_rows")
async def test_a_stream_of_an_earlier_attempt_reads_as_closed_although_it_was_left_open(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    retry = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 0}}}
    handle = await given.claimed(policy=retry)
    await append_each(engine, handle, "first")
    await engine.fail(handle, reason="x")
    await close_as_by_the_previous_version(connection, handle.execution_id)
    failed_at = await clock.now()
    found = await engine.read_stream(handle.execution_id, 0)
    assert (found.closed_at, found.closed_reason) == (failed_at, ClosedReason.ATTEMPT_FAILURE)

    second = (await given.claim()).handle
    await append_each(engine, second, "second")
    assert (await engine.read_stream(handle.execution_id, 1)).closed_at is None
    await clock.advance(ms=30_001)
    third = (await given.claim()).handle
    assert third.attempt_index == 2
    await append_each(engine, third, "third")
    await close_as_by_the_previous_version(connection, handle.execution_id)
    found = await engine.read_stream(handle.execution_id, 1)
    assert (texts(found), found.closed_reason) == (["second"], ClosedReason.RECLAIMED)
    assert found.closed_at == await clock.now()
    assert (await engine.read_stream(handle.execution_id, 0)).closed_reason is ClosedReason.ATTEMPT_FAILURE
    assert (await engine.read_stream(handle.execution_id, 2)).closed_reason is None

    # The end of the execution closed the last stream only.
    await clock.advance(ms=5)
    await engine.complete(third, b"")
    await close_as_by_the_previous_version(connection, handle.execution_id)
    closed = [await engine.read_stream(handle.execution_id, at) for at in range(3)]
    assert [each.closed_reason for each in closed] == ["attempt_failure", "reclaimed", "attempt_success"]
    assert closed[0].closed_at == failed_at
    assert closed[2].closed_at == await clock.now()


async def test_a_stream_stays_open_while_its_attempt_is_parked(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    await append_each(engine, handle, "a")
    await engine.delay(handle, await clock.now() + 1000)
    assert (await engine.read_stream(handle.execution_id, 0)).closed_at is None
    await clock.advance(ms=1000)
    resumed = (await given.claim()).handle
    await append_each(engine, resumed, "b")
    found = await engine.read_stream(handle.execution_id, 0)
    assert (texts(found), found.closed_at) == (["a", "b"], None)


@pytest.mark.usefixtures("altered_rows")
async def test_an_unknown_closing_reason_is_reported_as_corruption(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    await append_each(engine, handle, "a")
    await connection.execute("update stream set closed_at = 1, closed_reason = 'eaten'")
    detail = f"stream of {handle.execution_id}: closed_reason: unknown literal 'eaten'"
    await refused(engine.read_stream(handle.execution_id, 0), "corruption", detail)
    await connection.execute("update stream set closed_at = null, closed_reason = null")
