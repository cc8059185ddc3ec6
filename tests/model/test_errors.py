import copy
import pickle

import pytest

from flowfabric.model import errors
from flowfabric.model.errors import CODES, EngineError, ErrorClass, TransportError, error
from model.cases import for_each

EXPECTED = """
validation Terminal      invalid_input
validation Retryable     capability_mismatch
validation Terminal      invalid_capabilities
validation Terminal      invalid_policy_json
validation Terminal      payload_too_large
validation Terminal      signal_limit_exceeded
validation Terminal      invalid_waitpoint_key
validation Terminal      invalid_token
validation Terminal      missing_token
validation Terminal      token_expired
validation Terminal      waitpoint_not_token_bound
validation Terminal      invalid_waitpoint_for_execution
validation Terminal      retention_limit_exceeded
validation Terminal      invalid_lease_for_suspend
validation Terminal      invalid_dependency
validation Terminal      invalid_blocking_reason
validation Retryable     invalid_offset
validation Terminal      unauthorized
validation Terminal      invalid_budget_scope
validation Terminal      budget_override_not_allowed
validation Terminal      invalid_quota_spec
validation Terminal      invalid_kid
validation Terminal      invalid_secret_hex
validation Terminal      invalid_grace_ms
validation Terminal      invalid_tag_key
validation SoftError     invalid_frame_type
validation Terminal      corruption
validation Terminal      handle_from_other_backend
contention Retryable     use_claim_resumed_execution
contention Retryable     not_a_resumed_execution
contention Retryable     execution_not_leaseable
contention Retryable     lease_conflict
contention Retryable     invalid_claim_grant
contention Retryable     claim_grant_expired
contention Retryable     no_eligible_execution
contention Retryable     waitpoint_not_found
contention Retryable     stale_graph_revision
contention Terminal      execution_not_active
contention Informational execution_not_eligible
contention Informational execution_not_in_eligible_set
contention Informational execution_not_reclaimable
contention Informational no_active_lease
contention Retryable     rate_limit_exceeded
contention Retryable     concurrency_limit_exceeded
contention Retryable     retry_exhausted
conflict   Terminal      dependency_already_exists
conflict   Terminal      cycle_detected
conflict   Terminal      self_referencing_edge
conflict   Terminal      execution_already_in_flow
conflict   Informational waitpoint_already_exists
conflict   Terminal      budget_attach_conflict
conflict   Terminal      quota_attach_conflict
conflict   Terminal      rotation_conflict
conflict   Terminal      idempotency_conflict
conflict   Bug           active_attempt_exists
state      Terminal      stale_lease
state      Terminal      lease_expired
state      Terminal      lease_revoked
state      Informational execution_not_suspended
state      Informational already_suspended
state      Informational waitpoint_closed
state      Informational waitpoint_not_pending
state      Informational pending_waitpoint_expired
state      Informational waitpoint_not_open
state      Informational grant_already_exists
state      Informational deps_not_satisfied
state      Informational not_blocked_by_deps
state      Informational duplicate_signal
state      Informational ok_already_applied
state      Informational attempt_already_terminal
state      Informational stream_already_closed
state      Informational already_satisfied
state      Informational budget_soft_exceeded
state      Terminal      target_not_signalable
state      Terminal      resume_condition_not_met
state      Terminal      stream_closed
state      Terminal      stale_owner_cannot_append
state      Terminal      execution_not_in_flow
state      Terminal      attempt_not_started
state      Terminal      execution_not_eligible_for_attempt
state      Terminal      max_retries_exhausted
state      Terminal      execution_not_terminal
state      Terminal      max_replays_exhausted
state      Terminal      replay_not_allowed
state      Terminal      not_runnable
state      Terminal      terminal
state      Terminal      flow_already_terminal
state      Cooperative   budget_exceeded
bug        Bug           attempt_not_in_created_state
bug        Bug           internal
not_found  Terminal      execution_not_found
not_found  Terminal      flow_not_found
not_found  Terminal      attempt_not_found
not_found  Terminal      budget_not_found
not_found  Terminal      quota_policy_not_found
not_found  Expected      stream_not_found
unavailable         Terminal      unavailable
unavailable         Terminal      hmac_secret_not_initialized
resource_exhausted  Retryable     resource_exhausted
timeout             Terminal      timeout
stream_disconnected Terminal      stream_disconnected
stream_backpressure Informational stream_backpressure
"""

ROWS = [tuple(line.split()) for line in EXPECTED.strip().splitlines()]

