"""What the benchmark uses of the package, in one place.

With `--beside` this benchmark runs on the package of another checkout, so it keeps to names that both have; where a
name has moved between the two, this module imports it from either.
"""

import inspect
from typing import Any

from flowfabric import Context, Engine, EngineError, Fabric, NewExecution, Reconciler, Settings, Task, Worker
from flowfabric.db.statements import Statement, Statements, statements_beside
from flowfabric.model.condition import Single
from flowfabric.model.handle import Handle
from flowfabric.model.ids import SuspensionId, WaitpointId, mint_uuid_texts, uuid7
from flowfabric.model.policy import ExecutionPolicy, RoutingRequirements, TimeoutPolicy
from flowfabric.model.signal import Accepted
from flowfabric.model.suspension import SuspendArgs, Suspended, SuspensionReason
from flowfabric.model.waitpoint import Fresh, PendingWaitpoint

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
    "drain_option",
    "mint_uuid_texts",
    "statements_beside",
    "uuid7",
]


def drain_option(seconds: float) -> dict[str, Any]:
    """How long a worker drains, as an option of `Worker`."""
    return {"drain" if "drain" in inspect.signature(Worker).parameters else "drain_seconds": seconds}
