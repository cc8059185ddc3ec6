"""Waitpoints: how a suspend binds them, what operations on one answer, how lists show them, and why they close."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from flowfabric.model.condition import Condition, waitpoint_keys
from flowfabric.model.errors import error
from flowfabric.model.ids import ExecutionId, WaitpointId, parse_uuid
from flowfabric.model.policy_checks import set_field
from flowfabric.model.states import WaitpointState
from flowfabric.model.text import check_text
from flowfabric.model.token import WaitpointToken


class CloseReason(StrEnum):
    """Why a suspension and its waitpoints are closed; a caller who closes a waitpoint may give any other text."""

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
    """A waitpoint made with the suspension."""

    waitpoint_id: WaitpointId
    waitpoint_key: str

    if TYPE_CHECKING:

        def __init__(self, *, waitpoint_id: UUID | str, waitpoint_key: str) -> None: ...

    def __post_init__(self) -> None:
        """Refuse what is no binding."""
        set_field(self, "waitpoint_id", parse_uuid(self.waitpoint_id, "waitpoint_id"))
        check_text(self.waitpoint_key, "waitpoint_key")


@dataclass(frozen=True, kw_only=True, slots=True)
class UsePending:
    """A waitpoint made earlier, with its key, token and buffered signals."""

    waitpoint_id: WaitpointId

    if TYPE_CHECKING:

        def __init__(self, *, waitpoint_id: UUID | str) -> None: ...

    def __post_init__(self) -> None:
        """Refuse what is no binding."""
        set_field(self, "waitpoint_id", parse_uuid(self.waitpoint_id, "waitpoint_id"))


Binding: TypeAlias = Fresh | UsePending


def default_binding(waitpoint_id: WaitpointId, condition: Condition) -> Fresh:
    """Return the binding of a wait that names none: the first key the condition names, else one of its own."""
    return Fresh(waitpoint_id=waitpoint_id, waitpoint_key=next(iter(waitpoint_keys(condition)), f"wpk:{waitpoint_id}"))


def parse_binding(value: Any) -> Binding:
    """Return the binding a JSON value says."""
    match value:
        case Fresh() | UsePending():
            return value
        case {"Fresh": {"waitpoint_id": given, "waitpoint_key": key, **others}} if len(value) == 1 and not others:
            return Fresh(waitpoint_id=given, waitpoint_key=key)
        case {"UsePending": {"waitpoint_id": given, **others}} if len(value) == 1 and not others:
            return UsePending(waitpoint_id=given)
    raise error("invalid_input", "waitpoints: must be Fresh or UsePending")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdditionalWaitpoint:
    """A waitpoint of a suspension besides its first."""

    waitpoint_id: WaitpointId
    waitpoint_key: str
    waitpoint_token: WaitpointToken


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingWaitpoint:
    """A waitpoint that keeps signals for a later suspend, and what lets a caller signal it."""

    waitpoint_id: WaitpointId
    hmac_token: WaitpointToken


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """The waitpoint takes no more signals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyClosed:
    """The waitpoint took no signals before; nothing changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitpointInfo:
    """A waitpoint that takes signals, as a list shows it; of its token only what tells it from others."""

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
    """A part of the list of an execution's open waitpoints; `next_cursor` leads on where there is more."""

    entries: list[WaitpointInfo]
    next_cursor: WaitpointId | None