EXCEPTIONS = {
    "validation": errors.InvalidInputError,
    "contention": errors.ContentionError,
    "conflict": errors.ConflictError,
    "state": errors.StateError,
    "bug": errors.BugError,
    "not_found": errors.NotFoundError,
    "unavailable": errors.UnavailableError,
    "resource_exhausted": errors.ResourceExhaustedError,
    "timeout": errors.OperationTimeoutError,
    "stream_disconnected": errors.StreamDisconnectedError,
    "stream_backpressure": errors.StreamBackpressureError,
}


@for_each("category, error_class, code", ROWS)
def test_every_code_has_its_category_and_class(category: str, error_class: str, code: str) -> None:
    made = error(code, "why")
    assert type(made) is EXCEPTIONS[category]
    assert (made.code, made.category, made.error_class, made.detail) == (code, category, error_class, "why")
    assert made.retryable is (error_class == "Retryable")


def test_there_are_no_other_codes() -> None:
    assert sorted(CODES) == sorted(row[2] for row in ROWS)


def test_the_literals_of_error_classes() -> None:
    assert {str(word) for word in ErrorClass} == {
        "Terminal", "Retryable", "Cooperative", "Informational", "Advisory", "Bug", "Expected", "SoftError",
    }  # fmt: skip


def test_an_unknown_code_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        error("no_such_code")


def test_a_code_belongs_to_one_category() -> None:
    with pytest.raises(ValueError, match=r"code .stale_lease. is of category .state., not .validation.; call error"):
        errors.InvalidInputError("stale_lease")


def test_an_error_prints_code_and_detail() -> None:
    assert str(error("lease_conflict")) == "lease_conflict"
    assert str(error("invalid_input", "priority: must be a number")) == "invalid_input: priority: must be a number"
    assert str(error("invalid_input", "")) == "invalid_input"
    fields = {"terminal_outcome": "success", "lease_epoch": "3"}
    assert str(error("execution_not_active", fields)) == "execution_not_active: terminal_outcome=success, lease_epoch=3"


def test_a_missing_object_prints_not_found() -> None:
    missing = error("quota_policy_not_found")
    assert str(missing) == "not found: quota_policy"
    assert isinstance(missing, errors.NotFoundError)
    assert missing.entity == "quota_policy"


@for_each(
    "kind, retryable",
    [
        ("transport", True),
        ("protocol", False),
        ("timeout", True),
        ("auth", False),
        ("cluster", True),
        ("busy_loading", True),
        ("script_not_loaded", False),
        ("other", False),
    ],
)
def test_a_transport_error_is_retryable_by_its_kind(kind: str, retryable: object) -> None:
    made = TransportError(kind, "connection reset")
    assert (made.code, made.kind, made.category, made.backend) == (kind, kind, "transport", "postgres")
    assert made.retryable is retryable
    assert made.error_class == ("Retryable" if retryable else "Terminal")
    assert str(made) == f"{kind}: connection reset"


def test_an_unknown_transport_kind_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no_such_kind"):
        TransportError("no_such_kind")


@for_each(
    "made",
    [
        error("execution_not_found"),
        error("execution_not_active", {"lease_epoch": "3"}),
        error("invalid_input", "why"),
        TransportError("auth", "no", backend="elsewhere").with_context("while connecting"),
    ],
)
def test_an_error_survives_copying_and_pickling(made: EngineError) -> None:
    for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(twin) is type(made)
        assert vars(twin) == vars(made)
        assert str(twin) == str(made)
        assert twin.retryable is made.retryable


@for_each(
    "made",
    [TransportError(), error("unavailable", "claim"), error("resource_exhausted"), error("timeout")],
)
def test_context_is_added_to_transport_and_availability_errors(made: EngineError) -> None:
    assert made.with_context("while renewing") is made
    assert made.__notes__ == ["while renewing"]


@for_each("code", ["stale_lease", "invalid_input", "lease_conflict", "cycle_detected", "flow_not_found"])
def test_context_is_not_added_to_other_errors(code: str) -> None:
    made = error(code)
    assert made.with_context("while renewing") is made
    assert not hasattr(made, "__notes__")


def test_a_copy_equals_the_error() -> None:
    for original in (
        TransportError("timeout", "no answer", outcome_unknown=True),
        error("lease_expired", {"epoch": 3}),
    ):
        again = original.copy()
        assert again is not original
        assert type(again) is type(original)
        assert (again.code, again.detail, str(again)) == (original.code, original.detail, str(original))
        assert vars(again) == vars(original)
