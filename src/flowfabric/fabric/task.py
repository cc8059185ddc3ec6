"""Tasks: functions that workers run, and how to declare and submit them."""

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, cast, overload
from urllib.parse import quote
from uuid import UUID

import msgspec
from msgspec import structs

from flowfabric.fabric.limits import TaskLimits, limits_of
from flowfabric.fabric.options import budgets_in, policy_of
from flowfabric.fabric.run import Run, RunFabric
from flowfabric.model.duration import Duration, milliseconds
from flowfabric.model.errors import ConflictError, Detail, EngineError, error
from flowfabric.model.execution import Created, Duplicate, NewExecution
from flowfabric.model.ids import check_lane_id, parse_execution_id
from flowfabric.model.policy import Backoff, StreamPolicy
from flowfabric.model.tag import check_tags
from flowfabric.model.text import MAX_BATCH, MAX_KEY_BYTES, check_items, check_options, check_text, shorten, shown
from flowfabric.worker.budget import Budget
from flowfabric.worker.context import Context
from flowfabric.worker.handler import Handler
from flowfabric.worker.heritage import parent_of

Called = ParamSpec("Called")
"""The parameters of the function."""
Params = ParamSpec("Params")
"""The parameters of a submission: those of the function without the context."""
Returned = TypeVar("Returned", covariant=True)
"""What a call of the function returns: a coroutine or a result."""
Result = TypeVar("Result")
Value = TypeVar("Value", covariant=True)


class SubmitOptions(TypedDict, total=False):
    """How a task is submitted and run, for `@fabric.task(...)` and `task.options(...)`; all options are optional.

    Durations are seconds or a `timedelta`.
    """

    lane: str
    """The lane to submit to; by default that of the fabric."""
    priority: int
    """Executions with a higher priority are claimed first; by default 0."""
    retries: int
    """How many times a failed attempt is retried; by default 0."""
    backoff: Backoff | Duration
    """The pause before a retry; by default it doubles from one second to one minute."""
    timeout: Duration
    """How long one attempt may take; by default without limit."""
    deadline: Duration
    """How long the run may take from its submission to its end, retries included; by default without limit."""
    delay: Duration
    """How long to wait before the run may be claimed; by default not at all."""
    capabilities: Iterable[str]
    """The capabilities that a worker must offer to run it; by default none."""
    idempotency_key: str
    """Submit once: a repeat with the same key returns the first run; with other arguments it is a conflict.

    The key is scoped to the task, the lane and the namespace. With a key, the arguments are stored in a canonical
    form: with the defaults of parameters, and with sets and dicts sorted.
    """
    stream: StreamPolicy
    """How many frames of its stream are kept, and whether every write waits until its frame is stored."""
    tags: Mapping[str, str]
    """Labels with namespaced keys, such as `{"app.customer": "42"}`."""
    parent: str | None
    """The id of the run whose budgets and quota limit it too; by default the run whose handler submits it."""
    budgets: "Iterable[Budget | UUID | str]"
    """The budgets that limit it, or their ids: it does not start while one of them is used up."""
    quota: UUID | str
    """The id of a quota policy that limits it, beside the limits of the task."""


class TaskOptions(SubmitOptions, total=False):
    """The options of `@fabric.task(...)`."""

    name: str
    """The name of the task, which is the kind of its executions; by default the name of the function.

    Queued executions find their task by this name: keep it when you rename the function.
    """
    max_running: int
    """How many runs of the task may run at a time, over all workers and namespaces; by default any number."""
    rate: str
    """How many runs of the task may start per time, such as `"100/m"`, `"5/s"` or `"10/30s"`; by default any number."""
    per: str
    """The argument, or the tag such as `"tag:app.tenant"`, each value of which has these limits for itself."""
    weight: str
    """The argument, or the tag, that says how many of the `rate` a run takes; by default each takes one."""


Options = TypeVar("Options", bound=SubmitOptions)


class TaskFabric(RunFabric, Protocol):
    """What a task needs from its fabric."""

    namespace: str
    lane: str
    _identity: str

    def _add(self, task: "Task[Called, Params, Returned]") -> "Task[Called, Params, Returned]":
        """Add a task to those that the workers of the fabric run."""
        ...

    async def _define_limits(self, task: str, limits: TaskLimits) -> None:
        """Create the limits of a task, unless this process has done so."""
        ...


class NotAllSubmitted(Exception):
    """Some calls of `submit_many` were refused; the others are submitted.

    `answers` holds, in the order of the calls, the run of each submitted call and the error of each refused one.
    """

    def __init__(self, answers: "Sequence[Run[Any] | EngineError]") -> None:
        super().__init__(answers)
        self.answers = answers

    def __str__(self) -> str:
        """Return how many calls were refused, and the first error."""
        refused = [answer for answer in self.answers if isinstance(answer, EngineError)]
        return (
            f"{len(refused)} of {len(self.answers)} calls were not submitted; the first error is: {refused[0]}; "
            "`answers` holds a run or an error for each call"
        )


