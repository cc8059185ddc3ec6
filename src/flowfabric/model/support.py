"""What an engine can do: its identity and one flag for each thing an operator may ask of it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A version by its three numbers."""

    major: int
    minor: int
    patch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendIdentity:
    """Which backend this is, and how far it has come."""

    family: str
    version: Version
    stage: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The identity of an engine and what it offers; what is False is not there to be called."""

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
"""The operations each flag speaks for."""


def identify(family: str, version: str, stage: str) -> BackendIdentity:
    """The identity of a backend whose version is written with dots."""
    major, minor, patch = map(int, re.findall(r"\d+", version)[:3])
    return BackendIdentity(family=family, version=Version(major=major, minor=minor, patch=patch), stage=stage)


def capabilities_of(identity: BackendIdentity, offers: Callable[[str], bool]) -> Capabilities:
    """The flags of an engine that offers some operations: each is True where all of its operations are there."""
    flags = {flag: all(offers(operation) for operation in OPERATIONS[flag]) for flag in FLAGS}
    return Capabilities(identity=identity, **flags)
