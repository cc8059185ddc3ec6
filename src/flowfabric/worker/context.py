"""What a handler knows about its run, and what it can do with it."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload
from uuid import uuid5

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.loops import check_loop, running_loop
from flowfabric.model.duration import Duration, milliseconds
from flowfabric.model.errors import error
from flowfabric.model.handle import Fence, Handle
from flowfabric.model.ids import ExecutionId, SuspensionId, WaitpointId, uuid7
from flowfabric.model.signal import ResumeSignal
from flowfabric.model.states import AttemptType, TimeoutBehavior
from flowfabric.model.suspend_outcome import SuspendOutcome
from flowfabric.model.suspension import SuspendArgs, SuspendDetails, Suspended
from flowfabric.model.text import check_range, check_short, shown
from flowfabric.model.waitpoint import PendingWaitpoint
from flowfabric.worker.budget import BudgetRef
from flowfabric.worker.callback import Callback
from flowfabric.worker.codec import codec_of, name_of, reason
from flowfabric.worker.running import Running
from flowfabric.worker.spending import Spend, Spender
from flowfabric.worker.streaming import FLUSH_SECONDS, FrameQueue, FrameWriter, SummaryWriter
from flowfabric.worker.waits import (
    HandlerSuspended,
    NoSignal,
    SuspendOptions,
    WaitTimeout,
    check_has_timeout,
    is_timeout,
    read_signals,
    retry_suspend,
    retry_while_leased,
    suspend_args,
    with_retry_key,
)

Answer = TypeVar("Answer")
Payload = TypeVar("Payload")
Default = TypeVar("Default")

_NO_DEFAULT: Any = object()

UNHEALTHY_FAILURES = 3
"""Consecutive failed renewals after which a lease counts as unhealthy."""


def _is_suspended(outcome: SuspendOutcome, handle: Handle) -> bool:
    """Whether an outcome suspends this run; a stored one may belong to an earlier run or an earlier attempt."""
    if outcome.details.attempt_index != handle.attempt_index:
        raise error(
            "invalid_input",
            "idempotency_key: an earlier attempt has waited under it; make it different in each attempt, such as "
            "f'{ctx.attempt}:approval'",
        )
    return isinstance(outcome, Suspended) and outcome.handle.lease_id == handle.lease_id


def _not_called(value: object) -> str:
    if inspect.isawaitable(value):
        return f"a {type(value).__name__}; pass a call of an `async def` function that awaits it"
    name = getattr(value, "__name__", None)
    if not callable(value) or name is None:
        return shown(value)
    return f"the function {name} itself; call it: ctx.from_thread(ctx.stream.write(line))"


class Context:
    """What a handler knows about its run and can do with it.

    Annotate a parameter of the task with `Context` to get one: `async def deploy(ctx: Context, version: str)`. It is
    not part of the arguments that callers submit. What must be awaited is refused in another event loop than the one of
    the worker; a `def` handler calls it with `from_thread`.
    """

    __slots__ = ("_engine", "_loop", "_running")

    def __init__(self, running: Running, engine: Engine) -> None:
        self._running = running
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    @property
    def execution_id(self) -> ExecutionId:
        """The id of the execution."""
        return self._running.claimed.execution_id

    @property
    def execution_kind(self) -> str:
        """The kind of the execution, which is the name of its task."""
        return self._running.claimed.execution_kind

    @property
    def lane_id(self) -> str:
        """The lane it was claimed from."""
        return self._running.claimed.lane_id

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._running.attempt

    @property
    def attempt_index(self) -> int:
        """The number of this attempt as the engine stores it, from 0."""
        return self._running.claimed.attempt_index

    @property
    def attempt_type(self) -> AttemptType:
        """Why this attempt was made: `initial`, `retry`, `reclaim`, `replay` or `fallback`."""
        return self._running.claimed.attempt_type

    @property
    def retry_count(self) -> int:
        """How many attempts failed before this one; attempts that lost their lease do not count."""
        return self._running.claimed.retry_count

    @property
    def priority(self) -> int:
        """The priority of the execution when it was claimed."""
        return self._running.claimed.priority

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags that the execution was submitted with."""
        return self._running.claimed.tags

    @property
    def input_payload(self) -> bytes:
        """The payload as it was submitted, not decoded."""
        return self._running.claimed.input_payload

    @property
    def lease_epoch(self) -> int:
        """A fencing token for writes to other systems: it grows with every claim of this execution."""
        return self._running.claimed.lease_epoch

    @property
    def fence(self) -> Fence:
        """The proof that this run holds the lease, for calls of the engine."""
        return self._running.claimed.handle.fence

    @property
    def worker_instance_id(self) -> str:
        """The id of the worker process that runs this handler."""
        return self._running.claimed.handle.worker_instance_id

    @property
    def consecutive_renewal_failures(self) -> int:
        """How many renewals of the lease have failed since the latest successful one."""
        return self._running.failures

    @property
    def lease_lost(self) -> "asyncio.Future[None]":
        """A future that is done when the lease is lost; the handler is cancelled at the same time."""
        self._check_loop()
        running = self._running
        if running.waiter is None:
            running.waiter = self._loop.create_future()
            if running.lost is not None or running.is_dropped:
                running.waiter.set_result(None)
        return asyncio.shield(running.waiter)

    def is_lease_healthy(self) -> bool:
        """Return whether the lease is held and its renewals succeed; safe to call from any thread."""
        running = self._running
        return running.lost is None and not running.is_dropped and running.failures < UNHEALTHY_FAILURES

    async def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Report progress, from 0 to 100 percent, shown by `run.status()`; a value that is left out stays as it was."""
        self._check_loop()
        if percent is not None:
            check_range(percent, "percent", 0, 100)
        handle = self._running.claimed.handle
        await self._answer(lambda: self._engine.progress(handle, percent=percent, message=message))

    @property
    def stream(self) -> FrameWriter:
        """The stream of this attempt, which `run.stream()` follows: `await ctx.stream.write(token)`."""
        return FrameWriter(self._frame_queue)

    @property
    def summary(self) -> SummaryWriter:
        """The summary of this attempt, which `run.summary()` reads: `await ctx.summary.patch({"done": 3})`."""
        return SummaryWriter(self._frame_queue)

    def _frame_queue(self) -> FrameQueue:
        self._check_loop()
        running = self._running
        if running.frames is None:
            running.frames = FrameQueue(self._engine, running)
            if running.has_ended:
                running.frames.close()
        return running.frames

    @property
    def is_resumed(self) -> bool:
        """Whether this attempt has suspended before: the handler runs again, from its start."""
        return self._running.claimed.has_waited

    def resumed_signals(self) -> tuple[ResumeSignal, ...]:
        """Return the signals of the wait that is over, in the order they were accepted.

        They are empty before the first wait and after an operator resumed the execution. If `suspend` has returned,
        they are the signals of that wait.
        """
        return self._running.signals

    async def observe_signals(self) -> list[ResumeSignal]:
        """Read every signal of the latest wait of this attempt from the store."""
        self._check_loop()
        return await self._answer(lambda: self._engine.observe_signals(self._running.claimed.handle))

    async def create_waitpoint(self, waitpoint_key: str, expires_in: Duration) -> PendingWaitpoint:
        """Create a waitpoint that accepts signals from now on; pass it to `suspend` to wait for it later.

        Its token can be given to an outsider at once, for example with `callback`.
        """
        self._check_loop()
        handle, waitpoint_id = self._running.claimed.handle, WaitpointId(uuid7())
        expires_in_ms = milliseconds(expires_in, "expires_in")
        return await self._answer(
            lambda: self._engine.create_waitpoint(
                handle, waitpoint_key=waitpoint_key, expires_in_ms=expires_in_ms, waitpoint_id=waitpoint_id
            )
        )

    def callback(self, waitpoint: PendingWaitpoint, *, base_url: str | None = None) -> Callback:
        """Return the URL and the token with which an outsider signals a waitpoint of this run.

        The URL begins with `base_url`, or with the setting `FF_CALLBACK_URL` if that is left out.
        """
        if not isinstance(waitpoint, PendingWaitpoint):
            raise error(
                "invalid_input",
                f"waitpoint: expected the waitpoint that ctx.create_waitpoint returned, got {shown(waitpoint)}",
            )
        return Callback.of(
            base_url or self._engine.settings.callback_url,
            self.execution_id,
            waitpoint.waitpoint_id,
            waitpoint.hmac_token,
        )

    async def suspend(self, args: SuspendArgs | None = None, **options: Unpack[SuspendOptions]) -> SuspendDetails:
        """Wait for signals without holding a worker: `await ctx.suspend(keys=["approval"], timeout=3600)`.

        The handler ends here and runs again, from its start, when the wait is over; `is_resumed` and
        `resumed_signals()` tell the second run. The call returns only if there is nothing to wait for: signals that
        arrived earlier already meet the condition, or a wait under the same idempotency key is over.
        """
        self._check_loop()
        if args is None:
            args = suspend_args(self.attempt_index, options)
        elif options or not isinstance(args, SuspendArgs):
            raise TypeError(
                "suspend: pass either keyword options, such as keys=['approval'], or one SuspendArgs, not both"
            )
        check_has_timeout(args, self._running.claimed.policy)
        running, given = self._running, with_retry_key(args)
        handle = running.claimed.handle
        if running.frames is not None:
            await running.frames.wait_stored(FLUSH_SECONDS)
        running.is_suspending = True
        try:
            outcome = await retry_suspend(lambda: self._engine.suspend(handle, given), running)
            running.is_suspended = outcome is None or _is_suspended(outcome, handle)
        finally:
            running.is_suspending = running.is_suspended
        if outcome is not None and not running.is_suspended:
            details = outcome.details
            running.signals = await read_signals(self._engine, running, details.suspension_id)
            return details
        running.is_dropped = True
        raise HandlerSuspended

    @overload
    async def wait_for_signal(self, name: str, *, timeout: Duration | None = None, default: object = ...) -> Any: ...
    @overload
    async def wait_for_signal(self, name: str, type: type[Payload], *, timeout: Duration | None = None) -> Payload: ...
    @overload
    async def wait_for_signal(
        self, name: str, type: type[Payload], *, timeout: Duration | None = None, default: Default
    ) -> Payload | Default: ...
    async def wait_for_signal(
        self, name: str, type: Any = Any, *, timeout: Duration | None = None, default: Any = _NO_DEFAULT
    ) -> Any:
        """Return the payload of a signal, decoded to a type: `answer = await ctx.wait_for_signal("approval", str)`.

        The first time, the handler ends here and holds no worker while it waits. When the signal arrives, the handler
        runs again from its start and this call returns. The n-th wait for a name gets the n-th signal of that name.
        Raises `WaitTimeout` if no signal arrives in time and `NoSignal` if an operator ends the wait without one;
        with `default`, returns that instead. A new attempt after a failure waits again.
        """
        self._check_loop()
        check_short(name, "name")
        codec = codec_of(type)
        waits = self._running.waits
        nth = waits[name] = waits.get(name, 0) + 1
        signals = await self._signals_of(SuspensionId(uuid5(self.fence.attempt_id, f"{nth}:{name}")), name, timeout)
        received = next((each for each in signals if each.satisfier and not is_timeout(each)), None)
        if received is None:
            if default is not _NO_DEFAULT:
                return default
            if any(map(is_timeout, signals)):
                within = "in time" if timeout is None else f"within {milliseconds(timeout, 'timeout') / 1000:g} s"
                raise WaitTimeout(f"no signal {name!r} arrived {within}")
            raise NoSignal(f"the wait for signal {name!r} was ended without one; pass default= to go on with a value")
        try:
            return codec.decode(b"null" if received.payload is None else received.payload)
        except Exception as refused:
            sender = f" from {shown(received.source_identity)}" if received.source_identity else ""
            raise error(
                "invalid_input",
                f"signal {name!r}{sender}: the payload is not of type {name_of(type)}: {reason(refused)}",
            ) from None

    async def _signals_of(
        self, suspension_id: SuspensionId, key: str, timeout: Duration | None
    ) -> Sequence[ResumeSignal]:
        """Return the signals of a wait that is over, or begin the wait and end the handler."""
        if self.is_resumed:
            handle, past = self._running.claimed.handle, parts_of(self._engine).signals
            signals = await self._answer(lambda: past.signals_of_past_wait(handle, suspension_id))
            if signals is not None:
                self._running.signals = tuple(signals)
                return signals
        options: SuspendOptions = {"keys": [key]}
        if timeout is not None:
            options["timeout"] = timeout
            options["timeout_behavior"] = TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL
        await self.suspend(suspend_args(self.attempt_index, options, suspension_id))
        return self._running.signals

    def reserve(self, budget: BudgetRef, *, key: str | None = None, **amounts: int) -> Spend:
        """Reserve what a block may spend: `async with ctx.reserve(budget, tokens=4000) as spend: ...`.

        `spend.used(tokens=3120)` says what it has really spent. In a `def` handler it is `with`. If the budget has less
        left, its policy decides: by default BudgetExceeded is raised. `key` names the call, for a handler that leaves
        out calls when it runs again.
        """
        return Spend(self._spender.call(budget, amounts, key))

    async def spend(self, budget: BudgetRef, *, key: str | None = None, **amounts: int) -> None:
        """Count what is spent of a budget, without a reservation: `await ctx.spend(budget, tokens=120)`.

        If the budget has less left, nothing is counted and its policy decides, as for `reserve`.
        """
        await self._spender.call(budget, amounts, key).record()

    @property
    def _spender(self) -> Spender:
        return Spender(context=self, running=self._running, engine=self._engine)

    async def _answer(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        return await retry_while_leased(call, self._running)

    def _check_loop(self) -> None:
        """Refuse a call that would change the run in another event loop; what it started there might never end."""
        check_loop(self._loop, "the worker of this run is")

    def from_thread(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for an asynchronous call from a `def` handler: `ctx.from_thread(ctx.progress(50))`."""
        if not asyncio.iscoroutine(call):
            raise TypeError(f"from_thread: expected a call such as ctx.progress(50), got {_not_called(call)}")
        if running_loop() is self._loop:
            call.close()
            raise TypeError("from_thread: is for `def` handlers, which run in threads; here, await the call itself")
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
