import hashlib
import json
import pickle
import struct
import uuid

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.handle import Backend, Fence, Handle, check_handle
from flowfabric.model.ids import AttemptId, ExecutionId, LaneId, LeaseId, WorkerInstanceId, format_execution_id
from flowfabric.model.states import HandleKind
from model.cases import for_each

GOLDEN = Handle(
    kind=HandleKind.FRESH,
    execution_id=ExecutionId("{fp:7}:11111111-2222-3333-4444-555555555555"),
    attempt_index=0,
    attempt_id=AttemptId(uuid.UUID("aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa")),
    lease_id=LeaseId(uuid.UUID("bbbbbbbb-bbbb-4bbb-8bbb-bbbbbbbbbbbb")),
    lease_epoch=1,
    lease_ttl_ms=30_000,
    lane_id=LaneId("default"),
    worker_instance_id=WorkerInstanceId("w-1"),
)
BYTES = GOLDEN.opaque
SHA256 = "9526d2536893ee47009c98cb72d866bbe07ccf3fdb84e00a890120cdba2b621e"


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(data)) + data


def _fields(
    *,
    execution_id: str | bytes = GOLDEN.execution_id,
    attempt_id: str | bytes = str(GOLDEN.attempt_id),
    lease_id: str | bytes = str(GOLDEN.lease_id),
    lane_id: str | bytes = "default",
    worker_instance_id: str | bytes = "w-1",
    attempt_index: int = 0,
    lease_epoch: int = 1,
    lease_ttl_ms: int = 30_000,
) -> bytes:
    return (
        _text(execution_id)
        + struct.pack("<I", attempt_index)
        + _text(attempt_id)
        + _text(lease_id)
        + struct.pack("<QQ", lease_epoch, lease_ttl_ms)
        + _text(lane_id)
        + _text(worker_instance_id)
    )


def _decode(data: bytes) -> Handle:
    return Handle.decode(data, HandleKind.FRESH)


def test_the_golden_handle_encodes_to_the_golden_bytes() -> None:
    assert len(BYTES) == 168
    assert hashlib.sha256(BYTES).hexdigest() == SHA256
    assert b"\x02\x01\x02" + _fields() == BYTES


def test_the_golden_bytes_decode_to_the_golden_handle() -> None:
    assert _decode(BYTES) == GOLDEN


handles = st.builds(
    Handle,
    kind=st.sampled_from(HandleKind),
    execution_id=st.builds(format_execution_id, st.integers(0, 65535), st.uuids()),
    attempt_index=st.integers(0, 2**31 - 1),
    attempt_id=st.uuids(),
    lease_id=st.uuids(),
    lease_epoch=st.integers(0, 2**63 - 1),
    lease_ttl_ms=st.integers(1, 2**32 - 1),
    lane_id=st.text(st.characters(codec="utf-8")),
    worker_instance_id=st.text(st.characters(codec="utf-8")),
)


@given(handles)
def test_a_handle_survives_its_bytes_and_its_json(handle: Handle) -> None:
    assert Handle.decode(handle.opaque, handle.kind) == handle
    assert Handle.from_json(json.loads(json.dumps(handle.to_json()))) == handle
    assert pickle.loads(pickle.dumps(handle)) == handle


@given(handles, handles)
def test_handles_are_equal_exactly_when_backend_kind_and_bytes_are(one: Handle, other: Handle) -> None:
    assert (one == other) == ((one.backend, one.kind, one.opaque) == (other.backend, other.kind, other.opaque))
    assert hash(one) == hash(Handle.decode(one.opaque, one.kind))


@given(st.binary())
def test_random_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(InvalidInputError):
        _decode(data)


def test_every_prefix_of_a_handle_is_truncated() -> None:
    for end in range(len(BYTES)):
        with pytest.raises(InvalidInputError, match=r"corruption: handle_codec: Truncated\{needed=") as refused:
            _decode(BYTES[:end])
        assert refused.value.code == "corruption"


