"""The heartbeat: a thread with its own connection that renews the leases and the registration of a worker."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from flowfabric.engine.core.wakeups import LostReason
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.model.errors import EngineError
from flowfabric.model.lease import Renewed
from flowfabric.model.text import MAX_BATCH
from flowfabric.model.worker import NotRegistered
from flowfabric.pauses import is_done_before, is_set_within
from flowfabric.worker.faults import LEASE_IS_LOST, StoreHealth
from flowfabric.worker.running import Running

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LEAVE_SECONDS = 1.5
"""How long a stopping worker tries to deregister."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """The entry of a worker in the registry."""

    worker_id: str
    worker_instance_id: str
    lanes: Sequence[str]
    capabilities: Sequence[str]
    kinds: Sequence[str]
    liveness_ttl_ms: int
    namespace: str
    serves_all_namespaces: bool

    async def enter(self, engine: Engine) -> None:
        """Register the worker, or renew its entry."""
        await engine.register_worker(
            worker_id=self.worker_id,
            worker_instance_id=self.worker_instance_id,
            lanes=self.lanes,
            capabilities=self.capabilities,
            kinds=self.kinds,
            liveness_ttl_ms=self.liveness_ttl_ms,
            namespace=self.namespace,
            serves_all_namespaces=self.serves_all_namespaces,
        )

    async def keep(self, engine: Engine) -> None:
        """Keep the entry alive; register again if it has expired."""
        kept = await engine.heartbeat_worker(worker_instance_id=self.worker_instance_id, namespace=self.namespace)
        if isinstance(kept, NotRegistered):
            await self.enter(engine)

    async def leave(self, engine: Engine) -> None:
        """Deregister; if the store does not answer soon, the entry expires by itself."""
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await engine.mark_worker_dead(
                    worker_instance_id=self.worker_instance_id, namespace=self.namespace, reason="stopped"
                )
        except Exception as error:
            why = f"no answer within {LEAVE_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
            seconds = self.liveness_ttl_ms / 1000
            logger.info("worker %s stays registered for up to %g s: %s", self.worker_instance_id, seconds, why)


class Heartbeat:
    """Renews every lease after a third of its time, even while handlers block the main event loop.

    It checks every sixth of that time, so that a renewal is tried several times before the lease can expire. It stops
    renewing, so that another worker takes over, while the other connections of the worker have had no answer for the
    time of a lease, and for a run whose end could not be written for that long. A run whose lease expires is stopped.
    """

    STOP_SECONDS = 2.0
    """How long a stop waits for the connection to close."""
    CHECK_SECONDS = 1.0
    """The shortest pause between two checks of all leases."""

    def __init__(
        self,
        engine: Engine,
        *,
        lease_ttl_ms: int,
        registration: Registration,
        running: Callable[[], list[Running]],
        lose: Callable[[Running], None],
        health: StoreHealth,
    ) -> None:
        self._engine = engine
        self._registration = registration
        self._running = running
        self._lose = lose
        self._health = health
        self._is_holding_back = False
        self._has_warned = False
        self._checks_wanted = 0
        self._checks_done = 0
        self._checked_at = -math.inf
        self._ttl = lease_ttl_ms / 1000
        self._tick = max(self._ttl / 6, 0.001)
        self._kept_at = time.monotonic()
        self._main = asyncio.get_running_loop()
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, asyncio.Event]] = Future()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="flowfabric-heartbeat", daemon=True)

    async def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        await asyncio.wrap_future(self._started)

    async def stop(self) -> None:
        """Stop the thread, or leave it behind after STOP_SECONDS."""
        loop, stopping, woken = self._started.result()

        def end() -> None:
            stopping.set()
            woken.set()

        # In one call: the loop may end, and be closed, as soon as it has seen the first event.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end)
        # Not joined in a thread of the event loop's executor: handlers may occupy all of them.
        await asyncio.wait((asyncio.wrap_future(self._ended),), timeout=self.STOP_SECONDS)

    def check_all(self) -> None:
        """Find out soon which leases are still held, by renewing all of them."""
        loop, _, woken = self._started.result()
        self._checks_wanted += 1
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(woken.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        finally:
            self._ended.set_result(None)

    async def _live(self) -> None:
        stopping, woken = asyncio.Event(), asyncio.Event()
        self._started.set_result((asyncio.get_running_loop(), stopping, woken))
        closings: set[asyncio.Task[None]] = set()
        while not stopping.is_set():
            connected = AsyncExitStack()
            try:
                engine = await connected.enter_async_context(second_engine(self._engine, pool_size=1))
                while not stopping.is_set():
                    if not await is_done_before(stopping, self._beat(engine)):
                        break
                    if await is_set_within(woken, self._pause):
                        woken.clear()
            except _NoAnswer as silence:
                self._warn("the heartbeat reconnects: %s", silence)
                self._stop_expired(self._running())
            except Exception as error:
                # Any error: without a heartbeat, other workers would repeat the work of this one.
                if isinstance(error, EngineError):
                    self._warn("the heartbeat reconnects: %s", error)
                else:
                    logger.warning("the heartbeat reconnects: %s", error, exc_info=error)
                self._stop_expired(self._running())
                if await is_set_within(woken, self._pause):
                    woken.clear()
            # In the background: a connection to a silent server closes slowly.
            closing = asyncio.create_task(connected.aclose())
            closings.add(closing)
            closing.add_done_callback(closings.discard)
        await asyncio.gather(*closings, return_exceptions=True)

    @property
    def _pause(self) -> float:
        """The pause before the next beat, which is short while a check is requested."""
        return min(self._tick, self.CHECK_SECONDS) if self._checks_done < self._checks_wanted else self._tick

    async def _beat(self, engine: Engine) -> None:
        now = time.monotonic()
        if self._holds_back():
            self._stop_expired(self._running())
            return
        checks = self._checks_wanted
        is_check = self._checks_done < checks and now - self._checked_at >= self.CHECK_SECONDS
        if is_check:
            self._checked_at = now
        least = 0.0 if is_check else self._ttl / 3
        due = [running for running in self._running() if now - running.renewed_at >= least and self._is_kept(running)]
        for at in range(0, len(due), MAX_BATCH):
            await self._renew(engine, due[at : at + MAX_BATCH])
        unrenewed = [running for running in due if running.failures]
        self._stop_expired(unrenewed)
        if is_check and not unrenewed:
            self._checks_done = checks
        if now - self._kept_at >= self._registration.liveness_ttl_ms / 3000:
            try:
                await self._answer(self._registration.keep(engine))
                self._kept_at = now
            except EngineError as error:
                self._warn("the registration was not renewed, which is retried in %.2g s: %s", self._tick, error)

    def _is_kept(self, running: Running) -> bool:
        if running.is_suspended or running.lost is not None:
            return False
        return not running.has_ended or time.monotonic() - running.ended_at <= self._ttl

    def _holds_back(self) -> bool:
        """Whether renewals are suspended because the calls of the worker itself get no answer."""
        is_stuck = self._health.unanswered_for(self._ttl)
        if is_stuck and not self._is_holding_back:
            text = "leases are not renewed, so that other workers take over: the store has not answered for %g s"
            logger.warning(text, self._ttl)
        self._is_holding_back = is_stuck
        return is_stuck

    def _stop_expired(self, unrenewed: Iterable[Running]) -> None:
        """Stop the runs among these whose leases have expired."""
        for running in unrenewed:
            is_held = running.lost is None and not running.is_suspending and not running.has_ended
            if is_held and running.is_lease_expired:
                running.lost = LostReason.NOT_RENEWED
                self._main.call_soon_threadsafe(self._lose, running)

    async def _renew(self, engine: Engine, due: list[Running]) -> None:
        asked_at = time.monotonic()
        verdicts: Sequence[Renewed | EngineError]
        try:
            verdicts = await self._answer(engine.renew_many([running.claimed.handle for running in due]))
        except EngineError as error:
            self._warn("%d leases were not renewed, which is retried in %.2g s: %s", len(due), self._tick, error)
            verdicts = [error] * len(due)
        except _NoAnswer:
            for running in due:
                running.failures += 1
            raise
        for running, verdict in zip(due, verdicts, strict=True):
            if isinstance(verdict, Renewed):
                running.renewed_at = asked_at
                running.failures = 0
            elif verdict.code in LEASE_IS_LOST:
                # A suspend ends the lease before its answer arrives. If it fails, the next renewal finds the loss.
                if not running.is_suspending:
                    running.lost = verdict
                    self._main.call_soon_threadsafe(self._lose, running)
            else:
                running.failures += 1

    async def _answer(self, asked: Coroutine[Any, Any, Answer]) -> Answer:
        """Return the answer of the store; raise early enough to try another connection if there is none."""
        task = asyncio.create_task(asked)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        answered, _ = await asyncio.wait((task,), timeout=self._ttl / 3)
        if not answered:
            # Not awaited: a silent server does not answer a cancellation either.
            task.cancel()
            raise _NoAnswer("the store does not answer")
        answer = task.result()
        self._has_warned = False
        return answer

    def _warn(self, text: str, *values: object) -> None:
        """Log a fault of the store: as a warning if it is the first since the last answer, else at DEBUG."""
        logger.log(logging.DEBUG if self._has_warned else logging.WARNING, text, *values)
        self._has_warned = True


class _NoAnswer(Exception):
    """The store does not answer."""
