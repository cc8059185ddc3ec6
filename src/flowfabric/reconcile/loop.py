"""The background loop: find out what is due, run the sweeps that have work, sleep until more is due."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from flowfabric.engine.core.quarantine import pause_after
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import TransportError
from flowfabric.pauses import is_set_within, pauses
from flowfabric.reconcile.due import Due, read_due
from flowfabric.reconcile.sweeps import SWEEPS, Sweep

logger = logging.getLogger(__name__)


OnTick = Callable[[Exception | None, float], None]
"""Called after each tick with the store fault it met, or None, and its start by the monotonic clock."""


@dataclass(kw_only=True, slots=True)
class SweepStats:
    """What one sweep has done in this process."""

    cycles: int = 0
    processed: int = 0
    errors: int = 0
    seconds: float = 0.0
    last_error: str | None = None
    due_since: float | None = None

    @property
    def lag_seconds(self) -> float:
        """How long work has been waiting for this sweep, as seen by this process."""
        return 0.0 if self.due_since is None else time.monotonic() - self.due_since


class _ScheduledSweep:
    """A sweep and when it runs next."""

    __slots__ = ("behind_since", "every", "failures", "not_before", "stats", "sweep")

    def __init__(self, sweep: Sweep, every: float) -> None:
        self.sweep = sweep
        self.every = every
        self.stats = SweepStats()
        self.not_before = 0.0
        self.behind_since: float | None = None
        """The start of the first batch of the current run of full batches."""
        self.failures = 0

    @property
    def is_behind(self) -> bool:
        """Whether its last batch was full, so that another follows."""
        return self.behind_since is not None


class Reconciler:
    """Runs due sweeps while its `async with` block is active; any number of processes may run one on the same store.

    A sweep that fails is logged, counted and retried; after three failures in a row it is skipped for ten of its
    intervals. If the store is unreachable, the loop retries with growing pauses.
    """

    IDLE_SECONDS = 2.0
    """The pause when nothing is due. `read_due` sees timers at least this far ahead."""
    MIN_PAUSE_SECONDS = 0.02
    READ_SHARE = 10
    """The minimum time between two calls of `read_due` while batches are full, as a multiple of the call's duration."""
    GENTLE_SECONDS = 10.0
    """How long a gentle sweep pauses between full batches before it stops pausing."""
    FAULT_SECONDS = (0.2, 5.0)
    RESTART_SECONDS = 5.0
    SHUTDOWN_SECONDS = 3.0

    def __init__(self, engine: Engine, *, sweeps: Sequence[Sweep] = SWEEPS, on_tick: OnTick | None = None) -> None:
        self._parts = parts_of(engine)
        self._on_tick = on_tick or self._log_outage
        self._outage_since: float | None = None
        self._sweeps = [_ScheduledSweep(sweep, sweep.every(engine.settings).total_seconds()) for sweep in sweeps]
        timed = [scheduled.every for scheduled in self._sweeps if scheduled.sweep.is_woken_by_timers]
        self._shortest = min([self.IDLE_SECONDS, *timed])
        self._next_read_at = 0.0
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def stats(self) -> Mapping[str, SweepStats]:
        """The statistics of each sweep, by name."""
        return MappingProxyType({scheduled.sweep.name: scheduled.stats for scheduled in self._sweeps})

    async def _read_due(self) -> Due:
        parts = self._parts
        sweeps = (parts.lease_expiry, parts.delays, parts.timeouts, parts.suspension_timeouts)
        return await read_due(parts.store, [sweep.quarantine for sweep in sweeps])

    async def __aenter__(self) -> Self:
        """Start the loop and wait for its first tick, which creates the event partitions."""
        first = asyncio.Event()
        self._task = asyncio.create_task(self._run_forever(first), name="reconciler")
        try:
            await first.wait()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop after the running sweep, at the latest after SHUTDOWN_SECONDS."""
        await self.stop()

    async def stop(self) -> None:
        """Stop after the running sweep, at the latest after SHUTDOWN_SECONDS; uncommitted work is rolled back."""
        self._is_stopping = True
        self._parts.catch_up.is_left_to_sweeps = False
        self._parts.wakeups.timer_event.set()
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait({task}, timeout=self.SHUTDOWN_SECONDS)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def catch_up(self) -> int:
        """Process everything that is due now, regardless of intervals; return the number of items."""
        total = 0
        while True:
            due = await self._read_due()
            processed, is_behind = 0, False
            for scheduled in self._sweeps:
                if scheduled.sweep.is_due(due):
                    processed += await self._run(scheduled)
                    is_behind = is_behind or scheduled.is_behind
            if not processed and not is_behind:
                return total
            total += processed

    async def _run_forever(self, first: asyncio.Event) -> None:
        while not self._is_stopping:
            try:
                await self._run_ticks(first)
            except Exception:
                logger.exception("the reconciler failed and restarts in %s s", self.RESTART_SECONDS)
                self._parts.catch_up.is_left_to_sweeps = False
                first.set()
                await self._wait(self.RESTART_SECONDS)

    async def _run_ticks(self, first: asyncio.Event) -> None:
        faults = pauses(*self.FAULT_SECONDS)
        while not self._is_stopping:
            began = time.monotonic()
            try:
                pause = await self._tick()
                self._on_tick(None, began)
                faults = pauses(*self.FAULT_SECONDS)
            except TransportError as fault:
                self._on_tick(fault, began)
                logger.debug("the reconciler tries again: %s", fault)
                self._parts.catch_up.is_left_to_sweeps = False
                pause = next(faults)
            first.set()
            await self._wait(pause)

    def _log_outage(self, fault: Exception | None, began: float) -> None:
        if fault is not None and self._outage_since is None:
            self._outage_since = began
            logger.warning("the reconciler cannot reach the store and retries: %s", fault)
        elif fault is None and self._outage_since is not None:
            seconds = time.monotonic() - self._outage_since
            logger.warning("the reconciler reached the store again after %.1f s", seconds)
            self._outage_since = None

    async def _tick(self) -> float:
        """Read what is due and run one batch of each due sweep; return the pause until the next tick."""
        wakeups = self._parts.wakeups
        now = time.monotonic()
        behind = [scheduled for scheduled in self._sweeps if scheduled.is_behind and now >= scheduled.not_before]
        if behind and now < min(self._next_read_at, wakeups.next_timer):
            return self._pause(sum([await self._run_safely(scheduled) for scheduled in behind]), None)
        # The read below sees timers set before this point; timers set after it shorten the pause.
        wakeups.next_timer = float("inf")
        wakeups.timer_event.clear()
        due = await self._read_due()
        ended = time.monotonic()
        self._next_read_at = ended + min(self._shortest, self.READ_SHARE * (ended - now))
        processed = 0
        for scheduled in self._sweeps:
            if not scheduled.sweep.is_due(due):
                scheduled.behind_since = None
                scheduled.stats.due_since = None
            elif time.monotonic() >= scheduled.not_before and not self._is_stopping:
                processed += await self._run_safely(scheduled)
            elif scheduled.stats.due_since is None:
                scheduled.stats.due_since = time.monotonic()
        self._parts.catch_up.is_left_to_sweeps = not self._is_stopping and all(
            scheduled.failures == 0 for scheduled in self._sweeps if scheduled.sweep.is_woken_by_timers
        )
        return self._pause(processed, due.next_due_in_ms)

    def _pause(self, processed: int, next_due_in_ms: int | None) -> float:
        # While timers are due, other processes are likely to set more.
        pause = self._shortest if processed else self.IDLE_SECONDS
        if next_due_in_ms is not None:
            pause = min(self._shortest, next_due_in_ms / 1000)
        now = time.monotonic()
        return max(
            self.MIN_PAUSE_SECONDS, min([pause, *(each.not_before - now for each in self._sweeps if each.is_behind)])
        )

    async def _run_safely(self, scheduled: _ScheduledSweep) -> int:
        """Run one batch and count an error; raise it only if the store is unreachable."""
        try:
            return await self._run(scheduled)
        except Exception as error:
            scheduled.behind_since = None
            scheduled.failures += 1
            scheduled.stats.errors += 1
            scheduled.stats.last_error = str(error)
            scheduled.not_before = time.monotonic() + pause_after(scheduled.failures, scheduled.every)
            if isinstance(error, TransportError) and error.retryable:
                raise
            pause = scheduled.not_before - time.monotonic()
            text = "sweep %s failed and is retried in %.1f s (failure %d in a row): %s"
            logger.warning(
                text, scheduled.sweep.name, pause, scheduled.failures, error, exc_info=scheduled.failures == 1
            )
            return 0

    async def _run(self, scheduled: _ScheduledSweep) -> int:
        began = time.monotonic()
        stats = scheduled.stats
        if stats.due_since is None:
            stats.due_since = began
        processed, is_full, _ = await scheduled.sweep.run_batch(self._parts)
        ended = time.monotonic()
        scheduled.failures = 0
        if is_full:
            scheduled.behind_since = began if scheduled.behind_since is None else scheduled.behind_since
            is_pausing = scheduled.sweep.is_gentle and ended - scheduled.behind_since < self.GENTLE_SECONDS
            scheduled.not_before = ended + (ended - began if is_pausing else 0.0)
        else:
            scheduled.behind_since = None
            stats.due_since = None
            scheduled.not_before = 0.0 if scheduled.sweep.is_woken_by_timers else ended + scheduled.every
        stats.cycles += 1
        stats.processed += processed
        stats.seconds += ended - began
        return processed

    async def _wait(self, seconds: float) -> None:
        """Sleep; wake up early for a timer of this process or to stop."""
        wakeups = self._parts.wakeups
        now = time.monotonic()
        least, until = now + self.MIN_PAUSE_SECONDS, now + seconds
        while not self._is_stopping:
            left = min(until, max(least, wakeups.next_timer)) - time.monotonic()
            if left <= 0:
                return
            await is_set_within(wakeups.timer_event, left)
            wakeups.timer_event.clear()
