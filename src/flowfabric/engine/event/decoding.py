"""The events of feeds, decoded from the rows of the event table: one row may hold the events of many executions."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from flowfabric.db.database import Record
from flowfabric.model.cursor import EventCursors
from flowfabric.model.event import AcquireReason, CompletionOutcome, EventFamily, EventKind, ReleaseReason
from flowfabric.model.feed import (
    CompletionEvent,
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
    SignalDeliveryEvent,
)
from flowfabric.model.ids import ExecutionId, FlowId, SignalId, WaitpointId, id_prefix
from flowfabric.model.signal import ReportedEffect
from flowfabric.model.text import shown

Event = TypeVar("Event", bound=FeedEvent)

Member = tuple[bytes, ExecutionId, Any]
"""One execution of a row: the cursor after it, its id and the id of its lease."""


class Undecodable(ValueError):
    """This version cannot decode an event; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed(Generic[Event]):
    """What a feed delivers, and how its rows are decoded."""

    operation: str
    family: EventFamily
    decode: Callable[[Record, Iterator[Member]], Iterator[Event]]
    has_leases: bool = False
    has_outcome: bool = False

    def events(self, row: Record, cursors: EventCursors, skipped: int) -> Iterator[Event]:
        """The events of a row after its first `skipped` ones; raise Undecodable before the first one is returned."""
        return self.decode(row, _members(row, cursors, skipped))


def _members(row: Record, cursors: EventCursors, skipped: int) -> Iterator[Member]:
    prefix = id_prefix(row["partition_key"])
    ids = row["execution_ids"]
    if ids is None:
        yield cursors.after(0), ExecutionId(f"{prefix}{row['execution_id']}"), row["lease_id"]
        return
    leases = row["lease_ids"] or (None,) * len(ids)
    for nth in range(skipped, len(ids)):
        cursor = cursors.after((nth + 1) % len(ids))
        yield cursor, ExecutionId(f"{prefix}{ids[nth]}"), leases[nth]


def _completions(row: Record, members: Iterator[Member]) -> Iterator[CompletionEvent]:
    try:
        outcome = CompletionOutcome(row["outcome"]).literal
    except ValueError:
        raise Undecodable(f"the outcome {row['outcome']} is unknown") from None
    at, flow_id = row["at"], _flow_id(row)
    return (
        CompletionEvent(cursor=cursor, execution_id=execution_id, at=at, outcome=outcome, flow_id=flow_id)
        for cursor, execution_id, _ in members
    )


def _flow_id(row: Record) -> FlowId | None:
    return None if row["flow_id"] is None else FlowId(row["flow_id"])


def _leases(row: Record, members: Iterator[Member]) -> Iterator[LeaseEvent]:
    try:
        make = _LEASE_EVENTS[row["kind"]]
    except KeyError:
        raise Undecodable(f"the kind {row['kind']!r} is unknown") from None
    return make(row, members)


def _acquired(row: Record, members: Iterator[Member]) -> Iterator[LeaseAcquired]:
    try:
        reason = None if row["reason"] is None else AcquireReason(row["reason"])
    except ValueError:
        raise Undecodable(f"the reason {row['reason']!r} of a lease is unknown") from None
    at, epoch, index, worker = row["at"], row["lease_epoch"], row["attempt_index"], row["worker_instance_id"]
    return (
        LeaseAcquired(
            cursor=cursor,
            execution_id=execution_id,
            at=at,
            lease_epoch=epoch,
            attempt_index=index,
            lease_id=lease_id,
            worker_instance_id=worker,
            reason=reason,
        )
        for cursor, execution_id, lease_id in members
    )


def _renewed(row: Record, members: Iterator[Member]) -> Iterator[LeaseRenewed]:
    at, epoch, index, worker = row["at"], row["lease_epoch"], row["attempt_index"], row["worker_instance_id"]
    return (
        LeaseRenewed(
            cursor=cursor,
            execution_id=execution_id,
            at=at,
            lease_epoch=epoch,
            attempt_index=index,
            lease_id=lease_id,
            worker_instance_id=worker,
        )
        for cursor, execution_id, lease_id in members
    )


def _released(row: Record, members: Iterator[Member]) -> Iterator[LeaseReleased]:
    reason = _RELEASE_REASONS.get(row["reason"], row["reason"])
    at, epoch, index, worker = row["at"], row["lease_epoch"], row["attempt_index"], row["worker_instance_id"]
    return (
        LeaseReleased(
            cursor=cursor,
            execution_id=execution_id,
            at=at,
            lease_epoch=epoch,
            attempt_index=index,
            lease_id=lease_id,
            worker_instance_id=worker,
            reason=reason,
        )
        for cursor, execution_id, lease_id in members
    )


def _expired(row: Record, members: Iterator[Member]) -> Iterator[LeaseExpired]:
    return (
        LeaseExpired(
            cursor=cursor,
            execution_id=execution_id,
            at=row["at"],
            lease_epoch=row["lease_epoch"],
            attempt_index=row["attempt_index"],
            lease_id=lease_id,
            prev_owner=row["worker_instance_id"],
        )
        for cursor, execution_id, lease_id in members
    )


