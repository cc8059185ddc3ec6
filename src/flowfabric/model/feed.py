"""What the feeds of a store deliver: events of executions, and filters for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from flowfabric.model.errors import error
from flowfabric.model.event import AcquireReason, ReleaseReason
from flowfabric.model.ids import ExecutionId, FlowId, LeaseId, SignalId, WaitpointId
from flowfabric.model.tag import check_tag_key
from flowfabric.model.text import check_short, check_text, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannerFilter:
    """Which executions are meant: those of a namespace, or with a tag, or both; by default all.

    Namespace and tags are those that the execution had when the event was written.
    """

    namespace: str | None = None
    instance_tag: tuple[str, str] | None = None
    """The key of a tag and its value."""

    def __post_init__(self) -> None:
        """Check the texts."""
        if self.namespace is not None:
            check_short(self.namespace, "filter.namespace")
        if self.instance_tag is None:
            return
        if not isinstance(self.instance_tag, tuple) or len(self.instance_tag) != 2:
            raise error(
                "invalid_input",
                "filter.instance_tag: must be the key and the value of a tag, e.g. ('app.tenant', 'acme'), got "
                + shown(self.instance_tag),
            )
        check_tag_key(self.instance_tag[0])
        check_text(self.instance_tag[1], "filter.instance_tag")


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedEvent:
    """What every event of a feed has."""

    cursor: bytes
    """The position after this event: save it when the event is processed, and subscribe with it to continue."""
    execution_id: ExecutionId
    at: int
    """When it happened, by the clock of the database, in milliseconds."""


class ReportedOutcome(StrEnum):
    """What a completion event reports; `resumable` is not an end: a signal satisfied the wait of the execution."""

    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"
    RESUMABLE = "resumable"


class CompletionKind(StrEnum):
    """The outcome of a completion event in four words."""

    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"
    OTHER = "other"
    """Any other outcome."""


_COMPLETION_KINDS: Mapping[ReportedOutcome, CompletionKind] = {
    ReportedOutcome.SUCCESS: CompletionKind.SUCCESS,
    ReportedOutcome.FAILED: CompletionKind.FAILURE,
    ReportedOutcome.CANCELLED: CompletionKind.CANCELLED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionEvent(FeedEvent):
    """An execution ended, or a signal satisfied its wait (`resumable`)."""

    outcome: ReportedOutcome
    flow_id: FlowId | None
    event_id: int
    """The number of the event; executions that ended together in one statement may share it."""

    @property
    def kind(self) -> CompletionKind:
        """The outcome as one of four kinds."""
        return _COMPLETION_KINDS.get(self.outcome, CompletionKind.OTHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseEvent(FeedEvent):
    """Something happened to the lease of an execution."""

    lease_epoch: int
    attempt_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseAcquired(LeaseEvent):
    """A worker got a lease."""

    lease_id: LeaseId
    worker_instance_id: str | None
    """None if the worker has not been seen for so long that its name is deleted."""
    reason: AcquireReason | str | None
    """How, if not by an ordinary claim; text if it is not a reason that this version knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRenewed(LeaseEvent):
    """A worker extended its lease.

    A renewal and another event of the same execution that are committed at the same moment may arrive in either order,
    so this one may come after the `LeaseReleased` of its lease. All other events of an execution arrive in order.
    """

    lease_id: LeaseId
    worker_instance_id: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReleased(LeaseEvent):
    """A lease ended."""

    lease_id: LeaseId
    worker_instance_id: str | None
    reason: ReleaseReason | str | None
    """Why; text if it is not a reason that this version knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseExpired(LeaseEvent):
    """A lease was not renewed in time."""

    lease_id: LeaseId
    prev_owner: str | None
    """The worker instance that held it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReclaimed(LeaseEvent):
    """A worker took over an execution whose lease had expired or was revoked."""

    new_lease_id: LeaseId
    new_owner: str | None
    """The worker instance that holds the new lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRevoked(LeaseEvent):
    """A lease was revoked."""

    lease_id: LeaseId
    revoked_by: str
    """`operator` or `reconciler`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReplayInitiated(LeaseEvent):
    """An ended execution was made runnable again."""

    reason: str | None
    replay_count: int | None
    """How often it has been replayed, this time included; None if the event does not say."""


AnyLeaseEvent = (
    LeaseAcquired | LeaseRenewed | LeaseReleased | LeaseExpired | LeaseReclaimed | LeaseRevoked | LeaseReplayInitiated
)
"""What the history of leases delivers, for `match`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalDeliveryEvent(FeedEvent):
    """A signal was accepted, buffered, or recognised as a duplicate."""

    signal_id: SignalId
    """The id of the signal; for a duplicate that of the first delivery."""
    waitpoint_id: WaitpointId | None
    source_identity: str | None
    effect: str
    """`satisfied`, `buffered`, `deduped`, or `appended_to_waitpoint`."""
    disposition: str | None
    """Why the delivery had this effect; `deduped` for a duplicate."""


class OperatorEventType(StrEnum):
    """What an operator did, or what happened to a flow."""

    PRIORITY_CHANGED = "priority_changed"
    REPLAYED = "replayed"
    RESUMED = "resumed"
    FLOW_STATE_CHANGED = "flow_state_changed"
    FLOW_CANCEL_REQUESTED = "flow_cancel_requested"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorEvent(FeedEvent):
    """An action of an operator; `execution_id` is the UUID of the flow if it concerns a flow."""

    event_type: OperatorEventType
    details: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceTagEvent(FeedEvent):
    """The instance tag of an execution changed."""

    tag: str
    """The value of the tag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceTagAttached(InstanceTagEvent):
    """The instance tag of an execution got this value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceTagCleared(InstanceTagEvent):
    """The instance tag of an execution lost this value."""


AnyInstanceTagEvent = InstanceTagAttached | InstanceTagCleared
"""What the feed of instance tags delivers, for `match`."""
