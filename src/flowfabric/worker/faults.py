"""What an engine error means for a worker: retry the call, give up the run, or fail the run."""

import logging
import time
from collections.abc import Mapping
from typing import Final

from flowfabric.engine.core.wakeups import LostReason
from flowfabric.model.errors import EngineError, TransportError, TransportKind
from flowfabric.model.states import TerminalOutcome

logger = logging.getLogger(__name__)

LEASE_IS_LOST = frozenset(
    {
        "lease_conflict",
        "stale_lease",
        "lease_expired",
        "lease_revoked",
        "execution_not_active",
        "execution_not_found",
        "stale_owner_cannot_append",
        "stream_closed",
    }
)
"""Error codes that mean that the lease is no longer held: a retry cannot succeed."""

RETRY_SECONDS = (0.05, 1.0)
"""The first and the longest pause before a call is retried after a fault of the store."""

_LOSSES: Final = {
    LostReason.COMPLETED: "another caller has completed it",
    LostReason.FAILED: "another caller has failed it",
    LostReason.RETRY: "another caller has failed its attempt",
    LostReason.RETRY_NOW: "another caller has failed its attempt",
    LostReason.CANCELLED: "it was cancelled",
    LostReason.TIMEOUT_RETRY: "its attempt timeout has passed",
    LostReason.TIMEOUT_RETRY_NOW: "its attempt timeout has passed",
    LostReason.TIMEOUT_EXPIRED: "its attempt timeout has passed",
    LostReason.ATTEMPT_TIMEOUT: "its attempt timeout has passed",
    LostReason.DEADLINE_EXPIRED: "its execution deadline has passed",
    LostReason.RECLAIM_LIMIT: "its lease was lost as often as its policy allows",
    LostReason.LEASE_EXPIRED: "its lease has expired",
    LostReason.LEASE_REVOKED: "its lease was revoked",
    LostReason.SKIPPED: "its dependencies can no longer be satisfied",
    LostReason.RECLAIMED: "its lease was lost and it was claimed again",
    LostReason.NOT_RENEWED: "its lease has expired: no renewal got through in time",
    LostReason.UNKNOWN: "its lease is lost",
}
_ASKED_FOR: Final = frozenset({LostReason.COMPLETED, LostReason.FAILED, LostReason.RETRY, LostReason.RETRY_NOW})
_EXPIRIES: Final = frozenset({LostReason.TIMEOUT_EXPIRED, LostReason.DEADLINE_EXPIRED})
_FAULTS: Final = frozenset({"resource_exhausted", "bug"})
_REFUSED: Final = frozenset({TransportKind.OTHER, TransportKind.PROTOCOL})
_UNANSWERED: Final = frozenset({TransportKind.TRANSPORT, TransportKind.TIMEOUT})


def is_store_fault(error: Exception) -> bool:
    """Whether the store was unavailable or busy, so that the same call may succeed later.

    This is narrower than `retryable`: a missing waitpoint does not appear by waiting.
    """
    if isinstance(error, TransportError):
        return error.kind is not TransportKind.OTHER
    return isinstance(error, EngineError) and (error.category in _FAULTS or error.code == "retry_exhausted")


def is_bad_input(error: Exception) -> bool:
    """Whether the error is about the arguments: the same call would be refused again."""
    if isinstance(error, TransportError):
        return error.kind is TransportKind.OTHER
    return isinstance(error, EngineError) and error.category == "validation"


def is_lease_lost(error: Exception) -> bool:
    """Whether the error means that the lease is no longer held."""
    return isinstance(error, EngineError) and error.code in LEASE_IS_LOST


def is_cancel(reason: Exception | LostReason) -> bool:
    """Whether a lease is lost because its execution was cancelled."""
    if isinstance(reason, LostReason):
        return reason is LostReason.CANCELLED
    detail = reason.detail if isinstance(reason, EngineError) else None
    return isinstance(detail, Mapping) and detail.get("terminal_outcome") == TerminalOutcome.CANCELLED


def is_expiry(reason: Exception | LostReason) -> bool:
    """Whether a lease is lost because its execution has expired for good."""
    if isinstance(reason, LostReason):
        return reason in _EXPIRIES
    detail = reason.detail if isinstance(reason, EngineError) else None
    return isinstance(detail, Mapping) and detail.get("terminal_outcome") == TerminalOutcome.EXPIRED


def loss_log_level(reason: Exception | LostReason) -> int:
    """Return the log level for a lost lease: INFO if a caller ended the run on purpose, else WARNING."""
    return logging.INFO if is_cancel(reason) or reason in _ASKED_FOR else logging.WARNING


def loss_text(reason: Exception | LostReason) -> str:
    """Return why a lease is lost, for the log."""
    if is_cancel(reason):
        return _LOSSES[LostReason.CANCELLED]
    return _LOSSES[reason] if isinstance(reason, LostReason) else str(reason)


def retry_log_level(error: Exception) -> int:
    """Return the log level for a retry: DEBUG during an outage, which `StoreHealth` logs once for all calls."""
    return logging.DEBUG if _is_outage(error) else logging.WARNING


def _is_outage(error: Exception) -> bool:
    return isinstance(error, TransportError) and error.kind not in _REFUSED


class StoreHealth:
    """Tracks whether the store answers a worker; logs when an outage begins and when it ends.

    The heartbeat has a connection of its own and is not tracked here.
    """

    def __init__(self) -> None:
        self._silent_since: float | None = None
        """When the first unanswered call since the last answer was sent."""
        self._outage_since: float | None = None
        """When the call that first found the store unavailable was sent."""
        self._is_unreachable = False
        """Whether the latest call of the outage could not connect: then any answer means that the outage is over."""

    def answered(self) -> None:
        """Record that the store has answered a call, also by refusing it."""
        self._silent_since = None
        if self._outage_since is not None:
            self._end_outage(self._outage_since)

    def failed(self, error: Exception, asked_at: float) -> None:
        """Record that a call has failed."""
        if not isinstance(error, TransportError) or error.kind not in _UNANSWERED:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = asked_at
        if _is_outage(error):
            self._note_outage(error, asked_at)

    def forget_silence(self) -> None:
        """Measure the silence of the store from the next call on."""
        self._silent_since = None

    def reconciled(self, error: Exception | None, asked_at: float) -> None:
        """Record a tick of the reconciler; its calls do not count for the renewal of leases."""
        if error is not None:
            self._note_outage(error, asked_at)
        elif self._outage_since is not None and self._is_unreachable:
            # Its calls may only read, which does not show that a read-only store accepts writes again.
            self._end_outage(self._outage_since)

    def _note_outage(self, error: Exception, asked_at: float) -> None:
        if self._outage_since is None:
            self._outage_since = asked_at
            logger.warning("the store is unavailable, calls are retried: %s", error)
        self._is_unreachable = isinstance(error, TransportError) and error.kind is TransportKind.TRANSPORT

    def _end_outage(self, since: float) -> None:
        logger.warning("the store is available again after %.1f s", time.monotonic() - since)
        self._outage_since = None

    @property
    def is_silent(self) -> bool:
        """Whether the latest call was not answered."""
        return self._silent_since is not None

    def unanswered_for(self, seconds: float) -> bool:
        """Whether no call has been answered for this long."""
        since = self._silent_since
        return since is not None and time.monotonic() - since > seconds
