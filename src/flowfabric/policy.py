"""How an execution is retried, timed out and routed, as `create_execution` takes it."""

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
