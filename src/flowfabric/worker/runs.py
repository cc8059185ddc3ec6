"""The runs of a worker: how each one starts, ends, or is stopped."""

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from flowfabric.engine.core.wakeups import LostLease, LostReason
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.states import HandleKind
from flowfabric.worker import presence
from flowfabric.worker.faults import StoreHealth, is_expiry, loss_log_level, loss_text
from flowfabric.worker.handler import Handler
from flowfabric.worker.log_lines import log_expired, log_run_start, log_stop
from flowfabric.worker.logs import current_run
from flowfabric.worker.outcome import Dropped, Failure, Outcome, Postponed, Success, outcome_of
from flowfabric.worker.reports import Reports
from flowfabric.worker.running import Running
from flowfabric.worker.slots import Slots
from flowfabric.worker.streaming import FLUSH_SECONDS, STOPPED_FLUSH_SECONDS, FrameQueue
from flowfabric.worker.threads import Threads
from flowfabric.worker.timeouts import TimeLimits

logger = logging.getLogger(__name__)

EARLIER_SECONDS = 10.0
"""The longest time a run waits for an earlier run of its execution to return."""
POSTPONE_MS = 5000
"""The delay of an execution whose earlier run has not returned; it ends early when that run returns."""


class Runs:
    """Runs claimed executions with their handlers and reports how they ended.

    Two runs of the same execution never overlap in one process: the next one begins when the earlier has returned. If
    the earlier one does not return soon, the execution is postponed and left to other workers.
    """

    def __init__(
        self, engine: Engine, handlers: Mapping[str, Handler], *, concurrency: int, threads: int, health: StoreHealth
    ) -> None:
        self._engine = engine
        self._store_key = parts_of(engine).store_key
        self._handlers = handlers
        self.slots = Slots(concurrency, self._begin, health)
        self.reports = Reports(engine, self._release, health)
        self._limits = TimeLimits(self.reports)
        self._threads = Threads(threads)
        self._postponed: set[asyncio.Task[None]] = set()
        """The tasks of postponed runs, which wait for the earlier runs to return."""
        self._context: contextvars.Context

    def capture_context(self) -> None:
        """Let handlers see the context variables of the caller, as they are now."""
        self._context = contextvars.copy_context()

    def start(self, claimed: Sequence[ClaimedExecution], asked_at: float, *, hands_back: bool) -> None:
        """Run executions that were just claimed, or hand all of them back because the worker is stopping."""
        loop = asyncio.get_running_loop()
        for one in claimed:
            running = Running(one, asked_at, loop)
            self.slots.held.add(running)
            if (earlier := presence.enter(self._store_key, running)) is not None:
                self._follow(running, earlier)
            if hands_back:
                running.is_dropped = running.is_handed_back = True
            self.slots.enter(running)
            if one.attempt_timeout_ms is not None or one.execution_deadline_at is not None:
                self._limits.begin(running)

    def lose(self, running: Running) -> None:
        """Stop a handler whose lease is lost; if it has returned or is suspending, the store refuses its report."""
        running.lost = running.lost or LostReason.RECLAIMED
        if not running.has_ended and not running.is_suspending and not running.is_dropped:
            log_stop(running, loss_log_level(running.lost), loss_text(running.lost))
            if is_expiry(running.lost):
                log_expired(running)
            running.stop()

    def lose_leases(self, leases: Iterable[LostLease]) -> None:
        """Stop the runs that hold these leases; one that is suspending is left to the heartbeat."""
        for execution_id, lease_epoch, reason in leases:
            running = presence.latest(self._store_key, execution_id)
            if running is None or running not in self.slots.held or running.is_suspending:
                continue
            if running.claimed.lease_epoch == lease_epoch:
                running.lost = running.lost or reason
                self.lose(running)

    def hand_back_unstarted(self) -> None:
        """Hand back the runs that wait for an earlier run of their execution."""
        for running in self.slots.held:
            if running.earlier is not None:
                self._hand_back(running)

    def hand_back_all(self) -> None:
        """Cancel every handler that has not returned, and hand back its lease when it does."""
        for running in list(self.slots.held):
            self._hand_back(running)

    def close(self) -> None:
        """Write nothing more, and start no function that waits for a thread."""
        self.reports.close()
        self._threads.close()
        for task in self._postponed:
            task.cancel()

    def abandon_unwritten(self) -> None:
        """Give up on runs whose handler has returned and whose end could not be written."""
        for running in self.slots.held:
            if running.has_ended and running.task is not None:
                running.task.cancel()

    def _begin(self, running: Running) -> None:
        # Not asyncio.create_task, which asks the system for the process id to find the loop. Not in the context of
        # the caller, which may be another run that has ended and freed its slot.
        running.task = running.loop.create_task(self._run(running), context=self._context.copy())

    def _follow(self, running: Running, earlier: Running) -> None:
        """Make a run wait for the earlier one, whose lease is lost."""
        running.earlier = earlier
        if earlier.loop is asyncio.get_running_loop():
            self.lose(earlier)
        else:
            with contextlib.suppress(RuntimeError):
                earlier.loop.call_soon_threadsafe(self.lose, earlier)

    async def _run(self, running: Running) -> None:
        outcome: Outcome = Dropped()
        claimed = running.claimed
        current_run.set(claimed)
        if not running.is_dropped:
            running.has_started = True
            handler = self._handlers[claimed.execution_kind]
            if claimed.handle.kind is HandleKind.RECLAIMED or logger.isEnabledFor(logging.DEBUG):
                log_run_start(running)
            if running.earlier is None:
                outcome = await outcome_of(running, handler, self._engine, self._threads)
            else:
                outcome = await self._outcome_after_earlier(running, handler)
            if running.frames is not None:
                outcome = await _close_frames(running, running.frames, outcome)
        running.has_ended = True
        running.ended_at = time.monotonic()
        self.slots.returned(running)
        if running.timer is not None:
            running.timer.cancel()
        match outcome:
            case Success(payload):
                self.reports.complete(running, payload)
            case Failure() as failure:
                await self.reports.fail(running, failure)
            case Postponed():
                is_postponed = False
                try:
                    is_postponed = await self.reports.postpone(running, POSTPONE_MS)
                finally:
                    self._release(running)
                if is_postponed:
                    await self._bring_forward(running)
            case Dropped():
                try:
                    if running.expiry is not None:
                        await running.expiry
                    elif running.is_handed_back:
                        await self.reports.hand_back(running)
                    elif running.is_suspended:
                        logger.debug("%s is suspended in attempt %d", running, running.attempt)
                finally:
                    self._release(running)

    async def _outcome_after_earlier(self, running: Running, handler: Handler) -> Outcome:
        try:
            async with asyncio.timeout(_seconds_for_earlier(running)):
                await presence.wait_for_earlier(running)
        except asyncio.CancelledError:
            return Dropped()
        except TimeoutError:
            if (earlier := running.earlier) is not None:
                level = logging.INFO if earlier.is_stuck else logging.WARNING
                text = "%s is delayed by %g s: an earlier run of it in this process does not return"
                logger.log(level, text, running, POSTPONE_MS / 1000)
                earlier.is_stuck = True
                return Postponed()
        return await outcome_of(running, handler, self._engine, self._threads)

    async def _bring_forward(self, running: Running) -> None:
        """Make a postponed execution claimable as soon as its earlier run has returned."""
        assert running.task is not None
        self._postponed.add(running.task)
        try:
            async with asyncio.timeout(POSTPONE_MS / 1000):
                await presence.wait_for_earlier(running)
            await self.reports.bring_forward(running)
        except TimeoutError:
            pass
        finally:
            self._postponed.discard(running.task)

    def _release(self, running: Running) -> None:
        self.slots.release(running)
        presence.leave(self._store_key, running)

    def _hand_back(self, running: Running) -> None:
        if not running.has_ended and not running.is_dropped:
            running.is_handed_back = True
            running.stop()


async def _close_frames(running: Running, frames: FrameQueue, outcome: Outcome) -> Outcome:
    """Store the frames of a run before its end is; return its outcome, which is Dropped if it is stopped meanwhile."""
    try:
        if not running.is_dropped:
            try:
                await frames.wait_stored(FLUSH_SECONDS)
            except asyncio.CancelledError:
                outcome = Dropped()
        if running.is_dropped:
            await frames.wait_stored(STOPPED_FLUSH_SECONDS)
    finally:
        frames.close()
    return outcome


def _seconds_for_earlier(running: Running) -> float:
    """Return how long a run waits for an earlier one: not at all if another run has already waited for it."""
    if running.earlier is not None and running.earlier.is_stuck:
        return 0.0
    timeout_ms = running.claimed.attempt_timeout_ms
    return EARLIER_SECONDS if timeout_ms is None else min(EARLIER_SECONDS, timeout_ms / 2000)
