"""What an error of the engine means for a worker's call: repeat it, give the run up, or fail the run."""

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
    }
)
"""The errors that say that a lease is no longer held: repeating the call cannot help."""

FAULT_SECONDS = (0.05, 1.0)
"""The first and the longest pause before a call that met a fault of the store is repeated."""

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
    LostReason.RECLAIMED: "its lease was lost and it was claimed again",
    LostReason.NOT_RENEWED: "its lease has expired: no renewal got through in time",
    LostReason.UNKNOWN: "its lease is lost",
}
_ASKED_FOR: Final = frozenset({LostReason.COMPLETED, LostReason.FAILED, LostReason.RETRY, LostReason.RETRY_NOW})
_FAULTS: Final = frozenset({"resource_exhausted", "bug"})
_UNANSWERED: Final = frozenset({TransportKind.TRANSPORT, TransportKind.TIMEOUT})


def is_passing(error: Exception) -> bool:
    """Whether the store was at fault or in contention, so that the same call may succeed later.

    That an error is retryable does not say so: a waitpoint that is not found does not come by waiting.
    """
    if isinstance(error, TransportError):
        return error.kind is not TransportKind.OTHER
    return isinstance(error, EngineError) and (error.category in _FAULTS or error.code == "retry_exhausted")


def is_about_values(error: Exception) -> bool:
    """Whether the error judges what the call was given: the same call will be refused again."""
    if isinstance(error, TransportError):
        return error.kind is TransportKind.OTHER
    return isinstance(error, EngineError) and error.category == "validation"


def is_of_lost_lease(error: Exception) -> bool:
    """Whether the error says that the lease of the call is no longer held."""
    return isinstance(error, EngineError) and error.code in LEASE_IS_LOST


def is_cancel(reason: Exception | LostReason) -> bool:
    """Whether a lease is lost because its execution was cancelled, which is no surprise to anybody."""
    if isinstance(reason, LostReason):
        return reason is LostReason.CANCELLED
    detail = reason.detail if isinstance(reason, EngineError) else None
    return isinstance(detail, Mapping) and detail.get("terminal_outcome") == TerminalOutcome.CANCELLED


def level_of_loss(reason: Exception | LostReason) -> int:
    """The level to log the loss of a lease at: what a caller has asked for is no warning."""
    return logging.INFO if is_cancel(reason) or reason in _ASKED_FOR else logging.WARNING


def loss_text(reason: Exception | LostReason) -> str:
    """Why a lease is lost, for the log."""
    if is_cancel(reason):
        return _LOSSES[LostReason.CANCELLED]
    return _LOSSES[reason] if isinstance(reason, LostReason) else str(reason)


def level_of_retry(error: Exception) -> int:
    """The level to log a retry at: `Contact` has logged an unavailable store once for all calls."""
    return logging.DEBUG if _is_outage(error) else logging.WARNING


def _is_outage(error: Exception) -> bool:
    return isinstance(error, TransportError) and error.kind is not TransportKind.OTHER


class Contact:
    """Whether the store answers the calls of a worker's main connections; logs when an outage begins and ends."""

    def __init__(self) -> None:
        self._silent_since: float | None = None
        """When the first call of those that were not answered since the last answer was made."""
        self._outage_since: float | None = None
        """When the first call was made that found the store unavailable."""
        self._is_unreachable = False
        """Whether the latest call of the outage found no connection: any answer shows that the outage is over."""

    def answered(self) -> None:
        """The store has carried out a call, or refused it for what it asks."""
        self._silent_since = None
        if self._outage_since is not None:
            self._end_outage(self._outage_since)

    def failed(self, error: Exception, asked_at: float) -> None:
        """A call has failed; a refusal of the store is an answer too."""
        if not isinstance(error, TransportError) or error.kind not in _UNANSWERED:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = asked_at
        if _is_outage(error):
            self._note_outage(error, asked_at)

    def forget_silence(self) -> None:
        """Count the silence of the store from the next call on."""
        self._silent_since = None

    def reconciled(self, error: Exception | None, asked_at: float) -> None:
        """The reconciler has made its calls; they do not count for the leases."""
        if error is not None:
            self._note_outage(error, asked_at)
        elif self._outage_since is not None and self._is_unreachable:
            # Its calls may only read: they do not show that a store that refused to write takes writes again.
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
        """Whether the latest calls were not answered."""
        return self._silent_since is not None

    def unanswered_for(self, seconds: float) -> bool:
        """Whether no call has been answered for this long."""
        since = self._silent_since
        return since is not None and time.monotonic() - since > seconds
