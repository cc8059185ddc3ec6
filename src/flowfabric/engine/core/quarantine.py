"""Items of sweeps that fail: left out for a while, and for longer after three failures in a row, so others go on."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from flowfabric.model.errors import EngineError, TransportError
from flowfabric.model.ids import ExecutionId, split_execution_id

FAILURES_IN_A_ROW = 3
INTERVALS_LEFT_OUT = 10
MOST_LEFT_OUT = 10_000

logger = logging.getLogger(__name__)

Together = Callable[[Sequence[UUID], list[ExecutionId]], Awaitable[int]]
"""Process a batch of due items except these ids, collecting the ids found; return how many succeeded."""
Alone = Callable[[ExecutionId], Awaitable[bool]]
"""Process one item; whether that succeeded."""
Batch = Callable[[Sequence[UUID]], Awaitable[int]]
"""Process a batch of due items except these ids, all or none of them; return how many there were."""
ListDue = Callable[[Sequence[UUID]], Awaitable[Sequence[ExecutionId]]]
"""The items of such a batch."""
Some = Callable[[Sequence[ExecutionId]], Awaitable[int]]
"""Process these items, all or none of them; return how many were still due."""


def pause_after(failures: int, every: float) -> float:
    """The seconds before what has failed so often in a row is tried again, where it is tried at such intervals."""
    return every * (INTERVALS_LEFT_OUT if failures % FAILURES_IN_A_ROW == 0 else 1)


class Quarantine:
    """The executions that one sweep could not deal with, as far as this process has seen."""

    def __init__(self, every: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._failures: dict[ExecutionId, tuple[int, float]] = {}
        """How often each has failed in a row, and until when it is left out."""

    def left_out(self) -> list[UUID]:
        """The executions to leave out now."""
        now = self._clock()
        # One that has not failed again for as long as it may be left out is dealt with, or gone.
        forgotten = self._every * INTERVALS_LEFT_OUT
        for execution_id in [each for each, (_, until) in self._failures.items() if until + forgotten < now]:
            del self._failures[execution_id]
        return [UUID(split_execution_id(each)[1]) for each, (_, until) in self._failures.items() if until > now]

    def failed(self, execution_id: ExecutionId, problem: object) -> None:
        """Note that an execution could not be dealt with."""
        failures = self._failures.pop(execution_id, (0, 0.0))[0] + 1
        pause = pause_after(failures, self._every)
        while len(self._failures) >= MOST_LEFT_OUT:
            del self._failures[next(iter(self._failures))]
        self._failures[execution_id] = failures, self._clock() + pause
        logger.warning("%s is left alone for %g s, it failed %d times: %s", execution_id, pause, failures, problem)

    async def sweep(self, together: Together, alone: Alone, *, limit: int) -> int:
        """Do one batch, item by item where it fails as a whole; returns how many items are done.

        A full batch of nothing but items that fail is followed by the next, so that they never stand before the others.
        """

        async def each(found: Sequence[ExecutionId]) -> int:
            return sum([await self._try(execution_id, alone) for execution_id in found])

        return await self._sweep(together, each, limit)

    async def sweep_by_halves(self, batch: Batch, list_due: ListDue, some: Some, *, limit: int) -> int:
        """Do one batch as `sweep` does, but halve one that fails until only the items that fail are left."""

        async def together(left_out: Sequence[UUID], found: list[ExecutionId]) -> int:
            try:
                return await batch(left_out)
            except EngineError as fault:
                if not is_connection_fault(fault):
                    found += await list_due(left_out)
                raise

        async def halve(found: Sequence[ExecutionId]) -> int:
            try:
                return await some(found)
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                if len(found) == 1:
                    self.failed(found[0], fault)
                    return 0
            middle = len(found) // 2
            return await halve(found[:middle]) + await halve(found[middle:])

        return await self._sweep(together, halve, limit)

    async def _sweep(self, together: Together, apart: Some, limit: int) -> int:
        for _ in range(1 + MOST_LEFT_OUT // limit):
            found: list[ExecutionId] = []
            try:
                done = await together(self.left_out(), found)
            except Exception as fault:
                if not found or is_connection_fault(fault):
                    raise
                done = await apart(found)
            if done or len(found) < limit:
                return done
        return 0

    async def _try(self, execution_id: ExecutionId, alone: Alone) -> bool:
        try:
            if is_done := await alone(execution_id):
                return is_done
            problem: object = "nothing is due any more"
        except Exception as fault:
            if is_connection_fault(fault):
                raise
            problem = fault
        self.failed(execution_id, problem)
        return False


def is_connection_fault(fault: Exception) -> bool:
    """Whether a fault says nothing of the items at hand, because the store is out of reach."""
    return isinstance(fault, TransportError) and fault.retryable
