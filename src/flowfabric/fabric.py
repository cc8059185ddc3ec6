"""Fabric: what users hold. Functions become durable tasks, and a submitted task becomes a run to wait for."""

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypedDict, TypeVar, Unpack, cast, overload
from urllib.parse import quote

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import (
    ConflictError,
    Detail,
    EngineError,
    NotFoundError,
    OperationTimeoutError,
    ValidationError,
    error,
    reason_of,
)
from flowfabric.model.execution import Duplicate, ExecutionInfo
from flowfabric.model.explanation import Explanation
from flowfabric.model.ids import ExecutionId, parse_execution_id
from flowfabric.model.policy import Backoff
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.model.text import MAX_KEY_BYTES, check_items, check_short, check_text, shorten, shown
from flowfabric.options import Seconds, checked_lane, checked_tags, milliseconds, policy_of
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
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

Called = ParamSpec("Called")
"""What a function takes."""
Params = ParamSpec("Params")
"""What a submission takes: the same without the context."""
Returned = TypeVar("Returned", covariant=True)
"""What a call gives: a coroutine or a result."""
Result = TypeVar("Result")
Kept = TypeVar("Kept", covariant=True)


class ExecutionFailed(Exception):
    """A run did not succeed: `outcome` says how it ended, `reason` why."""

    def __init__(self, execution_id: ExecutionId, outcome: TerminalOutcome, reason: str | None) -> None:
        super().__init__(execution_id, outcome, reason)
        self.execution_id = execution_id
        self.outcome = outcome
        self.reason = reason

    def __str__(self) -> str:
        """Read `<execution id> <outcome>: <reason>`."""
        return f"{self.execution_id} {self.outcome}" + (f": {self.reason}" if self.reason else "")


class UnreadableResult(ValidationError):
    """A run succeeded, and its stored result does not fit the type its task names now."""

    def __init__(self, execution_id: ExecutionId, unreadable: ValidationError) -> None:
        super().__init__(unreadable.code, unreadable.detail)
        self.execution_id = execution_id
        self.args = (execution_id, unreadable)

    def __str__(self) -> str:
        """Read `<code>: <execution id>: <detail>`."""
        return f"{self.code}: {self.execution_id}: {self.detail}"


class _KeyConflict(ConflictError):
    """An idempotency key belongs to a run that was submitted otherwise; `detail` is that of the engine."""

    def __init__(self, detail: Detail, task: str, key: str) -> None:
        super().__init__("idempotency_conflict", detail)
        self.args = (detail, task, key)
        self._task = task
        self._key = key

    def __str__(self) -> str:
        """Read `<code>: task <name>: <sentence>`."""
        found = self.detail if isinstance(self.detail, Mapping) else {}
        words = {"payload": "arguments", "policy": "options (retries, backoff, timeout, deadline or capabilities)"}
        differs = " and ".join(words.get(part, part) for part in str(found.get("differs", "")).split(" and "))
        return (
            f"{self.code}: task {self._task!r}: idempotency_key {shown(self._key)} belongs to run "
            f"{found.get('execution_id')}, which was submitted with other {differs}; submit the same again, or use "
            "another key"
        )


class SubmitOptions(TypedDict, total=False):
    """How a task is submitted and run; what is absent is left to the fabric and the engine."""

    lane: str
    priority: int
    retries: int
    """How often a failed attempt is tried again."""
    backoff: Backoff | Seconds
    """The pause before a retry; one that doubles from a second to a minute when absent."""
    timeout: Seconds
    """How long one attempt may take, above 0."""
    deadline: Seconds
    """How long the execution may take, from its submission to its end."""
    delay: Seconds
    """How long it waits before it may be claimed."""
    capabilities: Iterable[str]
    """What a worker must offer."""
    idempotency_key: str
    """A repeat under the same key gives the run of the first; with other arguments it is a conflict.

    Under a key the defaults of parameters are stored with the arguments, and sets and dicts in sorted order. A key
    counts for its task, lane and namespace.
    """
    tags: Mapping[str, str]
    """Labels by namespaced keys, such as `app.customer`."""


class TaskOptions(SubmitOptions, total=False):
    """How a task is declared."""

    name: str
    """The kind of its executions: the function's name when absent. Queued work knows its task by this."""


Options = TypeVar("Options", bound=SubmitOptions)

_STANDING_SECONDS = 1.0
"""How long a timed out wait asks for the state it reports."""