class Call(Generic[Value]):
    """A call of a task with checked arguments, made by `task.bind(...)` for `task.submit_many`."""

    __slots__ = ("_key", "_new", "_task")

    def __init__(self, task: "Task[Any, Any, Any]", new: NewExecution, key: str | None) -> None:
        self._task = task
        self._new = new
        self._key = key

    def __repr__(self) -> str:
        """Return `Call(<task>)`."""
        return f"Call({self._task.name})"

    def _run(self, made: Created | Duplicate) -> Run[Value]:
        """Return the run of this call after it was submitted."""
        is_duplicate = isinstance(made, Duplicate)
        task = self._task
        return Run(task._fabric, made.execution_id, task._handler, is_duplicate=is_duplicate, is_checked=True)

    def _refusal(self, refused: EngineError) -> EngineError:
        """Return the error of this call, with the name of the task and the key as the user wrote it."""
        if refused.code == "idempotency_conflict" and self._key is not None:
            return _key_conflict(refused.detail, self._task.name, self._key)
        return refused


def _key_conflict(detail: Detail, task: str, key: str) -> ConflictError:
    """Return the error of a key that belongs to a run with other arguments or options."""
    found = detail if isinstance(detail, Mapping) else {}
    options = "options (retries, backoff, timeout, deadline, capabilities, stream, budgets or quota)"
    words = {"payload": "arguments", "policy": options}
    differs = " and ".join(words.get(part, part) for part in str(found.get("differs", "")).split(" and "))
    return ConflictError(
        "idempotency_conflict",
        {**found, "idempotency_key": key},
        f"task {task!r}: idempotency_key {shown(key)} belongs to run {found.get('execution_id')}, which was submitted "
        f"with other {differs}; repeat the same call, or use another key",
    )


