"""All exceptions: of the settings, of the engine, of a run that did not succeed, and those a handler may raise."""

from flowfabric.fabric.errors import RunCancelled, RunError, RunExpired, RunFailed, RunSkipped, UnreadableResult
from flowfabric.fabric.flow_run import FlowRunCancelled, FlowRunError, FlowRunFailed
from flowfabric.fabric.task import NotAllSubmitted
from flowfabric.model.errors import (
    BugError,
    ConflictError,
    ContentionError,
    EngineError,
    ErrorClass,
    InvalidInputError,
    NotFoundError,
    OperationTimeoutError,
    ResourceExhaustedError,
    StateError,
    StreamBackpressureError,
    StreamDisconnectedError,
    TransportError,
    TransportKind,
    UnavailableError,
)
from flowfabric.settings import SettingsError
from flowfabric.worker.budget import BudgetExceeded
from flowfabric.worker.callback import BackendError, CallbackError, TokenMismatch, UnknownWaitpoint
from flowfabric.worker.outcome import NoRetry
from flowfabric.worker.waits import NoSignal, WaitTimeout

__all__ = [
    "BackendError",
    "BudgetExceeded",
    "BugError",
    "CallbackError",
    "ConflictError",
    "ContentionError",
    "EngineError",
    "ErrorClass",
    "FlowRunCancelled",
    "FlowRunError",
    "FlowRunFailed",
    "InvalidInputError",
    "NoRetry",
    "NoSignal",
    "NotAllSubmitted",
    "NotFoundError",
    "OperationTimeoutError",
    "ResourceExhaustedError",
    "RunCancelled",
    "RunError",
    "RunExpired",
    "RunFailed",
    "RunSkipped",
    "SettingsError",
    "StateError",
    "StreamBackpressureError",
    "StreamDisconnectedError",
    "TokenMismatch",
    "TransportError",
    "TransportKind",
    "UnavailableError",
    "UnknownWaitpoint",
    "UnreadableResult",
    "WaitTimeout",
]
