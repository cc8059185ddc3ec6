"""What a worker gets for each lease, built from the rows of the claim statements."""

from collections.abc import Iterable

import msgspec

from flowfabric.db.database import Record
from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.execution.checking import MAX_PRIORITY
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ID_FORMAT, ExecutionId, LaneId, WorkerInstanceId
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.policy import read_stored_policy
from flowfabric.model.states import AttemptType, HandleKind

LEAST_AHEAD_MS = 5_000
"""An attempt with a shorter timeout is not claimed before a slot is free, because its time runs from the claim."""

_KINDS = {
    "fresh": HandleKind.FRESH,
    "resumed": HandleKind.RESUMED,
    "parked": HandleKind.RESUMED,
    "reclaimed": HandleKind.RECLAIMED,
}
_TYPES = {str(attempt_type): attempt_type for attempt_type in AttemptType}
_read_tags = msgspec.json.Decoder(dict[str, str]).decode
_NO_TAGS: dict[str, str] = {}


class Queues:
    """A cache of the lane and kind of each queue this process claimed from; neither ever changes."""

    MAX_KNOWN = 256

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._known: dict[int, tuple[LaneId, str]] = {}

    @property
    def known(self) -> list[int]:
        """The numbers of the cached queues."""
        return list(self._known)

    def of(self, queue_no: int, lane_id: str | None, execution_kind: str | None) -> tuple[LaneId, str]:
        """Return the lane and kind of a queue; None for either means the queue is cached."""
        if lane_id is None or execution_kind is None:
            return self._known[queue_no]
        found = LaneId(lane_id), execution_kind
        if len(self._known) < self._most:
            self._known[queue_no] = found
        return found

    def missing(self, queue_nos: Iterable[int]) -> list[int]:
        """Those of these queues that are not cached; room is made for all of them."""
        wanted = {*queue_nos}
        missing = wanted - self._known.keys()
        if len(self._known) + len(missing) > self._most:
            self._known.clear()
            missing = wanted
        return [*missing]

    def add(self, queue_no: int, lane_id: str, execution_kind: str) -> None:
        """Cache a queue."""
        self._known[queue_no] = LaneId(lane_id), execution_kind


def claimed_of(row: Record, instance: WorkerInstanceId, lease_ttl_ms: int, queues: Queues) -> ClaimedExecution:
    """Build what a worker gets from the row of a claim statement."""
    (
        branch,
        partition,
        uuid,
        _route_no,
        queue_no,
        place,
        lane_id,
        retry_count,
        lease_id,
        lease_epoch,
        attempt_id,
        attempt_type,
        attempt_index,
        now,
        execution_kind,
        input_payload,
        payload_encoding,
        policy,
        tags,
        attempt_timeout_ms,
        execution_deadline_at,
    ) = row
    # Inlined: hot path.
    lane_id, execution_kind = queues.of(queue_no, lane_id, execution_kind)
    if attempt_id is None:
        # The lease that begins an attempt gives the attempt its id.
        attempt_id = lease_id
    execution_id = ExecutionId(ID_FORMAT % (partition, uuid))
    return ClaimedExecution(
        execution_id=execution_id,
        lease_id=lease_id,
        lease_epoch=lease_epoch,
        attempt_index=attempt_index,
        attempt_id=attempt_id,
        attempt_type=_TYPES[attempt_type],
        lease_expires_at=now + lease_ttl_ms,
        handle=Handle(
            kind=_KINDS[branch],
            execution_id=execution_id,
            attempt_index=attempt_index,
            attempt_id=attempt_id,
            lease_id=lease_id,
            lease_epoch=lease_epoch,
            lease_ttl_ms=lease_ttl_ms,
            lane_id=lane_id,
            worker_instance_id=instance,
        ),
        lane_id=lane_id,
        execution_kind=execution_kind,
        input_payload=input_payload,
        payload_encoding=payload_encoding,
        tags=_read_tags(tags) if tags else _NO_TAGS,
        policy=read_stored_policy(policy),
        has_waited=branch == "resumed",
        retry_count=retry_count,
        priority=MAX_PRIORITY - (place >> BAND_BITS),
        attempt_timeout_ms=attempt_timeout_ms,
        execution_deadline_at=execution_deadline_at,
    )
