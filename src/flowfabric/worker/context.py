"""What a worker holds of an execution while it runs it, and what a handler sees of that."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, Unpack, overload
from uuid import uuid5

from flowfabric.engine.core.wakeups import LostReason
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.duration import Duration, milliseconds
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Fence, Handle
from flowfabric.model.ids import ExecutionId, SuspensionId, WaitpointId, uuid7
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.signal import ResumeSignal
from flowfabric.model.states import AttemptType, TimeoutBehavior
from flowfabric.model.suspend_outcome import SuspendOutcome
from flowfabric.model.suspension import SuspendArgs, SuspendDetails, Suspended
from flowfabric.model.text import shown
from flowfabric.model.waitpoint import PendingWaitpoint
from flowfabric.worker.callback import Callback
from flowfabric.worker.codec import codec_of, name_of, reason
from flowfabric.worker.waits import (
    HandlerSuspended,
    NoSignal,
    SuspendOptions,
    WaitTimeout,
    answer_of,
    check_has_deadline,
    is_timeout,
    repeatable,
    signals_of,
    suspend_args,
    while_leased,
)

Answer = TypeVar("Answer")
Payload = TypeVar("Payload")
Default = TypeVar("Default")

_NO_DEFAULT: Any = object()

UNHEALTHY_FAILURES = 3
"""Renewals that fail in a row before a lease counts as unhealthy."""


class Running:
    """One claimed execution, from its claim to the commit of its ending."""

    __slots__ = (
        "claimed",
        "claimed_at",
        "earlier",
        "ended_at",
        "expiry",
        "failures",
        "has_ended",
        "has_left",
        "has_slot",
        "has_started",
        "is_dropped",
        "is_given_back",
        "is_stuck",
        "is_suspended",
        "is_suspending",
        "left",
        "loop",
        "lost",
        "on_stop",
        "renewed_at",
        "signals",
        "task",
        "timer",
        "waiter",
        "waits",
    )

    def __init__(self, claimed: ClaimedExecution, at: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.claimed = claimed
        self.claimed_at = at
        """When the claim was asked for, by the monotonic clock."""
        self.renewed_at = at
        """When the lease was last asked for, by the monotonic clock."""
        self.failures = 0
        self.has_slot = False
        """Whether its handler takes up a slot."""
        self.has_started = False
        """Whether its handler may have been called."""
        self.has_ended = False
        """Whether its handler has returned; the run goes on until that is committed."""
        self.ended_at = 0.0
        """When its handler returned, by the monotonic clock."""
        self.has_left = False
        """Whether nothing of it is left in this process."""
        self.earlier: Running | None = None
        """The run of the same execution that was in this process when this one was claimed."""
        self.left: Future[None] | None = None
        """Done when this run has left this process; there is one when the next run of the execution waits for it."""
        self.is_dropped = False
        """Whether its result is of no more use: it waits, its lease is lost, or the worker stops without it."""
        self.is_given_back = False
        """Whether its lease is handed back once its handler has returned."""
        self.is_stuck = False
        """Whether a later run of the same execution has waited in vain for this one to leave."""
        self.is_suspending = False
        """Whether it asks to be suspended, or was. Lease errors are ignored meanwhile: suspending ends the lease."""
        self.is_suspended = False
        self.signals: tuple[ResumeSignal, ...] = ()
        """The signals of the wait it was resumed from."""
        self.lost: EngineError | LostReason | None = None
        """Why its lease is no longer held, where that is known."""
        self.on_stop: Callable[[Running], None] | None = None
        """Called when it is stopped while it waits for a slot."""
        self.loop = loop or asyncio.get_running_loop()
        """The event loop of its worker."""
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Stops the run when the time of its attempt or of its execution is up."""
        self.expiry: asyncio.Task[None] | None = None
        """Ends the attempt or the execution in the store after that."""
        self.waiter: asyncio.Future[None] | None = None
        self.waits: dict[str, int] = {}
        """How often its handler has waited for a signal of each name."""

    def __str__(self) -> str:
        """Read `<execution id> (<kind>)`."""
        return f"{self.claimed.execution_id} ({self.claimed.execution_kind})"

    @property
    def execution_id(self) -> ExecutionId:
        """The execution that runs."""
        return self.claimed.execution_id

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self.claimed.attempt_index + 1

    @property
    def is_lease_over(self) -> bool:
        """Whether the lease has run out, by this process's clock, since it was last renewed."""
        return time.monotonic() - self.renewed_at >= self.claimed.handle.lease_ttl_ms / 1000

    def stop(self) -> None:
        """Make the result void and cancel the handler; one that has not been called never is."""
        self.is_dropped = True
        if self.on_stop is not None:
            self.on_stop(self)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        if self.task is not None and self.has_started and not self.has_ended:
            self.task.cancel()


