"""Waitpoints: how a suspend binds them, the answers of operations, how lists show them, and why they close."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from flowfabric.model.condition import Condition, waitpoint_keys
from flowfabric.model.errors import error
from flowfabric.model.ids import ExecutionId, WaitpointId, parse_uuid
from flowfabric.model.policy_checks import set_field
from flowfabric.model.states import WaitpointState
from flowfabric.model.text import check_text, shown
from flowfabric.model.token import WaitpointToken


class CloseReason(StrEnum):
    """Why a suspension and its waitpoints were closed; a caller that closes a waitpoint may give any other text."""

    RESUMED = "resumed"
    TIMED_OUT_FAIL = "timed_out_fail"
    TIMED_OUT_CANCEL = "timed_out_cancel"
    TIMED_OUT_EXPIRE = "timed_out_expire"
    TIMED_OUT_AUTO_RESUME = "timed_out_auto_resume"
    CANCELLED = "cancelled"
    EXPIRED_EXECUTION_DEADLINE = "expired:execution_deadline"
    NEVER_COMMITTED = "never_committed"
    PROACTIVE_CLOSE = "proactive_close"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fresh:
    """A waitpoint that is created with the suspension."""

    waitpoint_id: WaitpointId
    waitpoint_key: str

    if TYPE_CHECKING:

        def __init__(self, *, waitpoint_id: UUID | str, waitpoint_key: str) -> None: ...

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        set_field(self, "waitpoint_id", parse_uuid(self.waitpoint_id, "waitpoint_id"))
        check_text(self.waitpoint_key, "waitpoint_key")


@dataclass(frozen=True, kw_only=True, slots=True)
class UsePending:
    """A waitpoint created earlier, with its key, token and buffered signals."""

    waitpoint_id: WaitpointId

    if TYPE_CHECKING:

        def __init__(self, *, waitpoint_id: UUID | str) -> None: ...

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        set_field(self, "waitpoint_id", parse_uuid(self.waitpoint_id, "waitpoint_id"))


Binding: TypeAlias = Fresh | UsePending


def default_binding(waitpoint_id: WaitpointId, condition: Condition) -> Fresh:
    """Return the binding of a wait without bindings: the first key of the condition, or else a generated key."""
    return Fresh(waitpoint_id=waitpoint_id, waitpoint_key=next(iter(waitpoint_keys(condition)), f"wpk:{waitpoint_id}"))


def parse_binding(value: Any) -> Binding:
    """Return the binding of a JSON value."""
    match value:
        case Fresh() | UsePending():
            return value
        case {"Fresh": {"waitpoint_id": given, "waitpoint_key": key, **others}} if len(value) == 1 and not others:
            return Fresh(waitpoint_id=given, waitpoint_key=key)
        case {"UsePending": {"waitpoint_id": given, **others}} if len(value) == 1 and not others:
            return UsePending(waitpoint_id=given)
    raise error("invalid_input", f"waitpoints: must be Fresh or UsePending, got {shown(value)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdditionalWaitpoint:
    """A waitpoint of a suspension other than its first."""

    waitpoint_id: WaitpointId
    waitpoint_key: str
    waitpoint_token: WaitpointToken


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingWaitpoint:
    """A waitpoint that buffers signals for a later suspend, and its token."""

    waitpoint_id: WaitpointId
    hmac_token: WaitpointToken


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """The waitpoint was closed and accepts no more signals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyClosed:
    """The waitpoint was closed already; nothing changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitpointInfo:
    """A waitpoint that accepts signals, with the fingerprint of its token instead of the token."""

    waitpoint_id: WaitpointId
    waitpoint_key: str
    state: WaitpointState
    required_signal_names: tuple[str, ...]
    created_at: int
    activated_at: int | None
    expires_at: int | None
    execution_id: ExecutionId
    token_kid: str
    token_fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitpointPage:
    """A page of an execution's open waitpoints; `next_cursor` is None on the last page."""

    entries: list[WaitpointInfo]
    next_cursor: WaitpointId | None
