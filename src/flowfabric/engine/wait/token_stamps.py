"""Stamps of refused tokens, written after the reply: the response time must not reveal which waitpoints exist."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from flowfabric.db.statements import full_columns, statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.delivery import RefusedToken
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId, WaitpointId, split_execution_id
from flowfabric.pauses import is_set_within
from flowfabric.tasks import create_shared_task

SQL = statements_beside(__file__)

logger = logging.getLogger(__name__)

_COLUMNS = ("partition_keys", "execution_ids", "waitpoint_ids", "refused_ats")


class TokenStamps:
    """Records the time of refused tokens on their executions in a background task.

    Unknown waitpoints go through the same steps as known ones, before and after the reply; the statement ignores them.
    """

    MAX_WAITING = 1_000
    """Stamps waiting to be written; more are dropped."""
    PAUSE_SECONDS = 0.05
    MAX_PAUSE_SECONDS = 1.0

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[tuple[ExecutionId, WaitpointId], int] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_draining = asyncio.Event()

    def note(self, refused: Iterable[RefusedToken]) -> None:
        """Queue refusals for the background task."""
        for each in refused:
            key = each.execution_id, each.waitpoint_id
            if key in self._waiting or len(self._waiting) < self.MAX_WAITING:
                self._waiting[key] = each.at
        if self._waiting and self._task is None:
            self._task = create_shared_task(self._write_all())

    async def drain(self) -> None:
        """Write the queued stamps; stamps of locked rows are dropped."""
        while (task := self._task) is not None:
            self._is_draining.set()
            await asyncio.wait((task,))

    async def _write_all(self) -> None:
        pause = self.PAUSE_SECONDS
        try:
            while self._waiting:
                await is_set_within(self._is_draining, pause)
                taken, self._waiting = self._waiting, {}
                locked = await self._write(taken)
                if self._is_draining.is_set():
                    continue
                pause = min(pause * 2, self.MAX_PAUSE_SECONDS) if locked else self.PAUSE_SECONDS
                self._waiting = {**locked, **self._waiting}
        finally:
            self._task = None
            self._is_draining.clear()

    async def _write(
        self, stamps: Mapping[tuple[ExecutionId, WaitpointId], int]
    ) -> dict[tuple[ExecutionId, WaitpointId], int]:
        """Write stamps; return those whose executions are locked by another session."""
        keys = list(stamps)
        rows = [
            (*split_execution_id(execution), waitpoint, stamps[execution, waitpoint]) for execution, waitpoint in keys
        ]
        try:
            skipped = await self._store.fetch(SQL.stamp_refused_tokens, **full_columns(_COLUMNS, rows))
        except EngineError as problem:
            logger.warning("%d refused tokens could not be recorded on their executions: %s", len(keys), problem)
            return {}
        locked = (keys[row["nth"] - 1] for row in skipped)
        return {key: stamps[key] for key in locked}
