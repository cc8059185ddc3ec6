import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.stream import (
    FIRST,
    LAST,
    BestEffortLive,
    BestEffortLiveConfig,
    ClosedReason,
    Durable,
    DurableSummary,
    Frame,
    FrameId,
    FrameKind,
    FrameMode,
    StreamFrame,
    SummaryDocument,
    TailVisibility,
    live_window,
    lower_bound,
    next_id,
    tail_position,
    upper_bound,
)
from flowfabric.model.summary import PatchKind
from model.cases import for_each

MAX_SEQ = 2**31 - 1


def refusal_of(call: Any, **arguments: Any) -> str:
    with pytest.raises(InvalidInputError) as refused:
        call(**arguments)
    assert refused.value.code == "invalid_input"
    return str(refused.value.detail)


def test_the_literals_of_streams() -> None:
    assert [str(kind) for kind in FrameKind] == ["stdout", "stderr", "event", "blob"]
    assert [str(mode) for mode in FrameMode] == ["durable", "summary", "best_effort"]
    assert [str(visibility) for visibility in TailVisibility] == ["", "exclude_best_effort"]
    assert [str(kind) for kind in PatchKind] == ["json-merge-patch"]
    assert {str(reason) for reason in ClosedReason} == {
        "attempt_success",
        "attempt_failure",
        "attempt_cancelled",
        "expired",
        "suspension_timeout",
        "lease_expired",
        "reclaimed",
        "dependency_impossible",
        "attempt_interrupted",
    }


def test_a_frame_without_a_type_has_the_name_of_its_kind() -> None:
    assert Frame(bytes=b"").frame_type == "event"
    assert [Frame(bytes=b"", kind=kind).frame_type for kind in FrameKind] == list(FrameKind)
    assert Frame(bytes=b"", frame_type="token").frame_type == "token"
    assert Frame(bytes=b"").mode == Durable()


@for_each(
    "fields, detail",
    [
        ({"bytes": "text"}, "bytes: must be bytes, got 'text'; write text.encode()"),
        ({"bytes": bytearray(b"a")}, "bytes: must be bytes, got bytearray(b'a')"),
        ({"kind": "log"}, "kind: must be one of stdout, stderr, event, blob, got 'log'"),
        ({"frame_type": 1}, "frame_type: must be text, got 1"),
        ({"frame_type": "a\0"}, "frame_type: must not contain NUL (\\0), got 'a\\x00'"),
        ({"frame_type": "a" * 1025}, "frame_type: must be at most 1024 characters long, got 1025"),
        ({"correlation_id": 1}, "correlation_id: must be text, got 1"),
        ({"mode": "durable"}, "mode: expected Durable, DurableSummary or BestEffortLive, got 'durable'"),
        ({"seq": -1}, "seq: must be a whole number from 0 to 18446744073709551615, got -1"),
    ],
)
def test_a_frame_of_wrong_fields_is_refused(fields: dict[str, Any], detail: str) -> None:
    assert refusal_of(Frame, **{"bytes": b"", **fields}) == detail


def test_a_mode_of_wrong_fields_is_refused() -> None:
    assert refusal_of(DurableSummary, patch_kind="json-patch") == (
        "unsupported patch_kind 'json-patch'; the only kind is 'json-merge-patch'"
    )
    assert DurableSummary(patch_kind="json-merge-patch").patch_kind is PatchKind.JSON_MERGE_PATCH  # type: ignore[arg-type]
    assert refusal_of(BestEffortLive, config=5) == "config: expected a BestEffortLiveConfig, got 5"
    assert refusal_of(BestEffortLiveConfig, ttl_ms=-1) == (
        "ttl_ms: must be a whole number from 0 to 9007199254740991, got -1"
    )
    assert refusal_of(BestEffortLiveConfig, ttl_ms=1, ema_alpha="a") == "ema_alpha: must be a number, got 'a'"
    assert refusal_of(BestEffortLiveConfig, ttl_ms=1, maxlen_floor=1.5).startswith("maxlen_floor: must be a whole")
    assert refusal_of(BestEffortLiveConfig, ttl_ms=1, maxlen_ceiling=2**31).startswith("maxlen_ceiling: must be")


def test_the_worked_values_of_the_live_window() -> None:
    config = BestEffortLiveConfig(ttl_ms=10_000)
    now, last, rate = 1_000_000, None, None
    found = []
    for elapsed in (0, 10, 10, 0, 5000):
        now += elapsed
        window = live_window(config, now, rate, last)
        found.append((round(window.ema_rate_hz, 8), window.maxlen))
        assert window.expires_at == now + 20_000
        rate, last = window.ema_rate_hz, now
    assert found == [(3.2, 64), (22.56, 452), (38.048, 761), (230.4384, 4609), (184.39072, 3688)]


