"""Execution policies: retries, timeouts and routing, as `create_execution` takes them."""

from flowfabric.model.policy import (
    DurabilityMode,
    ExecutionPolicy,
    ExponentialBackoff,
    FixedBackoff,
    RetryPolicy,
    RoutingRequirements,
    StreamPolicy,
    SuspensionPolicy,
    TimeoutPolicy,
)

__all__ = [
    "DurabilityMode",
    "ExecutionPolicy",
    "ExponentialBackoff",
    "FixedBackoff",
    "RetryPolicy",
    "RoutingRequirements",
    "StreamPolicy",
    "SuspensionPolicy",
    "TimeoutPolicy",
]