@for_each(
    "data, reason",
    [
        (b"", "Truncated{needed=1, at=0, have=0}"),
        (BYTES[:5], "Truncated{needed=4, at=3, have=2}"),
        (b"\x02\x01\x02\xff\xff\xff\xff", "Truncated{needed=4294967295, at=7, have=0}"),
        (BYTES + b"!", "TrailingBytes{pos=168, len=169}"),
        (b"\x02\x02" + BYTES[2:], "BadWireVersion(0x02)"),
        (b"\x00" + BYTES[1:], "BadV1Version(0x00)"),
        (b"\x03" + BYTES[1:], "BadV1Version(0x03)"),
        (b"\x02\x01\x00" + BYTES[3:], "BadBackendTag(0x00)"),
        (b"\x02\x01\x04" + BYTES[3:], "BadBackendTag(0x04)"),
        (b"\x02\x01\x02" + _fields(execution_id=b"\xff"), "InvalidUtf8{field=execution_id}"),
        (b"\x02\x01\x02" + _fields(attempt_id=b"\xff"), "InvalidUtf8{field=attempt_id}"),
        (b"\x02\x01\x02" + _fields(lease_id=b"\xff"), "InvalidUtf8{field=lease_id}"),
        (b"\x02\x01\x02" + _fields(lane_id=b"\xff"), "InvalidUtf8{field=lane_id}"),
        (b"\x02\x01\x02" + _fields(worker_instance_id=b"\xff"), "InvalidUtf8{field=worker_instance_id}"),
        (b"\x02\x01\x02" + _fields(execution_id="x"), "ParseField{field=execution_id, MissingTag: 'x' "),
        (b"\x02\x01\x02" + _fields(attempt_id="x"), "ParseField{field=attempt_id, "),
        (b"\x02\x01\x02" + _fields(lease_id="x"), "ParseField{field=lease_id, "),
    ],
)
def test_unreadable_bytes_are_corruption_with_the_fault(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        _decode(data)
    assert refused.value.code == "corruption"
    assert str(refused.value.detail).startswith(f"handle_codec: {reason}")


def test_lane_and_worker_are_not_checked_on_decode() -> None:
    decoded = _decode(b"\x02\x01\x02" + _fields(lane_id="", worker_instance_id="two words"))
    assert (decoded.lane_id, decoded.worker_instance_id) == ("", "two words")


@for_each("ttl", [0, 2**32, 2**63, -1 % 2**64])
def test_a_lease_ttl_out_of_range_is_rejected(ttl: int) -> None:
    with pytest.raises(InvalidInputError) as refused:
        _decode(b"\x02\x01\x02" + _fields(lease_ttl_ms=ttl))
    expected = "handle_codec: ParseField{field=lease_ttl_ms, lease_ttl_ms: must be a whole number from 1 to 4294967295"
    assert refused.value.code == "corruption"
    assert str(refused.value.detail).startswith(f"{expected}, got {ttl}}}; ")


@for_each("ttl", [1, 2**32 - 1])
def test_the_limits_of_a_lease_ttl_are_inclusive(ttl: int) -> None:
    assert _decode(b"\x02\x01\x02" + _fields(lease_ttl_ms=ttl)).lease_ttl_ms == ttl


@for_each("beyond", [_fields(attempt_index=2**31), _fields(lease_epoch=2**63)])
def test_numbers_out_of_range_are_rejected(beyond: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"invalid_input: handle.*must be at most [0-9]+, got [0-9]+"):
        _decode(b"\x02\x01\x02" + beyond)


@for_each(
    "data, backend, actual",
    [
        (b"\x02\x01\x01" + _fields(), "Valkey", "Valkey"),
        (b"\x02\x01\x03" + _fields(), "Sqlite", "Sqlite"),
        (b"\x02\x01\x01" + _fields(), "Postgres", "Valkey"),
        (BYTES, "Sqlite", "Sqlite"),
        (b"\x01" + _fields(), "Valkey", "Valkey"),
        (b"\x01" + _fields(), "Postgres", "Valkey"),
    ],
)
def test_a_handle_of_another_backend_is_rejected_with_its_backend(data: bytes, backend: str, actual: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        Handle.decode(data, HandleKind.FRESH, backend)
    assert refused.value.code == "handle_from_other_backend"
    assert refused.value.detail == f"expected=Postgres actual={actual}"


def test_unreadable_bytes_of_version_1_are_corruption() -> None:
    with pytest.raises(InvalidInputError, match="corruption: handle_codec: Truncated"):
        _decode(b"\x01" + _fields()[:-1])


def test_the_json_of_a_handle_has_three_text_fields() -> None:
    plain = GOLDEN.to_json()
    assert list(plain) == ["backend", "kind", "opaque"]
    assert (plain["backend"], plain["kind"]) == ("Postgres", "Fresh")
    assert {type(value) for value in plain.values()} == {str}


@for_each(
    "changes, field",
    [
        ({"backend": "Oracle"}, "handle.backend"),
        ({"backend": None}, "handle.backend"),
        ({"backend": []}, "handle.backend"),
        ({"kind": "fresh"}, "handle.kind"),
        ({"kind": {}}, "handle.kind"),
        ({"opaque": None}, "handle.opaque"),
        ({"opaque": "***"}, "handle.opaque"),
        ({"opaque": "é"}, "handle.opaque"),
    ],
)
def test_malformed_json_of_a_handle_is_rejected_with_the_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"invalid_input: {field}: "):
        Handle.from_json({**GOLDEN.to_json(), **changes})


@for_each("value", [None, "handle", [], 3])
def test_the_json_of_a_handle_must_be_an_object(value: object) -> None:
    with pytest.raises(InvalidInputError, match="invalid_input: handle: "):
        Handle.from_json(value)


def test_a_handle_is_immutable() -> None:
    for name in ("lease_epoch", "backend", "opaque", "other"):
        with pytest.raises(AttributeError):
            setattr(GOLDEN, name, 5)


def test_operations_accept_only_handles_of_this_backend() -> None:
    assert check_handle(GOLDEN) is GOLDEN
    foreign = msgspec.structs.replace(GOLDEN, backend=Backend.SQLITE)
    with pytest.raises(InvalidInputError, match="handle_from_other_backend: expected=Postgres actual=Sqlite"):
        check_handle(foreign)
    for value in (None, BYTES, GOLDEN.to_json()):
        with pytest.raises(InvalidInputError, match="invalid_input: handle: "):
            check_handle(value)


@for_each(
    "changes, detail",
    [
        ({"attempt_index": 2**31}, "attempt_index: must be a whole number from 0 to 2147483647, got 2147483648"),
        ({"attempt_index": -1}, "attempt_index: must be a whole number from 0 to 2147483647, got -1"),
        ({"lease_epoch": 2**63}, f"lease_epoch: must be a whole number from 0 to {2**63 - 1}, got {2**63}"),
        ({"lease_epoch": "1"}, f"lease_epoch: must be a whole number from 0 to {2**63 - 1}, got '1'"),
    ],
)
def test_operations_refuse_a_handle_whose_numbers_cannot_be_stored(changes: dict[str, object], detail: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_handle(msgspec.structs.replace(GOLDEN, **changes))
    assert refused.value.detail == f"handle.{detail}"
    for most in ({"attempt_index": 2**31 - 1}, {"lease_epoch": 2**63 - 1}, {"attempt_index": 0, "lease_epoch": 0}):
        check_handle(msgspec.structs.replace(GOLDEN, **most))


def test_a_handle_carries_the_fence_of_its_lease() -> None:
    assert GOLDEN.fence == Fence(lease_id=GOLDEN.lease_id, lease_epoch=1, attempt_id=GOLDEN.attempt_id)
