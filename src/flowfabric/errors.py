"""Every exception: what the engine raises, how a run fails, and what a handler may raise."""

from flowfabric.fabric import RunFailed, UnreadableResult
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
from flowfabric.worker.callback import BackendError, CallbackError, TokenMismatch, UnknownWaitpoint
from flowfabric.worker.outcome import NoRetry

__all__ = [
    "BackendError",
    "BugError",
    "CallbackError",
    "ConflictError",
    "ContentionError",
    "EngineError",
    "ErrorClass",
    "InvalidInputError",
    "NoRetry",
    "NotFoundError",
    "OperationTimeoutError",
    "ResourceExhaustedError",
    "RunFailed",
    "StateError",
    "StreamBackpressureError",
    "StreamDisconnectedError",
    "TokenMismatch",
    "TransportError",
    "TransportKind",
    "UnavailableError",
    "UnknownWaitpoint",
    "UnreadableResult",
]
