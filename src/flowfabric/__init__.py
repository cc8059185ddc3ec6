"""FlowFabric: durable execution for Python on nothing but Postgres."""

from flowfabric.engine.engine import Engine
from flowfabric.fabric import ExecutionFailed, Fabric, Run, Task
from flowfabric.model.errors import EngineError
from flowfabric.model.policy import ExponentialBackoff, FixedBackoff
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.version import __version__
from flowfabric.worker.context import Context
from flowfabric.worker.outcome import PermanentError
from flowfabric.worker.worker import Worker

__all__ = [
    "Context",
    "Engine",
    "EngineError",
    "ExecutionFailed",
    "ExponentialBackoff",
    "Fabric",
    "FixedBackoff",
    "PermanentError",
    "PublicState",
    "Run",
    "Settings",
    "Task",
    "TerminalOutcome",
    "Worker",
    "__version__",
]
