import pytest

from flowfabric.model.event import AcquireReason, CompletionOutcome, EventKind, ReleaseReason, WorkerEvent
from flowfabric.model.states import TerminalOutcome


def test_events_are_stored_and_shown_by_these_words() -> None:
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
    ]


def test_completion_outcomes_have_their_stored_numbers_and_words() -> None:
    assert {outcome.literal: outcome.value for outcome in CompletionOutcome} == {
        "success": 1,
        "failed": 2,
        "cancelled": 3,
        "expired": 4,
        "skipped": 5,
        "resumable": 6,
    }


@pytest.mark.parametrize("ending", [outcome for outcome in TerminalOutcome if outcome is not TerminalOutcome.NONE])
def test_every_ending_is_reported_by_its_own_word(ending: TerminalOutcome) -> None:
    assert CompletionOutcome.of(ending).literal == ending


def test_what_has_not_ended_is_not_reported() -> None:
    with pytest.raises(KeyError):
        CompletionOutcome.of(TerminalOutcome.NONE)


def test_the_feeds_say_why_in_these_words() -> None:
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
