"""Reports to the store of how runs ended; completions that arrive together share one statement."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from flowfabric.engine.core.wakeups import LostReason
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.expire import ExpiryPhase
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import FailureReason
from flowfabric.model.errors import EngineError
from flowfabric.model.lease import AlreadyTerminal, Completed, Expired, NotYetDue, RetryScheduled, TerminalFailed
from flowfabric.model.states import PublicState
from flowfabric.model.text import shown_time
from flowfabric.pauses import pauses
from flowfabric.tasks import create_shared_task
from flowfabric.worker.faults import (
    RETRY_SECONDS,
    StoreHealth,
    is_bad_input,
    is_cancel,
    is_expiry,
    is_lease_lost,
    retry_log_level,
)
from flowfabric.worker.log_lines import log_expired
from flowfabric.worker.logs import log_about
from flowfabric.worker.outcome import Failure
from flowfabric.worker.running import Running

logger = logging.getLogger(__name__)

RESULT_REFUSED = "result_refused"
NOT_STORED = "%s: the %s was not stored before the lease expired: %s"

_Completion = tuple[Running, bytes | None]


class Reports:
    """Writes how runs ended, and releases each run once that is committed.

    A run fails only if the store refuses its result. After any other error the write is retried, which is safe, until
    it is answered or the lease has expired.
    """

    SIZE = 300
    """The most completions in one statement."""
    STREAMS = 2
    """How many statements run at the same time."""
    GATHER_SECONDS = 0.005
    """How long a statement waits for more completions while they keep arriving."""

    def __init__(self, engine: Engine, release: Callable[[Running], None], health: StoreHealth | None = None) -> None:
        self._engine = engine
        self._release = release
        self._health = health or StoreHealth()
        self._completed: deque[_Completion] = deque()
        self._streams = 0
        """The number of streams that will still write completions."""
        self._is_gathering = False
        """Whether a stream is gathering completions; a second one would only split them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses = pauses(*RETRY_SECONDS)
        self._is_closed = False
        self.handed_back = 0
        """How many executions were handed back so far."""

    def complete(self, running: Running, payload: bytes | None) -> None:
        """Queue the success of a run to be written with the next batch."""
        self._completed.append((running, payload))
        if not self._is_gathering:
            self._begin_stream()

    async def fail(self, running: Running, failure: Failure) -> None:
        """Write that an attempt failed, and log whether it is retried."""
        claimed = running.claimed
        answer: RetryScheduled | TerminalFailed | None = None

        async def write() -> bool:
            nonlocal answer
            answer = await self._engine.fail(
                claimed.handle, reason=failure.reason, classification=failure.classification, claimed=claimed
            )
            return True

        try:
            await self._write(running, write, "failure")
        finally:
            try:
                _log_failure(running, failure, answer)
            finally:
                # Also if a handler of the log raises: a run that is not released occupies its worker for good.
                self._release(running)

    async def hand_back(self, running: Running) -> None:
        """Release the lease of a stopped run, so that any worker can claim the execution at once.

        After `close()` nothing is handed back: the handlers of the remaining runs may still run in threads.
        """

        async def write() -> bool:
            await self._engine.hand_back(running.claimed.handle, was_started=running.has_started)
            return True

        if await self._write(running, write, "hand-back"):
            self.handed_back += 1
            # Executions that were claimed ahead and have not started can be hundreds.
            level = logging.INFO if running.has_started else logging.DEBUG
            log_about(running.claimed, logger, level, "%s is handed back: any worker can claim it now", running)

    async def postpone(self, running: Running, milliseconds: int) -> bool:
        """Release the lease of a run that cannot start; any worker can claim it after the delay."""

        async def write() -> bool:
            await self._engine.delay(running.claimed.handle, delay_ms=milliseconds)
            return True

        return await self._write(running, write, "delay")

    async def bring_forward(self, running: Running) -> None:
        """Make a delayed execution claimable now."""

        async def write() -> bool:
            await parts_of(self._engine).delays.bring_forward(running.claimed.handle)
            return True

        await self._write(running, write, "end of the delay")

    async def expire(self, running: Running, phase: ExpiryPhase) -> None:
        """End the attempt or the execution of a run that exceeded its time, and log what follows."""
        answer: Expired | RetryScheduled | AlreadyTerminal | NotYetDue | None = None

        async def write() -> bool:
            # The clock of the store decides, and it may be behind the clock of this process.
            nonlocal answer
            answer = await self._engine.expire_execution(running.execution_id, phase)
            if isinstance(answer, AlreadyTerminal) and await self._has_expired(running):
                # A sweep was faster.
                answer = Expired(execution_id=running.execution_id)
            return running.lost is not None or not isinstance(answer, NotYetDue)

        is_deadline = phase is ExpiryPhase.EXECUTION_DEADLINE
        if await self._write(running, write, "expiry" if is_deadline else "timeout"):
            _log_expiry(running, answer)
        running.lost = running.lost or (LostReason.DEADLINE_EXPIRED if is_deadline else LostReason.ATTEMPT_TIMEOUT)

    async def _has_expired(self, running: Running) -> bool:
        info = await self._engine.read_execution_info(running.execution_id)
        return info is not None and info.public_state is PublicState.EXPIRED

    def close(self) -> None:
        """Give up on what is not written yet; from now on nothing is written or retried."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()

    async def _write(self, running: Running, write: Callable[[], Awaitable[bool]], what: str) -> bool:
        """Write, with retries until it is done or refused or the lease has expired; return whether it is done."""
        has_failed = False
        for pause in pauses(*RETRY_SECONDS):
            if self._is_closed:
                break
            asked_at = time.monotonic()
            why: Exception | str = "it is not due yet"
            try:
                is_done = await write()
            except Exception as error:
                if is_lease_lost(error) or is_bad_input(error):
                    self._health.answered()
                    # An earlier try may have taken effect without an answer, which ended the lease.
                    is_expected = is_cancel(error) or (has_failed and is_lease_lost(error))
                    level = logging.INFO if is_expected else logging.WARNING
                    log_about(running.claimed, logger, level, "%s: the %s was refused: %s", running, what, error)
                    if is_expiry(error):
                        log_expired(running)
                    return False
                self._health.failed(error, asked_at)
                has_failed, why = True, error
            else:
                self._health.answered()
                if is_done:
                    return True
            if running.is_lease_expired:
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
                await self._write_batch(batch)
                if self._is_gathering:
                    break
        finally:
            self._streams -= 1

    async def _gather(self) -> list[_Completion]:
        """Return the next batch; wait for more completions while every turn of the event loop brings some."""
        self._is_gathering = True
        seen, until = 0, time.monotonic() + self.GATHER_SECONDS
        while seen < len(self._completed) < self.SIZE and time.monotonic() < until:
            seen = len(self._completed)
            await asyncio.sleep(0)
        self._is_gathering = False
        return [self._completed.popleft() for _ in range(min(self.SIZE, len(self._completed)))]

    async def _write_batch(self, batch: list[_Completion]) -> None:
        asked_at = time.monotonic()
        verdicts: Sequence[Completed | Exception]
        try:
            verdicts = await self._engine.complete_many(
                [(running.claimed.handle, payload) for running, payload in batch]
            )
        except Exception as error:
            if len(batch) > 1 and is_bad_input(error):
                # One of them is at fault: write each alone.
                for one in batch:
                    await self._write_batch([one])
                return
            self._health.failed(error, asked_at)
            verdicts = [error] * len(batch)
        else:
            self._health.answered()
        retried: list[_Completion] = []
        is_debug = logger.isEnabledFor(logging.DEBUG)
        for one, verdict in zip(batch, verdicts, strict=True):
            if not isinstance(verdict, Exception):
                if is_debug:
                    _log_success(one[0])
                self._release(one[0])
            elif await self._should_retry(one[0], verdict):
                retried.append(one)
        if retried:
            asyncio.get_running_loop().call_later(next(self._pauses), self._complete_again, retried)
        else:
            self._pauses = pauses(*RETRY_SECONDS)

    def _complete_again(self, batch: list[_Completion]) -> None:
        if not self._is_closed:
            for running, payload in batch:
                self.complete(running, payload)

    async def _should_retry(self, running: Running, error: Exception) -> bool:
        """Return whether to retry a completion; if not, fail or release its run."""
        if is_lease_lost(error):
            level = logging.INFO if is_cancel(error) else logging.WARNING
            log_about(running.claimed, logger, level, "%s: the result was refused: %s", running, error)
            if is_expiry(error):
                log_expired(running)
        elif is_bad_input(error):
            await self.fail(running, Failure(FailureReason(f"the result was refused: {error}", detail=RESULT_REFUSED)))
            return False
        elif running.is_lease_expired:
            log_about(running.claimed, logger, logging.WARNING, NOT_STORED, running, "result", error)
        else:
            text = "%s: storing the result failed and is retried: %s"
            log_about(running.claimed, logger, retry_log_level(error), text, running, error)
            return True
        self._release(running)
        return False


def _log_failure(running: Running, failure: Failure, answer: RetryScheduled | TerminalFailed | None) -> None:
    """Log a failed attempt and what the store has answered, if anything."""
    if answer is None and isinstance(failure.error, EngineError) and is_lease_lost(failure.error):
        # A call of the handler was refused because the lease is over, which is already logged.
        return
    level = logging.WARNING
    match answer:
        case RetryScheduled(delay_until=delay_until):
            follows = f" and is retried at {shown_time(delay_until)}"
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
    """Log what follows for a run that was stopped because its time was up."""
    match answer:
        case RetryScheduled(delay_until=delay_until):
            retry_at = shown_time(delay_until)
            log_about(running.claimed, logger, logging.INFO, "%s is retried at %s", running, retry_at)
        case Expired():
            log_expired(running)


def _log_success(running: Running) -> None:
    seconds = running.ended_at - running.claimed_at
    text = "%s succeeded in attempt %d, %.3f s after its claim"
    log_about(running.claimed, logger, logging.DEBUG, text, running, running.attempt, seconds)
