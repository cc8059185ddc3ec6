"""Handles: a worker's proof that it owns an attempt, with an opaque, versioned byte form."""

import struct
import uuid
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import msgspec

from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import (
    AttemptId,
    ExecutionId,
    LaneId,
    LeaseId,
    WorkerInstanceId,
    parse_execution_id,
    parse_uuid,
)
from flowfabric.model.states import HandleKind
from flowfabric.model.text import Word, check_range, shown, word_of


class Backend(StrEnum):
    """The store a handle belongs to; always Postgres in this engine."""

    VALKEY = "Valkey"
    POSTGRES = "Postgres"
    SQLITE = "Sqlite"


_TAGS = {Backend.VALKEY: 0x01, Backend.POSTGRES: 0x02, Backend.SQLITE: 0x03}
_BACKENDS = {tag: backend for backend, tag in _TAGS.items()}
_V1_MAGIC = 0x01
_V2_MAGIC = 0x02
_WIRE_VERSION = 0x01
MAX_LEASE_TTL_MS = 2**32 - 1
_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """The values that prove that a lease is still the caller's."""

    lease_id: LeaseId
    lease_epoch: int
    attempt_id: AttemptId


class Handle(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker's ownership of one attempt, which callers pass back to the engine unchanged.

    Two handles are equal if their backend, kind and opaque bytes are equal.
    """

    kind: HandleKind
    execution_id: ExecutionId
    attempt_index: int
    attempt_id: AttemptId
    lease_id: LeaseId
    lease_epoch: int
    lease_ttl_ms: int
    lane_id: LaneId
    worker_instance_id: WorkerInstanceId
    backend: Backend = Backend.POSTGRES

    @property
    def fence(self) -> Fence:
        """The values that prove the lease of this handle."""
        return Fence(lease_id=self.lease_id, lease_epoch=self.lease_epoch, attempt_id=self.attempt_id)

    @property
    def opaque(self) -> bytes:
        """The bytes that a caller may store."""
        return b"".join(
            (
                bytes((_V2_MAGIC, _WIRE_VERSION, _TAGS[self.backend])),
                _text(self.execution_id),
                struct.pack("<I", self.attempt_index),
                _text(str(self.attempt_id)),
                _text(str(self.lease_id)),
                struct.pack("<QQ", self.lease_epoch, self.lease_ttl_ms),
                _text(self.lane_id),
                _text(self.worker_instance_id),
            )
        )

    @classmethod
    def decode(cls, opaque: bytes, kind: HandleKind, backend: str = Backend.POSTGRES) -> Self:
        """Return the handle that stored bytes encode."""
        reader = _Reader(opaque)
        embedded = reader.backend()
        handle = cls(
            backend=embedded,
            kind=kind,
            execution_id=reader.execution_id(),
            attempt_index=reader.number("attempt_index", 4, _MAX_INT32),
            attempt_id=AttemptId(reader.uuid("attempt_id")),
            lease_id=LeaseId(reader.uuid("lease_id")),
            lease_epoch=reader.number("lease_epoch", 8, _MAX_INT64),
            lease_ttl_ms=reader.lease_ttl_ms(),
            lane_id=LaneId(reader.text("lane_id")),
            worker_instance_id=WorkerInstanceId(reader.text("worker_instance_id")),
        )
        reader.finish()
        for found in (backend, embedded):
            if found != Backend.POSTGRES:
                raise _foreign(found)
        return handle

    def to_json(self) -> dict[str, str]:
        """Return the JSON object of this handle."""
        return {
            "backend": self.backend.value,
            "kind": self.kind.value,
            "opaque": b64encode(self.opaque).decode(),
        }

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Return the handle that a JSON object encodes."""
        if not isinstance(value, Mapping):
            raise error("invalid_input", f"handle: must be an object with backend, kind and opaque, got {shown(value)}")
        backend = _word(Backend, value.get("backend"), "handle.backend")
        kind = _word(HandleKind, value.get("kind"), "handle.kind")
        opaque = value.get("opaque")
        try:
            decoded = b64decode(opaque, validate=True) if isinstance(opaque, str) else None
        except ValueError:
            decoded = None
        if decoded is None:
            raise error("invalid_input", f"handle.opaque: must be base64 text, got {shown(opaque)}")
        return cls.decode(decoded, kind, backend)


def check_handle(value: object) -> Handle:
    """Return the value if it is a handle of this engine whose numbers can be stored."""
    if not isinstance(value, Handle):
        raise error(
            "invalid_input",
            f"handle: must be a Handle, got {shown(value)}; pass the handle of the claim, or Handle.from_json(...)",
        )
    if value.backend != Backend.POSTGRES:
        raise _foreign(value.backend)
    check_range(value.attempt_index, "handle.attempt_index", 0, _MAX_INT32)
    check_range(value.lease_epoch, "handle.lease_epoch", 0, _MAX_INT64)
    return value


def _foreign(backend: str) -> EngineError:
    return error("handle_from_other_backend", f"expected={Backend.POSTGRES} actual={backend}")


def _word(words: type[Word], value: object, field: str) -> Word:
    word = word_of(words, value)
    if word is None:
        raise error("invalid_input", f"{field}: must be one of {', '.join(words)}, got {shown(value)}")
    return word


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def _unreadable(reason: str) -> EngineError:
    return error("corruption", f"handle_codec: {reason}; pass the stored bytes of the handle unchanged")


class _Reader:
    """Reads one field after the other from the bytes of a handle."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise _unreadable(f"Truncated{{needed={size}, at={self._at}, have={len(self._data) - self._at}}}")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def backend(self) -> Backend:
        magic = self._take(1)[0]
        if magic == _V1_MAGIC:
            return Backend.VALKEY
        if magic != _V2_MAGIC:
            raise _unreadable(f"BadV1Version(0x{magic:02x})")
        version = self._take(1)[0]
        if version != _WIRE_VERSION:
            raise _unreadable(f"BadWireVersion(0x{version:02x})")
        tag = self._take(1)[0]
        if tag not in _BACKENDS:
            raise _unreadable(f"BadBackendTag(0x{tag:02x})")
        return _BACKENDS[tag]

    def number(self, field: str, size: int, largest: int) -> int:
        value = int.from_bytes(self._take(size), "little")
        if value > largest:
            raise error("invalid_input", f"handle.{field}: must be at most {largest}, got {value}")
        return value

    def lease_ttl_ms(self) -> int:
        value = int.from_bytes(self._take(8), "little")
        try:
            check_range(value, "lease_ttl_ms", 1, MAX_LEASE_TTL_MS)
        except EngineError as refused:
            raise _unreadable(f"ParseField{{field=lease_ttl_ms, {refused.detail}}}") from None
        return value

    def text(self, field: str) -> str:
        data = self._take(int.from_bytes(self._take(4), "little"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise _unreadable(f"InvalidUtf8{{field={field}}}") from None

    def execution_id(self) -> ExecutionId:
        text = self.text("execution_id")
        try:
            return parse_execution_id(text)
        except EngineError as refused:
            raise _unreadable(f"ParseField{{field=execution_id, {refused.detail}}}") from None

    def uuid(self, field: str) -> uuid.UUID:
        text = self.text(field)
        try:
            return parse_uuid(text, field)
        except EngineError as refused:
            raise _unreadable(f"ParseField{{field={field}, {refused.detail}}}") from None

    def finish(self) -> None:
        if self._at != len(self._data):
            raise _unreadable(f"TrailingBytes{{pos={self._at}, len={len(self._data)}}}")