def _reclaimed(row: Record, members: Iterator[Member]) -> Iterator[LeaseReclaimed]:
    return (
        LeaseReclaimed(
            cursor=cursor,
            execution_id=execution_id,
            at=row["at"],
            lease_epoch=row["lease_epoch"],
            attempt_index=row["attempt_index"],
            new_lease_id=lease_id,
            new_owner=row["worker_instance_id"],
        )
        for cursor, execution_id, lease_id in members
    )


def _revoked(row: Record, members: Iterator[Member]) -> Iterator[LeaseRevoked]:
    revoked_by = _details(row).get("revoked_by", "operator")
    return (
        LeaseRevoked(
            cursor=cursor,
            execution_id=execution_id,
            at=row["at"],
            lease_epoch=row["lease_epoch"],
            attempt_index=row["attempt_index"],
            lease_id=lease_id,
            revoked_by=str(revoked_by),
        )
        for cursor, execution_id, lease_id in members
    )


def _replay_initiated(row: Record, members: Iterator[Member]) -> Iterator[LeaseReplayInitiated]:
    return (
        LeaseReplayInitiated(
            cursor=cursor,
            execution_id=execution_id,
            at=row["at"],
            lease_epoch=row["lease_epoch"],
            attempt_index=row["attempt_index"],
            reason=row["reason"],
        )
        for cursor, execution_id, _ in members
    )


_RELEASE_REASONS = {reason.value: reason for reason in ReleaseReason}
_LEASE_EVENTS: Mapping[str, Callable[[Record, Iterator[Member]], Iterator[LeaseEvent]]] = {
    EventKind.ACQUIRED: _acquired,
    EventKind.RENEWED: _renewed,
    EventKind.RELEASED: _released,
    EventKind.EXPIRED: _expired,
    EventKind.RECLAIMED: _reclaimed,
    EventKind.REVOKED: _revoked,
    EventKind.REPLAY_INITIATED: _replay_initiated,
}


def _details(row: Record) -> Mapping[str, object]:
    details = None if row["details"] is None else json.loads(row["details"])
    if not isinstance(details, dict | None):
        raise Undecodable(f"the details are not an object: {shown(row['details'])}")
    return details or {}


def _signals(row: Record, members: Iterator[Member]) -> Iterator[SignalDeliveryEvent]:
    details = _details(row)
    try:
        signal_id = SignalId(UUID(str(details["signal_id"])))
        waitpoint_id = None if (given := details["waitpoint_id"]) is None else WaitpointId(UUID(str(given)))
        effect, disposition = str(details["effect"]), details["disposition"]
    except (KeyError, ValueError) as unreadable:
        raise Undecodable(f"the details of a signal cannot be read: {unreadable!r}") from None
    return (
        SignalDeliveryEvent(
            cursor=cursor,
            execution_id=execution_id,
            at=row["at"],
            signal_id=signal_id,
            waitpoint_id=waitpoint_id,
            source_identity=_text(details.get("source_identity")),
            effect=_EFFECTS.get(effect, effect),
            disposition=_text(disposition),
        )
        for cursor, execution_id, _ in members
    )


_EFFECTS: Mapping[str, str] = {effect.value: effect for effect in ReportedEffect}


def _text(value: object) -> str | None:
    return None if value is None or value == "" else str(value)


def _operator_actions(row: Record, members: Iterator[Member]) -> Iterator[OperatorEvent]:
    given = OperatorEventType.RESUMED if row["kind"] == EventKind.OPERATOR_RESUMED else row["reason"]
    try:
        event_type = OperatorEventType(given)
    except ValueError:
        raise Undecodable(f"the event type {given!r} is unknown") from None
    details = _details(row)
    flow_id = ExecutionId(str(row["execution_id"])) if event_type in _FLOW_EVENTS else None
    return (
        OperatorEvent(
            cursor=cursor, execution_id=flow_id or execution_id, at=row["at"], event_type=event_type, details=details
        )
        for cursor, execution_id, _ in members
    )


_FLOW_EVENTS = (OperatorEventType.FLOW_STATE_CHANGED, OperatorEventType.FLOW_CANCEL_REQUESTED)
"""Their row has the UUID of the flow in place of that of an execution."""


def _instance_tags(row: Record, members: Iterator[Member]) -> Iterator[InstanceTagEvent]:
    if row["instance_tag"] is None:
        raise Undecodable("the value of the tag is missing")
    make = InstanceTagAttached if row["kind"] == EventKind.TAG_ATTACHED else InstanceTagCleared
    return (
        make(cursor=cursor, execution_id=execution_id, at=row["at"], tag=row["instance_tag"])
        for cursor, execution_id, _ in members
    )


COMPLETION = Feed(
    operation="subscribe_completion", family=EventFamily.COMPLETION, decode=_completions, has_outcome=True
)
LEASE = Feed(operation="subscribe_lease_history", family=EventFamily.LEASE, decode=_leases, has_leases=True)
SIGNAL = Feed(operation="subscribe_signal_delivery", family=EventFamily.SIGNAL, decode=_signals)
OPERATOR = Feed(operation="subscribe_operator_events", family=EventFamily.OPERATOR, decode=_operator_actions)
INSTANCE_TAG = Feed(operation="subscribe_instance_tags", family=EventFamily.INSTANCE_TAG, decode=_instance_tags)
