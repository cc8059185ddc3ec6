"""What the benchmark uses of the package, in one place.

With `--beside` this benchmark runs on the package of another checkout, so it keeps to names that both have; where a
name has moved between the two, this module imports it from either.
"""

from flowfabric import (
    Accepted,
    Context,
    Engine,
    EngineError,
    ExecutionPolicy,
    Fabric,
    Fresh,
    Handle,
    NewExecution,
    PendingWaitpoint,
    Reconciler,
    RoutingRequirements,
    Settings,
    Single,
    SuspendArgs,
    Suspended,
    SuspensionReason,
    Task,
    TimeoutPolicy,
    Worker,
)
from flowfabric.db.statements import Statement, Statements, statements_beside
from flowfabric.model.ids import SuspensionId, WaitpointId, mint_uuid_texts, uuid7

__all__ = [
    "Accepted",
    "Context",
    "Engine",
    "EngineError",
    "ExecutionPolicy",
    "Fabric",
    "Fresh",
    "Handle",
    "NewExecution",
    "PendingWaitpoint",
    "Reconciler",
    "RoutingRequirements",
    "Settings",
    "Single",
    "Statement",
    "Statements",
    "SuspendArgs",
    "Suspended",
    "SuspensionId",
    "SuspensionReason",
    "Task",
    "TimeoutPolicy",
    "WaitpointId",
    "Worker",
    "mint_uuid_texts",
    "statements_beside",
    "uuid7",
]
