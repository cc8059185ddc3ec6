"""Signals: what a caller delivers, the effect of a delivery, and what a resumed run reads."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from flowfabric.model.errors import error
from flowfabric.model.ids import (
    ExecutionId,
    SignalId,
    WaitpointId,
    check_storable,
    parse_execution_id,
    parse_uuid,
    uuid7,
)
from flowfabric.model.policy_checks import INT32, MAX_MS
from flowfabric.model.text import MAX_KEY_BYTES, check_length, check_range, check_short, shown
from flowfabric.model.token import WaitpointToken

MAX_PAYLOAD_BYTES = 65_536
MAX_TEXT = 1_024
"""The largest number of characters in a text field of a signal."""
DEFAULT_SIGNAL_LIMIT = 10_000
DEFAULT_MAXLEN = 1_000
DEFAULT_DEDUP_TTL_MS = 86_400_000

_TEXTS = (
    "signal_name",
    "signal_category",
    "source_type",
    "source_identity",
    "payload_encoding",
    "correlation_id",
    "target_scope",
)
_OPTIONAL_TEXTS = frozenset({"payload_encoding", "correlation_id"})
_NO_TOKEN = WaitpointToken("-")


class SignalEffect(StrEnum):
    """The effect of a delivery."""

    APPENDED_TO_WAITPOINT = "appended_to_waitpoint"
    RESUME_CONDITION_SATISFIED = "resume_condition_satisfied"
    BUFFERED_FOR_PENDING_WAITPOINT = "buffered_for_pending_waitpoint"


class ReportedEffect(StrEnum):
    """The effect of a delivery as its event reports it."""

    APPENDED_TO_WAITPOINT = "appended_to_waitpoint"
    SATISFIED = "satisfied"
    BUFFERED = "buffered"
    DEDUPED = "deduped"


class SignalDisposition(StrEnum):
    """Why a delivery had its effect."""

    SIGNAL_IGNORED_NOT_IN_CONDITION = "signal_ignored_not_in_condition"
    SIGNAL_IGNORED_MATCHER_FAILED = "signal_ignored_matcher_failed"
    APPENDED_TO_WAITPOINT_DUPLICATE = "appended_to_waitpoint_duplicate"
    APPENDED_TO_WAITPOINT = "appended_to_waitpoint"
    NO_OP = "no_op"
    RESUME_CONDITION_SATISFIED = "resume_condition_satisfied"
    BUFFERED_FOR_PENDING_WAITPOINT = "buffered_for_pending_waitpoint"

    @property
    def effect(self) -> SignalEffect:
        """The effect of the delivery."""
        if self is SignalDisposition.RESUME_CONDITION_SATISFIED:
            return SignalEffect.RESUME_CONDITION_SATISFIED
        if self is SignalDisposition.BUFFERED_FOR_PENDING_WAITPOINT:
            return SignalEffect.BUFFERED_FOR_PENDING_WAITPOINT
        return SignalEffect.APPENDED_TO_WAITPOINT

    @property
    def is_matched(self) -> bool:
        """Whether the signal matched the condition."""
        return self.is_satisfier or self is SignalDisposition.APPENDED_TO_WAITPOINT_DUPLICATE

    @property
    def is_satisfier(self) -> bool:
        """Whether the signal is a satisfier: it counted towards the condition or met it."""
        return self is SignalDisposition.RESUME_CONDITION_SATISFIED or self is SignalDisposition.APPENDED_TO_WAITPOINT


@dataclass(kw_only=True, slots=True)
class NewSignal:
    """A signal as a caller delivers it; all checks that need no database have passed.

    Not frozen because the checks normalise its fields on the hot path; nothing changes it later.
    """

    execution_id: ExecutionId
    waitpoint_id: WaitpointId
    waitpoint_token: WaitpointToken | None
    signal_name: str
    signal_category: str = "external"
    source_type: str = "external"
    source_identity: str = ""
    signal_id: SignalId | None = None
    payload: bytes | None = field(default=None, repr=False)
    payload_encoding: str | None = "json"
    correlation_id: str | None = None
    idempotency_key: str | None = None
    target_scope: str = "waitpoint"
    created_at: int | None = None
    dedup_ttl_ms: int = DEFAULT_DEDUP_TTL_MS
    resume_delay_ms: int | None = None
    max_signals_per_execution: int | None = None
    signal_maxlen: int = DEFAULT_MAXLEN
    is_trusted: bool = field(default=False, repr=False)
    """Whether the sender needs no token, because it has read the waitpoint from the store."""
    is_minted: bool = field(default=False, init=False, repr=False)
    """Whether this process minted the id, so that no stored signal can have it."""

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Return the signal of a call's arguments; ids and token may be given as text."""
        return cls(**given)

    def __post_init__(self) -> None:
        """Reject invalid fields; a missing or malformed token is rejected later, with the waitpoint."""
        execution_id = parse_execution_id(self.execution_id)
        check_storable(execution_id)
        self.execution_id = execution_id
        self.waitpoint_id = WaitpointId(parse_uuid(self.waitpoint_id, "waitpoint_id"))
        if self.signal_id is None:
            self.is_minted = True
            self.signal_id = SignalId(uuid7())
        else:
            self.signal_id = SignalId(parse_uuid(self.signal_id, "signal_id"))
        token: object = self.waitpoint_token
        if token is not None and not isinstance(token, WaitpointToken):
            self.waitpoint_token = WaitpointToken(token) if isinstance(token, str) else _NO_TOKEN
        self._check_texts()
        if self.idempotency_key is not None and self.idempotency_key != "":
            check_short(self.idempotency_key, "idempotency_key")
        if not self.signal_name:
            raise error("invalid_input", "signal_name: must not be empty")
        if self.payload is not None and not isinstance(self.payload, bytes):
            raise error("invalid_input", f"payload: must be bytes, got {shown(self.payload)}")
        if self.created_at is not None:
            check_range(self.created_at, "created_at", -MAX_MS, MAX_MS)
        if self.resume_delay_ms is not None:
            check_range(self.resume_delay_ms, "resume_delay_ms", 0, MAX_MS)
        if self.max_signals_per_execution is not None:
            check_range(self.max_signals_per_execution, "max_signals_per_execution", 0, INT32)
        check_range(self.dedup_ttl_ms, "dedup_ttl_ms", 0, MAX_MS)
        check_range(self.signal_maxlen, "signal_maxlen", 1, INT32)
        if len(self.payload or b"") > MAX_PAYLOAD_BYTES:
            raise error(
                "payload_too_large",
                f"payload: must be at most {MAX_PAYLOAD_BYTES} bytes, got {len(self.payload or b'')}",
            )

    def _check_texts(self) -> None:
        texts = (
            self.signal_name,
            self.signal_category,
            self.source_type,
            self.source_identity,
            self.target_scope,
            "" if self.payload_encoding is None else self.payload_encoding,
            "" if self.correlation_id is None else self.correlation_id,
        )
        try:
            joined = "".join(texts)
            if len(joined) <= MAX_TEXT and joined.isascii() and "\0" not in joined:
                return
        except TypeError:
            pass
        for name in _TEXTS:
            if name not in _OPTIONAL_TEXTS or getattr(self, name) is not None:
                check_length(getattr(self, name), name, MAX_TEXT)

    @property
    def id(self) -> SignalId:
        """The id: the caller's, or else the minted one."""
        assert self.signal_id is not None, "minted if the caller gave none"
        return self.signal_id

    @property
    def dedup_key(self) -> str | None:
        """The key that identifies a duplicate of this signal, or None if it is not deduplicated."""
        return (self.idempotency_key or None) if self.dedup_ttl_ms else None


