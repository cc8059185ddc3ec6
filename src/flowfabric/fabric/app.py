"""Fabric: the tasks of an application and their Postgres database."""

import asyncio
import inspect
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, Unpack
from uuid import UUID

from flowfabric.engine.engine import Engine
from flowfabric.fabric.flow import Flow
from flowfabric.fabric.flow_run import FlowRun
from flowfabric.fabric.limits import TaskLimits, apply_limits, define_limits
from flowfabric.fabric.run import Run
from flowfabric.fabric.task import Called, Params, Returned, Task, TaskDecorator
from flowfabric.loops import check_loop, running_loop
from flowfabric.model.duration import Duration
from flowfabric.model.errors import EngineError, InvalidInputError, error, reason_of
from flowfabric.model.ids import FlowId, check_lane_id, parse_execution_id, parse_uuid
from flowfabric.model.text import check_options, check_short, shown
from flowfabric.settings import Settings
from flowfabric.worker.budget import Budget, OnBreach
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
    """The tasks of an application and the Postgres database that runs them.

    Declare tasks with `@fabric.task`, connect with `async with fabric:`, then submit calls and run workers:

        fabric = Fabric()

        @fabric.task(retries=3)
        async def add(a: int, b: int) -> int:
            return a + b

        async with fabric, fabric.worker():
            run = await add.submit(1, 2)
            print(await run.result())

    The database is `url`, or that of `settings`, or the one in `FF_DATABASE_URL`. If none of these is set, a Postgres
    server embedded under `.flowfabric` is started. `namespace` and `lane` are the defaults of the tasks. A process may
    have any number of fabrics.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        settings: Settings | None = None,
        namespace: str = "default",
        lane: str = "default",
    ) -> None:
        if not isinstance(url, str | None):
            # Any other value may contain a password.
            got = shown(url) if isinstance(url, int | float) else f"a {type(url).__name__}"
            advice = "; write Fabric(settings=...)" if isinstance(url, Settings) else ""
            raise error("invalid_input", f"url: must be text, as in postgresql://host/database, got {got}{advice}")
        if not isinstance(settings, Settings | None):
            raise error("invalid_input", f"settings: must be Settings(...), got {shown(settings)}")
        self._url = url
        self._settings = settings
        self.namespace = check_short(namespace, "namespace")
        self.lane: str = check_lane_id(lane, "lane")
        self._identity = f"{socket.gethostname()}-{os.getpid()}"
        self.tasks: dict[str, Task[Any, Any, Any]] = {}
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which the fabric was connected."""
        self._open = AsyncExitStack()
        self._limited: set[str] = set()
        """The tasks whose limits this process has created."""
        self._unserved_again_at = 0.0
        self._unserved_queues: dict[int, float] = {}

    @property
    def task(self) -> TaskDecorator:
        """The decorator that declares a task: `@fabric.task`, or with options `@fabric.task(retries=3)`."""
        return TaskDecorator(self, {})

    @property
    def engine(self) -> Engine:
        """The engine of this fabric, which has every operation; available while the fabric is connected."""
        if self._engine is None:
            raise RuntimeError("the fabric is not connected; use it inside `async with fabric:`")
        self._check_loop()
        return self._engine

    async def __aenter__(self) -> Self:
        """Connect to the database."""
        if self._engine is not None:
            raise RuntimeError(
                "the fabric is already connected; enter `async with fabric:` once, around all of its users"
            )
        self._engine = await self._open.enter_async_context(Engine.connect(self._url, settings=self._settings))
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect from the database."""
        self._check_loop()
        self._engine = self._loop = None
        self._limited.clear()
        await self._open.aclose()

    def _check_loop(self) -> None:
        check_loop(self._loop, "the fabric is connected", "connect a Fabric in each event loop, or ")

    def run(self, execution_id: str) -> Run[Any]:
        """Return the run of any execution by its id, whichever process submitted it.

        The result is decoded with the task of that execution if this fabric has it, else as plain JSON. Use
        `task.run(id)` for a result with a static type.
        """
        try:
            return Run(self, parse_execution_id(execution_id), None)
        except InvalidInputError as refused:
            if not _is_uuid(execution_id):
                raise
            raise error(refused.code, f"{refused.detail}; for the id of a flow use fabric.flow_run(id)") from None

    def flow(
        self,
        kind: str,
        *,
        id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
        budgets: Iterable[Budget | UUID | str] = (),
        quota: UUID | str | None = None,
    ) -> Flow:
        """Return a new flow to add tasks to: `flow = fabric.flow("nightly")`, then `await flow.submit()`.

        kind: what it is a flow of, shown in lists
        id: submit once: a UUID, or any text that is unique among the flows of this kind and namespace
        tags: labels with namespaced keys
        budgets: the budgets that limit every node, or their ids
        quota: the id of the quota policy that limits every node
        """
        return Flow(self, kind, id=id, tags=tags, budgets=budgets, quota=quota)

    def budget(
        self,
        name: str,
        *,
        soft: Mapping[str, int] | None = None,
        every: Duration | None = None,
        on_breach: OnBreach = "refuse",
        id: UUID | str | None = None,
        **limits: int,
    ) -> Budget:
        """Return a budget with its hard limits: `fabric.budget("llm", tokens=1_000_000, usd_micros=5_000_000)`.

        The first use creates it; one that exists keeps its limits.

        name: its name, unique in the namespace of the fabric
        soft: limits that only warn
        every: how often its counters are set to zero; by default never
        on_breach: what happens to a run that would exceed it: `refuse`, `fail`, `cancel_flow` or `ask`
        id: a UUID instead of the one that follows from namespace and name
        """
        return Budget(
            lambda: self.engine,
            name,
            namespace=self.namespace,
            limits=limits,
            soft=soft,
            every=every,
            on_breach=on_breach,
            id=id,
        )

    def flow_run(self, flow_id: UUID | str) -> FlowRun:
        """Return the run of a submitted flow by its id, whichever process submitted it."""
        try:
            return FlowRun(self, FlowId(parse_uuid(flow_id, "flow_id")))
        except InvalidInputError as refused:
            if (hint := _flow_id_hint(flow_id)) is None:
                raise
            raise error(refused.code, f"{refused.detail}; {hint}") from None

    def _add(self, task: Task[Called, Params, Returned]) -> Task[Called, Params, Returned]:
        """Add a task to those that the workers of this fabric run."""
        if (first := self.tasks.get(task.name)) is not None:
            raise ValueError(
                f"a task named {task.name!r} already exists, declared in {_place_of(first)}; give this one another "
                "name with name="
            )
        self.tasks[task.name] = task
        return task

    async def _define_limits(self, task: str, limits: TaskLimits) -> None:
        """Create the limits of a task, unless this process has done so."""
        if task not in self._limited:
            await define_limits(self.engine, task, limits)
            self._limited.add(task)

    async def _apply_limits(self) -> None:
        """Let the limits of the tasks be what their options say; a worker does so before it starts."""
        await apply_limits(self.engine, {name: task._limits for name, task in self.tasks.items()})
        self._limited.update(self.tasks)

    def _handler_of(self, kind: str) -> Handler | None:
        task = self.tasks.get(kind)
        return None if task is None else task._handler

    def worker(self, **options: Unpack[WorkerOptions]) -> Worker:
        """Return a worker that runs the tasks of this fabric: `async with fabric.worker(): ...`.

        By default it claims from the lanes of the tasks and from the namespace of the fabric; with `namespace=None` it
        claims from every namespace. The options are:

        lanes: the lanes to claim from
        concurrency: how many handlers run at a time
        worker_id: the name that workers of one group share
        worker_instance_id: the unique name of this worker
        capabilities: what this worker offers
        lease_ttl: how long a lease lasts without a renewal
        namespace: the namespace to claim from
        poll_interval: the longest pause between two claims
        drain: how long a stop waits for running handlers
        threads: how many `def` handlers run at a time
        reconcile: whether it also runs the sweeps
        """
        check_options(options, WorkerOptions.__annotations__)
        options.setdefault("lanes", sorted({task.lane for task in self.tasks.values()}) or [self.lane])
        options.setdefault("namespace", self.namespace)
        worker = Worker(self.engine, handlers={name: task._handler for name, task in self.tasks.items()}, **options)
        worker._before_start = self._apply_limits
        return worker

    def run_worker(self, **options: Unpack[WorkerOptions]) -> None:
        """Connect and run a worker until SIGTERM or SIGINT: the main function of a worker process.

        The first signal drains the worker, the second ends the process at once. If the program has not set up logging,
        lines from INFO on go to stderr.

        It waits for a server that is not up yet. Any other failure to start is reported in one line on stderr, with
        exit code 2 for a wrong setting or option and 1 otherwise. When it stops, the process does not wait for handlers
        that ignore their cancellation, nor for threads of `asyncio.to_thread` that do not return. The options are those
        of `worker`.
        """
        if running_loop() is not None:
            raise RuntimeError(
                "run_worker() starts an event loop of its own and cannot be called inside a running one; there, use "
                "`async with fabric, fabric.worker():`"
            )

        async def work() -> None:
            interrupted = asyncio.Event()
            # From the first step on: a signal during the start also ends the process cleanly.
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


def _flow_id_hint(given: object) -> str | None:
    """Return what to write instead of this, which is not the id of a flow."""
    if isinstance(given, Flow | FlowRun):
        return "write fabric.flow_run(flow.id)"
    if not isinstance(given, str):
        return None
    try:
        parse_execution_id(given)
    except InvalidInputError:
        return f"if that is the text of a flow, use fabric.flow(kind, id={shown(given)}).id"
    return "for the id of a run use fabric.run(id)"


def _is_uuid(value: object) -> bool:
    try:
        parse_uuid(value, "id")
    except InvalidInputError:
        return False
    return True


def _place_of(task: Task[Any, Any, Any]) -> str:
    """Return where the function of a task is defined, for a message."""
    function = inspect.unwrap(task._handler.function)
    module = getattr(function, "__module__", None) or "an unknown module"
    code = getattr(function, "__code__", None)
    return module if code is None else f"{module}, line {code.co_firstlineno}"
