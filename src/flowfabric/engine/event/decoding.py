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
    AnyInstanceTagEvent,
    AnyLeaseEvent,
    CompletionEvent,
    FeedEvent,
    InstanceTagAttached,
    InstanceTagCleared,
    LeaseAcquired,
    LeaseExpired,
    LeaseReclaimed,
    LeaseReleased,
    LeaseRenewed,
    LeaseReplayInitiated,
    LeaseRevoked,
    OperatorEvent,
    OperatorEventType,
    ReportedOutcome,
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
        """The events of a row after its first `skipped` ones; ends with Undecodable at one that cannot be decoded."""
        executions, leases = row["execution_ids"], row["lease_ids"]
        try:
            if leases is not None and len(leases) != len(executions or ()):
                raise Undecodable("the numbers of executions and leases differ")
            yield from self.decode(row, _members(row, cursors, skipped))
        except Undecodable:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as unreadable:
            raise Undecodable(f"it cannot be decoded: {unreadable!r}") from None


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
        outcome = ReportedOutcome(CompletionOutcome(row["outcome"]).literal)
    except ValueError:
        raise Undecodable(f"the outcome {row['outcome']} is unknown") from None
    fields = {"at": row["at"], "outcome": outcome, "flow_id": _flow_id(row), "event_id": row["event_id"]}
    return (CompletionEvent(cursor=cursor, execution_id=execution_id, **fields) for cursor, execution_id, _ in members)


def _flow_id(row: Record) -> FlowId | None:
    return None if row["flow_id"] is None else FlowId(row["flow_id"])


@dataclass(frozen=True, kw_only=True, slots=True)
class _LeaseKind:
    """How a row of a kind becomes events of leases."""

    make: Callable[..., AnyLeaseEvent]
    lease_field: str | None = "lease_id"
    """The field with the id of the lease."""
    worker_field: str | None = None
    """The field with the worker instance."""
    other_fields: Callable[[Record], dict[str, object]] = lambda _: {}


def _leases(row: Record, members: Iterator[Member]) -> Iterator[AnyLeaseEvent]:
    try:
        kind = _LEASE_KINDS[row["kind"]]
    except KeyError:
        raise Undecodable(f"the kind {row['kind']!r} is unknown") from None
    fields = {key: row[key] for key in ("at", "lease_epoch", "attempt_index")} | kind.other_fields(row)
    if kind.worker_field is not None:
        fields[kind.worker_field] = row["worker_instance_id"]
    return _made(kind, fields, members)


def _made(kind: _LeaseKind, fields: dict[str, object], members: Iterator[Member]) -> Iterator[AnyLeaseEvent]:
    make, lease_field = kind.make, kind.lease_field
    for cursor, execution_id, lease_id in members:
        fields["cursor"], fields["execution_id"] = cursor, execution_id
        if lease_field is not None:
            fields[lease_field] = lease_id
        yield make(**fields)


_ACQUIRE_REASONS: Mapping[str, AcquireReason] = {reason.value: reason for reason in AcquireReason}
_RELEASE_REASONS: Mapping[str, ReleaseReason] = {reason.value: reason for reason in ReleaseReason}
_LEASE_KINDS: Mapping[str, _LeaseKind] = {
    EventKind.ACQUIRED: _LeaseKind(
        make=LeaseAcquired,
        worker_field="worker_instance_id",
        other_fields=lambda row: {"reason": _ACQUIRE_REASONS.get(row["reason"], row["reason"])},
    ),
    EventKind.RENEWED: _LeaseKind(make=LeaseRenewed, worker_field="worker_instance_id"),
    EventKind.RELEASED: _LeaseKind(
        make=LeaseReleased,
        worker_field="worker_instance_id",
        other_fields=lambda row: {"reason": _RELEASE_REASONS.get(row["reason"], row["reason"])},
    ),
    EventKind.EXPIRED: _LeaseKind(make=LeaseExpired, worker_field="prev_owner"),
    EventKind.RECLAIMED: _LeaseKind(make=LeaseReclaimed, lease_field="new_lease_id", worker_field="new_owner"),
    EventKind.REVOKED: _LeaseKind(
        make=LeaseRevoked, other_fields=lambda row: {"revoked_by": str(_details(row).get("revoked_by", "operator"))}
    ),
    EventKind.REPLAY_INITIATED: _LeaseKind(
        make=LeaseReplayInitiated,
        lease_field=None,
        other_fields=lambda row: {"reason": row["reason"], "replay_count": _number(_details(row).get("replay_count"))},
    ),
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


def _number(value: object) -> int | None:
    return value if type(value) is int else None


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


def _instance_tags(row: Record, members: Iterator[Member]) -> Iterator[AnyInstanceTagEvent]:
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
