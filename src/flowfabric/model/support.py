"""What an engine reports about itself: its identity, its capability flags, and the answers of `prepare`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A version number."""

    major: int
    minor: int
    patch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendIdentity:
    """The name, version and maturity of a backend."""

    family: str
    version: Version
    stage: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The identity of an engine and one flag per feature; operations of a False flag raise `unavailable`."""

    identity: BackendIdentity
    cancel_execution: bool
    change_priority: bool
    replay_execution: bool
    revoke_lease: bool
    read_execution_state: bool
    read_execution_info: bool
    get_execution_result: bool
    budget_admin: bool
    quota_admin: bool
    rotate_waitpoint_hmac_secret_all: bool
    seed_waitpoint_hmac_secret: bool
    list_pending_waitpoints: bool
    cancel_flow_header: bool
    cancel_flow_wait_timeout: bool
    cancel_flow_wait_indefinite: bool
    ack_cancel_member: bool
    claim_for_worker: bool
    issue_reclaim_grant: bool
    release_admission: bool
    read_quota_policy_limits: bool
    block_execution_for_admission: bool
    read_budget_usage_and_limits: bool
    prepare: bool
    subscribe_lease_history: bool
    subscribe_completion: bool
    subscribe_signal_delivery: bool
    subscribe_instance_tags: bool
    stream_durable_summary: bool
    stream_best_effort_live: bool
    register_worker: bool
    heartbeat_worker: bool
    mark_worker_dead: bool
    list_expired_leases: bool
    list_workers: bool


FLAGS = tuple(name for name in Capabilities.__dataclass_fields__ if name != "identity")

OPERATIONS: Mapping[str, tuple[str, ...]] = {
    **{flag: (flag,) for flag in FLAGS},
    "budget_admin": ("create_budget", "report_usage", "reset_budget", "get_budget_status", "report_usage_admin"),
    "quota_admin": ("create_quota_policy",),
    "cancel_flow_wait_timeout": ("cancel_flow",),
    "cancel_flow_wait_indefinite": ("cancel_flow",),
    "issue_reclaim_grant": ("issue_reclaim_grant", "reclaim_execution"),
    "stream_durable_summary": ("read_summary",),
    "stream_best_effort_live": ("tail_stream",),
}
"""The operations that a flag covers; by default the one of the same name."""


_NAMES = """
create_execution cancel cancel_execution change_priority replay_execution promote_delayed expire_execution
block_execution_for_admission unblock_execution trim_retention set_execution_tag set_execution_tags get_execution_tag
get_execution_namespace explain claim claim_many claim_for_worker issue_claim_grant issue_grant_and_claim
claim_execution claim_resumed_execution claim_from_resume_grant scan_eligible_executions renew renew_lease renew_many
revoke_lease issue_reclaim_grant reclaim_execution mark_lease_expired_if_due list_expired_leases progress complete
complete_execution complete_many fail fail_execution delay wait_children hand_back suspend suspend_by_triple
create_waitpoint close_waitpoint read_waitpoint_token list_pending_waitpoints list_suspended expire_suspension
resume_execution deliver_signal deliver_approval_signal observe_signals seed_waitpoint_hmac_secret
rotate_waitpoint_hmac_secret_all list_waitpoint_hmac_kids append_frame read_stream tail_stream read_summary
subscribe_completion subscribe_lease_history subscribe_signal_delivery subscribe_instance_tags
subscribe_operator_events create_flow add_execution_to_flow stage_dependency_edge apply_dependency_to_child
submit_flow set_edge_group_policy resolve_dependency evaluate_flow_eligibility promote_blocked_to_eligible
cascade_completion cancel_flow cancel_flow_header ack_cancel_member drain_sibling_cancel_group
reconcile_sibling_cancel_group project_flow_summary describe_flow list_flows list_edges describe_edge set_flow_tag
set_flow_tags get_flow_tag resolve_execution_flow_id create_budget report_usage report_usage_admin record_spend
release_budget reset_budget get_budget_status read_budget_usage_and_limits reconcile_budget_counters
create_quota_policy read_quota_policy_limits check_admission release_admission reconcile_quota_counters
register_worker heartbeat_worker mark_worker_dead list_workers describe_execution read_execution_state
read_execution_info read_execution_context get_execution_result read_current_attempt_index read_total_attempt_count
read_exec_core_fields list_executions list_lanes server_time_ms ping capabilities backend_label prepare
shutdown_prepare
"""
NAMED_OPERATIONS = frozenset(_NAMES.split())
"""Every operation name of the specification; calling one that an engine lacks raises `unavailable`."""


def identify(family: str, version: str, stage: str) -> BackendIdentity:
    """Return the identity of a backend from a dotted version."""
    major, minor, patch = map(int, re.findall(r"\d+", version)[:3])
    return BackendIdentity(family=family, version=Version(major=major, minor=minor, patch=patch), stage=stage)


def capabilities_of(identity: BackendIdentity, offers: Callable[[str], bool]) -> Capabilities:
    """Return the flags of an engine: a flag is True if the engine offers all of its operations."""
    flags = {flag: all(offers(operation) for operation in OPERATIONS[flag]) for flag in FLAGS}
    return Capabilities(identity=identity, **flags)


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingToPrepare:
    """The database needed no preparation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """The database was prepared; `description` says how."""

    description: str
