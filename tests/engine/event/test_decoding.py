"""Every kind of stored event is decoded with all of its fields; one that cannot be decoded is not delivered."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fixtures import Given
from flowfabric.db.database import Record
from flowfabric.engine.engine import Engine
from flowfabric.engine.event.decoding import Feed, Member, Undecodable
from flowfabric.feeds import (
    OLDEST,
    AcquireReason,
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
    ReleaseReason,
    ReportedOutcome,
    SignalDeliveryEvent,
)
from flowfabric.model.cursor import CursorWriter
from flowfabric.model.event import CompletionOutcome, EventFamily
from flowfabric.model.ids import ExecutionId, FlowId, LeaseId, SignalId, WaitpointId
from flowfabric.model.position import Position
from flowfabric.model.signal import ReportedEffect

from .following import take

UUIDS = [UUID(int=nth, version=4) for nth in range(1, 5)]
EXECUTION, LEASE, FLOW, SIGNAL = UUIDS
WAITPOINT = UUIDS[0]
COMMON: dict[str, Any] = {"cursor": b"", "execution_id": ExecutionId(f"{{fp:3}}:{EXECUTION}"), "at": 5}
OF_LEASE: dict[str, Any] = {**COMMON, "lease_epoch": 7, "attempt_index": 2}
HELD: dict[str, Any] = {**OF_LEASE, "lease_id": LeaseId(LEASE), "worker_instance_id": "w-1"}

Case = tuple[dict[str, object], FeedEvent]
"""The columns of a row, and the event that it becomes."""


def completions() -> Iterator[Case]:
    """Every outcome, within a flow and outside of one."""
    for outcome in CompletionOutcome:
        reported = ReportedOutcome(outcome.literal)
        for flow in (FLOW, None):
            flow_id = None if flow is None else FlowId(flow)
            yield (
                {"kind": "ended", "outcome": outcome.value, "flow_id": flow},
                CompletionEvent(**COMMON, outcome=reported, flow_id=flow_id, event_id=0),
            )


def leases() -> Iterator[Case]:
    """Every kind, with every reason."""
    for acquired in (*AcquireReason, "by_magic", None):
        yield {"kind": "acquired", "reason": acquired}, LeaseAcquired(**HELD, reason=acquired)
    for released in (*ReleaseReason, "by_magic", None):
        yield {"kind": "released", "reason": released}, LeaseReleased(**HELD, reason=released)
    yield {"kind": "renewed"}, LeaseRenewed(**HELD)
    yield {"kind": "expired"}, LeaseExpired(**OF_LEASE, lease_id=LeaseId(LEASE), prev_owner="w-1")
    yield {"kind": "reclaimed"}, LeaseReclaimed(**OF_LEASE, new_lease_id=LeaseId(LEASE), new_owner="w-1")
    for details, revoked_by in ((None, "operator"), ('{"revoked_by": "reconciler"}', "reconciler")):
        yield (
            {"kind": "revoked", "details": details},
            LeaseRevoked(**OF_LEASE, lease_id=LeaseId(LEASE), revoked_by=revoked_by),
        )
    for replayed in ("wrong result", None):
        for details, count in ((None, None), ('{"replay_count": 2}', 2), ('{"replay_count": "2"}', None)):
            yield (
                {"kind": "replay_initiated", "reason": replayed, "details": details},
                LeaseReplayInitiated(**OF_LEASE, reason=replayed, replay_count=count),
            )


def signals() -> Iterator[Case]:
    """Every effect, with all details and with few."""
    for effect in (*ReportedEffect, "by_magic"):
        details = f'"signal_id": "{SIGNAL}", "effect": "{effect}"'
        full = f'{{{details}, "waitpoint_id": "{WAITPOINT}", "source_identity": "ann", "disposition": "why"}}'
        few = f'{{{details}, "waitpoint_id": null, "disposition": null}}'
        event: dict[str, Any] = {**COMMON, "signal_id": SignalId(SIGNAL), "effect": effect}
        yield (
            {"kind": "signal", "details": full},
            SignalDeliveryEvent(**event, waitpoint_id=WaitpointId(WAITPOINT), source_identity="ann", disposition="why"),
        )
        yield (
            {"kind": "signal", "details": few},
            SignalDeliveryEvent(**event, waitpoint_id=None, source_identity=None, disposition=None),
        )


def operator_actions() -> Iterator[Case]:
    """Every type of event; those of flows name the flow in place of an execution."""
    of_flow = {**COMMON, "execution_id": ExecutionId(str(EXECUTION))}
    for event_type in OperatorEventType:
        row: dict[str, object] = {"kind": "operator_action", "reason": event_type}
        if event_type is OperatorEventType.RESUMED:
            row = {"kind": "operator_resumed"}
        fields = of_flow if event_type.startswith("flow_") else COMMON
        yield {**row, "details": '{"x": 1}'}, OperatorEvent(**fields, event_type=event_type, details={"x": 1})
        yield row, OperatorEvent(**fields, event_type=event_type, details={})


def instance_tags() -> Iterator[Case]:
    """Both kinds."""
    yield {"kind": "tag_attached", "instance_tag": "a"}, InstanceTagAttached(**COMMON, tag="a")
    yield {"kind": "tag_cleared", "instance_tag": "a"}, InstanceTagCleared(**COMMON, tag="a")


@pytest.mark.parametrize(
    ("operation", "cases"),
    [
        ("subscribe_completion", completions),
        ("subscribe_lease_history", leases),
        ("subscribe_signal_delivery", signals),
        ("subscribe_operator_events", operator_actions),
        ("subscribe_instance_tags", instance_tags),
    ],
)
async def test_every_event_is_delivered_with_its_fields(
    engine: Engine, given: Given, connection: asyncpg.Connection, operation: str, cases: Any
) -> None:
    await given.claimed(worker="w")
    worker_no = await connection.fetchval("select worker_no from worker_identity")
    # The event of the claim is not part of the test.
    await connection.execute("delete from event")
    expected = []
    # Written as rows: no operation of this version leads to some of them.
    for columns, event in cases():
        row = {
            "at": 5,
            "partition_key": 3,
            "namespace_no": 1,
            "execution_id": EXECUTION,
            "lease_id": LEASE,
            "lease_epoch": 7,
            "attempt_index": 2,
            "worker_no": worker_no,
            **columns,
        }
        places = ", ".join(f"${nth}" for nth in range(1, len(row) + 1))
        await connection.execute(f"insert into event ({', '.join(row)}) values ({places})", *row.values())
        expected.append(event)
    async with getattr(engine, operation)(OLDEST) as events:
        found = await take(events, len(expected))
    for one, other in zip(found, expected, strict=True):
        # A known word is a member of its enumeration, which is equal to the word.
        assigned = {"cursor": b"", "event_id": 0} if isinstance(one, CompletionEvent) else {"cursor": b""}
        assert repr(replace(one, **assigned)) == repr(other)


@pytest.mark.parametrize("failure", [ValueError, TypeError, KeyError, RecursionError])
@pytest.mark.parametrize("is_late", [False, True])
def test_an_event_that_fails_to_decode_is_undecodable(failure: type[Exception], is_late: bool) -> None:  # noqa: FBT001
    def later(members: Iterator[Member]) -> Iterator[CompletionEvent]:
        for _ in members:
            raise failure("broken")
            yield

    def decode(_: Record, members: Iterator[Member]) -> Iterator[CompletionEvent]:
        if is_late:
            return later(members)
        raise failure("broken")

    feed = Feed(operation="subscribe_completion", family=EventFamily.COMPLETION, decode=decode)
    row = {"execution_ids": None, "lease_ids": None, "partition_key": 1, "execution_id": EXECUTION, "lease_id": None}
    cursors = CursorWriter(Position.oldest(EventFamily.COMPLETION)).of_event(1)
    with pytest.raises(Undecodable, match=r"^it cannot be decoded: .*broken"):
        list(feed.events(row, cursors, 0))
