"""Runs: handles of submitted executions, to watch, await, signal and cancel from any process."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, Protocol, TypeVar, cast
from uuid import UUID, uuid5

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.fabric.errors import (
    RUN_ERRORS,
    RUN_ERRORS_BY_STATE,
    RunCancelled,
    RunError,
    RunSkipped,
    UnreadableResult,
)
from flowfabric.fabric.follow import RunFrames
from flowfabric.model.attempt import Failure
from flowfabric.model.budget import MAX_TOTAL, check_amounts
from flowfabric.model.duration import Duration, milliseconds
from flowfabric.model.errors import (
    ContentionError,
    EngineError,
    InvalidInputError,
    NotFoundError,
    OperationTimeoutError,
    error,
)
from flowfabric.model.execution import Ended, ExecutionStatus
from flowfabric.model.explanation import Explanation, NoCapableWorkerReason, NoWorkerReason
from flowfabric.model.ids import ExecutionId, SignalId, WaitpointId, plain_id, row_key
from flowfabric.model.signal import MAX_TEXT
from flowfabric.model.states import ENDED_STATES, PublicState, TerminalOutcome
from flowfabric.model.text import check_length, check_short, shown
from flowfabric.pauses import pauses
from flowfabric.worker.codec import encode_as_its_type, reason
from flowfabric.worker.handler import Handler
from flowfabric.worker.spending import APPROVE, ASK, REJECT, raise_for

Value = TypeVar("Value", covariant=True)
"""The type of the result of a run."""

logger = logging.getLogger(__name__)

UNSERVED_SECONDS = 10.0
"""How long a wait for a result lasts before it checks whether any worker can run the execution."""
STATE_SECONDS = 1.0
"""How long a wait that timed out may take to read the state for its message."""
_WAIT_IS_OVER = frozenset({"target_not_signalable", "waitpoint_closed"})
SIGNAL_PAUSE_SECONDS = (0.02, 0.5)
"""The first and the longest pause between two checks whether the run waits for a signal."""
ABSENCE = "it was not submitted to this store, or its retention is over"
"""Why a run or a flow may not be found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus(Generic[Value]):
    """A snapshot of a run, from `await run.status()`."""

    id: ExecutionId
    """The id of the execution."""
    task: str
    """The name of its task."""
    state: PublicState
    """Where the run stands, such as `waiting`, `active`, `suspended` or `completed`."""
    attempt: int
    """The number of the current or last attempt, from 1; 0 before the first has started."""
    progress: int | None
    """The progress in percent that the task reported last with `ctx.progress`."""
    message: str | None
    """The message of that progress report."""
    result: Value | None
    """The result of a run that succeeded; None before, and for a task that returns None."""
    error: RunError | UnreadableResult | None
    """The error that `run.result()` raises; None unless the run has ended without a result that can be read."""
    last_failure: Failure | None
    """The failure of the latest failed attempt, also while a retry is due or runs."""
    retry_at: datetime | None
    """When a delayed run, or the retry of a failed attempt, becomes claimable."""
    created_at: datetime
    """When the run was submitted."""
    started_at: datetime | None
    """When its first attempt started; None before that."""
    ended_at: datetime | None
    """When it ended; None before that."""

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, with a result or without one."""
        return self.state in ENDED_STATES


class RunFabric(Protocol):
    """What a run needs from its fabric."""

    _unserved_again_at: float
    """When, by the monotonic clock, a waiting caller checks again whether any worker can run its execution."""
    _unserved_queues: dict[int, float]
    """When, by the monotonic clock, a wait for a flow warns again about a queue that no worker serves."""

    @property
    def engine(self) -> Engine: ...

    def _handler_of(self, kind: str) -> Handler | None:
        """Return the handler of a task by its name, if this process has that task."""
        ...


class Run(Generic[Value]):
    """A handle of a submitted execution: watch it, await its result, signal it or cancel it, from any process.

    `task.submit(...)` returns one. `task.run(id)` and `fabric.run(id)` find a run that was submitted earlier.
    """

    def __init__(
        self,
        fabric: RunFabric,
        execution_id: ExecutionId,
        handler: Handler | None,
        *,
        is_duplicate: bool = False,
        is_checked: bool = False,
        absence: str = ABSENCE,
    ) -> None:
        self._fabric = fabric
        self._handler = handler
        """Decodes the result; None if the task is not known before the execution is read."""
        self._is_checked = is_checked
        """Whether the execution is known to belong to the task of the handler."""
        self.id = execution_id
        """The id of the execution."""
        self.is_duplicate = is_duplicate
        """Whether an earlier submit with the same idempotency key had created the execution."""
        self._absence = absence
        """Why the execution may not be found."""

    def __repr__(self) -> str:
        """Return `Run(<execution id>)`."""
        return f"Run({self.id})"

    def __eq__(self, other: object) -> bool:
        """Return whether both are handles of the same execution."""
        return self.id == other.id if isinstance(other, Run) else NotImplemented

    def __hash__(self) -> int:
        """Return a hash of the id."""
        return hash(self.id)

    @property
    def plain_id(self) -> str:
        """The id without braces and colons, for URLs, file names and shells; accepted wherever an id is."""
        return plain_id(self.id)

    async def status(self) -> "RunStatus[Value]":
        """Read the state, the progress, the attempt, and the result or the error of the run."""
        status = await self._fabric.engine.read_execution_status(self.id)
        if status is None:
            raise self._not_found()
        self._check_task(status.execution_kind)
        result, unreadable = None, None
        if status.public_state is PublicState.COMPLETED:
            try:
                result = self._read_result(status.execution_kind, status.result)
            except UnreadableResult as refused:
                unreadable = refused
        return RunStatus(
            id=self.id,
            task=status.execution_kind,
            state=status.public_state,
            attempt=status.attempt_count,
            progress=status.progress_percent,
            message=status.progress_message,
            result=result,
            error=unreadable or _error_of(status),
            last_failure=status.failure,
            retry_at=_time(status.delay_until),
            created_at=datetime.fromtimestamp(status.created_at / 1000, UTC),
            started_at=_time(status.started_at),
            ended_at=_time(status.ended_at),
        )

    async def explain(self) -> Explanation:
        """Explain why the run is where it is: `summary` is a sentence, `reasons` lists everything that blocks it."""
        try:
            return await self._fabric.engine.explain(self.id)
        except NotFoundError:
            raise self._not_found() from None

    async def result(self, timeout: Duration | None = None) -> Value:
        """Wait until the run has ended and return its result: `await run.result(timeout=30)`.

        Raises RunFailed, RunCancelled, RunExpired or RunSkipped if the run ends without a result, TimeoutError if it
        does not end in time, UnreadableResult if the stored result does not fit the return type of the task, and
        InvalidInputError if the run belongs to another task.
        """
        seconds = None if timeout is None else milliseconds(timeout, "timeout") / 1000
        try:
            ended = await self._wait_for_ending(seconds)
        except OperationTimeoutError:
            raise TimeoutError(f"{self.id} has not ended within {seconds:g} s{await self._read_state_text()}") from None
        except NotFoundError:
            raise self._not_found() from None
        if self._handler is None or not self._is_checked:
            info = await self._fabric.engine.read_execution_info(self.id)
            if info is None:
                raise self._not_found()
            kind = info.execution_kind
            self._check_task(kind)
        else:
            kind = self._handler.name
        if ended.outcome is not TerminalOutcome.SUCCESS:
            raise RUN_ERRORS[ended.outcome](
                self.id, ended.reason, error_type=ended.error_type, traceback=ended.traceback
            )
        return self._read_result(kind, ended.result)

    async def _wait_for_ending(self, seconds: float | None) -> Ended:
        engine, first = self._fabric.engine, UNSERVED_SECONDS
        if seconds is not None and seconds <= first:
            return await engine.wait_for_ending(self.id, timeout=seconds)
        try:
            return await engine.wait_for_ending(self.id, timeout=first)
        except OperationTimeoutError:
            await self._warn_if_unserved()
        return await engine.wait_for_ending(self.id, timeout=None if seconds is None else seconds - first)

    async def _warn_if_unserved(self) -> None:
        """Log a warning if no worker can run this; a program that forgot its worker waits in silence otherwise."""
        # One of many waiting callers is enough.
        if time.monotonic() < self._fabric._unserved_again_at:
            return
        self._fabric._unserved_again_at = time.monotonic() + UNSERVED_SECONDS
        await self._log_if_unserved()

    async def _log_if_unserved(self) -> None:
        with contextlib.suppress(EngineError):
            explanation = await self._fabric.engine.explain(self.id)
            if any(isinstance(each, NoWorkerReason | NoCapableWorkerReason) for each in explanation.reasons):
                logger.warning("%s has not started: %s", self.id, explanation.summary)

    async def signal(
        self,
        name: str,
        payload: object = None,
        *,
        by: str = "",
        id: str | None = None,
        timeout: Duration = 30,
    ) -> None:
        """Send a signal as soon as the run waits for that name: `await run.signal("approval", "yes", by="ada")`.

        The payload is sent as JSON, and `by` names the sender. A repeat with the same name and `id` is ignored,
        whatever the run does by then; if a new attempt waits again, send the signal under another id. Raises
        TimeoutError if the run does not wait for the signal in time, and StateError (`target_not_signalable`) if it
        has ended.
        """
        check_short(name, "name")
        data = _signal_payload(name, payload)
        check_length(by, "by", MAX_TEXT)
        if id == "":
            raise error("invalid_input", "id: must not be empty; leave it out if repeats need not be recognised")
        # The execution has a signal id once, at whichever wait of that name the signal arrived.
        signal_id = None
        if id is not None:
            signal_id = SignalId(uuid5(UUID(row_key(self.id)[1]), f"{name}\0{check_length(id, 'id', MAX_TEXT)}"))
        signals, seconds = parts_of(self._fabric.engine).signals, milliseconds(timeout, "timeout") / 1000

        async def deliver(waitpoint_id: WaitpointId) -> None:
            await signals.deliver_trusted(
                execution_id=self.id,
                waitpoint_id=waitpoint_id,
                signal_name=name,
                source_identity=by,
                signal_id=signal_id,
                payload=data,
                idempotency_key=id,
            )

        await self._when_waiting(name, signal_id, deliver, seconds)

    async def approve_budget(
        self, *, raise_to: Mapping[str, int] | None = None, by: str = "", timeout: Duration = 30
    ) -> None:
        """Let the run go on that asks for more of a budget: `await run.approve_budget(raise_to={"tokens": 2_000_000})`.

        Raises the hard limits of the budget: to `raise_to`, else by as much as the run needs. `by` names who approves.
        Raises TimeoutError if the run does not ask in time, and StateError (`target_not_signalable`) if it has ended.
        """
        given = check_amounts(raise_to or {}, "raise_to", least=1, most=MAX_TOTAL, is_empty_allowed=True)
        payload = msgspec.json.encode(given)

        check_length(by, "by", MAX_TEXT)

        async def approve(waitpoint_id: WaitpointId) -> None:
            # First: a run whose budget is used up is not claimed.
            await raise_for(self._fabric.engine, self.id, given)
            await self._answer_budget(waitpoint_id, APPROVE, payload, by)

        await self._when_waiting(ASK, None, approve, milliseconds(timeout, "timeout") / 1000)

    async def reject_budget(self, *, by: str = "", timeout: Duration = 30) -> None:
        """Refuse the run that asks for more of a budget: BudgetExceeded is raised in its handler."""

        check_length(by, "by", MAX_TEXT)

        async def reject(waitpoint_id: WaitpointId) -> None:
            await self._answer_budget(waitpoint_id, REJECT, b"null", by)

        await self._when_waiting(ASK, None, reject, milliseconds(timeout, "timeout") / 1000)

    async def _answer_budget(self, waitpoint_id: WaitpointId, name: str, payload: bytes, by: str) -> None:
        await parts_of(self._fabric.engine).signals.deliver_trusted(
            execution_id=self.id,
            waitpoint_id=waitpoint_id,
            signal_name=name,
            source_identity=by,
            signal_id=None,
            payload=payload,
            idempotency_key=None,
        )

    async def _when_waiting(
        self,
        key: str,
        signal_id: SignalId | None,
        deliver: Callable[[WaitpointId], Awaitable[None]],
        seconds: float,
    ) -> None:
        """Deliver a signal as soon as the run waits on a waitpoint with this key."""
        signals = parts_of(self._fabric.engine).signals
        deadline = time.monotonic() + seconds
        for pause in pauses(*SIGNAL_PAUSE_SECONDS):
            left = deadline - time.monotonic()
            target = await signals.read_target(self.id, key, signal_id)
            if target is None:
                raise self._not_found()
            if target.waitpoint_id is not None:
                try:
                    await deliver(target.waitpoint_id)
                    return
                except EngineError as refused:
                    # Another signal or a timeout has ended that wait; the run may wait for this name again.
                    if refused.code not in _WAIT_IS_OVER:
                        raise
            if target.state in ENDED_STATES:
                raise error("target_not_signalable", f"{self.id} is {target.state} and accepts no more signals")
            if left <= 0:
                waits = ", ".join(map(repr, target.open_keys))
                why = f": it waits for {waits}" if waits else _state_text(target.state)
                missed = "ask for more of a budget" if key == ASK else f"wait for signal {key!r}"
                raise TimeoutError(f"{self.id} did not {missed} within {seconds:g} s{why}")
            await asyncio.sleep(min(pause, left))

    def stream(self, *, after: str | None = None, attempt: int | None = None, follow: bool = True) -> RunFrames:
        """Return the frames that the run writes with `ctx.stream`: `async for frame in run.stream(): ...`.

        They come in order, over all attempts, and the iterator ends when the run has ended. `after` is the id of the
        last frame that you have: the iterator continues after it, in any process. `attempt`, from 1, leaves out the
        other attempts. Without `follow` it ends after the last frame that is stored.
        """
        return RunFrames(
            self.id,
            after=after,
            attempt=attempt,
            follow=follow,
            engine=lambda: self._fabric.engine,
            not_found=self._not_found,
            warn_if_unserved=self._warn_if_unserved,
        )

    async def summary(self) -> dict[str, Any] | None:
        """Read the document that the run publishes with `ctx.summary`; None if it has published none.

        A new attempt begins a new document. Until it does, the one of the attempt before is returned.
        """
        try:
            found = await parts_of(self._fabric.engine).tails.read_newest_summary(self.id)
        except NotFoundError:
            raise self._not_found() from None
        return None if found is None else found.document

    async def cancel(self, reason: str = "cancelled by its submitter") -> None:
        """Cancel the run, whether it waits, runs or is suspended; a running handler is cancelled too."""
        try:
            await self._fabric.engine.cancel_execution(execution_id=self.id, reason=reason)
        except NotFoundError:
            raise self._not_found() from None
        except ContentionError as refused:
            outcome = refused.detail.get("terminal_outcome") if isinstance(refused.detail, Mapping) else None
            if refused.code != "execution_not_active" or outcome is None:
                raise
            raise error(refused.code, f"{self.id} has already ended with outcome {outcome}") from None

    async def replay(
        self, reason: str | None = None, *, by: str | None = None, allow_cancelled_flow: bool = False
    ) -> None:
        """Run an ended run again, whatever its outcome: its next attempt begins with the same arguments and id.

        Its result is gone until it succeeds again. A skipped run of a flow waits for what it depends on, so replay what
        failed first. A run of a cancelled flow is replayed only with `allow_cancelled_flow`. Raises StateError
        (`execution_not_terminal`) if it has not ended.
        """
        try:
            await self._fabric.engine.replay_execution(
                execution_id=self.id, reason=reason, requested_by=by, allow_cancelled_flow=allow_cancelled_flow
            )
        except NotFoundError:
            raise self._not_found() from None

    def _not_found(self) -> EngineError:
        return error("execution_not_found", f"{self.id}: {self._absence}")

    async def _read_state_text(self) -> str:
        """Return the state for a message and how to learn more, or that the store does not answer."""
        try:
            async with asyncio.timeout(STATE_SECONDS):
                info = await self._fabric.engine.read_execution_info(self.id)
        except (EngineError, TimeoutError):
            return ", and the database does not answer now"
        return "" if info is None else _state_text(info.public_state)

    def _check_task(self, kind: str) -> None:
        if self._handler is not None and kind != self._handler.name:
            raise error(
                "invalid_input",
                f"{self.id} is a run of task {shown(kind)}, not of {shown(self._handler.name)}; use the run() of that "
                "task, or fabric.run(id)",
            )
        self._is_checked = True

    def _read_result(self, kind: str, payload: bytes | None) -> Value:
        handler = self._handler or self._fabric._handler_of(kind)
        if handler is None:
            return cast(Value, _plain_result(payload))
        try:
            return cast(Value, handler.decode_result(payload))
        except InvalidInputError as unreadable:
            raise UnreadableResult(self.id, unreadable) from None


def _state_text(state: PublicState) -> str:
    return f": it is {state.value.replace('_', ' ')}; `await run.explain()` says why"


def _signal_payload(name: str, payload: object) -> bytes:
    try:
        return encode_as_its_type(payload)
    except Exception as refused:
        raise error(
            "invalid_input",
            f"signal {shown(name)}: the payload {shown(payload)} cannot be sent as JSON: {reason(refused)}",
        ) from None


def _plain_result(payload: bytes | None) -> object:
    """Return the result of a task that this process does not have: decoded JSON, or bytes if it is not JSON."""
    if payload is None:
        return None
    try:
        return msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return payload


def _error_of(status: ExecutionStatus) -> RunError | None:
    kind = RUN_ERRORS_BY_STATE.get(status.public_state)
    if kind is None:
        return None
    if kind is RunCancelled:
        return kind(status.execution_id, status.cancellation_reason)
    failure = status.failure
    if failure is None or kind is RunSkipped:
        return kind(status.execution_id, None)
    return kind(status.execution_id, failure.message, error_type=failure.error_type, traceback=failure.traceback)


def _time(milliseconds: int | None) -> datetime | None:
    if milliseconds is None:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        # After the year 9999.
        return datetime.max.replace(tzinfo=UTC)
