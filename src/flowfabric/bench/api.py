"""Everything that the benchmark imports from the package.

With `--beside` the benchmark runs on the package of another checkout, so it uses only names that both checkouts have.
If a name has moved, this module imports it from either place.
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
    """The option of `Worker` that limits its drain to these seconds."""
    return {"drain" if "drain" in inspect.signature(Worker).parameters else "drain_seconds": seconds}
