"""The kinds of events, and the reasons and outcomes they carry."""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Final, Self

from flowfabric.model.states import TerminalOutcome


class EventKind(StrEnum):
    """What happened to a lease or an execution; the stored and shown value."""

    ENDED = "ended"
    """An execution without a lease ended."""
    ACQUIRED = "acquired"
    RENEWED = "renewed"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"
    RECLAIMED = "reclaimed"
    REPLAY_INITIATED = "replay_initiated"
    OPERATOR_RESUMED = "operator_resumed"
    SIGNAL = "signal"
    OPERATOR_ACTION = "operator_action"
    """An action of an operator other than a resume; the reason is the type of the event."""
    TAG_ATTACHED = "tag_attached"
    TAG_CLEARED = "tag_cleared"


class EventFamily(StrEnum):
    """The feed that an event belongs to; also the name of the channel of its hints."""

    COMPLETION = "completion"
    LEASE = "lease_event"
    SIGNAL = "signal_event"
    OPERATOR = "operator_event"
    INSTANCE_TAG = "instance_tag"


FAMILY_KINDS: Final[Mapping[EventFamily, tuple[EventKind, ...]]] = {
    EventFamily.COMPLETION: (EventKind.ENDED, EventKind.RELEASED),
    EventFamily.LEASE: (
        EventKind.ACQUIRED,
        EventKind.RENEWED,
        EventKind.RELEASED,
        EventKind.EXPIRED,
        EventKind.REVOKED,
        EventKind.RECLAIMED,
        EventKind.REPLAY_INITIATED,
    ),
    EventFamily.SIGNAL: (EventKind.SIGNAL,),
    EventFamily.OPERATOR: (EventKind.OPERATOR_RESUMED, EventKind.OPERATOR_ACTION),
    EventFamily.INSTANCE_TAG: (EventKind.TAG_ATTACHED, EventKind.TAG_CLEARED),
}
"""The kinds of events of each feed. A release that ends its execution is of two feeds."""

RARE_FAMILIES: Final = (EventFamily.SIGNAL, EventFamily.OPERATOR, EventFamily.INSTANCE_TAG)
"""The feeds whose events are found by kind, without reading the events of the other feeds."""


class ReleaseReason(StrEnum):
    """Why a held lease ended."""

    COMPLETED = "completed"
    FAILED_RETRY_SCHEDULED = "failed_retry_scheduled"
    FAILED_TERMINAL = "failed_terminal"
    CANCELLED = "cancelled"
    WORKER_DELAY = "worker_delay"
    WAITING_CHILDREN = "waiting_children"
    HANDED_BACK = "handed_back"
    SUSPEND = "suspend"
    EXPIRED_ATTEMPT_TIMEOUT = "expired:attempt_timeout"
    EXPIRED_EXECUTION_DEADLINE = "expired:execution_deadline"
    DEPENDENCY_IMPOSSIBLE = "dependency_impossible"
    MAX_RECLAIMS_EXCEEDED = "max_reclaims_exceeded"


class AcquireReason(StrEnum):
    """How a lease was acquired, if not by an ordinary claim."""

    CLAIM_RESUMED = "claim_resumed"
    ISSUE_GRANT_AND_CLAIM = "issue_grant_and_claim"
    ISSUE_GRANT_AND_CLAIM_RESUMED = "issue_grant_and_claim_resumed"


class CompletionOutcome(IntEnum):
    """What the completion feed reports, stored as a small number; RESUMABLE is not an end."""

    SUCCESS = 1
    FAILED = 2
    CANCELLED = 3
    EXPIRED = 4
    SKIPPED = 5
    RESUMABLE = 6

    @property
    def literal(self) -> str:
        """The word that readers see."""
        return self.name.lower()

    @classmethod
    def of(cls, outcome: TerminalOutcome) -> Self:
        """Return what the feed reports for a terminal outcome."""
        return cls[outcome.name]


class WorkerEvent(StrEnum):
    """What happened to a worker registry entry."""

    REGISTERED = "registered"
    HEARTBEAT = "heartbeat"
    MARKED_DEAD = "marked_dead"
    TTL_SWEPT = "ttl_swept"
