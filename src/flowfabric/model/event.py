"""The kinds of events, and the reasons and outcomes they carry."""

from enum import IntEnum, StrEnum
from typing import Self

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
