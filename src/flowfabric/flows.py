"""The arguments of the engine's flow operations, and the states of flows, edges and groups."""

from flowfabric.model.edge import (
    AllOfEdges,
    AnyOfEdges,
    DependencyState,
    EdgePolicy,
    EdgeState,
    FlowEligibility,
    GroupState,
    Incoming,
    OnSatisfied,
    Outgoing,
    QuorumOfEdges,
)
from flowfabric.model.flow import (
    CancellationPolicy,
    FlowEdge,
    FlowNode,
    FlowState,
    FlowStatus,
    NoWait,
    WaitIndefinite,
    WaitUpTo,
)

__all__ = [
    "AllOfEdges",
    "AnyOfEdges",
    "CancellationPolicy",
    "DependencyState",
    "EdgePolicy",
    "EdgeState",
    "FlowEdge",
    "FlowEligibility",
    "FlowNode",
    "FlowState",
    "FlowStatus",
    "GroupState",
    "Incoming",
    "NoWait",
    "OnSatisfied",
    "Outgoing",
    "QuorumOfEdges",
    "WaitIndefinite",
    "WaitUpTo",
]
