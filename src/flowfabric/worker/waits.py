"""Waits of handlers for signals: the options of a wait, and calls that are retried while the store is at fault."""

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
from flowfabric.worker.faults import LEASE_IS_LOST, RETRY_SECONDS, is_store_fault

Answer = TypeVar("Answer")

Waitpoint = Binding | PendingWaitpoint | Mapping[str, object]
"""A waitpoint to wait on: one to create with the wait, or one created before."""


class HandlerSuspended(BaseException):
    """Ends a handler whose run is suspended; not an `Exception`, so that `except Exception` does not catch it."""


class WaitTimeout(TimeoutError):
    """No signal arrived before the timeout of a wait."""


class NoSignal(Exception):
    """An operator ended a wait for a signal without sending one."""


class SuspendOptions(TypedDict, total=False):
    """The keyword options of `Context.suspend`."""

    condition: Condition | Mapping[str, object] | str
    """When the wait is over; by default, when each of the keys has a signal."""
    keys: Iterable[str]
    """The names of the waitpoints to wait for, instead of a condition."""
    reason_code: SuspensionReason | str
    """Why it waits, shown to operators; by default `waiting_for_signal`."""
    waitpoints: Iterable[Waitpoint]
    """Waitpoints created before; by default, one is created for each key of the condition."""
    timeout: Duration
    """How long to wait at most; by default as the policy says, or without limit."""
    timeout_behavior: TimeoutBehavior | str
    """What happens when the timeout passes; by default the execution fails."""
    resume_policy: ResumePolicy | Mapping[str, object]
    """What happens to the waitpoints and signals when the wait is over, and how long the resume is delayed."""
    continuation_metadata_pointer: str
    """A reference to state that the handler keeps elsewhere; stored and shown, not used."""
    idempotency_key: str
    """Identifies the wait within its attempt: a repeat under the same key does not wait again."""


def suspend_args(attempt_index: int, options: SuspendOptions, suspension_id: SuspensionId | None = None) -> SuspendArgs:
    """Return the arguments of a suspend for the options of a handler; a suspension id is generated if none is given."""
    wait: dict[str, Any] = {name: given for name, given in options.items() if given is not None}
    if unknown := wait.keys() - SuspendOptions.__annotations__.keys():
        raise TypeError(
            f"suspend: no such option: {', '.join(sorted(unknown))}; the options are: "
            f"{', '.join(sorted(SuspendOptions.__annotations__))}"
        )
    if "timeout" in wait:
        wait["timeout_ms"] = milliseconds(wait.pop("timeout"), "timeout")
    if wait.get("idempotency_key"):
        # Scoped to the attempt: the next attempt waits again.
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
            raise TypeError("suspend: pass condition= or keys=, not both; a condition names its own keys")
        return parse_condition(given)
    if not keys:
        raise TypeError("suspend: nothing to wait for; pass condition= or keys=, such as keys=['approval']")
    return Single(waitpoint_key=keys[0]) if len(keys) == 1 else all_of_waitpoints(keys)


def check_has_timeout(args: SuspendArgs, policy: ExecutionPolicy | None) -> None:
    """Refuse a wait with a `timeout_behavior` and no timeout, neither its own nor that of the policy."""
    if args.timeout_behavior is None or args.has_timeout:
        return
    default = None if policy is None else policy.suspension_policy
    if default is None or default.default_timeout_ms is None:
        raise error(
            "invalid_input",
            "timeout_behavior: has no effect without a timeout; add timeout=, or default_timeout_ms to the policy",
        )


def with_retry_key(args: SuspendArgs) -> SuspendArgs:
    """Return the wait with an idempotency key if it uses a waitpoint created before.

    A retry of the call would otherwise find that waitpoint used by the first try.
    """
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
    """The lease that a call is made under."""

    @property
    def is_lease_expired(self) -> bool: ...


class LeasedRun(Leased, Protocol):
    """A run that holds a lease."""

    @property
    def claimed(self) -> ClaimedExecution: ...


async def retry_while_leased(call: Callable[[], Awaitable[Answer]], lease: Leased) -> Answer:
    """Return the answer of an idempotent call; retry it while the store is at fault and the lease lasts."""
    pause = pauses(*RETRY_SECONDS)
    while True:
        try:
            return await call()
        except EngineError as error:
            if not is_store_fault(error) or lease.is_lease_expired:
                raise
        await asyncio.sleep(next(pause))


async def retry_suspend(call: Callable[[], Awaitable[Answer]], lease: Leased) -> Answer | None:
    """Return the answer of a call that ends the lease; retry it while the store is at fault and the lease lasts.

    Return None if a retry finds the lease gone: an earlier try took effect and its answer was lost, or the lease was.
    """
    has_failed, pause = False, pauses(*RETRY_SECONDS)
    while True:
        try:
            return await call()
        except EngineError as error:
            if has_failed and error.code in LEASE_IS_LOST:
                return None
            if not is_store_fault(error) or lease.is_lease_expired:
                raise
            has_failed = True
        await asyncio.sleep(next(pause))


async def read_signals(
    engine: Engine, run: LeasedRun, suspension_id: SuspensionId | None = None
) -> tuple[ResumeSignal, ...]:
    """Return the signals of a wait of a run, by default the latest; retry while the lease lasts."""
    handle = run.claimed.handle
    return tuple(await retry_while_leased(lambda: engine.observe_signals(handle, suspension_id=suspension_id), run))


def is_timeout(signal: ResumeSignal) -> bool:
    """Whether a signal is the one that the engine sends when a wait times out."""
    return (signal.signal_category, signal.source_type) == (
        TimeoutSignal().signal_category,
        TimeoutSignal().source_type,
    )
