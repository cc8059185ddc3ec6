"""FlowFabric: durable execution for Python on Postgres."""

from flowfabric.engine.engine import Engine
from flowfabric.fabric.app import Fabric
from flowfabric.fabric.errors import RunCancelled, RunError, RunExpired, RunFailed, RunSkipped, UnreadableResult
from flowfabric.fabric.flow import Flow
from flowfabric.fabric.flow_run import FlowRun, FlowRunCancelled, FlowRunFailed, FlowRunStatus
from flowfabric.fabric.node import all_of, any_of, quorum
from flowfabric.fabric.run import Run, RunStatus
from flowfabric.fabric.task import Task
from flowfabric.model.errors import EngineError, InvalidInputError
from flowfabric.model.execution import NewExecution
from flowfabric.model.flow import FlowStatus
from flowfabric.model.ids import ExecutionId
from flowfabric.model.policy import ExponentialBackoff, FixedBackoff
from flowfabric.model.states import PublicState
from flowfabric.reconcile.loop import Reconciler
from flowfabric.settings import Settings
from flowfabric.version import __version__
from flowfabric.worker.budget import Budget, BudgetExceeded
from flowfabric.worker.callback import Callback, verify_and_deliver
from flowfabric.worker.context import Context
from flowfabric.worker.logs import log_fields
from flowfabric.worker.outcome import NoRetry
from flowfabric.worker.waits import WaitTimeout
from flowfabric.worker.worker import Worker

__all__ = [
    "Budget",
    "BudgetExceeded",
    "Callback",
    "Context",
    "Engine",
    "EngineError",
    "ExecutionId",
    "ExponentialBackoff",
    "Fabric",
    "FixedBackoff",
    "Flow",
    "FlowRun",
    "FlowRunCancelled",
    "FlowRunFailed",
    "FlowRunStatus",
    "FlowStatus",
    "InvalidInputError",
    "NewExecution",
    "NoRetry",
    "PublicState",
    "Reconciler",
    "Run",
    "RunCancelled",
    "RunError",
    "RunExpired",
    "RunFailed",
    "RunSkipped",
    "RunStatus",
    "Settings",
    "Task",
    "UnreadableResult",
    "WaitTimeout",
    "Worker",
    "__version__",
    "all_of",
    "any_of",
    "log_fields",
    "quorum",
    "verify_and_deliver",
]

_MODULES = ("conditions", "errors", "feeds", "flows", "ids", "outcomes", "policy", "streams")


def __dir__() -> list[str]:
    """List the public names and modules, without what this package imports for itself."""
    return sorted([*__all__, *_MODULES])