class Run(Generic[Kept]):
    """A submitted execution, to be watched, waited for and cancelled from any process."""

    def __init__(
        self,
        fabric: "Fabric",
        execution_id: ExecutionId,
        handler: Handler,
        *,
        is_duplicate: bool,
        is_found: bool = False,
    ) -> None:
        self._fabric = fabric
        self._handler = handler
        self._is_found = is_found
        """Whether the id came from the caller, and may be that of a run of another task."""
        self.id = execution_id
        self.is_duplicate = is_duplicate
        """Whether the execution had been submitted before, under the same idempotency key."""

    def __repr__(self) -> str:
        """Read `Run(<execution id>)`."""
        return f"Run({self.id})"

    async def state(self) -> PublicState:
        """The state in one word."""
        return (await self.info()).public_state

    async def info(self) -> ExecutionInfo:
        """What an operator sees of it."""
        info = await self._fabric.engine.read_execution_info(self.id)
        if info is None:
            raise error("execution_not_found", self.id)
        return info

    async def explain(self) -> Explanation:
        """Why it is where it is: `summary` says it in a sentence, `reasons` name everything that holds it."""
        try:
            return await self._fabric.engine.explain(self.id)
        except NotFoundError:
            raise error("execution_not_found", self.id) from None

    async def result(self, timeout: float | None = None) -> Kept:
        """The result as soon as it is there.

        ExecutionFailed when there is none, TimeoutError when it takes longer, UnreadableResult when what is stored does
        not fit the type the task names; `invalid_input` when it is a run of another task.
        """
        try:
            ended = await self._fabric.engine.wait_for_ending(self.id, timeout=timeout)
        except OperationTimeoutError:
            raise TimeoutError(f"{self.id} has not ended within {timeout} s{await self._standing()}") from None
        except NotFoundError:
            raise error("execution_not_found", self.id) from None
        if self._is_found:
            await self._check_task()
        if ended.outcome is not TerminalOutcome.SUCCESS:
            raise ExecutionFailed(self.id, ended.outcome, ended.reason)
        try:
            return cast(Kept, self._handler.decode_result(ended.result))
        except ValidationError as unreadable:
            raise UnreadableResult(self.id, unreadable) from None

    async def _standing(self) -> str:
        """The state for a message, and how to learn more; nothing where the store does not answer at once."""
        try:
            async with asyncio.timeout(_STANDING_SECONDS):
                state = await self.state()
        except (EngineError, TimeoutError):
            return ""
        return f": it is {state.value.replace('_', ' ')}; `await run.explain()` says why"

    async def _check_task(self) -> None:
        kind = (await self.info()).execution_kind
        if kind != self._handler.name:
            raise error(
                "invalid_input",
                f"{self.id} is an execution of task {shown(kind)}, not {shown(self._handler.name)}; find it with the "
                "task it belongs to",
            )
        self._is_found = False

    async def cancel(self, reason: str = "cancelled by its submitter") -> None:
        """End it as cancelled, whatever it does."""
        await self._fabric.engine.cancel_execution(execution_id=self.id, reason=reason)


class Task(Generic[Called, Params, Returned]):
    """A function that can also be submitted; called, it is the plain function."""

    __name__: str

    def __init__(self, fabric: "Fabric", name: str, handler: Handler, options: SubmitOptions) -> None:
        functools.update_wrapper(self, handler.function)
        self._fabric = fabric
        self._options = options
        self._policy = policy_of(
            retries=options.get("retries"),
            backoff=options.get("backoff"),
            timeout=options.get("timeout"),
            deadline=options.get("deadline"),
            capabilities=options.get("capabilities"),
        )
        self._tags = checked_tags(options.get("tags"))
        delay = options.get("delay")
        self._delay_ms = None if delay is None else milliseconds(delay, "delay")
        if "lane" in options:
            checked_lane(options["lane"])
        self.name = name
        self.handler = handler

    def __call__(self, *args: Called.args, **kwargs: Called.kwargs) -> Returned:
        """Call the function here and now."""
        return cast(Returned, self.handler.function(*args, **kwargs))

    def __repr__(self) -> str:
        """Read `Task(<name>)`."""
        return f"Task({self.name})"

    @property
    def lane(self) -> str:
        """The lane it is submitted to."""
        return self._options.get("lane", self._fabric.lane)

    def options(self, **options: Unpack[SubmitOptions]) -> Self:
        """The same task with these options instead of its own: `await add.options(priority=5).submit(1, 2)`."""
        given = _checked(options, SubmitOptions)
        return type(self)(self._fabric, self.name, self.handler, {**self._options, **given})

    @overload
    async def submit(
        self: "Task[Called, Params, Coroutine[Any, Any, Result]]", *args: Params.args, **kwargs: Params.kwargs
    ) -> Run[Result]: ...
    @overload
    async def submit(self, *args: Params.args, **kwargs: Params.kwargs) -> Run[Returned]: ...
    async def submit(self, *args: Any, **kwargs: Any) -> Run[Any]:
        """Have a worker call the function; the execution is durable when this returns."""
        engine, options = self._fabric.engine, self._options
        key = self._key()
        payload = self.handler.encode(args, kwargs, is_canonical=key is not None)
        try:
            made = await engine.create_execution(
                namespace=self._fabric.namespace,
                lane_id=self.lane,
                execution_kind=self.name,
                input_payload=payload,
                payload_encoding="json",
                priority=options.get("priority", 0),
                creator_identity=self._fabric.identity,
                idempotency_key=key,
                tags=self._tags,
                policy=self._policy,
                delay_ms=self._delay_ms,
            )
        except ConflictError as refused:
            if refused.code != "idempotency_conflict":
                raise
            raise _KeyConflict(refused.detail, self.name, options["idempotency_key"]) from None
        return Run(self._fabric, made.execution_id, self.handler, is_duplicate=isinstance(made, Duplicate))

    def _key(self) -> str | None:
        """The idempotency key as the engine gets it: tasks of one lane do not share keys."""
        given = self._options.get("idempotency_key")
        if given is None:
            return None
        if given == "":
            raise error("invalid_input", "idempotency_key: must not be empty; leave it out to submit without a key")
        # A quoted name holds no slash, so that the first one ends it.
        key = f"{quote(self.name, safe='')}/{check_text(given, 'idempotency_key')}"
        if (size := len(key.encode())) > MAX_KEY_BYTES:
            raise error(
                "invalid_input",
                f"idempotency_key: with the name of task {shorten(self.name)} before it {size} bytes, at most "
                f"{MAX_KEY_BYTES} are allowed; use a shorter key, such as a digest of this one",
            )
        return key

    @overload
    def find(self: "Task[Called, Params, Coroutine[Any, Any, Result]]", execution_id: str) -> Run[Result]: ...
    @overload
    def find(self, execution_id: str) -> Run[Returned]: ...
    def find(self, execution_id: str) -> Run[Any]:
        """The run of an execution that was submitted before, by whichever process."""
        return Run(self._fabric, parse_execution_id(execution_id), self.handler, is_duplicate=True, is_found=True)


