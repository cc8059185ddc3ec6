import copy
import dataclasses
import pickle
import uuid
from typing import Any

import pytest

from flowfabric.model import outcomes
from flowfabric.model.handle import Handle
from flowfabric.model.ids import AttemptId, ExecutionId, LaneId, LeaseId, WorkerInstanceId
from flowfabric.model.outcomes import ClaimedExecution, FailureClass, FailureReason, failure_category
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
        retry_count=0,
        priority=5,
        attempt_timeout_ms=None,
        execution_deadline_at=None,
    )


def test_a_claim_is_a_frozen_value() -> None:
    claimed = _claimed()
    assert claimed == _claimed()
    assert claimed != dataclasses.replace(claimed, priority=6)
    assert [field.name for field in dataclasses.fields(claimed)] == list(vars(claimed))
    assert copy.deepcopy(claimed) == pickle.loads(pickle.dumps(claimed)) == claimed
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(claimed, "priority", 6)  # noqa: B010


OUTCOMES: dict[str, Any] = {name: value for name, value in vars(outcomes).items() if dataclasses.is_dataclass(value)}


@pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=OUTCOMES)
def test_every_outcome_is_frozen(outcome: Any) -> None:
    assert outcome.__dataclass_params__.frozen


def test_callers_match_on_these_names() -> None:
    names = """
        Created Duplicate ClaimedExecution Renewed Completed RetryScheduled TerminalFailed Cancelled Registered
        Refreshed NotRegistered Promoted AlreadySatisfied Marked Expired AlreadyTerminal NotYetDue ExecutionInfo
    """
    assert set(names.split()) <= set(OUTCOMES)
    assert issubclass(outcomes.AlreadyMet, outcomes.AlreadySatisfied)


@pytest.mark.parametrize(
    ("reason", "category"),
    [
        (FailureReason("boom"), "transient"),
        (FailureReason("boom", detail=""), "transient"),
        (FailureReason("boom", detail=b""), "transient"),
        (FailureReason("boom", detail=b"\xff"), "transient"),
        (FailureReason("boom", detail="rate_limited"), "rate_limited"),
        (FailureReason("boom", detail=b"rate_limited"), "rate_limited"),
    ],
)
def test_a_readable_detail_names_the_category_of_a_failure(reason: FailureReason, category: str) -> None:
    assert failure_category(reason, FailureClass.TRANSIENT) == category


def test_failure_classes_are_their_categories() -> None:
    assert [str(word) for word in FailureClass] == ["transient", "permanent", "infra_crash", "timeout", "cancelled"]
