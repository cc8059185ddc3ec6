import copy
import pickle
import uuid

import msgspec
import pytest

from flowfabric.model.handle import Handle
from flowfabric.model.ids import AttemptId, ExecutionId, LaneId, LeaseId, WorkerInstanceId
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.states import AttemptType, HandleKind

EXECUTION = ExecutionId("{fp:7}:11111111-2222-3333-4444-555555555555")
ATTEMPT = AttemptId(uuid.UUID(int=1))
LEASE = LeaseId(uuid.UUID(int=2))
LANE = LaneId("default")


def _claimed() -> ClaimedExecution:
    return ClaimedExecution(
        execution_id=EXECUTION,
        lease_id=LEASE,
        lease_epoch=1,
        attempt_index=0,
        attempt_id=ATTEMPT,
        attempt_type=AttemptType.INITIAL,
        lease_expires_at=30_000,
        handle=Handle(
            kind=HandleKind.FRESH,
            execution_id=EXECUTION,
            attempt_index=0,
            attempt_id=ATTEMPT,
            lease_id=LEASE,
            lease_epoch=1,
            lease_ttl_ms=30_000,
            lane_id=LANE,
            worker_instance_id=WorkerInstanceId("w-1"),
        ),
        lane_id=LANE,
        execution_kind="greet",
        input_payload=b"{}",
        payload_encoding=None,
        tags={"a.b": "c"},
        policy=None,
        has_waited=False,
        retry_count=0,
        priority=5,
        attempt_timeout_ms=None,
        execution_deadline_at=None,
    )


def test_a_claimed_execution_is_an_immutable_value() -> None:
    claimed = _claimed()
    assert claimed == _claimed()
    assert claimed != msgspec.structs.replace(claimed, priority=6)
    assert copy.deepcopy(claimed) == pickle.loads(pickle.dumps(claimed)) == claimed
    with pytest.raises(AttributeError, match="immutable"):
        setattr(claimed, "priority", 6)  # noqa: B010
