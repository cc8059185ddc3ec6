"""The loop that claims executions for a worker."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.lease import ClaimedExecution
from flowfabric.pauses import is_set_within, pauses
from flowfabric.worker.faults import RETRY_SECONDS, StoreHealth, retry_log_level
from flowfabric.worker.heartbeat import Registration
from flowfabric.worker.slots import Slots

logger = logging.getLogger(__name__)

RECHECK_SECONDS = (0.05, 0.2)
"""The pauses after claims that found nothing although there was work just now: a row that another session had locked at
that moment, such as a cascade that counts a late result, is not announced again."""
LISTENING_POLL_SECONDS = 5.0
"""The longest pause between two claims while hints arrive and due work is announced by a hint."""
IDLE_SECONDS = 0.05
"""The first pause between two claims while no hints arrive; each further pause is longer."""


class ClaimLoop:
    """Claims executions into the free slots of a worker until the worker stops."""

    def __init__(
        self,
        engine: Engine,
        worker: Registration,
        *,
        lease_ttl_ms: int,
        poll_seconds: float,
        is_due_work_announced: bool,
        slots: Slots,
        health: StoreHealth,
        stopping: asyncio.Event,
        start: Callable[[Sequence[ClaimedExecution], float], None],
    ) -> None:
        """Prepare a loop that passes what it claims to `start`, with the monotonic time at which the claim was sent."""
        self._engine = engine
        self._wakeups = parts_of(engine).wakeups
        self._worker = worker
        self._lease_ttl_ms = lease_ttl_ms
        self._poll_seconds = poll_seconds
        self._is_due_work_announced = is_due_work_announced
        self._slots = slots
        self._health = health
        self._stopping = stopping
        self._start = start
        self._retry_pauses = pauses(*RETRY_SECONDS)

    async def run(self) -> None:
        """Claim until the worker stops."""
        if not self._worker.kinds:
            logger.warning("worker %s has no handlers and claims nothing", self._worker.worker_instance_id)
            await self._stopping.wait()
            return
        lanes = self._worker.lanes
        idle_pauses = pauses(IDLE_SECONDS, self._poll_seconds)
        rechecks = iter(RECHECK_SECONDS)
        while True:
            wanted = await self._slots.wait_for_capacity()
            if self._stopping.is_set():
                return
            wakes = self._wakeups.wakes(lanes)
            asked_at = time.monotonic()
            free = self._slots.free
            try:
                claimed = await self._claim(wanted, free)
            except Exception as error:
                await self._pause_after(error, asked_at)
                continue
            self._health.answered()
            self._retry_pauses = pauses(*RETRY_SECONDS)
            self._slots.ahead.claimed(is_full=len(claimed) == wanted)
            if claimed:
                idle_pauses = pauses(IDLE_SECONDS, self._poll_seconds)
                rechecks = iter(RECHECK_SECONDS)
                self._start(claimed, asked_at)
            if len(claimed) >= min(wanted, free):
                # There may be more: what could not be claimed ahead is claimed when a slot is free.
                continue
            if claimed:
                # The lanes are empty. New work wakes this loop; rows that were locked elsewhere are tried again soon.
                await self._wakeups.wait_for_work(lanes, next(idle_pauses), since=wakes)
            elif not self._stopping.is_set():
                if self._is_due_work_announced and self._wakeups.hints.is_listening:
                    seconds = next(rechecks, LISTENING_POLL_SECONDS * random.uniform(0.75, 1))
                else:
                    seconds = next(idle_pauses)
                if await self._wakeups.wait_for_work(lanes, seconds, since=wakes):
                    rechecks = iter(RECHECK_SECONDS)

    async def _claim(self, wanted: int, free: int) -> Sequence[ClaimedExecution]:
        worker = self._worker
        return await self._engine.claim_many(
            lanes=worker.lanes,
            worker_id=worker.worker_id,
            worker_instance_id=worker.worker_instance_id,
            capabilities=worker.capabilities,
            kinds=worker.kinds,
            namespace=None if worker.serves_all_namespaces else worker.namespace,
            lease_ttl_ms=self._lease_ttl_ms,
            limit=wanted,
            slots=free,
        )

    async def _pause_after(self, error: Exception, asked_at: float) -> None:
        self._health.failed(error, asked_at)
        level, trace = retry_log_level(error), None if isinstance(error, EngineError) else error
        pause = next(self._retry_pauses)
        logger.log(level, "a claim failed and is retried in %.2f s: %s", pause, error, exc_info=trace)
        self._slots.hand_back_waiting()
        await is_set_within(self._stopping, pause)
