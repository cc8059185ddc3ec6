"""The loop of the sweeps: asks once what is due, runs those that have work, and sleeps until more is due."""

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
"""Takes the fault of the store that a tick met, or None, and when the tick began by the monotonic clock."""


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
        """For how long something has been waiting for this sweep, as far as this process has seen."""
        return 0.0 if self.due_since is None else time.monotonic() - self.due_since


class _Duty:
    """A sweep with its place in time."""

    __slots__ = ("behind_since", "every", "failures", "not_before", "stats", "sweep")

    def __init__(self, sweep: Sweep, every: float) -> None:
        self.sweep = sweep
        self.every = every
        self.stats = SweepStats()
        self.not_before = 0.0
        self.behind_since: float | None = None
        """When its first full batch of several in a row began."""
        self.failures = 0

    @property
    def is_behind(self) -> bool:
        """Whether another batch follows its last one."""
        return self.behind_since is not None


class Reconciler:
    """Does what is due while its block runs; any number of processes may run one on the same store.

    A sweep that fails is logged, counted and tried again; after three failures in a row it is left alone for ten of
    its intervals. A store that cannot be reached is asked again after a growing pause.
    """

    IDLE_SECONDS = 2.0
    """The pause of a loop that has nothing to do and sees no timer near: a look sees the timers of as long ahead."""
    LEAST_SECONDS = 0.02
    LOOK_SHARE = 10
    """The least time between two looks while batches are full, as a multiple of what a look takes."""
    GENTLE_SECONDS = 10.0
    """How long full batches of a gentle sweep may follow each other before it rests no more."""
    FAULT_SECONDS = (0.2, 5.0)
    RESTART_SECONDS = 5.0
    SHUTDOWN_SECONDS = 3.0

    def __init__(self, engine: Engine, *, sweeps: Sequence[Sweep] = SWEEPS, on_tick: OnTick | None = None) -> None:
        self._parts = parts_of(engine)
        self._on_tick = on_tick or self._log_outage
        self._outage_since: float | None = None
        self._duties = [_Duty(sweep, sweep.every(engine.settings).total_seconds()) for sweep in sweeps]
        timed = [duty.every for duty in self._duties if duty.sweep.is_woken_by_timers]
        self._shortest = min([self.IDLE_SECONDS, *timed])
        self._look_at = 0.0
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def stats(self) -> Mapping[str, SweepStats]:
        """What each sweep has done so far, by its name."""
        return MappingProxyType({duty.sweep.name: duty.stats for duty in self._duties})

    async def _read_due(self) -> Due:
        parts = self._parts
        sweeps = (parts.lease_expiry, parts.delays, parts.timeouts, parts.suspension_timeouts)
        return await read_due(parts.store, [sweep.quarantine for sweep in sweeps])

    async def __aenter__(self) -> Self:
        """Begin; the partitions that events are written to are there when this returns."""
        first = asyncio.Event()
        self._task = asyncio.create_task(self._keep_going(first), name="reconciler")
        try:
            await first.wait()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop after the sweep under way, at the latest after three seconds."""
        await self.stop()

    async def stop(self) -> None:
        """Stop after the sweep under way, at the latest after three seconds; what it has not committed is undone."""
        self._is_stopping = True
        self._parts.catch_up.is_swept = False
        self._parts.wakeups.timer_event.set()
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait({task}, timeout=self.SHUTDOWN_SECONDS)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def catch_up(self) -> int:
        """Do all that is due by now, whatever the intervals; answers how many items there were."""
        total = 0
        while True:
            due = await self._read_due()
            processed, is_behind = 0, False
            for duty in self._duties:
                if duty.sweep.is_due(due):
                    processed += await self._run(duty)
                    is_behind = is_behind or duty.is_behind
            if not processed and not is_behind:
                return total
            total += processed

    async def _keep_going(self, first: asyncio.Event) -> None:
        while not self._is_stopping:
            try:
                await self._go(first)
            except Exception:
                logger.exception("the reconciler failed and starts again in %s s", self.RESTART_SECONDS)
                self._parts.catch_up.is_swept = False
                first.set()
                await self._wait(self.RESTART_SECONDS)

    async def _go(self, first: asyncio.Event) -> None:
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
                self._parts.catch_up.is_swept = False
                pause = next(faults)
            first.set()
            await self._wait(pause)

    def _log_outage(self, fault: Exception | None, began: float) -> None:
        if fault is not None and self._outage_since is None:
            self._outage_since = began
            logger.warning("the store is unavailable to the reconciler, which tries again: %s", fault)
        elif fault is None and self._outage_since is not None:
            seconds = time.monotonic() - self._outage_since
            logger.warning("the store is available to the reconciler again after %.1f s", seconds)
            self._outage_since = None

    async def _tick(self) -> float:
        """One look and one batch of everything that is due; answers the pause until the next tick."""
        wakeups = self._parts.wakeups
        now = time.monotonic()
        behind = [duty for duty in self._duties if duty.is_behind and now >= duty.not_before]
        if behind and now < min(self._look_at, wakeups.next_timer):
            return self._pause(sum([await self._try(duty) for duty in behind]), None)
        # A timer set before this is in what is read now; one set from now on shortens the pause.
        wakeups.next_timer = float("inf")
        wakeups.timer_event.clear()
        due = await self._read_due()
        ended = time.monotonic()
        self._look_at = ended + min(self._shortest, self.LOOK_SHARE * (ended - now))
        processed = 0
        for duty in self._duties:
            if not duty.sweep.is_due(due):
                duty.behind_since = None
                duty.stats.due_since = None
            elif time.monotonic() >= duty.not_before and not self._is_stopping:
                processed += await self._try(duty)
            elif duty.stats.due_since is None:
                duty.stats.due_since = time.monotonic()
        self._parts.catch_up.is_swept = not self._is_stopping and all(
            duty.failures == 0 for duty in self._duties if duty.sweep.is_woken_by_timers
        )
        return self._pause(processed, due.next_due_in_ms)

    def _pause(self, processed: int, next_due_in_ms: int | None) -> float:
        # Where timers run out, others are likely that another process sets meanwhile.
        pause = self._shortest if processed else self.IDLE_SECONDS
        if next_due_in_ms is not None:
            pause = min(self._shortest, next_due_in_ms / 1000)
        now = time.monotonic()
        return max(self.LEAST_SECONDS, min([pause, *(d.not_before - now for d in self._duties if d.is_behind)]))

    async def _try(self, duty: _Duty) -> int:
        """Run one batch; an error is counted, and raised only when it is the store that is out of reach."""
        try:
            return await self._run(duty)
        except Exception as error:
            duty.behind_since = None
            duty.failures += 1
            duty.stats.errors += 1
            duty.stats.last_error = str(error)
            duty.not_before = time.monotonic() + pause_after(duty.failures, duty.every)
            if isinstance(error, TransportError) and error.retryable:
                raise
            pause = duty.not_before - time.monotonic()
            text = "sweep %s failed and is tried again in %.1f s (failure %d in a row): %s"
            logger.warning(text, duty.sweep.name, pause, duty.failures, error, exc_info=duty.failures == 1)
            return 0

    async def _run(self, duty: _Duty) -> int:
        began = time.monotonic()
        stats = duty.stats
        if stats.due_since is None:
            stats.due_since = began
        processed, is_full, _ = await duty.sweep.run_batch(self._parts)
        ended = time.monotonic()
        duty.failures = 0
        if is_full:
            duty.behind_since = began if duty.behind_since is None else duty.behind_since
            rests = duty.sweep.is_gentle and ended - duty.behind_since < self.GENTLE_SECONDS
            duty.not_before = ended + (ended - began if rests else 0.0)
        else:
            duty.behind_since = None
            stats.due_since = None
            duty.not_before = 0.0 if duty.sweep.is_woken_by_timers else ended + duty.every
        stats.cycles += 1
        stats.processed += processed
        stats.seconds += ended - began
        return processed

    async def _wait(self, seconds: float) -> None:
        """Sleep so long, less when a timer of this process runs out sooner or the loop is to stop."""
        wakeups = self._parts.wakeups
        now = time.monotonic()
        least, until = now + self.LEAST_SECONDS, now + seconds
        while not self._is_stopping:
            left = min(until, max(least, wakeups.next_timer)) - time.monotonic()
            if left <= 0:
                return
            await is_set_within(wakeups.timer_event, left)
            wakeups.timer_event.clear()
