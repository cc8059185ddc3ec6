"""The worker: registers, claims executions, runs their handlers, and drains when it stops."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from flowfabric.engine.core.wakeups import LostLease
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.claim import DEFAULT_LEASE_TTL_MS, MAX_LANES
from flowfabric.engine.parts import parts_of
from flowfabric.model.duration import Duration, milliseconds
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import MAX_LEASE_TTL_MS
from flowfabric.model.ids import check_lane_id, check_worker_id
from flowfabric.model.kind import check_kinds
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.policy import check_capabilities
from flowfabric.model.text import check_items, check_short, shown
from flowfabric.pauses import is_set_within, pauses
from flowfabric.reconcile.loop import Reconciler
from flowfabric.worker.claiming import ClaimLoop
from flowfabric.worker.faults import RETRY_SECONDS, StoreHealth, is_store_fault, retry_log_level
from flowfabric.worker.handler import Handler
from flowfabric.worker.heartbeat import Heartbeat, Registration
from flowfabric.worker.interrupts import calling_on_interrupts
from flowfabric.worker.log_lines import Drain, log_worker_start
from flowfabric.worker.logs import add_fields_to_records
from flowfabric.worker.options import check_count, check_flag, is_handler
from flowfabric.worker.runs import Runs

logger = logging.getLogger(__name__)

MAX_THREADS = 32
DEFAULT_NAMESPACE = "default"
"""The namespace in which a worker that serves every namespace is registered."""
CANCEL_SECONDS = 5.0
"""How long cancelled handlers may take to clean up."""
CLAIM_SECONDS = 3.0
"""The shortest time, from the start of the drain, that a stop waits for the answer to a claim."""
HAND_BACK_SECONDS = 1.0
"""How long handing back the executions of that claim may take."""


class Worker:
    """Claims executions from its lanes and runs them with the handler of their kind.

    Run it in the background with `async with worker:`, or as a whole program with `await worker.run()`. It claims only
    the kinds it has handlers for and, if it has a namespace, only executions of that namespace. At most `concurrency`
    handlers run at a time. While handlers return quickly and a backlog remains, it also claims what it will start
    within the next tenth of a second.

    A handler is cancelled, and its result discarded, when its execution is cancelled, its timeout or deadline passes,
    or its lease is lost. A handler that suspends ends there and runs again from its start when it is resumed. Two runs
    of the same execution never overlap in one process.

    Stopping waits up to `drain` seconds for running handlers, then cancels them and hands their leases back, so that
    any worker can claim the executions at once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        lanes: Iterable[str],
        handlers: Mapping[str, Handler | Callable[..., Any]],
        concurrency: int = 64,
        worker_id: str | None = None,
        worker_instance_id: str | None = None,
        capabilities: Iterable[str] = (),
        lease_ttl: Duration = DEFAULT_LEASE_TTL_MS / 1000,
        namespace: str | None = None,
        poll_interval: Duration = 1,
        drain: Duration = 30,
        threads: int | None = None,
        reconcile: bool = True,
    ) -> None:
        check_count("concurrency", concurrency)
        threads = min(concurrency, MAX_THREADS) if threads is None else threads
        self.lanes = tuple(dict.fromkeys(map(check_lane_id, check_items(lanes, "lanes"))))
        if not 1 <= len(self.lanes) <= MAX_LANES:
            raise error(
                "invalid_input", f"lanes: must name at least 1 and at most {MAX_LANES} lanes, got {len(self.lanes)}"
            )
        check_count("threads", threads)
        lease_ttl_ms = milliseconds(lease_ttl, "lease_ttl", least=1, most=MAX_LEASE_TTL_MS)
        if not isinstance(handlers, Mapping) or not all(map(is_handler, handlers.values())):
            raise error(
                "invalid_input",
                f"handlers: expected functions by kind, such as {{'greet': greet}}, got {shown(handlers)}",
            )
        host = "".join(char for char in socket.gethostname() if char.isprintable() and char != " ") or "worker"
        self.worker_id = check_worker_id(host if worker_id is None else worker_id, "worker_id")
        if worker_instance_id is None:
            worker_instance_id = f"{self.worker_id[:200]}-{os.getpid()}-{secrets.token_hex(4)}"
        self.worker_instance_id = check_worker_id(worker_instance_id, "worker_instance_id")
        self.capabilities = check_capabilities(check_items(capabilities, "capabilities"))
        self._engine = engine
        self._parts = parts_of(engine)
        self._handlers = {
            kind: handler if isinstance(handler, Handler) else Handler(handler) for kind, handler in handlers.items()
        }
        self.kinds = check_kinds(tuple(self._handlers), least=0)
        self.namespace = None if namespace is None else check_short(namespace, "namespace")
        self._lease_ttl_ms = lease_ttl_ms
        self._poll_seconds = milliseconds(poll_interval, "poll_interval", least=1) / 1000
        self._drain_seconds = milliseconds(drain, "drain") / 1000
        self._reconcile = check_flag("reconcile", reconcile)
        self._registration = Registration(
            worker_id=self.worker_id,
            worker_instance_id=self.worker_instance_id,
            lanes=self.lanes,
            capabilities=self.capabilities,
            kinds=self.kinds,
            liveness_ttl_ms=max(2 * lease_ttl_ms, 1000),
            namespace=self.namespace or DEFAULT_NAMESPACE,
            serves_all_namespaces=self.namespace is None,
        )
        self._health = StoreHealth()
        self._runs = Runs(engine, self._handlers, concurrency=concurrency, threads=threads, health=self._health)
        self._claiming: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._is_stopped_by_signal = False
        self._handed_back_before_stop = 0
        self._reconciler: Reconciler | None = None
        self._heartbeat: Heartbeat | None = None
        self._ignore_losses: Callable[[], None] = lambda: None
        self._before_start: Callable[[], Awaitable[None]] | None = None
        """Called before the worker registers; the fabric applies the limits of its tasks there."""

    @property
    def running(self) -> int:
        """The number of executions that have started here and whose end is not committed yet."""
        return self._runs.slots.started

    async def __aenter__(self) -> Self:
        """Register and start to claim in the background."""
        for handler in self._handlers.values():
            _ = handler.shape
        add_fields_to_records()
        self._runs.capture_context()
        async with AsyncExitStack() as stack:
            await self._register()
            stack.push_async_callback(self._registration.leave, self._engine)
            heartbeat = Heartbeat(
                self._engine,
                lease_ttl_ms=self._lease_ttl_ms,
                registration=self._registration,
                running=lambda: list(self._runs.slots.held),
                lose=self._runs.lose,
                health=self._health,
            )
            await heartbeat.start()
            stack.push_async_callback(heartbeat.stop)
            if self._reconcile:
                self._reconciler = await stack.enter_async_context(
                    Reconciler(self._engine, on_tick=self._health.reconciled)
                )
            self._heartbeat = heartbeat
            # A lease can be lost while the worker is too busy to wait for work.
            self._parts.wakeups.hints.start_listening()
            self._ignore_losses = self._parts.wakeups.on_lost(self._on_lost)
            loop = ClaimLoop(
                self._engine,
                self._registration,
                lease_ttl_ms=self._lease_ttl_ms,
                poll_seconds=self._poll_seconds,
                is_due_work_announced=self._reconcile,
                slots=self._runs.slots,
                health=self._health,
                stopping=self._stopping,
                start=self._start,
            )
            self._claiming = asyncio.create_task(loop.run())
            self._claiming.add_done_callback(self._claimed_last)
            stack.pop_all()
        log_worker_start(self._registration, self._runs.slots.concurrency)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop claiming, drain the running handlers and deregister, all within a bounded time."""
        try:
            await self._drain()
        finally:
            # Also if the drain was cancelled: the caller may close the engine next.
            self._runs.reports.close()
            self._ignore_losses()
            await asyncio.gather(self._stop_reconciler(), self._stop_heartbeat())

    async def run(self) -> None:
        """Work until `stop()`, SIGTERM or SIGINT, then drain; a second signal ends the process at once."""
        interrupted = asyncio.Event()
        with calling_on_interrupts(interrupted.set):
            await self._run_until(interrupted)

    async def _run_until(self, interrupted: asyncio.Event) -> None:
        """Work until `stop()` is called or a signal has set the event, then drain."""
        # The event of an earlier signal is set in the next turn of the event loop.
        await asyncio.sleep(0)
        if interrupted.is_set():
            return
        watching = asyncio.create_task(self._stop_when(interrupted))
        try:
            async with AsyncExitStack() as working:
                try:
                    await working.enter_async_context(self)
                except EngineError as error:
                    if not interrupted.is_set() or not is_store_fault(error):
                        raise
                    logger.info("worker %s stopped before it was registered: %s", self.worker_instance_id, error)
                    return
                await self._stopping.wait()
        finally:
            watching.cancel()

    def stop(self) -> None:
        """Stop claiming; `run()` and the end of `async with` then drain what runs."""
        if not self._stopping.is_set():
            self._handed_back_before_stop = self._runs.reports.handed_back
        self._stopping.set()
        self._runs.slots.close()
        self._parts.wakeups.wake_all()

    async def _stop_when(self, interrupted: asyncio.Event) -> None:
        await interrupted.wait()
        self._is_stopped_by_signal = True
        self.stop()

    async def _register(self) -> None:
        """Register, retrying while the store is at fault."""
        for pause in pauses(*RETRY_SECONDS):
            asked_at = time.monotonic()
            try:
                if self._before_start is not None:
                    await self._before_start()
                await self._registration.enter(self._engine)
                self._health.answered()
                return
            except EngineError as error:
                if not is_store_fault(error) or self._stopping.is_set():
                    raise
                self._health.failed(error, asked_at)
                logger.log(retry_log_level(error), "registering failed and is retried in %.2f s: %s", pause, error)
            await is_set_within(self._stopping, pause)

    def _claimed_last(self, _: asyncio.Task[None]) -> None:
        # After the last claim nothing would notice that the store answers again, and draining runs need renewals.
        self._health.forget_silence()
        self.stop()

    def _start(self, claimed: Sequence[ClaimedExecution], asked_at: float) -> None:
        self._runs.start(claimed, asked_at, hands_back=self._stopping.is_set())

    def _on_lost(self, leases: Sequence[LostLease] | None) -> None:
        """Stop the runs whose leases a hint names; if hints may have been missed, check every lease."""
        if leases is not None:
            self._runs.lose_leases(leases)
        elif self._heartbeat is not None:
            self._heartbeat.check_all()

    async def _drain(self) -> None:
        self.stop()
        assert self._claiming is not None
        slots = self._runs.slots
        drain = Drain(self.worker_instance_id, slots.held)
        drain.begin(self._drain_seconds, is_by_signal=self._is_stopped_by_signal)
        self._runs.hand_back_unstarted()
        await slots.until_empty(self._drain_seconds)
        drain.log_time_up(self._drain_seconds)
        self._runs.hand_back_all()
        await slots.until_empty(CANCEL_SECONDS)
        # Not cancelled at once: the answer to a claim brings leases, which are handed back.
        await asyncio.wait((self._claiming,), timeout=max(0.0, drain.began + CLAIM_SECONDS - time.monotonic()))
        if not self._claiming.done():
            seconds = self._lease_ttl_ms / 1000
            logger.warning("a claim was not answered: what it has leased may be claimed again within %g s", seconds)
            self._claiming.cancel()
        await slots.until_empty(HAND_BACK_SECONDS)
        self._runs.close()
        drain.end(handed_back=self._runs.reports.handed_back - self._handed_back_before_stop)
        self._runs.abandon_unwritten()
        await asyncio.wait((self._claiming,))
        if not self._claiming.cancelled():
            self._claiming.result()

    async def _stop_reconciler(self) -> None:
        if self._reconciler is not None:
            await self._reconciler.stop()

    async def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            await self._heartbeat.stop()
        # After the last heartbeat, which would register this worker again.
        await self._registration.leave(self._engine)
