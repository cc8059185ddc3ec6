"""Quarantine: a sweep skips the executions that it failed to process, and processes the others.

A failed execution is skipped for one interval of the sweep, after every third failure in a row for ten.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from flowfabric.db.faults import StoreFault
from flowfabric.engine.core.sweep import BatchSize
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.model.ids import ExecutionId, split_execution_id

FAILURES_IN_A_ROW = 3
"""After every so many failures in a row, an execution is skipped longer."""
SKIPPED_INTERVALS = 10
"""How many intervals it is skipped then."""
MAX_SKIPPED = 10_000
"""How many executions one quarantine remembers; the oldest are forgotten first."""
NOTHING_TO_DO = "it was found to be due, but there was nothing to do"

logger = logging.getLogger(__name__)

ProcessFound = Callable[[Sequence[UUID], list[ExecutionId]], Awaitable[int]]
"""Process a batch of due items except these ids, and add the ids found to the list; return how many succeeded."""
ProcessOne = Callable[[ExecutionId], Awaitable[bool]]
"""Process one item; return whether that succeeded."""
ProcessBatch = Callable[[Sequence[UUID]], Awaitable[int]]
"""Process a batch of due items except these ids, all or none of them; return how many there were."""
ListDue = Callable[[Sequence[UUID]], Awaitable[Sequence[ExecutionId]]]
"""List the items that `ProcessBatch` would process."""
ProcessItems = Callable[[Sequence[ExecutionId]], Awaitable[int]]
"""Process these items, all or none of them; return how many were still due."""


def pause_after(failures: int, interval: float) -> float:
    """The seconds until the next try after this many failures in a row, for a sweep with this interval in seconds."""
    return interval * (SKIPPED_INTERVALS if failures % FAILURES_IN_A_ROW == 0 else 1)


class Quarantine:
    """The executions that one sweep of this process has failed to process."""

    def __init__(self, interval: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._failures: dict[ExecutionId, tuple[int, float]] = {}
        """The number of failures in a row, and the time until which the execution is skipped."""

    def skipped(self) -> list[UUID]:
        """The executions to skip now."""
        now = self._clock()
        # An execution that has not failed again for that long was processed or deleted.
        forget_after = self._interval * SKIPPED_INTERVALS
        for execution_id in [each for each, (_, until) in self._failures.items() if until + forget_after < now]:
            del self._failures[execution_id]
        return [UUID(split_execution_id(each)[1]) for each, (_, until) in self._failures.items() if until > now]

    def failed(self, execution_id: ExecutionId, problem: object, *, times: int = 1) -> None:
        """Record that an execution could not be processed, and log the problem."""
        failures = self._failures.pop(execution_id, (0, 0.0))[0] + times
        pause = pause_after(failures, self._interval)
        while len(self._failures) >= MAX_SKIPPED:
            del self._failures[next(iter(self._failures))]
        self._failures[execution_id] = failures, self._clock() + pause
        logger.warning("%s failed %d times, skipping it for %g s: %s", execution_id, failures, pause, problem)

    async def sweep(self, process_batch: ProcessFound, process_one: ProcessOne, *, limit: int) -> int:
        """Process one batch, item by item if it fails as a whole; return how many items succeeded.

        If every item of a full batch fails, process the next batch, so that failing items never block the others.
        """

        async def process_one_by_one(found: Sequence[ExecutionId]) -> int:
            return sum([await self._try(execution_id, process_one) for execution_id in found])

        return await self._sweep(process_batch, process_one_by_one, limit)

    async def sweep_by_halves(
        self, process_due: ProcessBatch, list_due: ListDue, process_items: ProcessItems, *, limit: int
    ) -> int:
        """Process one batch as `sweep` does, but split a failing batch in halves until only failing items are left."""

        async def process_batch(skipped: Sequence[UUID], found: list[ExecutionId]) -> int:
            try:
                return await process_due(skipped)
            except EngineError as fault:
                if not is_connection_fault(fault):
                    found += await list_due(skipped)
                raise

        async def process_halves(found: Sequence[ExecutionId]) -> int:
            return await self._process_halves(found, process_items)

        return await self._sweep(process_batch, process_halves, limit)

    async def process_found(self, found: Sequence[ExecutionId], process_items: ProcessItems) -> int:
        """Process these items, and split them in halves as `sweep_by_halves` does if that fails."""
        try:
            return await process_items(found)
        except EngineError as fault:
            if is_connection_fault(fault):
                raise
        return await self._process_halves(found, process_items)

    async def sweep_in_time(
        self,
        process_due: ProcessBatch,
        list_due: ListDue,
        process_items: ProcessItems,
        *,
        limit: int,
        size: BatchSize,
        parts: int = 1,
        set_aside: ProcessOne | None = None,
    ) -> int:
        """Process one batch as `sweep_by_halves` does, but reduce the size of the next ones if it is not in time.

        `parts` is how many parts of one item are processed at most: while the size allows more than one, a smaller
        batch may be in time. Otherwise an item that is not in time alone is set aside, and skipped if it cannot be.
        """
        found: Sequence[ExecutionId] = []
        if size.is_reduced:
            # Outside the try: if the store is too slow for this too, no smaller batch helps.
            found = (await list_due(self.skipped()))[: size.of(limit)]
            if not found:
                size.reset()
                return 0
        try:
            if found:
                done = await self._process_halves(found, process_items)
            else:
                done = await self.sweep_by_halves(process_due, list_due, process_items, limit=limit)
        except TransportError as fault:
            if not is_statement_timeout(fault):
                raise
            if len(found) != 1 or size.of(parts) > 1:
                logger.warning("a batch of up to %d was not in time, the next are smaller: %s", size.of(limit), fault)
                size.reduce()
            elif set_aside is None or not await set_aside(found[0]):
                # Finding it again takes a timeout for each size, so it is skipped longer at once.
                self.failed(found[0], fault, times=FAILURES_IN_A_ROW)
            return 0
        if done:
            size.record_in_time()
        elif len(found) > 1:
            # Others that are due may be behind those that are left.
            size.reduce()
        return done

    async def _process_halves(self, found: Sequence[ExecutionId], process_items: ProcessItems) -> int:
        try:
            done = await process_items(found)
        except EngineError as fault:
            if is_connection_fault(fault):
                raise
            if len(found) == 1:
                self.failed(found[0], fault)
                return 0
        else:
            if not done and len(found) == 1:
                self.failed(found[0], NOTHING_TO_DO)
            return done
        middle = len(found) // 2
        halves = found[:middle], found[middle:]
        return sum([await self._process_halves(half, process_items) for half in halves])

    async def _sweep(self, process_batch: ProcessFound, process_failed: ProcessItems, limit: int) -> int:
        for _ in range(1 + MAX_SKIPPED // limit):
            found: list[ExecutionId] = []
            try:
                done = await process_batch(self.skipped(), found)
            except Exception as fault:
                if not found or is_connection_fault(fault):
                    raise
                done = await process_failed(found)
            if done or len(found) < limit:
                return done
        return 0

    async def _try(self, execution_id: ExecutionId, process_one: ProcessOne) -> bool:
        try:
            if await process_one(execution_id):
                return True
            problem: object = NOTHING_TO_DO
        except Exception as fault:
            if is_connection_fault(fault):
                raise
            problem = fault
        self.failed(execution_id, problem)
        return False


def is_connection_fault(fault: Exception) -> bool:
    """Whether the connection to the store failed, rather than the processing of an item."""
    return isinstance(fault, TransportError) and fault.retryable


def is_statement_timeout(fault: EngineError) -> bool:
    """Whether Postgres canceled a statement that took too long, unlike a wait for a free connection."""
    return isinstance(fault.__cause__, StoreFault) and fault.__cause__.is_canceled
