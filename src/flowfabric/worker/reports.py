"""Bringing the ends of runs into the store: the completions of one moment share a statement."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from flowfabric.engine.core.wakeups import LostReason
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.expire import ExpiryPhase
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import FailureReason
from flowfabric.model.lease import AlreadyTerminal, Completed, Expired, NotYetDue, RetryScheduled, TerminalFailed
from flowfabric.pauses import pauses
from flowfabric.tasks import create_shared_task
from flowfabric.worker.context import Running
from flowfabric.worker.faults import (
    FAULT_SECONDS,
    Contact,
    is_about_values,
    is_cancel,
    is_of_lost_lease,
    level_of_retry,
)
from flowfabric.worker.logs import log_about
from flowfabric.worker.outcome import Failure

logger = logging.getLogger(__name__)

RESULT_REFUSED = "result_refused"
NOT_STORED = "%s: the %s was not stored before the lease expired: %s"

_Completion = tuple[Running, bytes | None]


class Reports:
    """Writes how runs ended and gives up their slots once that is committed.

    Only an answer about the result fails a run. Any other error is a fault of the store: the call is repeated, which is
    harmless, until it is answered or the lease has run out.
    """

    SIZE = 300
    """Completions in one statement."""
    STREAMS = 2
    """Statements under way at the same time."""
    GATHER_SECONDS = 0.005
    """How long a statement waits at most for more completions that keep coming."""

    def __init__(self, engine: Engine, release: Callable[[Running], None], contact: Contact | None = None) -> None:
        self._engine = engine
        self._release = release
        self._contact = contact or Contact()
        self._completed: deque[_Completion] = deque()
        self._streams = 0
        """Streams that will still look; a task counts as running for a moment longer."""
        self._is_gathering = False
        """Whether a stream waits for more completions; one that begins meanwhile would only split them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses = pauses(*FAULT_SECONDS)
        self._is_closed = False
        self.handed_back = 0
        """Executions that were handed back so far."""

    def complete(self, running: Running, payload: bytes | None) -> None:
        """End a run in success, soon."""
        self._completed.append((running, payload))
        if not self._is_gathering:
            self._begin_stream()

    async def fail(self, running: Running, failure: Failure) -> None:
        """End a run's attempt in failure, and log what follows."""
        claimed = running.claimed
        answer: RetryScheduled | TerminalFailed | None = None

        async def write() -> bool:
            nonlocal answer
            answer = await self._engine.fail(
                claimed.handle, reason=failure.reason, classification=failure.classification, claimed=claimed
            )
            return True

        try:
            await self._repeat(running, write, "failure")
        finally:
            _log_failure(running, failure, answer)
            self._release(running)

    async def hand_back(self, running: Running) -> None:
        """Return up the lease of a run that was stopped, so that any worker can claim it at once.

        Nothing is handed back after `close()`: the code of a run that is left then may still run in a thread.
        """

        async def write() -> bool:
            await self._engine.hand_back(running.claimed.handle, was_started=running.has_started)
            return True

        if await self._repeat(running, write, "hand-back"):
            self.handed_back += 1
            # What was claimed ahead and has not begun may be hundreds of executions.
            level = logging.INFO if running.has_started else logging.DEBUG
            log_about(running.claimed, logger, level, "%s is handed back: any worker can claim it now", running)

    async def put_off(self, running: Running, milliseconds: int) -> bool:
        """Return up the lease of a run that cannot begin; any worker can claim it after that time."""

        async def write() -> bool:
            await self._engine.delay(running.claimed.handle, delay_ms=milliseconds)
            return True

        return await self._repeat(running, write, "delay")

    async def bring_forward(self, running: Running) -> None:
        """Make a delayed execution claimable now."""

        async def write() -> bool:
            await parts_of(self._engine).delays.bring_forward(running.claimed.handle)
            return True

        await self._repeat(running, write, "end of the delay")

    async def expire(self, running: Running, phase: ExpiryPhase) -> None:
        """End the attempt of a run that was stopped because its time is up, or its execution; log what follows."""
        answer: Expired | RetryScheduled | AlreadyTerminal | NotYetDue | None = None

        async def write() -> bool:
            # The store's clock decides, and it may be behind this process's.
            nonlocal answer
            answer = await self._engine.expire_execution(running.execution_id, phase)
            return running.lost is not None or not isinstance(answer, NotYetDue)

        is_deadline = phase is ExpiryPhase.EXECUTION_DEADLINE
        if await self._repeat(running, write, "expiry" if is_deadline else "timeout"):
            _log_expiry(running, answer)
        running.lost = running.lost or (LostReason.DEADLINE_EXPIRED if is_deadline else LostReason.ATTEMPT_TIMEOUT)

    def close(self) -> None:
        """Return up on what could not be written; from now on nothing is written or retried."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()

    async def _repeat(self, running: Running, write: Callable[[], Awaitable[bool]], what: str) -> bool:
        """Write until that is done or refused for good, or the lease has run out; whether it is done."""
        has_failed = False
        for pause in pauses(*FAULT_SECONDS):
            if self._is_closed:
                break
            asked_at = time.monotonic()
            why: Exception | str = "it is not due yet"
            try:
                is_done = await write()
            except Exception as error:
                if is_of_lost_lease(error) or is_about_values(error):
                    self._contact.answered()
                    # A call before may have been carried out without an answer: it has ended the lease then.
                    is_expected = is_cancel(error) or (has_failed and is_of_lost_lease(error))
                    level = logging.INFO if is_expected else logging.WARNING
                    log_about(running.claimed, logger, level, "%s: the %s was refused: %s", running, what, error)
                    return False
                self._contact.failed(error, asked_at)
                has_failed, why = True, error
            else:
                self._contact.answered()
                if is_done:
                    return True
            if running.is_lease_over:
                log_about(running.claimed, logger, logging.WARNING, NOT_STORED, running, what, why)
                return False
            log_about(running.claimed, logger, logging.DEBUG, "%s: the %s is retried: %s", running, what, why)
            await asyncio.sleep(pause)
        return False

    def _begin_stream(self) -> None:
        if self._streams < self.STREAMS:
            self._streams += 1
            self._is_gathering = True
            task = create_shared_task(self._write_completed())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _write_completed(self) -> None:
        try:
            while batch := await self._gather():
                if self._completed:
                    self._begin_stream()
                await self._settle(batch)
                if self._is_gathering:
                    break
        finally:
            self._streams -= 1

    async def _gather(self) -> list[_Completion]:
        """The next completions: those that end in this moment join, as long as each turn of the loop brings some."""
        self._is_gathering = True
        seen, until = 0, time.monotonic() + self.GATHER_SECONDS
        while seen < len(self._completed) < self.SIZE and time.monotonic() < until:
            seen = len(self._completed)
            await asyncio.sleep(0)
        self._is_gathering = False
        return [self._completed.popleft() for _ in range(min(self.SIZE, len(self._completed)))]

    async def _settle(self, batch: list[_Completion]) -> None:
        asked_at = time.monotonic()
        verdicts: Sequence[Completed | Exception]
        try:
            verdicts = await self._engine.complete_many(
                [(running.claimed.handle, payload) for running, payload in batch]
            )
        except Exception as error:
            if len(batch) > 1 and is_about_values(error):
                # Each is told alone: only one of them is meant.
                for one in batch:
                    await self._settle([one])
                return
            self._contact.failed(error, asked_at)
            verdicts = [error] * len(batch)
        else:
            self._contact.answered()
        again: list[_Completion] = []
        is_debug = logger.isEnabledFor(logging.DEBUG)
        for one, verdict in zip(batch, verdicts, strict=True):
            if not isinstance(verdict, Exception):
                if is_debug:
                    _log_success(one[0])
                self._release(one[0])
            elif await self._is_to_be_repeated(one[0], verdict):
                again.append(one)
        if again:
            asyncio.get_running_loop().call_later(next(self._pauses), self._complete_again, again)
        else:
            self._pauses = pauses(*FAULT_SECONDS)

    def _complete_again(self, batch: list[_Completion]) -> None:
        if not self._is_closed:
            for running, payload in batch:
                self.complete(running, payload)

    async def _is_to_be_repeated(self, running: Running, error: Exception) -> bool:
        """Whether a completion may still succeed; else the run is dealt with."""
        if is_of_lost_lease(error):
            level = logging.INFO if is_cancel(error) else logging.WARNING
            log_about(running.claimed, logger, level, "%s: the result was refused: %s", running, error)
        elif is_about_values(error):
            await self.fail(running, Failure(FailureReason(f"the result was refused: {error}", detail=RESULT_REFUSED)))
            return False
        elif running.is_lease_over:
            log_about(running.claimed, logger, logging.WARNING, NOT_STORED, running, "result", error)
        else:
            text = "%s: storing the result failed and is retried: %s"
            log_about(running.claimed, logger, level_of_retry(error), text, running, error)
            return True
        self._release(running)
        return False


def _log_failure(running: Running, failure: Failure, answer: RetryScheduled | TerminalFailed | None) -> None:
    """Log a failed attempt with what the store has answered, if it has."""
    level = logging.WARNING
    match answer:
        case RetryScheduled(delay_until=delay_until):
            follows = f" and is retried at {_shown_time(delay_until)}"
        case TerminalFailed():
            level, follows = logging.ERROR, " for good"
        case None:
            follows = ""
    text = "%s failed in attempt %d%s: %s"
    log_about(
        running.claimed,
        logger,
        level,
        text,
        running,
        running.attempt,
        follows,
        failure.reason.message,
        error=failure.error,
    )


def _log_expiry(running: Running, answer: Expired | RetryScheduled | AlreadyTerminal | NotYetDue | None) -> None:
    """Log what follows on a run whose time was up, which is logged by then."""
    match answer:
        case RetryScheduled(delay_until=delay_until):
            retry_at = _shown_time(delay_until)
            log_about(running.claimed, logger, logging.INFO, "%s is retried at %s", running, retry_at)
        case Expired():
            log_about(running.claimed, logger, logging.ERROR, "%s has expired for good", running)


def _log_success(running: Running) -> None:
    seconds = running.ended_at - running.claimed_at
    text = "%s succeeded in attempt %d, %.3f s after its claim"
    log_about(running.claimed, logger, logging.DEBUG, text, running, running.attempt, seconds)


def _shown_time(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(" ", "milliseconds")
    except (OverflowError, ValueError, OSError):
        # After the year 9999.
        return f"{milliseconds} ms since the epoch"
