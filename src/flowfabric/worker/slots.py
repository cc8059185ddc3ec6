"""The slots of a worker: how many executions it holds, which of them run, and which wait for a slot."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from flowfabric.worker.ahead import Ahead
from flowfabric.worker.faults import StoreHealth
from flowfabric.worker.logs import log_about
from flowfabric.worker.running import Running

logger = logging.getLogger(__name__)

CLAIM_SIZE = 500
"""The largest claim. Smaller than a large worker, so that claiming, running and committing overlap."""
UNCOMMITTED_PER_AHEAD = 2
"""How many ended executions may wait for their commit, as a multiple of those claimed ahead.

If nothing is claimed ahead, an execution keeps its slot until its end is committed.
"""
GATHER_SECONDS = 0.002
"""How long a claim for a few free slots waits for more slots to become free."""


class Slots:
    """Limits a worker to `concurrency` handlers at a time and holds executions claimed ahead for the next free slot.

    Every execution in `held` is under lease: it runs, waits for a slot, or waits for its end to be committed. An
    execution that waits for a slot is handed back when the worker stops, the store does not answer, or it waits too
    long.
    """

    def __init__(self, concurrency: int, begin: Callable[[Running], None], health: StoreHealth) -> None:
        self.held: set[Running] = set()
        self.ahead = Ahead(concurrency, CLAIM_SIZE)
        self.concurrency = concurrency
        self._begin = begin
        self._health = health
        self._active = 0
        """The number of handlers that have not returned."""
        self._waiting: deque[Running] = deque()
        self._changed = asyncio.Event()
        self._stale_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def free(self) -> int:
        """How many executions could start now."""
        return max(0, self.concurrency - self._active)

    @property
    def started(self) -> int:
        """How many executions have started and are not committed yet."""
        return len(self.held) - len(self._waiting)

    async def wait_for_capacity(self) -> int:
        """Wait until a claim is worthwhile and return how many executions to claim; 0 once the slots are closed."""
        while not self._is_closed:
            capacity, worthwhile = self._capacity, max(1, min((self.concurrency + self.ahead.size) // 4, CLAIM_SIZE))
            if self._waiting:
                if capacity >= worthwhile and len(self._waiting) <= self.ahead.size // 2:
                    return capacity
            elif capacity > 0:
                if self.held and capacity < worthwhile:
                    await asyncio.sleep(GATHER_SECONDS)
                return self._capacity
            self._changed.clear()
            await self._changed.wait()
        return 0

    @property
    def _capacity(self) -> int:
        """How many more executions may be held, in the slots and ahead of them."""
        ahead = self.ahead.size
        free = self.concurrency + ahead - self._active - len(self._waiting)
        return min(free, self.concurrency + (1 + UNCOMMITTED_PER_AHEAD) * ahead - len(self.held), CLAIM_SIZE)

    def enter(self, running: Running) -> None:
        """Start a run that was just claimed, or let it wait for a slot; a dropped run needs no slot."""
        if running.is_dropped:
            self._begin(running)
        elif self._active < self.concurrency:
            self._occupy(running)
        else:
            running.on_stop = self._stopped
            self._waiting.append(running)
            if self._stale_timer is None:
                self._watch_waiting(Ahead.STALE_SECONDS)

    def returned(self, running: Running) -> None:
        """Free the slot of a run whose handler has returned, and start the next run that waits."""
        if not running.has_slot:
            return
        running.has_slot = False
        self._active -= 1
        self.ahead.returned += 1
        while self._waiting and self._active < self.concurrency:
            if self._health.is_silent:
                self.hand_back_waiting()
                break
            following = self._waiting.popleft()
            following.on_stop = None
            if following.is_lease_expired:
                text = "%s is not started: its lease expired before a slot was free"
                log_about(following.claimed, logger, logging.WARNING, text, following)
                following.is_dropped = True
                self._begin(following)
            else:
                self._occupy(following)
        if self.ahead.size:
            self._changed.set()

    def release(self, running: Running) -> None:
        """Forget a run whose end is committed or given up."""
        self.held.discard(running)
        self._changed.set()

    def close(self) -> None:
        """Allow no more claims, and hand back the runs that wait for a slot."""
        self._is_closed = True
        self._changed.set()
        if self._stale_timer is not None:
            self._stale_timer.cancel()
        self.hand_back_waiting()

    def hand_back_waiting(self, *, claimed_before: float = float("inf")) -> None:
        """Hand back the runs that wait for a slot, or only those claimed before a monotonic time."""
        while self._waiting and self._waiting[0].claimed_at < claimed_before:
            # Claim nothing in their place before the rate is measured again.
            self.ahead.size = 0
            running = self._waiting.popleft()
            running.on_stop = None
            self._skip(running)

    async def until_empty(self, seconds: float) -> None:
        """Wait until nothing is held, or until the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.held:
                    self._changed.clear()
                    await self._changed.wait()

    def _occupy(self, running: Running) -> None:
        running.has_slot = True
        self._active += 1
        self._begin(running)

    def _skip(self, running: Running) -> None:
        """Hand back a run without calling its handler."""
        running.is_dropped = running.is_handed_back = True
        self._begin(running)

    def _stopped(self, running: Running) -> None:
        """End a run that was stopped while it waited for a slot."""
        running.on_stop = None
        self._waiting.remove(running)
        self._begin(running)

    def _watch_waiting(self, seconds: float) -> None:
        self._stale_timer = asyncio.get_running_loop().call_later(seconds, self._hand_back_stale)

    def _hand_back_stale(self) -> None:
        self._stale_timer = None
        now = time.monotonic()
        self.hand_back_waiting(claimed_before=now - Ahead.STALE_SECONDS)
        if self._waiting:
            self._watch_waiting(self._waiting[0].claimed_at + Ahead.STALE_SECONDS - now)