def _is_suspended(outcome: SuspendOutcome, handle: Handle) -> bool:
    """Whether an outcome suspends this run; one kept under its idempotency key may be of an earlier run of the attempt.

    What an earlier attempt has waited for is nothing this one could be told.
    """
    if outcome.details.attempt_index != handle.attempt_index:
        raise error("invalid_input", "idempotency_key: an earlier attempt has waited under it")
    return isinstance(outcome, Suspended) and outcome.handle.lease_id == handle.lease_id


class Context:
    """What a handler knows of its run and can do with it: a parameter of this type is given one."""

    __slots__ = ("_engine", "_loop", "_running")

    def __init__(self, running: Running, engine: Engine) -> None:
        self._running = running
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    @property
    def execution_id(self) -> ExecutionId:
        """The execution that runs."""
        return self._running.claimed.execution_id

    @property
    def execution_kind(self) -> str:
        """The name it was submitted under."""
        return self._running.claimed.execution_kind

    @property
    def lane_id(self) -> str:
        """The lane it was claimed from."""
        return self._running.claimed.lane_id

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._running.attempt

    @property
    def attempt_index(self) -> int:
        """Which attempt this is, from 0: the number the engine knows it by."""
        return self._running.claimed.attempt_index

    @property
    def attempt_type(self) -> AttemptType:
        """Why this attempt was made."""
        return self._running.claimed.attempt_type

    @property
    def retry_count(self) -> int:
        """How many attempts failed before this one; those of a lost lease do not count."""
        return self._running.claimed.retry_count

    @property
    def priority(self) -> int:
        """The priority it was claimed with."""
        return self._running.claimed.priority

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags it was submitted with."""
        return self._running.claimed.tags

    @property
    def input_payload(self) -> bytes:
        """The payload as it was submitted."""
        return self._running.claimed.input_payload

    @property
    def lease_epoch(self) -> int:
        """A number that rises with every claim of this execution: the token to fence writes of one's own with."""
        return self._running.claimed.lease_epoch

    @property
    def fence(self) -> Fence:
        """What proves that this attempt holds the lease."""
        return self._running.claimed.handle.fence

    @property
    def worker_instance_id(self) -> str:
        """The worker process that runs it."""
        return self._running.claimed.handle.worker_instance_id

    @property
    def consecutive_renewal_failures(self) -> int:
        """How many renewals of the lease failed since the last that did not."""
        return self._running.failures

    @property
    def lease_lost(self) -> "asyncio.Future[None]":
        """Done when the lease is known to be lost; the handler is cancelled at the same moment."""
        running = self._running
        if running.waiter is None:
            running.waiter = self._loop.create_future()
            if running.lost is not None or running.is_dropped:
                running.waiter.set_result(None)
        return asyncio.shield(running.waiter)

    def is_lease_healthy(self) -> bool:
        """Whether the lease is not known to be lost and its renewals get through; safe from any thread."""
        running = self._running
        return running.lost is None and not running.is_dropped and running.failures < UNHEALTHY_FAILURES

    async def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Overwrite what the run reports of itself; what is absent keeps its value."""
        handle = self._running.claimed.handle
        await self._answer(lambda: self._engine.progress(handle, percent=percent, message=message))

    @property
    def is_resumed(self) -> bool:
        """Whether a wait of this attempt is over: its handler runs again, from its start, after a `suspend`."""
        return self._running.claimed.has_waited

    def resumed_signals(self) -> tuple[ResumeSignal, ...]:
        """The signals of the wait that is over, in the order they were accepted; none before the first wait.

        Where `suspend` has returned, they are those of the wait it was called for.
        """
        return self._running.signals

    async def observe_signals(self) -> list[ResumeSignal]:
        """Every signal of this attempt's latest wait, read now."""
        return await self._answer(lambda: self._engine.observe_signals(self._running.claimed.handle))

    async def create_waitpoint(self, waitpoint_key: str, expires_in: Duration) -> PendingWaitpoint:
        """A waitpoint that takes signals from now on, to be waited for later; its token may be given away at once."""
        handle, waitpoint_id = self._running.claimed.handle, WaitpointId(uuid7())
        expires_in_ms = milliseconds(expires_in, "expires_in")
        return await self._answer(
            lambda: self._engine.create_waitpoint(
                handle, waitpoint_key=waitpoint_key, expires_in_ms=expires_in_ms, waitpoint_id=waitpoint_id
            )
        )

    def callback(self, waitpoint: PendingWaitpoint, *, base_url: str | None = None) -> Callback:
        """Where and with what an outsider signals a waitpoint of this run; `FF_CALLBACK_URL` is the usual base."""
        if not isinstance(waitpoint, PendingWaitpoint):
            raise error(
                "invalid_input", f"waitpoint: expected what ctx.create_waitpoint returned, got {shown(waitpoint)}"
            )
        return Callback.of(
            base_url or self._engine.settings.callback_url,
            self.execution_id,
            waitpoint.waitpoint_id,
            waitpoint.hmac_token,
        )

    async def suspend(self, args: SuspendArgs | None = None, **options: Unpack[SuspendOptions]) -> SuspendDetails:
        """Wait for signals without a worker: the handler ends here, and runs again from its start when they came.

        It returns only where there is nothing to wait for: signals that came before have met the condition already,
        or this is a repeat, under its idempotency key, of a wait that is over.
        """
        if args is None:
            args = suspend_args(self.attempt_index, options)
        elif options or not isinstance(args, SuspendArgs):
            raise TypeError("suspend: give either the options one by one, or all of them as SuspendArgs")
        check_has_deadline(args, self._running.claimed.policy)
        running, given = self._running, repeatable(args)
        handle = running.claimed.handle
        running.is_suspending = True
        try:
            outcome = await answer_of(lambda: self._engine.suspend(handle, given), running)
            running.is_suspended = outcome is None or _is_suspended(outcome, handle)
        finally:
            running.is_suspending = running.is_suspended
        if outcome is not None and not running.is_suspended:
            details = outcome.details
            running.signals = await signals_of(self._engine, running, details.suspension_id)
            return details
        running.is_dropped = True
        raise HandlerSuspended

    @overload
    async def wait_for_signal(self, name: str, *, timeout: Duration | None = None) -> Any: ...
    @overload
    async def wait_for_signal(self, name: str, kind: type[Payload], *, timeout: Duration | None = None) -> Payload: ...
    @overload
    async def wait_for_signal(
        self, name: str, kind: type[Payload], *, timeout: Duration | None = None, default: Default
    ) -> Payload | Default: ...
    async def wait_for_signal(
        self, name: str, kind: Any = Any, *, timeout: Duration | None = None, default: Any = _NO_DEFAULT
    ) -> Any:
        """The payload of a signal, of the type named: `answer = await ctx.wait_for_signal("approval", str)`.

        The first time, the handler ends here and holds no worker while it waits. When the signal has come the handler
        runs again from its start, and this call returns. The n-th wait for a name gets the n-th signal. `WaitTimeout`
        when none comes in time, `NoSignal` when an operator ends the wait without one; with a default, that instead.
        A failed attempt forgets its waits: the next one waits anew.
        """
        codec = codec_of(kind)
        waits = self._running.waits
        nth = waits[name] = waits.get(name, 0) + 1
        signals = await self._signals_of(SuspensionId(uuid5(self.fence.attempt_id, f"{nth}:{name}")), name, timeout)
        received = next((each for each in signals if each.satisfier and not is_timeout(each)), None)
        if received is None:
            if default is not _NO_DEFAULT:
                return default
            if any(map(is_timeout, signals)):
                raise WaitTimeout(f"no signal {name!r} came within {timeout} seconds")
            raise NoSignal(f"the wait for signal {name!r} was ended without one; pass default= to go on with a value")
        try:
            return codec.decode(b"null" if received.payload is None else received.payload)
        except Exception as refused:
            raise error(
                "invalid_input",
                f"signal {name!r} from {shown(received.source_identity)}: its payload is no {name_of(kind)}: "
                f"{reason(refused)}",
            ) from None

    async def _signals_of(
        self, suspension_id: SuspensionId, key: str, timeout: Duration | None
    ) -> Sequence[ResumeSignal]:
        """The signals of a wait that is over; a wait that has not begun begins, and the handler ends."""
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

    async def _answer(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        return await while_leased(call, self._running)

    def from_thread(self, awaitable: Coroutine[Any, Any, Answer]) -> Answer:
        """The answer of an asynchronous call, for a handler in a thread: `ctx.from_thread(ctx.progress(50))`."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            awaitable.close()
            raise TypeError("from_thread: is for `def` handlers, which run in threads; here, await the call itself")
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result()
