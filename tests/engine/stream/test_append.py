"""append_frame: its refusals in order, ids, counters, and what is stored."""

from dataclasses import replace
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.state import claim, refused, revoke
from engine.waits import suspend_args
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.handle import Backend, Handle
from flowfabric.model.ids import ExecutionId, LeaseId
from flowfabric.model.states import HandleKind
from flowfabric.model.stream import AppendFrameOutcome, Frame, FrameKind

from .writing import (
    SUMMARY,
    append,
    frames,
    live,
    patch,
    payloads,
    refused_unwritten,
    stored,
    stored_frames,
)

pytestmark = pytest.mark.usefixtures("consistent_rows")

LARGEST = 65_536


def changed(handle: Handle, **fields: Any) -> Handle:
    """A handle with other fields."""
    return Handle(**{name: getattr(handle, name) for name in Handle.__struct_fields__} | fields)


# What is stored.


async def test_a_frame_is_stored_with_its_fields_and_id(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed()
    now = await clock.now()
    first = await append(engine, handle, b"hello", frame_type="token", correlation_id="c1")
    assert first == AppendFrameOutcome(stream_id=f"{now}-0", frame_count=1, summary_version=None)
    later = await clock.advance(ms=5)
    second = await append(engine, handle, b"\xff\x00", kind=FrameKind.STDERR, seq=77)
    assert second == AppendFrameOutcome(stream_id=f"{later}-0", frame_count=2)
    found = await frames(engine, handle)
    assert [dict(frame.fields) for frame in found] == [
        {
            "correlation_id": "c1",
            "encoding": "utf8",
            "frame_type": "token",
            "mode": "durable",
            "payload": "hello",
            "source": "worker",
            "ts": str(now),
        },
        {
            "encoding": "base64",
            "frame_type": "stderr",
            "mode": "durable",
            "payload": "/wA=",
            "source": "worker",
            "ts": str(later),
        },
    ]
    row = await stored(rows, handle)
    assert {name: row[name] for name in row if name not in ("partition_key", "execution_id")} == {
        "attempt_index": 0,
        "attempt_id": handle.attempt_id,
        "created_at": now,
        "last_ms": later,
        "last_seq": 0,
        "frame_count": 2,
        "first_frame_no": 1,
        "oldest_ms": 0,
        "oldest_seq": 0,
        "total_bytes": 7,
        "last_frame_at": later,
        "has_durable_frame": True,
        "ema_rate_hz": None,
        "last_append_ts_ms": None,
        "maxlen_applied_last": None,
        "durability_mode": "buffered",
        "retention_maxlen": 10_000,
        "retention_ttl_ms": None,
        "released_epoch": 0,
        "numbered_epoch": 0,
        "numbered_count": 0,
        "closed_at": None,
        "closed_reason": None,
        "expires_at": None,
        # An hour after the retention.
        "sweep_at": now + 90_000_000,
    }


async def test_the_stream_policy_of_the_execution_is_stored_with_the_stream(
    engine: Engine, given: Given, rows: Rows
) -> None:
    policy = {"durability_mode": "durable", "retention_maxlen": 3, "retention_ttl_ms": 5_000}
    handle = await given.claimed(policy={"stream_policy": policy})
    await append(engine, handle)
    row = await stored(rows, handle)
    assert {name: row[name] for name in policy} == policy


async def test_a_stream_that_begins_under_a_later_lease_has_the_id_of_its_attempt(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    first = await given.claimed()
    await engine.hand_back(first)
    resumed = (await given.claim()).handle
    begun = await clock.advance(ms=5)
    await append(engine, resumed)
    await clock.advance(ms=5)
    await append(engine, resumed)
    row = await stored(rows, resumed)
    assert (row["attempt_id"], row["created_at"]) == (first.attempt_id, begun)
    assert row["attempt_id"] == resumed.attempt_id != resumed.lease_id


async def test_a_retry_starts_a_stream_of_its_own(engine: Engine, given: Given, clock: Clock, rows: Rows) -> None:
    first = await given.backing_off(delay_ms=0)
    # The attempt failed without a frame: it has no stream.
    assert await rows.of("stream") == []
    second = (await given.claim()).handle
    await append(engine, second, b"second")
    await engine.fail(second, reason="no luck")
    third = (await given.claim()).handle
    outcome = await append(engine, third, b"third")
    assert outcome.frame_count == 1
    assert (first.attempt_index, second.attempt_index, third.attempt_index) == (0, 1, 2)
    assert (await payloads(engine, second), await payloads(engine, third)) == ([b"second"], [b"third"])
    assert (await stored(rows, third))["attempt_id"] == third.attempt_id


# Ids and counters.


async def test_ids_increase_although_the_clock_steps_back(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    now = await clock.now()
    found = [(await append(engine, handle)).stream_id for _ in range(2)]
    await clock.advance(seconds=-10)
    found += [(await append(engine, handle)).stream_id for _ in range(2)]
    await clock.advance(seconds=10, ms=1)
    found.append((await append(engine, handle)).stream_id)
    assert found == [f"{now}-0", f"{now}-1", f"{now}-2", f"{now}-3", f"{now + 1}-0"]
    read = await frames(engine, handle)
    assert [frame.id for frame in read] == found
    # The time of a frame is that of the clock.
    assert [frame.ts - now for frame in read] == [0, 0, -10_000, -10_000, 1]


async def test_frame_count_counts_all_frames_ever_appended(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed(policy={"stream_policy": {"retention_maxlen": 2}})
    counts = [(await append(engine, handle, b"%d" % nth)).frame_count for nth in range(5)]
    assert counts == [1, 2, 3, 4, 5]
    assert await payloads(engine, handle) == [b"3", b"4"]
    assert (await stored(rows, handle))["total_bytes"] == 5


async def test_the_policy_may_keep_no_frame(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed(policy={"stream_policy": {"retention_maxlen": 0}})
    assert [(await append(engine, handle)).frame_count for _ in range(2)] == [1, 2]
    assert (await payloads(engine, handle), await stored_frames(rows, handle)) == ([], [])


# Refusals, in the order of the checks.


async def test_the_largest_frame_is_stored_and_a_larger_one_refused_first(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    await append(engine, handle, b"\x80" * LARGEST)
    assert await payloads(engine, handle) == [b"\x80" * LARGEST]
    too_large = b"x" * (LARGEST + 1)
    await refused_unwritten(rows, append(engine, handle, too_large), "retention_limit_exceeded", "65537 bytes")
    # Also if every later check would refuse it too.
    await engine.complete(handle, b"")
    await refused_unwritten(rows, append(engine, handle, too_large, mode=SUMMARY), "retention_limit_exceeded")


async def test_an_unknown_execution_and_foreign_handles_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    absent = ExecutionId(f"{handle.execution_id[:-36]}{uuid4()}")
    await refused_unwritten(rows, append(engine, changed(handle, execution_id=absent)), "execution_not_found")
    await refused_unwritten(rows, append(engine, changed(handle, backend=Backend.VALKEY)), "handle_from_other_backend")
    wrong: Any = "no handle"
    await refused_unwritten(rows, append(engine, wrong), "invalid_input", "handle")
    wrong_frame: Any = b"no frame"
    await refused_unwritten(rows, engine.append_frame(handle, wrong_frame), "invalid_input", "expected a Frame")


@pytest.mark.parametrize("has_stream", [True, False])
async def test_only_the_worker_of_an_active_execution_may_append(
    engine: Engine, given: Given, rows: Rows, clock: Clock, *, has_stream: bool
) -> None:
    async def begun(**overrides: Any) -> Handle:
        handle = await given.claimed(**overrides)
        if has_stream:
            await append(engine, handle)
        return handle

    async def closed(handle: Handle, detail: str) -> None:
        await refused_unwritten(rows, append(engine, handle), "stream_closed", detail)

    async def stale(handle: Handle, detail: str) -> None:
        await refused_unwritten(rows, append(engine, handle), "stale_owner_cannot_append", detail)

    completed = await begun()
    await engine.complete(completed, b"")
    await closed(completed, "terminal")
    failed = await begun(policy={"retry_policy": {"max_retries": 1}}, lane_id="failed")
    await engine.fail(failed, reason="no luck")
    await closed(failed, "runnable")
    suspended = await begun(lane_id="suspended")
    await engine.suspend(suspended, suspend_args())
    await closed(suspended, "suspended")
    parked = await begun(lane_id="parked")
    await engine.wait_children(parked)
    await closed(parked, "runnable")
    # The attempt continues under another lease, with the same index.
    resumed = (await given.claim(lane_id="parked")).handle
    assert resumed.attempt_index == parked.attempt_index
    await stale(parked, "epoch 1")
    for fields in ({"lease_id": LeaseId(uuid4())}, {"lease_epoch": 3}, {"attempt_index": 1}):
        await stale(changed(resumed, **fields), "not the current one")
    await append(engine, resumed)


@pytest.mark.parametrize("has_stream", [True, False])
async def test_a_worker_that_lost_its_lease_cannot_append(
    engine: Engine, given: Given, rows: Rows, clock: Clock, *, has_stream: bool
) -> None:
    lost = await given.claimed(lease_ttl_ms=1_000, lane_id="lost")
    revoked = await given.claimed(lease_ttl_ms=1_000_000, lane_id="revoked")
    if has_stream:
        await append(engine, lost)
        await append(engine, revoked)
    await clock.advance(ms=999)
    await append(engine, lost)
    await clock.advance(ms=1)
    await refused_unwritten(rows, append(engine, lost), "stale_owner_cannot_append", "expired")
    assert await parts_of(engine).lease_expiry.mark_expired([lost.execution_id]) == 1
    await refused_unwritten(rows, append(engine, lost), "stale_owner_cannot_append", "lost")
    (reclaimed,) = await claim(engine, "lost")
    assert reclaimed.attempt_index == 1
    await refused_unwritten(rows, append(engine, lost), "stale_owner_cannot_append", "not the current one")
    await append(engine, reclaimed.handle)
    await revoke(engine, revoked.execution_id)
    await refused_unwritten(rows, append(engine, revoked), "stale_owner_cannot_append", "lost")


async def test_a_renewed_lease_may_append_past_its_first_expiry(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(lease_ttl_ms=1_000)
    await append(engine, handle)
    await clock.advance(ms=900)
    await engine.renew(handle)
    await clock.advance(ms=900)
    assert (await append(engine, handle)).frame_count == 2


async def test_the_handle_of_a_suspended_run_cannot_append(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    outcome: Any = await engine.suspend(handle, suspend_args())
    assert outcome.handle.kind is HandleKind.SUSPENDED
    await refused_unwritten(rows, append(engine, outcome.handle), "stream_closed")
    await engine.resume_execution(execution_id=handle.execution_id)
    resumed = (await given.claim()).handle
    await refused_unwritten(rows, append(engine, outcome.handle), "stale_owner_cannot_append")
    await append(engine, resumed)


async def test_a_closed_stream_refuses_frames_of_the_current_lease(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    await append(engine, handle)
    await connection.execute("update stream set closed_at = 1, closed_reason = 'attempt_interrupted'")
    await refused_unwritten(rows, append(engine, handle), "stream_closed", "attempt_interrupted")
    # Before the payload of a summary frame is read.
    await refused_unwritten(rows, append(engine, handle, b"[]", mode=SUMMARY), "stream_closed")


async def test_a_patch_is_checked_last(engine: Engine, given: Given, rows: Rows) -> None:
    deep = b'{"a":' * 16 + b"{}" + b"}" * 16
    bad = {
        b"{": "patch payload is not valid JSON",
        b'{"a": NaN}': "patch payload is not valid JSON",
        b"\xff": "patch payload is not valid JSON",
        b"[]": "patch must be a JSON object",
        b"1": "patch must be a JSON object",
        deep: "patch_depth_exceeded",
    }
    new = await given.claimed()
    for payload, detail in bad.items():
        # The first frame of an attempt: not even a stream is left.
        await refused_unwritten(rows, append(engine, new, payload, mode=SUMMARY), "invalid_input", detail)
    await patch(engine, new, '{"a": 1}')
    for payload, detail in bad.items():
        await refused_unwritten(rows, append(engine, new, payload, mode=SUMMARY), "invalid_input", detail)
    await append(engine, new, deep.replace(b"{}", b"1"), mode=SUMMARY)
    await engine.complete(new, b"")
    for payload in bad:
        await refused_unwritten(rows, append(engine, new, payload, mode=SUMMARY), "stream_closed")


# Retention of the modes.


@pytest.mark.parametrize("maxlen", [1, 100, 300])
async def test_a_reader_sees_exactly_the_newest_frames(engine: Engine, given: Given, rows: Rows, maxlen: int) -> None:
    handle = await given.claimed(policy={"stream_policy": {"retention_maxlen": maxlen}}, lease_ttl_ms=600_000)
    for nth in range(700):
        await append(engine, handle, b"%d" % nth)
        if nth % 97 == 0 or nth in (255, 256, 257, 511, 512, 555, 556, 557):
            expected = [b"%d" % n for n in range(max(0, nth - maxlen + 1), nth + 1)]
            assert await payloads(engine, handle) == expected
            # Hidden frames are deleted in steps.
            kept = await stored_frames(rows, handle)
            assert len(kept) < maxlen + 256
            row = await stored(rows, handle)
            assert (row["oldest_ms"], row["oldest_seq"]) <= (kept[0]["ms"], kept[0]["seq"])
            # One above the last deleted frame.
            assert row["oldest_seq"] == (kept[0]["seq"] if kept[0]["frame_no"] > 1 else 0)


async def test_a_summary_frame_keeps_64_frames(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    for nth in range(70):
        await append(engine, handle, b"%d" % nth)
    assert len(await frames(engine, handle)) == 70
    await patch(engine, handle, "{}")
    assert await payloads(engine, handle) == [*(b"%d" % nth for nth in range(7, 70)), b"{}"]
    # Frames that were hidden once stay hidden.
    await append(engine, handle, b"next")
    assert len(await frames(engine, handle)) == 65


async def test_the_window_of_best_effort_frames_follows_their_rate(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    handle = await given.claimed()
    seen = []
    for ms in (0, 10, 10, 0, 5_000):
        now = await clock.advance(ms=ms)
        await append(engine, handle, mode=live())
        row = await stored(rows, handle)
        assert (row["last_append_ts_ms"], row["expires_at"], row["has_durable_frame"]) == (now, now + 20_000, False)
        seen.append((round(row["ema_rate_hz"], 9), row["maxlen_applied_last"]))
    assert seen == [(3.2, 64), (22.56, 452), (38.048, 761), (230.4384, 4609), (184.39072, 3688)]
    (first, *_) = await frames(engine, handle)
    assert (first.fields["mode"], first.fields["ttl_ms"]) == ("best_effort", "10000")


async def test_other_frames_do_not_change_the_rate(engine: Engine, given: Given, clock: Clock, rows: Rows) -> None:
    handle = await given.claimed()
    await append(engine, handle, mode=live())
    await clock.advance(ms=5)
    await append(engine, handle)
    await clock.advance(ms=5)
    await append(engine, handle, mode=live())
    row = await stored(rows, handle)
    assert (row["ema_rate_hz"], row["maxlen_applied_last"]) == (pytest.approx(22.56), 452)


async def test_a_best_effort_frame_trims_the_whole_stream(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    for nth in range(10):
        await append(engine, handle, b"%d" % nth)
    await append(engine, handle, b"live", mode=live(maxlen_floor=4, maxlen_ceiling=4))
    assert await payloads(engine, handle) == [b"7", b"8", b"9", b"live"]


async def test_a_best_effort_stream_expires_and_can_be_written_again(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    await append(engine, handle, b"old", mode=live())
    await clock.advance(ms=19_999)
    assert await payloads(engine, handle) == [b"old"]
    await append(engine, handle, b"refreshed", mode=live())
    await clock.advance(ms=20_000)
    assert await payloads(engine, handle) == []
    outcome = await append(engine, handle, b"new", mode=live())
    # Expired frames stay hidden for good; ids and counts go on.
    assert outcome.frame_count == 3
    assert await payloads(engine, handle) == [b"new"]
    assert (await stored(rows, handle))["first_frame_no"] == 3


@pytest.mark.parametrize("mode", ["durable", "summary"])
async def test_a_durable_frame_cancels_the_expiry_for_good(
    engine: Engine, given: Given, clock: Clock, rows: Rows, mode: str
) -> None:
    handle = await given.claimed(lease_ttl_ms=6_000_000)
    await append(engine, handle, b"1", mode=live())
    await (append(engine, handle, b"{}") if mode == "durable" else patch(engine, handle, "{}"))
    await append(engine, handle, b"2", mode=live())
    row = await stored(rows, handle)
    assert (row["expires_at"], row["has_durable_frame"]) == (None, True)
    await clock.advance(seconds=3_600)
    assert await payloads(engine, handle) == [b"1", b"{}", b"2"]


async def test_a_durable_frame_does_not_bring_expired_frames_back(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    await append(engine, handle, b"expired", mode=live())
    await clock.advance(ms=20_000)
    await append(engine, handle, b"durable")
    assert await payloads(engine, handle) == [b"durable"]


# The summary.


async def test_patches_are_merged_into_the_summary(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    first = await clock.now()
    versions = [(await patch(engine, handle, '{"a":1,"b":{"c":2}}')).summary_version]
    await clock.advance(ms=7)
    versions.append((await patch(engine, handle, '{"a":null,"b":{"d":3}}')).summary_version)
    last = await clock.advance(ms=7)
    versions.append((await patch(engine, handle, '{"x":"__ff_null__"}')).summary_version)
    assert versions == [1, 2, 3]
    await refused(patch(engine, handle, "[1]"), "invalid_input", "must be a JSON object")
    await append(engine, handle, b"not a patch")
    summary = await engine.read_summary(handle.execution_id, 0)
    assert summary is not None
    assert summary.document == {"b": {"c": 2, "d": 3}, "x": None}
    assert (summary.version, summary.first_applied_ms, summary.last_updated_ms) == (3, first, last)
    found = await frames(engine, handle)
    assert [frame.summary_version for frame in found] == [1, 2, 3, None]
    assert found[2].payload == b'{"x":"__ff_null__"}'


async def test_trimming_and_expiry_leave_the_summary(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(policy={"stream_policy": {"retention_maxlen": 1, "retention_ttl_ms": 1_000}})
    await patch(engine, handle, '{"kept": true}')
    for _ in range(300):
        await append(engine, handle)
    assert len(await frames(engine, handle)) == 1
    await engine.complete(handle, b"")
    await clock.advance(ms=1_000)
    assert (await parts_of(engine).stream_expiry.sweep_batch()).done == 1
    assert await frames(engine, handle) == []
    summary = await engine.read_summary(handle.execution_id, 0)
    assert summary is not None
    assert summary.document == {"kept": True}


async def test_each_attempt_has_its_own_summary(engine: Engine, given: Given) -> None:
    handle = await given.claimed(
        policy={"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    )
    await patch(engine, handle, '{"attempt": 0}')
    await engine.fail(handle, reason="no luck")
    second = (await given.claim()).handle
    assert (await patch(engine, second, '{"n": 1}')).summary_version == 1
    documents = [await engine.read_summary(handle.execution_id, index) for index in (0, 1)]
    assert [found and found.document for found in documents] == [{"attempt": 0}, {"n": 1}]


async def test_frames_keep_their_type(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    for kind in FrameKind:
        await append(engine, handle, kind=kind)
    plain = Frame(bytes=b"", frame_type="é\n")
    await engine.append_frame(handle, replace(plain, kind=FrameKind.BLOB))
    assert [frame.frame_type for frame in await frames(engine, handle)] == [*FrameKind, "é\n"]
