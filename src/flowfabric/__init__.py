"""FlowFabric: durable execution for Python on nothing but Postgres."""

from flowfabric.engine.engine import Engine
from flowfabric.fabric import Fabric, Run, RunFailed, Task, UnreadableResult
from flowfabric.model.errors import EngineError, InvalidInputError
from flowfabric.model.execution import NewExecution
from flowfabric.model.ids import ExecutionId
from flowfabric.model.policy import ExponentialBackoff, FixedBackoff
from flowfabric.model.states import PublicState
from flowfabric.reconcile.loop import Reconciler
from flowfabric.settings import Settings
from flowfabric.version import __version__
from flowfabric.worker.callback import Callback, verify_and_deliver
from flowfabric.worker.context import Context
from flowfabric.worker.outcome import NoRetry
from flowfabric.worker.worker import Worker

__all__ = [
    "Callback",
    "Context",
    "Engine",
    "EngineError",
    "ExecutionId",
    "ExponentialBackoff",
    "Fabric",
    "FixedBackoff",
    "InvalidInputError",
    "NewExecution",
    "NoRetry",
    "PublicState",
    "Reconciler",
    "Run",
    "RunFailed",
    "Settings",
    "Task",
    "UnreadableResult",
    "Worker",
    "__version__",
    "verify_and_deliver",
]
