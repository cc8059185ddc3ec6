"""Stored outcomes of suspends are read back unchanged, or not at all."""

from uuid import UUID

import msgspec

from flowfabric.model.handle import Handle
from flowfabric.model.ids import (
    AttemptId,
    ExecutionId,
    LaneId,
    LeaseId,
    SuspensionId,
    WaitpointId,
    WorkerInstanceId,
)
from flowfabric.model.states import HandleKind
from flowfabric.model.suspend_outcome import SuspendOutcome, already_met, outcome_json, read_stored_outcome
from flowfabric.model.suspension import SuspendDetails, Suspended
from flowfabric.model.token import WaitpointToken
from flowfabric.model.waitpoint import AdditionalWaitpoint
from model.cases import for_each

HANDLE = Handle(
    kind=HandleKind.SUSPENDED,
    execution_id=ExecutionId("{fp:7}:11111111-1111-4111-8111-111111111111"),
    attempt_index=3,
    attempt_id=AttemptId(UUID(int=1)),
    lease_id=LeaseId(UUID(int=2)),
    lease_epoch=9,
    lease_ttl_ms=30_000,
    lane_id=LaneId("default"),
    worker_instance_id=WorkerInstanceId("w-1"),
)
DETAILS = SuspendDetails(
    suspension_id=SuspensionId(UUID(int=3)),
    attempt_index=2,
    waitpoint_id=WaitpointId(UUID(int=4)),
    waitpoint_key='k "ü"',
    waitpoint_token=WaitpointToken("k1:" + "ab" * 32),
    additional_waitpoints=(
        AdditionalWaitpoint(
            waitpoint_id=WaitpointId(UUID(int=5)),
            waitpoint_key="b",
            waitpoint_token=WaitpointToken("k1:" + "cd" * 32),
        ),
    ),
)
OUTCOMES: dict[str, SuspendOutcome] = {
    "Suspended": Suspended(details=DETAILS, handle=HANDLE),
    "AlreadySatisfied": already_met(DETAILS),
}


@for_each("variant", OUTCOMES)
def test_an_outcome_survives_its_json(variant: str) -> None:
    text = outcome_json(OUTCOMES[variant])
    assert msgspec.json.decode(text)["variant"] == variant
    read = read_stored_outcome(text, 2)
    assert read == OUTCOMES[variant]
    assert read is not None
    assert outcome_json(read) == text
    if isinstance(read, Suspended):
        assert read.handle.kind is HandleKind.SUSPENDED


@for_each(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"variant": "Suspended"}',
        '{"variant": 1, "details": {}, "handle_opaque_hex": null}',
    ],
)
def test_malformed_text_is_no_outcome(text: str | None) -> None:
    assert read_stored_outcome(text, 2) is None


@for_each(
    "name, value",
    [("variant", "Asleep"), ("handle_opaque_hex", None), ("handle_opaque_hex", "zz"), ("handle_opaque_hex", "02")],
)
def test_an_outcome_with_an_invalid_field_is_not_read(name: str, value: str | None) -> None:
    plain = msgspec.json.decode(outcome_json(OUTCOMES["Suspended"]))
    plain[name] = value
    assert read_stored_outcome(msgspec.json.encode(plain).decode(), 2) is None


@for_each("name", ["suspension_id", "waitpoint_id", "waitpoint_key", "token", "extras"])
def test_an_outcome_with_a_missing_detail_is_not_read(name: str) -> None:
    plain = msgspec.json.decode(outcome_json(OUTCOMES["Suspended"]))
    del plain["details"][name]
    assert read_stored_outcome(msgspec.json.encode(plain).decode(), 2) is None


@for_each("variant", OUTCOMES)
def test_an_outcome_prints_without_its_tokens(variant: str) -> None:
    shown = repr(OUTCOMES[variant]) + str(OUTCOMES[variant])
    assert "ab" * 32 not in shown
    assert "cd" * 32 not in shown
    assert "REDACTED" in shown