def test_a_live_window_whose_clock_steps_back_counts_a_millisecond() -> None:
    config = BestEffortLiveConfig(ttl_ms=10_000)
    assert live_window(config, 5, 3.2, 1000) == live_window(config, 5, 3.2, 5)


def test_a_live_window_stays_between_floor_and_ceiling() -> None:
    narrow = BestEffortLiveConfig(ttl_ms=10_000, maxlen_floor=10, maxlen_ceiling=20)
    assert live_window(narrow, 10_000, 0.001, 0).maxlen == 10
    assert live_window(narrow, 10, 1e300, 9).maxlen == 20
    # A first window is exactly the floor, whatever the rounding of floor / time * time.
    for ttl_ms in range(1, 2000, 7):
        assert live_window(BestEffortLiveConfig(ttl_ms=ttl_ms), 1, None, None).maxlen == 64
    assert live_window(BestEffortLiveConfig(ttl_ms=0), 100, None, None).expires_at == 102


@for_each(
    "given_config, used",
    [
        ({}, (64, 16384, 0.2)),
        ({"maxlen_floor": 0, "maxlen_ceiling": -5, "ema_alpha": 0}, (64, 16384, 0.2)),
        ({"ema_alpha": 1.1}, (64, 16384, 0.2)),
        ({"ema_alpha": math.nan}, (64, 16384, 0.2)),
        ({"ema_alpha": 1}, (64, 16384, 1)),
        ({"maxlen_floor": 100, "maxlen_ceiling": 50}, (100, 100, 0.2)),
        ({"maxlen_floor": 20_000}, (20_000, 20_000, 0.2)),
        ({"maxlen_ceiling": 10}, (64, 64, 0.2)),
    ],
)
def test_values_of_a_config_that_are_out_of_range_are_replaced(
    given_config: dict[str, Any], used: tuple[Any, ...]
) -> None:
    config = BestEffortLiveConfig(ttl_ms=1000, **given_config)
    assert (config.maxlen_floor, config.maxlen_ceiling, config.ema_alpha) == used
    assert dataclasses.replace(config) == config


def test_ids_grow_although_the_clock_steps_back() -> None:
    ids = [FrameId(0, 0)]
    for now in (1000, 1000, 1001, 1001, 991, 1, 1001, 1002):
        ids.append(next_id(now, ids[-1]))
    assert [str(each) for each in ids[1:]] == [
        "1000-0",
        "1000-1",
        "1001-0",
        "1001-1",
        "1001-2",
        "1001-3",
        "1001-4",
        "1002-0",
    ]


@given(st.integers(0, 2**53), st.integers(0, 2**53), st.integers(0, MAX_SEQ))
def test_the_next_id_is_greater_and_fits_its_columns(now: int, ms: int, seq: int) -> None:
    following = next_id(now, FrameId(ms, seq))
    assert following > FrameId(ms, seq)
    assert following.seq < MAX_SEQ
    assert lower_bound(str(following)) == upper_bound(str(following)) == tail_position(str(following)) == following


@for_each(
    "cursor, lower, upper",
    [
        ("start", FIRST, FIRST),
        ("end", LAST, LAST),
        ("0-0", (0, 0), (0, 0)),
        ("1700", (1700, 0), (1700, MAX_SEQ)),
        ("1700-3", (1700, 3), (1700, 3)),
        ("007-03", (7, 3), (7, 3)),
        (FrameId(5, 6), (5, 6), (5, 6)),
        ("18446744073709551615-18446744073709551615", LAST, LAST),
    ],
)
def test_the_bounds_of_a_cursor(cursor: object, lower: tuple[int, int], upper: tuple[int, int]) -> None:
    assert (lower_bound(cursor), upper_bound(cursor)) == (lower, upper)
    if cursor not in ("start", "end"):
        assert tail_position(cursor) == lower


FORMS = "write 'start', 'end', '<ms>' or '<ms>-<seq>'"
TAIL_FORMS = "write '<ms>' or '<ms>-<seq>', or '0-0' to start from the beginning"


