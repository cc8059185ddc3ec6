from dataclasses import replace
from enum import StrEnum
from itertools import product
from typing import Any

from flowfabric.model.states import (
    AttemptLifecycle,
    AttemptState,
    AttemptType,
    BlockingReason,
    CancelSource,
    EligibilityState,
    HandleKind,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    StateVector,
    TerminalOutcome,
    TimeoutBehavior,
    derive_public_state,
    illegal,
)
from model.cases import for_each

LITERALS = {
    LifecyclePhase: "submitted runnable active suspended terminal",
    OwnershipState: "unowned leased lease_expired_reclaimable lease_revoked",
    EligibilityState: "eligible_now not_eligible_until_time blocked_by_dependencies blocked_by_budget blocked_by_quota "
    "blocked_by_route blocked_by_lane_state blocked_by_operator not_applicable",
    BlockingReason: "none waiting_for_worker waiting_for_retry_backoff waiting_for_resume_delay waiting_for_delay "
    "waiting_for_signal waiting_for_approval waiting_for_callback waiting_for_tool_result waiting_for_children "
    "waiting_for_budget waiting_for_quota waiting_for_capable_worker waiting_for_locality_match paused_by_operator "
    "paused_by_policy paused_by_flow_cancel",
    TerminalOutcome: "none success failed cancelled expired skipped",
    AttemptState: "none pending_first_attempt running_attempt attempt_interrupted pending_retry_attempt "
    "pending_replay_attempt attempt_terminal",
    PublicState: "waiting delayed rate_limited waiting_children active suspended resumable completed failed cancelled "
    "expired skipped",
    AttemptLifecycle: "created started suspended ended_success ended_failure ended_cancelled interrupted_reclaimed",
    AttemptType: "initial retry reclaim replay fallback",
    LaneState: "active paused draining disabled",
    CancelSource: "operator_override lease_holder flow_cascade system_timeout",
    HandleKind: "Fresh Resumed Suspended Reclaimed",
    TimeoutBehavior: "fail cancel expire auto_resume_with_timeout_signal escalate",
}

RUNNING = StateVector(
    lifecycle_phase=LifecyclePhase.ACTIVE,
    ownership_state=OwnershipState.LEASED,
    eligibility_state=EligibilityState.NOT_APPLICABLE,
    blocking_reason=BlockingReason.NONE,
    terminal_outcome=TerminalOutcome.NONE,
    attempt_state=AttemptState.RUNNING_ATTEMPT,
    public_state=PublicState.ACTIVE,
)


@for_each("words, literals", LITERALS.items())
def test_an_enum_has_exactly_these_literals(words: type[StrEnum], literals: str) -> None:
    assert [str(word) for word in words] == literals.split()


@for_each(
    "outcome, public",
    [
        ("success", "completed"),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
        ("expired", "expired"),
        ("skipped", "skipped"),
        ("none", "failed"),
    ],
)
def test_a_terminal_execution_shows_its_outcome(outcome: str, public: str) -> None:
    for eligibility, attempt in product(EligibilityState, AttemptState):
        derived = derive_public_state(LifecyclePhase.TERMINAL, eligibility, TerminalOutcome(outcome), attempt)
        assert derived == public


@for_each("phase, public", [("suspended", "suspended"), ("active", "active"), ("submitted", "waiting")])
def test_these_phases_alone_determine_the_public_state(phase: str, public: str) -> None:
    for eligibility, outcome, attempt in product(EligibilityState, TerminalOutcome, AttemptState):
        assert derive_public_state(LifecyclePhase(phase), eligibility, outcome, attempt) == public


@for_each(
    "eligibility, public",
    [
        ("eligible_now", "waiting"),
        ("blocked_by_route", "waiting"),
        ("blocked_by_lane_state", "waiting"),
        ("blocked_by_operator", "waiting"),
        ("not_applicable", "waiting"),
        ("not_eligible_until_time", "delayed"),
        ("blocked_by_dependencies", "waiting_children"),
        ("blocked_by_budget", "rate_limited"),
        ("blocked_by_quota", "rate_limited"),
    ],
)
def test_a_runnable_execution_shows_what_it_waits_for(eligibility: str, public: str) -> None:
    for outcome, attempt in product(TerminalOutcome, AttemptState):
        is_resumable = eligibility == "eligible_now" and attempt is AttemptState.ATTEMPT_INTERRUPTED
        derived = derive_public_state(LifecyclePhase.RUNNABLE, EligibilityState(eligibility), outcome, attempt)
        assert derived == ("resumable" if is_resumable else public)


def test_a_running_execution_is_legal() -> None:
    assert illegal(RUNNING) is None


def test_every_state_is_legal_exactly_when_the_invariants_hold() -> None:
    for phase, ownership, eligibility, outcome, attempt in product(
        LifecyclePhase, OwnershipState, EligibilityState, TerminalOutcome, AttemptState
    ):
        vector = StateVector(
            lifecycle_phase=phase,
            ownership_state=ownership,
            eligibility_state=eligibility,
            blocking_reason=BlockingReason.NONE,
            terminal_outcome=outcome,
            attempt_state=attempt,
            public_state=derive_public_state(phase, eligibility, outcome, attempt),
        )
        holds = (
            (ownership == "unowned" or phase == "active")
            and (outcome != "none") == (phase == "terminal")
            and (eligibility != "not_applicable") == (phase == "runnable")
        )
        assert (illegal(vector) is None) == holds


def _with(**changes: Any) -> StateVector:
    return replace(RUNNING, **changes)


@for_each(
    "vector, rule",
    [
        (_with(lifecycle_phase=LifecyclePhase.SUSPENDED), "leased implies active"),
        (_with(terminal_outcome=TerminalOutcome.FAILED), "terminal_outcome"),
        (_with(eligibility_state=EligibilityState.ELIGIBLE_NOW), "eligibility_state"),
        (_with(public_state=PublicState.WAITING), "public_state is waiting but must be active"),
    ],
)
def test_an_illegal_state_is_reported_with_the_violated_rule(vector: StateVector, rule: str) -> None:
    assert rule in str(illegal(vector))


def test_four_attempt_lifecycles_have_ended() -> None:
    assert [str(state) for state in AttemptLifecycle if state.has_ended] == [
        "ended_success",
        "ended_failure",
        "ended_cancelled",
        "interrupted_reclaimed",
    ]
