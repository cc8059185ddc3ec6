"""Feeds: subscriptions to the events of all executions, their filter, and the events they deliver."""

from flowfabric.engine.event.subscription import Subscription
from flowfabric.model.cursor import OLDEST
from flowfabric.model.event import AcquireReason, ReleaseReason
from flowfabric.model.feed import (
    AnyInstanceTagEvent,
    AnyLeaseEvent,
    CompletionEvent,
    CompletionKind,
    FeedEvent,
    InstanceTagAttached,
    InstanceTagCleared,
    InstanceTagEvent,
    LeaseAcquired,
    LeaseEvent,
    LeaseExpired,
    LeaseReclaimed,
    LeaseReleased,
    LeaseRenewed,
    LeaseReplayInitiated,
    LeaseRevoked,
    OperatorEvent,
    OperatorEventType,
    ReportedOutcome,
    ScannerFilter,
    SignalDeliveryEvent,
)
from flowfabric.model.signal import ReportedEffect

__all__ = [
    "OLDEST",
    "AcquireReason",
    "AnyInstanceTagEvent",
    "AnyLeaseEvent",
    "CompletionEvent",
    "CompletionKind",
    "FeedEvent",
    "InstanceTagAttached",
    "InstanceTagCleared",
    "InstanceTagEvent",
    "LeaseAcquired",
    "LeaseEvent",
    "LeaseExpired",
    "LeaseReclaimed",
    "LeaseReleased",
    "LeaseRenewed",
    "LeaseReplayInitiated",
    "LeaseRevoked",
    "OperatorEvent",
    "OperatorEventType",
    "ReleaseReason",
    "ReportedEffect",
    "ReportedOutcome",
    "ScannerFilter",
    "SignalDeliveryEvent",
    "Subscription",
]