class Task(Generic[Called, Params, Returned]):
    """A function that workers run: `run = await add.submit(1, 2)`. Called directly, it is the plain function.

    Arguments and results are stored as JSON and keep their types. Both are checked: a value of a wrong type is refused
    where it is passed or returned.
    """

    __name__: str
    __wrapped__: Callable[Called, Returned]

    def __init__(
        self,
        fabric: TaskFabric,
        name: str,
        handler: Handler,
        options: SubmitOptions,
        limits: TaskLimits | None = None,
    ) -> None:
        functools.update_wrapper(self, handler.function)
        self._fabric = fabric
        self._limits = limits
        self._options = options
        self._policy = policy_of(
            retries=options.get("retries"),
            backoff=options.get("backoff"),
            timeout=options.get("timeout"),
            deadline=options.get("deadline"),
            capabilities=options.get("capabilities"),
            stream=options.get("stream"),
            budgets=options.get("budgets"),
            quota=options.get("quota"),
        )
        self._budgets = budgets_in(options.get("budgets"))
        """Those of its budgets that are declared in code."""
        self._tags = check_tags(options.get("tags")) or None
        delay = options.get("delay")
        self._delay_ms = None if delay is None else milliseconds(delay, "delay")
        if type(priority := options.get("priority", 0)) is not int:
            raise error("invalid_input", f"priority: must be a whole number, got {shown(priority)}")
        if "lane" in options:
            check_lane_id(options["lane"], "lane")
        self._handler = handler
        self.name = name
        """The name of the task, which is the kind of its executions."""

    def __call__(self, *args: Called.args, **kwargs: Called.kwargs) -> Returned:
        """Call the function directly, in this process, without the database."""
        return cast(Returned, self._handler.function(*args, **kwargs))

    def __repr__(self) -> str:
        """Return `Task(<name>)`."""
        return f"Task({self.name})"

    @property
    def lane(self) -> str:
        """The lane that the task is submitted to."""
        return self._options.get("lane", self._fabric.lane)

    def options(self, **options: Unpack[SubmitOptions]) -> Self:
        """Return the same task with some options changed: `await add.options(priority=5).submit(1, 2)`.

        lane: the lane to submit to
        priority: executions with a higher priority are claimed first
        retries: how many times a failed attempt is retried
        backoff: the pause before a retry
        timeout: how long one attempt may take
        deadline: how long the run may take from its submission to its end
        delay: how long to wait before the run may be claimed
        capabilities: what a worker must offer to run it
        idempotency_key: submit once, a repeat with the same key returns the first run
        stream: how many frames of its stream are kept, and whether every write waits until its frame is stored
        tags: labels with namespaced keys
        parent: the id of the run whose budgets and quota limit it too
        budgets: the budgets that limit it, or their ids
        quota: the id of a quota policy that limits it
        """
        given = _checked(options, SubmitOptions)
        return type(self)(self._fabric, self.name, self._handler, {**self._options, **given}, self._limits)

    @overload
    async def submit(
        self: "Task[Called, Params, Coroutine[Any, Any, Result]]", *args: Params.args, **kwargs: Params.kwargs
    ) -> Run[Result]: ...
    @overload
    async def submit(self, *args: Params.args, **kwargs: Params.kwargs) -> Run[Returned]: ...
    async def submit(self, *args: Any, **kwargs: Any) -> Run[Any]:
        """Submit a call for a worker to run, and return its run; the call is durable when this returns.

        Raises InvalidInputError for an argument of a wrong type, TypeError for a call that does not fit the function,
        and ConflictError if the idempotency key belongs to a run with other arguments or options.
        """
        call = self._bound(args, kwargs)
        await self._prepare()
        new = await self._with_parents([call])
        try:
            made = await self._fabric.engine.create_execution(**msgspec.structs.asdict(new[0]))
        except ConflictError as refused:
            raise call._refusal(refused) from None
        return call._run(made)

    @overload
    def bind(
        self: "Task[Called, Params, Coroutine[Any, Any, Result]]", *args: Params.args, **kwargs: Params.kwargs
    ) -> Call[Result]: ...
    @overload
    def bind(self, *args: Params.args, **kwargs: Params.kwargs) -> Call[Returned]: ...
    def bind(self, *args: Any, **kwargs: Any) -> Call[Any]:
        """Return a call with these arguments for `submit_many`; the arguments are checked now."""
        return self._bound(args, kwargs)

    @overload
    async def submit_many(
        self: "Task[Called, Params, Coroutine[Any, Any, Result]]", calls: Iterable[Call[Result]]
    ) -> list[Run[Result]]: ...
    @overload
    async def submit_many(self, calls: Iterable[Call[Returned]]) -> list[Run[Returned]]: ...
    async def submit_many(self, calls: Iterable[Call[Any]]) -> list[Run[Any]]:
        """Submit many calls of this task at once: `await add.submit_many(add.bind(n, 1) for n in range(500))`.

        Returns the runs in the order of the calls. A thousand calls share one statement. Raises NotAllSubmitted if some
        calls are refused; the others are submitted.
        """
        if isinstance(calls, Call):
            raise TypeError(
                f"submit_many: expected a list of calls, got one call; write {self.name}.submit_many([call])"
            )
        bound = [self._checked_call(call) for call in calls]
        for task in {id(call._task): call._task for call in bound}.values():
            await task._prepare()
        answers: list[Run[Any] | EngineError] = []
        for begin in range(0, len(bound), MAX_BATCH):
            batch = bound[begin : begin + MAX_BATCH]
            made = await self._create_many(batch)
            answers += [
                call._refusal(each) if isinstance(each, EngineError) else call._run(each)
                for call, each in zip(batch, made, strict=True)
            ]
        runs = [answer for answer in answers if isinstance(answer, Run)]
        if len(runs) < len(answers):
            raise NotAllSubmitted(answers)
        return runs

    async def _create_many(self, batch: "Sequence[Call[Any]]") -> "Sequence[Created | Duplicate | EngineError]":
        try:
            return await self._fabric.engine.create_many(await self._with_parents(batch))
        except EngineError as refused:
            # The batch was refused as a whole; earlier batches stay submitted, and the caller learns which.
            return [refused.copy() for _ in batch]

    async def _prepare(self) -> None:
        """Create the limits of the task and its budgets, once in a process."""
        if self._limits is not None:
            await self._fabric._define_limits(self.name, self._limits)
        for budget in self._budgets:
            await budget.create(self._fabric.engine)

    async def _with_parents(self, calls: "Sequence[Call[Any]]") -> list[NewExecution]:
        """Return what is submitted for calls; those of a handler get the limits of its run."""
        if (parent := await parent_of(self._fabric.engine)) is None:
            return [call._new for call in calls]
        return [
            call._new if "parent" in call._task._options else structs.replace(call._new, parent_execution_id=parent)
            for call in calls
        ]

    def _checked_call(self, call: object) -> "Call[Any]":
        if not isinstance(call, Call):
            raise TypeError(
                f"submit_many: expected calls made by {self.name}.bind(...), got {shown(call)}; write "
                f"{self.name}.submit_many({self.name}.bind(x) for x in ...)"
            )
        if call._task._fabric is not self._fabric:
            raise TypeError(
                f"submit_many: a call of task {self.name!r} was bound by another fabric; bind it with this one's"
            )
        if call._task.name != self.name:
            raise TypeError(
                f"submit_many: expected calls of task {self.name!r}, got one of {call._task.name!r}; submit each "
                "task's calls with its own submit_many"
            )
        return call

    def _bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> "Call[Any]":
        key = self._key()
        payload = self._handler.encode(args, kwargs, is_canonical=key is not None)
        return Call(self, self._new(payload, key=key), self._options.get("idempotency_key"))

    def _new(self, payload: bytes, *, encoding: str = "json", key: str | None = None) -> NewExecution:
        """Return what is submitted for a call with this payload, with the options of the task."""
        return NewExecution(
            namespace=self._fabric.namespace,
            lane_id=self.lane,
            execution_kind=self.name,
            input_payload=payload,
            payload_encoding=encoding,
            priority=self._options.get("priority", 0),
            creator_identity=self._fabric._identity,
            idempotency_key=key,
            tags=self._tags,
            policy=self._policy,
            delay_ms=self._delay_ms,
            parent_execution_id=self._options.get("parent"),
        )

    def _key(self) -> str | None:
        """Return the key for the engine, with the name of the task: tasks of one lane do not share keys."""
        given = self._options.get("idempotency_key")
        if given is None:
            return None
        if given == "":
            raise error("invalid_input", "idempotency_key: must not be empty; leave it out to submit without a key")
        # A quoted name contains no slash, so the first slash ends it.
        key = f"{quote(self.name, safe='')}/{check_text(given, 'idempotency_key')}"
        if (size := len(key.encode())) > MAX_KEY_BYTES:
            raise error(
                "invalid_input",
                f"idempotency_key: must be at most {MAX_KEY_BYTES} bytes together with the name of task "
                f"{shorten(self.name)}, got {size}; use a shorter key, such as a digest of this one",
            )
        return key

    @overload
    def run(self: "Task[Called, Params, Coroutine[Any, Any, Result]]", execution_id: str) -> Run[Result]: ...
    @overload
    def run(self, execution_id: str) -> Run[Returned]: ...
    def run(self, execution_id: str) -> Run[Any]:
        """Return the run of an execution of this task by its id, whichever process submitted it."""
        return Run(self._fabric, parse_execution_id(execution_id), self._handler)


