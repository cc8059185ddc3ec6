"""What waiting leaves and answers: why waits end, what a suspend comes to, and waitpoints as their readers see them."""

from dataclasses import dataclass
from enum import StrEnum

from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, SuspensionId, WaitpointId
from flowfabric.model.states import WaitpointState
from flowfabric.model.tokens import WaitpointToken


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
class AdditionalWaitpoint:
    """A waitpoint of a suspension besides its first."""

    waitpoint_id: WaitpointId
    waitpoint_key: str
    waitpoint_token: WaitpointToken


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspendDetails:
    """The suspension, the attempt it is of, its first waitpoint, and the others in the order of their bindings."""

    suspension_id: SuspensionId
    attempt_index: int
    waitpoint_id: WaitpointId
    waitpoint_key: str
    waitpoint_token: WaitpointToken
    additional_waitpoints: tuple[AdditionalWaitpoint, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspended:
    """The lease is given up; the handle identifies the attempt that waits, and no more."""

    details: SuspendDetails
    handle: Handle


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspendedExecution:
    """An execution that waits, since when, and for what reason."""

    execution_id: ExecutionId
    suspended_at_ms: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspendedPage:
    """A part of the list of suspended executions; `next_cursor` leads on where there is more."""

    entries: list[SuspendedExecution]
    next_cursor: str | None
