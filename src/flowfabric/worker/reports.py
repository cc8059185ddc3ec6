"""Bringing the ends of runs into the store: the completions of one moment share a statement."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.outcomes import Completed, FailureReason
from flowfabric.pauses import pauses
from flowfabric.worker.context import Running
from flowfabric.worker.faults import FAULT_SECONDS, LEASE_IS_LOST, is_passing
from flowfabric.worker.outcome import Failure

logger = logging.getLogger(__name__)

RESULT_REFUSED = "result_refused"


class Reports:
    """Writes how runs ended and gives up their slots once that is committed.

    A call that meets a fault of the store is repeated until the store answers: a repeat of an ending is harmless.
    """

    SIZE = 300
    """Completions in one statement."""
    STREAMS = 2
    """Statements under way at the same time."""

    def __init__(self, engine: Engine, release: Callable[[Running], None]) -> None:
        self._engine = engine
        self._release = release
        self._completed: deque[tuple[Running, bytes | None]] = deque()
        self._streams = 0
        """Streams that will still look; a task counts as running for a moment longer."""
        self._tasks: set[asyncio.Task[None]] = set()

    def complete(self, running: Running, payload: bytes | None) -> None:
        """End a run in success, soon."""
        self._completed.append((running, payload))
        if self._streams < self.STREAMS:
            self._streams += 1
            task = asyncio.create_task(self._write_completed())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def fail(self, running: Running, failure: Failure) -> None:
        """End a run's attempt in failure."""
        try:
            for pause in pauses(*FAULT_SECONDS):
                if await self._write_failure(running, failure) or running.is_dropped:
                    return
                await asyncio.sleep(pause)
        finally:
            self._release(running)

    def close(self) -> None:
        """Give up on what could not be written."""
        for task in self._tasks:
            task.cancel()

    async def _write_failure(self, running: Running, failure: Failure) -> bool:
        """Whether the store has answered."""
        claimed = running.claimed
        try:
            await self._engine.fail(
                claimed.handle, reason=failure.reason, classification=failure.classification, claimed=claimed
            )
        except Exception as error:
            if is_passing(error):
                return False
            logger.warning("the failure of %s was refused: %s", running.execution_id, error)
        return True

    async def _write_completed(self) -> None:
        try:
            # One turn of the loop lets the runs that end in this instant join the first statement.
            await asyncio.sleep(0)
            while self._completed:
                count = min(self.SIZE, len(self._completed))
                await self._settle([self._completed.popleft() for _ in range(count)])
        finally:
            self._streams -= 1

    async def _settle(self, batch: list[tuple[Running, bytes | None]]) -> None:
        for (running, payload), verdict in zip(batch, await self._complete(batch), strict=True):
            if not isinstance(verdict, Exception):
                self._release(running)
            elif is_passing(verdict):
                self._completed.append((running, payload))
            else:
                await self._refused(running, verdict)

    async def _complete(self, batch: list[tuple[Running, bytes | None]]) -> Sequence[Completed | Exception]:
        items = [(running.claimed.handle, payload) for running, payload in batch]
        pause = pauses(*FAULT_SECONDS)
        while True:
            try:
                return await self._engine.complete_many(items)
            except Exception as error:
                if not is_passing(error):
                    # Something may be wrong with one of them: each is told alone.
                    return [error] if len(items) == 1 else [(await self._complete([one]))[0] for one in batch]
                logger.warning("%d completions are repeated: %s", len(items), error)
            await asyncio.sleep(next(pause))

    async def _refused(self, running: Running, error: Exception) -> None:
        logger.warning("the result of %s was refused: %s", running.execution_id, error)
        if isinstance(error, EngineError) and error.code in LEASE_IS_LOST:
            self._release(running)
        else:
            await self.fail(running, Failure(FailureReason(f"the result was refused: {error}", detail=RESULT_REFUSED)))