class _Anything:
    """For type checkers only: accepted only by a first parameter that accepts anything, which is not a context."""


class TaskDecorator:
    """Declares a function as a task: `@fabric.task`, or `@fabric.task(retries=3)`."""

    def __init__(self, fabric: TaskFabric, options: TaskOptions) -> None:
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
        """Declare a function as a task, or return a decorator with these options."""
        if not functions:
            return TaskDecorator(self._fabric, cast(TaskOptions, {**self._options, **options}))
        (function,) = functions
        _check_function(function)
        submit_options = self._options.copy()
        name = check_text(submit_options.pop("name", function.__name__), "name")
        if not name:
            raise error("invalid_input", "name: must not be empty; leave it out to use the name of the function")
        limits = limits_of(
            name,
            function,
            max_running=submit_options.pop("max_running", None),
            rate=submit_options.pop("rate", None),
            per=submit_options.pop("per", None),
            weight=submit_options.pop("weight", None),
        )
        return self._fabric._add(Task(self._fabric, name, Handler(function, task=name), submit_options, limits))


def _check_function(function: object) -> None:
    """Raise TypeError for a value that cannot be a task."""
    if isinstance(function, Task):
        raise TypeError(f"@fabric.task: {function.name!r} is already a task; decorate the function once")
    plain = function.__func__ if isinstance(function, classmethod) else function
    if not callable(plain):
        raise TypeError(
            f"@fabric.task: expected a function, got {shown(function)}; name the options, such as "
            "@fabric.task(retries=3)"
        )
    if isinstance(plain, type):
        raise TypeError(
            f"@fabric.task: {plain.__name__!r} is a class, and tasks are functions; decorate a function that uses it"
        )
    first = next(iter(inspect.signature(plain).parameters.values()), None)
    if first is not None and first.name in ("self", "cls") and first.annotation is inspect.Parameter.empty:
        raise TypeError(
            f"@fabric.task: {getattr(plain, '__qualname__', None)!r} is a method, and tasks are functions: no worker "
            f"has its {first.name!r}; move it out of the class, or declare it as a function inside a function that has "
            "the object"
        )


def _checked(options: Options, known: type[Options]) -> Options:
    """Return the options if all of them are known, with items that can be read more than once."""
    if of_task := sorted(options.keys() & (TaskOptions.__annotations__.keys() - known.__annotations__.keys())):
        raise TypeError(
            f"{of_task[0]} belongs to the task and is the same for all runs: @fabric.task({of_task[0]}=...)"
        )
    check_options(options, known.__annotations__)
    items: dict[str, object] = {}
    if options.get("capabilities") is not None:
        items["capabilities"] = check_items(options["capabilities"], "capabilities")
    if options.get("budgets") is not None:
        items["budgets"] = check_items(options["budgets"], "budgets")
    return cast(Options, {**options, **items}) if items else options
