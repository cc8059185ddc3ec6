"""How a handler waits for signals: what it asks the engine for, and how its run ends while it waits."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypedDict, TypeVar

from flowfabric.engine.engine import Engine
from flowfabric.model.condition import Condition, Single, all_of_waitpoints, parse_condition, waitpoint_keys
from flowfabric.model.duration import Duration, milliseconds
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import SuspensionId, WaitpointId, uuid7
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.resume import ResumePolicy
from flowfabric.model.signal import ResumeSignal, TimeoutSignal
from flowfabric.model.states import TimeoutBehavior
from flowfabric.model.suspension import SuspendArgs, SuspensionReason
from flowfabric.model.text import check_items, check_text
from flowfabric.model.waitpoint import Binding, Fresh, PendingWaitpoint, UsePending, default_binding, parse_binding
from flowfabric.pauses import pauses
from flowfabric.worker.faults import FAULT_SECONDS, LEASE_IS_LOST, is_passing

Answer = TypeVar("Answer")

Waitpoint = Binding | PendingWaitpoint | Mapping[str, object]
"""A waitpoint to wait on: one that the wait makes, or one made before."""


class HandlerSuspended(BaseException):
    """Ends a handler whose run is suspended; no `Exception`, so that no handler catches it by the way."""


class WaitTimeout(TimeoutError):
    """A wait was not answered in time."""


class NoSignal(Exception):
    """A wait for a signal was ended by an operator who sent none."""


class SuspendOptions(TypedDict, total=False):
    """What a handler waits for, as `Context.suspend` takes it; what is absent is left to the engine."""

    condition: Condition | Mapping[str, object] | str
    """What meets the wait; without it, any signal on each of the keys does."""
    keys: Iterable[str]
    reason_code: SuspensionReason | str
    """Why it waits, as operators see it: `waiting_for_signal` when absent."""
    waitpoints: Iterable[Waitpoint]
    """Waitpoints made before; without them, one is made for each key of the condition."""
    timeout: Duration
    """How long it waits at most; the policy's time when absent, and without that for ever."""
    timeout_behavior: TimeoutBehavior | str
    """What happens then: the execution fails when absent."""
    resume_policy: ResumePolicy | Mapping[str, object]
    continuation_metadata_pointer: str
    idempotency_key: str
    """What a repeat within this attempt is known by."""


def suspend_args(attempt_index: int, options: SuspendOptions, suspension_id: SuspensionId | None = None) -> SuspendArgs:
    """The arguments of a suspend from what a handler says; the id of the suspension is minted where none is given."""
    wait: dict[str, Any] = {name: given for name, given in options.items() if given is not None}
    if unknown := wait.keys() - SuspendOptions.__annotations__.keys():
        raise TypeError(
            f"suspend: no such option: {', '.join(sorted(unknown))}; the options are: "
            f"{', '.join(sorted(SuspendOptions.__annotations__))}"
        )
    if "timeout" in wait:
        wait["timeout_ms"] = milliseconds(wait.pop("timeout"), "timeout")
    if wait.get("idempotency_key"):
        # A wait that is over is over for its attempt: the next attempt waits anew.
        wait["idempotency_key"] = f"{attempt_index}:{check_text(wait['idempotency_key'], 'idempotency_key')}"
    condition = _condition(wait.pop("condition", None), wait.pop("keys", ()))
    bindings = _bindings(wait.pop("waitpoints", ()), condition)
    fields: dict[str, Any] = {"reason_code": SuspensionReason.WAITING_FOR_SIGNAL, **wait}
    return SuspendArgs(
        suspension_id=suspension_id or SuspensionId(uuid7()), resume_condition=condition, waitpoints=bindings, **fields
    )


def _condition(given: Any, keys: Any) -> Condition:
    keys = check_items(keys, "keys")
    if given is not None:
        if keys:
            raise TypeError("suspend: give condition= or keys=, not both; a condition names its keys itself")
        return parse_condition(given)
    if not keys:
        raise TypeError("suspend: nothing to wait for; give condition= or keys=, such as keys=['approval']")
    return Single(waitpoint_key=keys[0]) if len(keys) == 1 else all_of_waitpoints(keys)


def check_has_deadline(args: SuspendArgs, policy: ExecutionPolicy | None) -> None:
    """Refuse a wait that says what a timeout is to do while nothing sets one: it would never come."""
    if args.timeout_behavior is None or args.has_timeout:
        return
    default = None if policy is None else policy.suspension_policy
    if default is None or default.default_timeout_ms is None:
        raise error(
            "invalid_input",
            "timeout_behavior: has no effect without a timeout; add timeout=, or a default timeout of the policy",
        )


def repeatable(args: SuspendArgs) -> SuspendArgs:
    """The same wait, with a key of its own where a repeat of the call would find its waitpoint used up by the call."""
    if args.idempotency_key or not any(isinstance(each, UsePending) for each in args.waitpoints):
        return args
    return replace(args, idempotency_key=f"call:{uuid7()}")


def _bindings(given: Any, condition: Condition) -> tuple[Binding, ...]:
    given = check_items(given, "waitpoints")
    if given:
        return tuple(
            UsePending(waitpoint_id=each.waitpoint_id) if isinstance(each, PendingWaitpoint) else parse_binding(each)
            for each in given
        )
    keys = waitpoint_keys(condition)
    if not keys:
        return (default_binding(WaitpointId(uuid7()), condition),)
    return tuple(Fresh(waitpoint_id=WaitpointId(uuid7()), waitpoint_key=key) for key in keys)


class Leased(Protocol):
    """What is known of the lease that a call is made under."""

    @property
    def is_lease_over(self) -> bool: ...


class LeasedRun(Leased, Protocol):
    """A run that holds a lease."""

    @property
    def claimed(self) -> ClaimedExecution: ...


async def while_leased(call: Callable[[], Awaitable[Answer]], lease: Leased) -> Answer:
    """The answer of a call that may be repeated, which it is while the store is at fault and the lease lasts."""
    pause = pauses(*FAULT_SECONDS)
    while True:
        try:
            return await call()
        except EngineError as error:
            if not is_passing(error) or lease.is_lease_over:
                raise
        await asyncio.sleep(next(pause))


async def answer_of(call: Callable[[], Awaitable[Answer]], lease: Leased) -> Answer | None:
    """The answer of a call that gives up a lease, repeated while the store is at fault and the lease lasts.

    None when a repeat finds the lease gone: the call before was carried out and its answer lost, or the lease was.
    """
    has_failed, pause = False, pauses(*FAULT_SECONDS)
    while True:
        try:
            return await call()
        except EngineError as error:
            if has_failed and error.code in LEASE_IS_LOST:
                return None
            if not is_passing(error) or lease.is_lease_over:
                raise
            has_failed = True
        await asyncio.sleep(next(pause))


async def signals_of(
    engine: Engine, run: LeasedRun, suspension_id: SuspensionId | None = None
) -> tuple[ResumeSignal, ...]:
    """What came to a wait of a run, the latest unless named.

    A handler that did not know would wait again, or fail after its wait is over.
    """
    handle = run.claimed.handle
    return tuple(await while_leased(lambda: engine.observe_signals(handle, suspension_id=suspension_id), run))


def is_timeout(signal: ResumeSignal) -> bool:
    """Whether a signal is the engine's own, which tells that the wait timed out."""
    return (signal.signal_category, signal.source_type) == (
        TimeoutSignal().signal_category,
        TimeoutSignal().source_type,
    )