def approval_key(signal_name: str, suffix: str, source_identity: str) -> str:
    """Return the idempotency key of an approval, which is distinct for each signal name, suffix and approver."""
    parts = (signal_name, suffix, source_identity) if source_identity else (signal_name, suffix)
    # Colons are escaped, so that different parts never produce the same key.
    key = ":".join(("approval", *(part.replace("%", "%25").replace(":", "%3A") for part in parts)))
    if len(data := key.encode()) <= MAX_KEY_BYTES:
        return key
    return f"approval:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutSignal:
    """The signal that a resumed attempt reads when its wait timed out; no caller sends it."""

    waitpoint_key: str = "__timeout__"
    signal_name: str = "timeout"
    signal_category: str = "timeout"
    source_type: str = "system"
    source_identity: str = "suspension_timeout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The signal is recorded, with its effect and disposition."""

    signal_id: SignalId
    effect: SignalEffect
    disposition: SignalDisposition


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalDuplicate:
    """The signal was recorded already, under this id; nothing changed."""

    existing_signal_id: SignalId


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeSignal:
    """A signal of a suspension, as the resumed run reads it."""

    signal_id: SignalId
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: int
    payload: bytes | None
    disposition: SignalDisposition
    satisfier: bool


def smallest_limit(*limits: int | None) -> int | None:
    """Return the smallest limit, or None; a limit of 0 or None means no limit."""
    return min(filter(None, limits), default=None)
