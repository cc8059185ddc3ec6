"""Fabric: tasks, and the Postgres they live on."""

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, Unpack

from flowfabric.engine.engine import Engine
from flowfabric.fabric.options import checked_lane
from flowfabric.fabric.run import Run
from flowfabric.fabric.task import Called, Params, Returned, Task, TaskDecorator
from flowfabric.model.errors import EngineError, error, reason_of
from flowfabric.model.ids import parse_execution_id
from flowfabric.model.text import check_short, shown
from flowfabric.settings import Settings
from flowfabric.worker.handler import Handler
from flowfabric.worker.interrupts import calling_on_interrupts
from flowfabric.worker.logs import add_fields_to_records, log_to_stderr_if_unconfigured
from flowfabric.worker.options import WorkerOptions
from flowfabric.worker.start import (
    MISUSED,
    StartError,
    close_within_limit,
    connect_when_available,
    reporting_on_stderr,
    run_to_end,
)
from flowfabric.worker.worker import Worker


class Fabric:
    """Tasks and the Postgres they live on: the named one, the configured one, or one embedded under `.flowfabric`.

    `async with fabric:` connects it. Any number of fabrics may exist side by side.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        settings: Settings | None = None,
        namespace: str = "default",
        lane: str = "default",
    ) -> None:
        if not isinstance(settings, Settings | None):
            raise error("invalid_input", f"settings: must be Settings, got {shown(settings)}")
        self._url = url
        self._settings = settings
        self.namespace = check_short(namespace, "namespace")
        self.lane: str = checked_lane(lane)
        self._identity = f"{socket.gethostname()}-{os.getpid()}"
        self.tasks: dict[str, Task[Any, Any, Any]] = {}
        self._engine: Engine | None = None
        self._open = AsyncExitStack()

    @property
    def task(self) -> TaskDecorator:
        """Make a function a task: `@fabric.task`, or with options, `@fabric.task(retries=3)`."""
        return TaskDecorator(self, {})

    @property
    def engine(self) -> Engine:
        """The engine below, with every operation there is."""
        if self._engine is None:
            raise RuntimeError("the fabric is not connected: use it inside `async with fabric:`")
        return self._engine

    async def __aenter__(self) -> Self:
        """Connect."""
        if self._engine is not None:
            raise RuntimeError("the fabric is connected already")
        self._engine = await self._open.enter_async_context(Engine.connect(self._url, settings=self._settings))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect."""
        self._engine = None
        await self._open.aclose()

    def run(self, execution_id: str) -> Run[Any]:
        """The run of any execution, submitted by any process; of `task.run(id)` the result has a type."""
        return Run(self, parse_execution_id(execution_id), None)

    def _add(self, task: Task[Called, Params, Returned]) -> Task[Called, Params, Returned]:
        """Let the workers of this fabric run a task."""
        if task.name in self.tasks:
            raise ValueError(f"a task named {task.name!r} exists already; give this one another name=")
        self.tasks[task.name] = task
        return task

    def _handler_of(self, kind: str) -> Handler | None:
        task = self.tasks.get(kind)
        return None if task is None else task._handler

    def worker(self, **options: Unpack[WorkerOptions]) -> Worker:
        """A worker for the tasks of this fabric, on their lanes: `async with` it, or `await worker.run()`.

        It serves the fabric's namespace; with `namespace=None` it serves every one.
        """
        options.setdefault("lanes", sorted({task.lane for task in self.tasks.values()}) or [self.lane])
        options.setdefault("namespace", self.namespace)
        return Worker(self.engine, handlers={name: task._handler for name, task in self.tasks.items()}, **options)

    def run_worker(self, **options: Unpack[WorkerOptions]) -> None:
        """Connect and work until SIGTERM or SIGINT: the main function of a worker process.

        Where the program has not set up logging, lines from INFO on go to stderr.

        A server that is not there yet is waited for. A start that fails otherwise is told on stderr, and the process
        ends with exit code 1, or 2 where a setting or an option is wrong. Handlers that ignore their cancellation and
        threads of `asyncio.to_thread` that do not return are not waited for: the process ends without them.
        """

        async def work() -> None:
            interrupted = asyncio.Event()
            # Over the whole time, so that a signal between two steps ends the process cleanly too.
            with calling_on_interrupts(interrupted.set):
                try:
                    if await connect_when_available(self.__aenter__, interrupted):
                        await self._worker_or_start_error(options)._run_until(interrupted)
                finally:
                    await close_within_limit(self.__aexit__(None, None, None))

        add_fields_to_records()
        log_to_stderr_if_unconfigured()
        with reporting_on_stderr():
            run_to_end(work())

    def _worker_or_start_error(self, options: WorkerOptions) -> Worker:
        try:
            return self.worker(**options)
        except (EngineError, TypeError, ValueError) as wrong:
            text = reason_of(wrong) if isinstance(wrong, EngineError) else str(wrong)
            raise StartError(text, exit_code=MISUSED) from wrong
