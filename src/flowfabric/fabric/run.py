"""Runs: handles of submitted executions, to watch, await, signal and cancel from any process."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, Generic, Protocol, TypeVar, cast

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.model.attempt import Failure
from flowfabric.model.duration import Duration, milliseconds
from flowfabric.model.errors import EngineError, InvalidInputError, NotFoundError, OperationTimeoutError, error
from flowfabric.model.execution import ExecutionStatus
from flowfabric.model.explanation import Explanation
from flowfabric.model.ids import ExecutionId, plain_id
from flowfabric.model.states import ENDED_STATES, PublicState, TerminalOutcome
from flowfabric.model.text import shown
from flowfabric.model.waitpoint import WaitpointInfo
from flowfabric.pauses import pauses
from flowfabric.worker.codec import encode
from flowfabric.worker.handler import Handler

Value = TypeVar("Value", covariant=True)
"""The type of the result of a run."""

STATE_SECONDS = 1.0
"""How long a wait that timed out may take to read the state for its message."""
SIGNAL_PAUSE_SECONDS = (0.02, 0.5)
"""The first and the longest pause between two checks whether the run waits for a signal."""


class RunError(Exception):
    """A run ended without a result; the subclass says how: RunFailed, RunCancelled, RunExpired or RunSkipped.

    `reason` says why. After a failure, `error_type` and `traceback` describe the exception of the last attempt.
    """

    outcome: ClassVar[TerminalOutcome]
    verb: ClassVar[str]

    def __init__(
        self,
        execution_id: ExecutionId,
        reason: str | None,
        *,
        error_type: str | None = None,
        traceback: str | None = None,
    ) -> None:
        super().__init__(execution_id, reason)
        self.execution_id = execution_id
        self.reason = reason
        self.error_type = error_type
        self.traceback = traceback
        if traceback:
            self.add_note(f"In the worker:\n{traceback.rstrip()}")

    def __str__(self) -> str:
        """Return `<execution id> failed: <reason>`."""
        return f"{self.execution_id} {self.verb}" + (f": {self.reason}" if self.reason else "")


class RunFailed(RunError):
    """The last attempt of a run failed."""

    outcome = TerminalOutcome.FAILED
    verb = "failed"


class RunCancelled(RunError):
    """A run was cancelled."""

    outcome = TerminalOutcome.CANCELLED
    verb = "was cancelled"


class RunExpired(RunError):
    """A run exceeded its deadline, or the timeout of its last attempt."""

    outcome = TerminalOutcome.EXPIRED
    verb = "expired"


class RunSkipped(RunError):
    """A run was skipped because a run it depends on did not succeed."""

    outcome = TerminalOutcome.SKIPPED
    verb = "was skipped"


_ERRORS: Mapping[TerminalOutcome, type[RunError]] = {
    kind.outcome: kind for kind in (RunFailed, RunCancelled, RunExpired, RunSkipped)
}


class UnreadableResult(InvalidInputError):
    """A run succeeded, but its stored result does not fit the return type that its task has now."""

    def __init__(self, execution_id: ExecutionId, unreadable: InvalidInputError) -> None:
        super().__init__(unreadable.code, unreadable.detail)
        self.execution_id = execution_id
        self.args = (execution_id, unreadable)

    def __str__(self) -> str:
        """Return `<code>: <execution id>: <detail>`."""
        return f"{self.code}: {self.execution_id}: {self.detail}"


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
    error: RunError | None
    """The error that `run.result()` raises; None unless the run has ended without a result."""
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

    def __repr__(self) -> str:
        """Return `Run(<execution id>)`."""
        return f"Run({self.id})"

    @property
    def plain_id(self) -> str:
        """The id without braces and colons, for URLs, file names and shells; accepted wherever an id is."""
        return plain_id(self.id)

    async def status(self) -> "RunStatus[Value]":
        """Read the state, the progress, the attempt, and the result or the error of the run."""
        status = await self._fabric.engine.read_execution_status(self.id)
        if status is None:
            raise error("execution_not_found", self.id)
        self._check_task(status.execution_kind)
        has_succeeded = status.public_state is PublicState.COMPLETED
        return RunStatus(
            id=self.id,
            task=status.execution_kind,
            state=status.public_state,
            attempt=status.attempt_count,
            progress=status.progress_percent,
            message=status.progress_message,
            result=self._read_result(status.execution_kind, status.result) if has_succeeded else None,
            error=_error_of(status),
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
            raise error("execution_not_found", self.id) from None

    async def result(self, timeout: Duration | None = None) -> Value:
        """Wait until the run has ended and return its result: `await run.result(timeout=30)`.

        Raises RunFailed, RunCancelled, RunExpired or RunSkipped if the run ends without a result, TimeoutError if it
        does not end in time, UnreadableResult if the stored result does not fit the return type of the task, and
        InvalidInputError if the run belongs to another task.
        """
        seconds = None if timeout is None else milliseconds(timeout, "timeout") / 1000
        try:
            ended = await self._fabric.engine.wait_for_ending(self.id, timeout=seconds)
        except OperationTimeoutError:
            raise TimeoutError(f"{self.id} has not ended within {seconds:g} s{await self._state_text()}") from None
        except NotFoundError:
            raise error("execution_not_found", self.id) from None
        if self._handler is None or not self._is_checked:
            status = await self._fabric.engine.read_execution_info(self.id)
            if status is None:
                raise error("execution_not_found", self.id)
            kind = status.execution_kind
            self._check_task(kind)
        else:
            kind = self._handler.name
        if ended.outcome is not TerminalOutcome.SUCCESS:
            raise _ERRORS[ended.outcome](self.id, ended.reason, error_type=ended.error_type, traceback=ended.traceback)
        return self._read_result(kind, ended.result)

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

        The payload is sent as JSON, `by` names the sender, and a repeat with the same `id` is ignored. Raises
        TimeoutError if the run does not wait for the signal in time, and StateError (`target_not_signalable`) if it
        has ended.
        """
        engine, deadline = self._fabric.engine, time.monotonic() + milliseconds(timeout, "timeout") / 1000
        data = encode(payload)
        for pause in pauses(*SIGNAL_PAUSE_SECONDS):
            waitpoint = await self._waitpoint(name)
            if waitpoint is not None:
                token = await engine.read_waitpoint_token(execution_id=self.id, waitpoint_id=waitpoint.waitpoint_id)
                if token is not None:
                    await engine.deliver_signal(
                        execution_id=self.id,
                        waitpoint_id=waitpoint.waitpoint_id,
                        waitpoint_token=token,
                        signal_name=name,
                        source_identity=by,
                        payload=data,
                        idempotency_key=id,
                    )
                    return
            elif (info := await engine.read_execution_info(self.id)) is not None and info.public_state in ENDED_STATES:
                raise error("target_not_signalable", f"{self.id} is {info.public_state} and accepts no more signals")
            if time.monotonic() + pause >= deadline:
                raise TimeoutError(f"{self.id} did not wait for signal {name!r} in time{await self._state_text()}")
            await asyncio.sleep(pause)

    async def cancel(self, reason: str = "cancelled by its submitter") -> None:
        """Cancel the run, whether it waits, runs or is suspended; a running handler is cancelled too."""
        await self._fabric.engine.cancel_execution(execution_id=self.id, reason=reason)

    async def _waitpoint(self, name: str) -> WaitpointInfo | None:
        """Return the open waitpoint with this name, if any."""
        after = None
        while True:
            page = await self._fabric.engine.list_pending_waitpoints(execution_id=self.id, after=after)
            for each in page.entries:
                if each.waitpoint_key == name:
                    return each
            if page.next_cursor is None:
                return None
            after = page.next_cursor

    async def _state_text(self) -> str:
        """Return the state for a message and how to learn more; empty if the store does not answer at once."""
        try:
            async with asyncio.timeout(STATE_SECONDS):
                info = await self._fabric.engine.read_execution_info(self.id)
        except (EngineError, TimeoutError):
            return ""
        if info is None:
            return ""
        return f": it is {info.public_state.value.replace('_', ' ')}; `await run.explain()` says why"

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


def _plain_result(payload: bytes | None) -> object:
    """Return the result of a task that this process does not have: decoded JSON, or bytes if it is not JSON."""
    if payload is None:
        return None
    try:
        return msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return payload


def _error_of(status: ExecutionStatus) -> RunError | None:
    match status.public_state:
        case PublicState.FAILED:
            kind: type[RunError] = RunFailed
        case PublicState.CANCELLED:
            return RunCancelled(status.execution_id, status.cancellation_reason)
        case PublicState.EXPIRED:
            kind = RunExpired
        case PublicState.SKIPPED:
            return RunSkipped(status.execution_id, None)
        case _:
            return None
    failure = status.failure
    if failure is None:
        return kind(status.execution_id, None)
    return kind(status.execution_id, failure.message, error_type=failure.error_type, traceback=failure.traceback)


def _time(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)