class _Anything:
    """To a type checker, what only a first parameter that takes anything takes: it is an argument, not the context."""


class TaskDecorator:
    """What makes a function a task: `@fabric.task`, or `@fabric.task(retries=3)`."""

    def __init__(self, fabric: "Fabric", options: TaskOptions) -> None:
        self._fabric = fabric
        self._options = _checked(options, TaskOptions)

    @overload
    def __call__(
        self, function: Callable[Concatenate[_Anything, Params], Returned], /
    ) -> Task[Concatenate[Any, Params], Concatenate[Any, Params], Returned]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, Params], Returned], /
    ) -> Task[Concatenate[Context, Params], Params, Returned]: ...
    @overload
    def __call__(self, function: Callable[Params, Returned], /) -> Task[Params, Params, Returned]: ...
    @overload
    def __call__(self, **options: Unpack[TaskOptions]) -> "TaskDecorator": ...
    def __call__(self, *functions: Callable[..., Any], **options: Any) -> Any:
        """Declare a function as a task, or give the decorator that does so with more options."""
        if not functions:
            return TaskDecorator(self._fabric, cast(TaskOptions, {**self._options, **options}))
        (function,) = functions
        if not callable(function):
            raise TypeError(f"a task is a function, got {shown(function)}; options have names: task(retries=3)")
        submit_options = self._options.copy()
        name = check_text(submit_options.pop("name", function.__name__), "name")
        return self._fabric.add(Task(self._fabric, name, Handler(function, task=name), submit_options))


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
        self.lane = checked_lane(lane)
        self.identity = f"{socket.gethostname()}-{os.getpid()}"
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

    def add(self, task: Task[Called, Params, Returned]) -> Task[Called, Params, Returned]:
        """Have the workers of this fabric run a task."""
        if not isinstance(task, Task):
            raise TypeError(f"a task is wanted, got {shown(task)}; `@fabric.task` makes one of a function")
        if task.name in self.tasks:
            raise ValueError(f"there is a task {task.name!r} already; give this one another name=")
        self.tasks[task.name] = task
        return task

    def worker(self, **options: Unpack[WorkerOptions]) -> Worker:
        """A worker for the tasks of this fabric, on their lanes: `async with` it, or `await worker.run()`.

        It serves the fabric's namespace; with `namespace=None` it serves every one.
        """
        options.setdefault("lanes", sorted({task.lane for task in self.tasks.values()}) or [self.lane])
        options.setdefault("namespace", self.namespace)
        return Worker(self.engine, handlers={name: task.handler for name, task in self.tasks.items()}, **options)

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
                        await self._worker_or_start_error(options).run_until(interrupted)
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


def _checked(options: Options, known: type[Options]) -> Options:
    """The options, all of them known, with a collection that may be read again."""
    if unknown := options.keys() - known.__annotations__.keys():
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    if options.get("capabilities") is None:
        return options
    return cast(Options, {**options, "capabilities": check_items(options["capabilities"], "capabilities")})
