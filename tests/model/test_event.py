import pytest

from flowfabric.model.event import AcquireReason, CompletionOutcome, EventFamily, EventKind, ReleaseReason, WorkerEvent
from flowfabric.model.states import TerminalOutcome
from model.cases import for_each


def test_the_literals_of_event_kinds() -> None:
    assert [str(kind) for kind in EventKind] == [
        "ended",
        "acquired",
        "renewed",
        "released",
        "expired",
        "revoked",
        "reclaimed",
        "replay_initiated",
        "operator_resumed",
        "signal",
        "operator_action",
        "tag_attached",
        "tag_cleared",
    ]


def test_the_literals_of_event_families() -> None:
    assert [str(family) for family in EventFamily] == [
        "completion",
        "lease_event",
        "signal_event",
        "operator_event",
        "instance_tag",
    ]


def test_the_literals_and_numbers_of_completion_outcomes() -> None:
    assert {outcome.literal: outcome.value for outcome in CompletionOutcome} == {
        "success": 1,
        "failed": 2,
        "cancelled": 3,
        "expired": 4,
        "skipped": 5,
        "resumable": 6,
    }


@for_each("ending", [outcome for outcome in TerminalOutcome if outcome is not TerminalOutcome.NONE])
def test_every_terminal_outcome_is_reported_with_its_literal(ending: TerminalOutcome) -> None:
    assert CompletionOutcome.of(ending).literal == ending


def test_no_outcome_is_not_reported() -> None:
    with pytest.raises(KeyError):
        CompletionOutcome.of(TerminalOutcome.NONE)


def test_the_literals_of_event_reasons() -> None:
    released = """
        completed failed_retry_scheduled failed_terminal cancelled worker_delay waiting_children handed_back suspend
        expired:attempt_timeout expired:execution_deadline dependency_impossible max_reclaims_exceeded
    """
    assert [str(reason) for reason in ReleaseReason] == released.split()
    assert {str(reason) for reason in AcquireReason} == {
        "claim_resumed",
        "issue_grant_and_claim",
        "issue_grant_and_claim_resumed",
    }
    assert {str(event) for event in WorkerEvent} == {"registered", "heartbeat", "marked_dead", "ttl_swept"}
