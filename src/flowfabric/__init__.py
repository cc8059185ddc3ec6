"""FlowFabric: durable execution for Python on nothing but Postgres."""

from flowfabric.engine.engine import Engine
from flowfabric.fabric import ExecutionFailed, Fabric, Run, Task
from flowfabric.model.errors import (
    BugError,
    ConflictError,
    ContentionError,
    EngineError,
    NotFoundError,
    OperationTimeoutError,
    ResourceExhaustedError,
    StateError,
    TransportError,
    UnavailableError,
    ValidationError,
)
from flowfabric.model.execution import NewExecution
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.outcomes import (
    Cancelled,
    ClaimedExecution,
    Completed,
    Created,
    Duplicate,
    Ended,
    ExecutionInfo,
    FailureClass,
    FailureReason,
    Marked,
    NotRegistered,
    Refreshed,
    Registered,
    Renewed,
    RetryScheduled,
    TerminalFailed,
)
from flowfabric.model.policy import (
    ExecutionPolicy,
    ExponentialBackoff,
    FixedBackoff,
    RetryPolicy,
    RoutingRequirements,
    StreamPolicy,
    TimeoutPolicy,
)
from flowfabric.model.states import AttemptType, LaneState, PublicState, StateVector, TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.version import __version__
from flowfabric.worker.context import Context
from flowfabric.worker.outcome import PermanentError
from flowfabric.worker.worker import Worker

__all__ = [
    "AttemptType",
    "BugError",
    "Cancelled",
    "ClaimedExecution",
    "Completed",
    "ConflictError",
    "ContentionError",
    "Context",
    "Created",
    "Duplicate",
    "Ended",
    "Engine",
    "EngineError",
    "ExecutionFailed",
    "ExecutionId",
    "ExecutionInfo",
    "ExecutionPolicy",
    "ExponentialBackoff",
    "Fabric",
    "FailureClass",
    "FailureReason",
    "FixedBackoff",
    "Handle",
    "LaneState",
    "Marked",
    "NewExecution",
    "NotFoundError",
    "NotRegistered",
    "OperationTimeoutError",
    "PermanentError",
    "PublicState",
    "Refreshed",
    "Registered",
    "Renewed",
    "ResourceExhaustedError",
    "RetryPolicy",
    "RetryScheduled",
    "RoutingRequirements",
    "Run",
    "Settings",
    "StateError",
    "StateVector",
    "StreamPolicy",
    "Task",
    "TerminalFailed",
    "TerminalOutcome",
    "TimeoutPolicy",
    "TransportError",
    "UnavailableError",
    "ValidationError",
    "Worker",
    "__version__",
]