@for_each(
    "cursor, detail",
    [
        ("", f"must not be empty; {FORMS}"),
        ("-", "bare '-' is not a cursor; write 'start'"),
        ("+", "bare '+' is not a cursor; write 'end'"),
        *(
            (cursor, f"malformed cursor {cursor!r}; {FORMS}")
            for cursor in (
                "START",
                " 1",
                "1-",
                "-1",
                "1-2-3",
                "1.5",
                "1\n",
                "0x1",
                "(1-2",
                "$",
                "18446744073709551616",
                "1-18446744073709551616",
                1,
                None,
                b"1-2",
            )
        ),
        ("١", f"malformed cursor '١'; {FORMS}"),
        ("1" * 2000, f"malformed cursor '{'1' * 199}...; {FORMS}"),
    ],
)
def test_a_malformed_cursor_is_refused(cursor: object, detail: str) -> None:
    assert refusal_of(lambda: lower_bound(cursor)) == f"from: {detail}"
    assert refusal_of(lambda: upper_bound(cursor)) == f"to: {detail}"
    tail_detail = f"{detail.rpartition('; ')[0]}; {TAIL_FORMS}"
    assert refusal_of(lambda: tail_position(cursor)) == f"after: {tail_detail}"


def test_an_id_of_a_run_is_refused_with_its_cursor() -> None:
    for read, name in ((lower_bound, "from"), (upper_bound, "to"), (tail_position, "after")):
        assert refusal_of(lambda read=read: read("0:17-3")) == (
            f"{name}: malformed cursor '0:17-3'; it is an id of run.stream(), whose part after the colon is the"
            " cursor: write '17-3'"
        )


@for_each("cursor", ["start", "end"])
def test_a_tail_needs_a_concrete_position(cursor: str) -> None:
    assert refusal_of(lambda: tail_position(cursor)) == (
        f"after: must be the id of a frame, got '{cursor}'; write '0-0' to start from the beginning"
    )


def stored(**changed: Any) -> dict[str, Any]:
    return {
        "ms": 1000,
        "seq": 2,
        "frame_no": 7,
        "at": 990,
        "mode": "durable",
        "frame_type": "token",
        "payload": b"hi",
        "correlation_id": None,
        "summary_version": None,
        "ttl_ms": None,
        **changed,
    }


def test_the_fields_of_a_frame_are_text_with_sorted_names() -> None:
    frame = StreamFrame.of(stored())
    assert (frame.id, frame.position, frame.number) == ("1000-2", FrameId(1000, 2), 7)
    assert list(frame.fields.items()) == [
        ("encoding", "utf8"),
        ("frame_type", "token"),
        ("mode", "durable"),
        ("payload", "hi"),
        ("source", "worker"),
        ("ts", "990"),
    ]
    full = StreamFrame.of(stored(mode="best_effort", correlation_id="c", summary_version=7, ttl_ms=5000))
    assert list(full.fields) == sorted(full.fields)
    assert set(full.fields) - set(frame.fields) == {"correlation_id", "summary_version", "ttl_ms"}
    assert (full.mode, full.correlation_id, full.summary_version, full.ts) == (FrameMode.BEST_EFFORT, "c", 7, 990)
    assert (full.fields["summary_version"], full.fields["ttl_ms"]) == ("7", "5000")
    assert {type(value) for value in full.fields.values()} == {str}
    assert (frame.correlation_id, frame.summary_version, frame.frame_type) == (None, None, "token")


def test_a_frame_without_a_mode_reads_as_durable() -> None:
    frame = StreamFrame(position=FrameId(1, 0), number=1, payload=b"hi", frame_type="event", ts=1)
    assert (frame.mode, frame.fields["mode"], frame.text) == (FrameMode.DURABLE, "durable", "hi")


@given(st.binary())
def test_every_payload_comes_back_byte_by_byte(payload: bytes) -> None:
    frame = StreamFrame.of(stored(payload=payload))
    assert frame.payload == payload
    assert frame.text == payload.decode(errors="replace")


def test_a_payload_that_is_not_utf8_reads_as_base64() -> None:
    frame = StreamFrame.of(stored(payload=b"\xff\x00"))
    assert (frame.fields["encoding"], frame.fields["payload"]) == ("base64", "/wA=")
    assert frame.text == "\ufffd\0"


def test_a_summary_document_decodes_its_bytes() -> None:
    summary = SummaryDocument(
        document_json=b'{"a":[1,null]}',
        version=1,
        patch_kind=PatchKind.JSON_MERGE_PATCH,
        last_updated_ms=2,
        first_applied_ms=1,
    )
    assert summary.document == {"a": [1, None]}
