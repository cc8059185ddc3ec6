"""Edges between executions of a flow: their groups and policies, and the answers of operations on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from flowfabric.model.errors import error
from flowfabric.model.ids import EdgeId, ExecutionId, FlowId
from flowfabric.model.states import PublicState
from flowfabric.model.text import shown, word_of

MAX_QUORUM = 2**31 - 1
MAX_REF_CHARACTERS = 1024
SUCCESS_ONLY = "success_only"
"""The only dependency kind in use."""


class EdgeState(StrEnum):
    """Whether an edge is only staged, or applied to its downstream execution."""

    PENDING = "pending"
    APPLIED = "applied"


class DependencyState(StrEnum):
    """What an edge means for its downstream execution; STAGED until it is applied."""

    STAGED = "staged"
    UNSATISFIED = "unsatisfied"
    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"


class GroupState(StrEnum):
    """Whether the inbound edges of an execution have decided whether it runs."""

    PENDING = "pending"
    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"


class OnSatisfied(StrEnum):
    """What happens to the other upstream executions when a group is decided."""

    CANCEL_REMAINING = "cancel_remaining"
    LET_RUN = "let_run"


class AllOfEdges(msgspec.Struct, frozen=True, tag_field="kind", tag="all_of"):
    """Satisfied when every upstream execution has succeeded."""


class AnyOfEdges(msgspec.Struct, frozen=True, tag_field="kind", tag="any_of"):
    """Satisfied by the first upstream execution that succeeds."""

    on_satisfied: OnSatisfied


class QuorumOfEdges(msgspec.Struct, frozen=True, tag_field="kind", tag="quorum"):
    """Satisfied when k upstream executions have succeeded."""

    k: int
    on_satisfied: OnSatisfied


EdgePolicy: TypeAlias = AllOfEdges | AnyOfEdges | QuorumOfEdges
"""When the inbound edges of an execution are satisfied."""


_KINDS: Mapping[str, type[EdgePolicy]] = {"all_of": AllOfEdges, "any_of": AnyOfEdges, "quorum": QuorumOfEdges}


def parse_edge_policy(value: object, field: str = "policy") -> EdgePolicy:
    """Return an edge policy given as one, or as a mapping of its kind and its fields."""
    policy = _policy_of(value, field) if isinstance(value, Mapping) else value
    if not isinstance(policy, AllOfEdges | AnyOfEdges | QuorumOfEdges):
        raise error(
            "invalid_input",
            f"{field}: expected AllOfEdges, AnyOfEdges or QuorumOfEdges, or a mapping such as {{'kind': 'all_of'}}, "
            f"got {shown(value)}",
        )
    if isinstance(policy, AnyOfEdges | QuorumOfEdges) and word_of(OnSatisfied, policy.on_satisfied) is None:
        words = " or ".join(OnSatisfied)
        raise error("invalid_input", f"{field}: on_satisfied must be {words}, got {shown(policy.on_satisfied)}")
    if isinstance(policy, QuorumOfEdges):
        if type(policy.k) is not int or policy.k > MAX_QUORUM:
            raise error(
                "invalid_input", f"{field}: quorum k must be an integer up to {MAX_QUORUM}, got {shown(policy.k)}"
            )
        if policy.k < 1:
            raise error("invalid_input", f"{field}: quorum k must be >= 1, got {policy.k}")
    return policy


def _policy_of(given: Mapping[Any, Any], field: str) -> EdgePolicy:
    kind = next((kind for kind in _KINDS if kind == given.get("kind")), None)
    if kind is None:
        raise error("invalid_input", f"{field}: kind must be all_of, any_of or quorum, got {shown(given.get('kind'))}")
    fields = {name: value for name, value in given.items() if name != "kind"}
    names = _KINDS[kind].__struct_fields__
    if unknown := [name for name in fields if name not in names]:
        raise error("invalid_input", f"{field}: a policy of kind {kind} has no field {shown(unknown[0])}")
    if missing := [name for name in names if name not in fields]:
        raise error("invalid_input", f"{field}: a policy of kind {kind} needs {' and '.join(missing)}")
    return _KINDS[kind](**fields)


def edge_policy_columns(policy: EdgePolicy) -> tuple[str, int | None, OnSatisfied | None]:
    """Return the kind, k and on_satisfied of a policy, as they are stored."""
    match policy:
        case AllOfEdges():
            return "all_of", None, None
        case AnyOfEdges(on_satisfied=on_satisfied):
            return "any_of", None, OnSatisfied(on_satisfied)
        case QuorumOfEdges(k=k, on_satisfied=on_satisfied):
            return "quorum", k, OnSatisfied(on_satisfied)


def edge_policy_of(kind: str, k: int | None, on_satisfied: str | None) -> EdgePolicy:
    """Return the policy that stored columns describe; a missing on_satisfied is read as CANCEL_REMAINING."""
    effect = word_of(OnSatisfied, on_satisfied or OnSatisfied.CANCEL_REMAINING)
    if effect is not None:
        match kind:
            case "all_of":
                return AllOfEdges()
            case "any_of":
                return AnyOfEdges(effect)
            case "quorum" if k is not None:
                return QuorumOfEdges(k, effect)
    raise error(
        "corruption",
        f"edge group: the policy {shown(kind)} with k {k!r} and on_satisfied {on_satisfied!r} cannot be read",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """The edge is part of the graph; it blocks its downstream execution once it is applied."""

    edge_id: EdgeId
    new_graph_revision: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DependencyApplied:
    """The downstream execution depends on the edge."""

    unsatisfied_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyApplied:
    """It was applied before: the edge, or the report of usage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySet:
    """The policy of the group is stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadySet:
    """The group had this policy before."""


class Resolution(StrEnum):
    """What the resolution of one edge did."""

    ALREADY_RESOLVED = "already_resolved"
    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"
    PENDING = "pending"
    ALREADY_FIRED = "already_fired"


class ResolutionMarker(StrEnum):
    """What else the resolution of one edge did."""

    NONE = ""
    DATA_INJECTED = "data_injected"
    CHILD_SKIPPED = "child_skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class DependencyResolved:
    """The result of `resolve_dependency`."""

    resolution: Resolution
    marker: ResolutionMarker = ResolutionMarker.NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeResult:
    """How many edges one call of `cascade_completion` resolved."""

    resolved: int
    cascaded_children: int = 0
    synchronous: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DependenciesPromoted:
    """The execution no longer waits for its dependencies."""

    execution_id: ExecutionId
    public_state: PublicState


class FlowEligibility(StrEnum):
    """Whether the dependencies of an execution allow it to run."""

    NOT_FOUND = "not_found"
    NOT_RUNNABLE = "not_runnable"
    OWNED = "owned"
    TERMINAL = "terminal"
    ELIGIBLE = "eligible"
    IMPOSSIBLE = "impossible"
    BLOCKED_BY_DEPENDENCIES = "blocked_by_dependencies"


@dataclass(frozen=True, kw_only=True, slots=True)
class EligibilityStatus:
    """The result of `evaluate_flow_eligibility`."""

    status: FlowEligibility


class SiblingDrain(StrEnum):
    """What a pass of the sibling dispatcher did with one group."""

    DRAINED = "drained"
    ALREADY_DRAINED = "already_drained"
    DRAINED_SANS_GROUP = "drained_sans_group"


class SiblingReconcile(StrEnum):
    """What a pass of the sibling reconciler did with one group."""

    SREMMED_STALE = "sremmed_stale"
    COMPLETED_DRAIN = "completed_drain"
    NO_OP = "no_op"


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeSnapshot:
    """An edge as stored."""

    edge_id: EdgeId
    flow_id: FlowId
    upstream_execution_id: ExecutionId
    downstream_execution_id: ExecutionId
    dependency_kind: str
    satisfaction_condition: str
    data_passing_ref: str | None
    edge_state: EdgeState
    dependency_state: DependencyState
    created_at: int
    created_by: str
    staged_at: int
    applied_at: int | None
    last_resolved_at: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeGroupSnapshot:
    """The inbound edges of one execution, and what they have decided."""

    downstream_execution_id: ExecutionId
    policy: EdgePolicy
    total_deps: int
    satisfied_count: int
    failed_count: int
    skipped_count: int
    running_count: int
    group_state: GroupState


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Selects the edges that leave an execution."""

    from_node: ExecutionId | str


@dataclass(frozen=True, slots=True)
class Incoming:
    """Selects the edges that lead to an execution."""

    to_node: ExecutionId | str


EdgeSelector: TypeAlias = Outgoing | Incoming
"""Which edges `list_edges` returns."""
