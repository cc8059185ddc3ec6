"""Execution policies: retries, timeouts and routing, as `create_execution` takes them."""

from flowfabric.model.policy import (
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
    "ExecutionPolicy",
    "ExponentialBackoff",
    "FixedBackoff",
    "RetryPolicy",
    "RoutingRequirements",
    "StreamPolicy",
    "SuspensionPolicy",
    "TimeoutPolicy",
]
