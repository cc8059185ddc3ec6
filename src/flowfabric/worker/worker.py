"""The worker: claims executions into its free slots and runs their handlers."""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypedDict

from flowfabric.engine.claim import DEFAULT_LEASE_TTL_MS, MAX_LANES, MAX_TTL_MS
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import check_lane_id, check_worker_id
from flowfabric.model.kinds import check_kinds
from flowfabric.model.outcomes import ClaimedExecution
from flowfabric.model.policy import check_capabilities
from flowfabric.model.text import check_items, check_short, shown
from flowfabric.pauses import pauses
from flowfabric.reconcile.loop import Reconciler
from flowfabric.worker.context import Running
from flowfabric.worker.faults import FAULT_SECONDS
from flowfabric.worker.handler import Handler
from flowfabric.worker.heartbeat import Heartbeat, Registration
from flowfabric.worker.interrupts import calling_on_interrupts
from flowfabric.worker.outcome import Dropped, Failure, Success, outcome_of
from flowfabric.worker.reports import Reports
from flowfabric.worker.threads import Threads

logger = logging.getLogger(__name__)

CLAIM_SIZE = 500
"""Executions in one claim: while some of a worker's slots are claimed into, others run and yet others are ended."""
MAX_THREADS = 32
LISTENING_POLL_SECONDS = 5.0
"""The longest pause between two looks at the lanes while hints arrive and due work is announced."""
IDLE_SECONDS = 0.05
"""The first pause between two looks at the lanes while no hints arrive; each further one is longer."""
GATHER_SECONDS = 0.002
"""How long a few free slots wait for more to be claimed into with them."""
DEFAULT_NAMESPACE = "default"
"""Where a worker that serves every namespace is registered."""
CANCEL_SECONDS = 5.0
"""How long cancelled handlers may take to clean up."""


class WorkerOptions(TypedDict, total=False):
    """How a worker works, as `Worker` takes it."""

    lanes: Iterable[str]
    concurrency: int
    worker_id: str
    worker_instance_id: str
    capabilities: Iterable[str]
    lease_ttl_ms: int
    namespace: str | None
    claim_poll_interval_ms: int
    drain_seconds: float
    threads: int
    reconcile: bool


class Worker:
    """Runs the executions of its lanes with handlers by kind: `async with worker:` in the background, or `run()`.

    It takes only the kinds it has handlers for, and with a namespace only the work of that one.
    A handler whose lease is lost is cancelled, and its result is not written. One that suspends ends there, and runs
    again from its start when it is resumed. Stopping waits for the running handlers; one that is still running at the
    end of that time is cancelled and its lease left to lapse, so that another worker takes the execution over.
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
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        namespace: str | None = None,
        claim_poll_interval_ms: int = 1000,
        drain_seconds: float = 30,
        threads: int | None = None,
        reconcile: bool = True,
    ) -> None:
        _check_range("concurrency", concurrency)
        threads = min(concurrency, MAX_THREADS) if threads is None else threads
        self.lanes = tuple(dict.fromkeys(map(check_lane_id, check_items(lanes, "lanes"))))
        _check_range("lanes", len(self.lanes), MAX_LANES)
        _check_range("threads", threads)
        _check_range("lease_ttl_ms", lease_ttl_ms, MAX_TTL_MS)
        _check_range("claim_poll_interval_ms", claim_poll_interval_ms)
        if isinstance(drain_seconds, bool) or not isinstance(drain_seconds, int | float) or not drain_seconds >= 0:
            raise ValueError(f"drain_seconds: a number from 0 on, got {shown(drain_seconds)}")
        if not isinstance(handlers, Mapping) or not all(map(_is_handler, handlers.values())):
            raise error("invalid_input", f"handlers: functions by kind are wanted, got {shown(handlers)}")
        host = "".join(char for char in socket.gethostname() if char.isprintable() and char != " ") or "worker"
        self.worker_id = check_worker_id(worker_id or host, "worker_id")
        self.worker_instance_id = check_worker_id(
            worker_instance_id or f"{self.worker_id[:200]}-{os.getpid()}-{secrets.token_hex(4)}", "worker_instance_id"
        )
        self.capabilities = check_capabilities(check_items(capabilities, "capabilities"))
        self._engine = engine
        self._handlers = {
            kind: handler if isinstance(handler, Handler) else Handler(handler) for kind, handler in handlers.items()
        }
        self.kinds = check_kinds(tuple(self._handlers), least=0)
        self.namespace = None if namespace is None else check_short(namespace, "namespace")
        self._concurrency = concurrency
        self._worth_claiming = max(1, min(concurrency // 4, CLAIM_SIZE))
        self._lease_ttl_ms = lease_ttl_ms
        self._poll_seconds = claim_poll_interval_ms / 1000
        self._drain_seconds = drain_seconds
        self._reconcile = reconcile
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
        self._running: set[Running] = set()
        self._reports = Reports(engine, self._release)
        self._threads = Threads(threads)
        self._claiming: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._slot_freed = asyncio.Event()
        self._background = AsyncExitStack()

    @property
    def running(self) -> int:
        """How many executions hold a slot."""
        return len(self._running)

    async def __aenter__(self) -> Self:
        """Register, and begin to claim in the background."""
        for handler in self._handlers.values():
            _ = handler.shape
        async with AsyncExitStack() as stack:
            await self._registration.enter(self._engine)
            stack.push_async_callback(self._leave)
            heartbeat = Heartbeat(
                self._engine,
                lease_ttl_ms=self._lease_ttl_ms,
                registration=self._registration,
                running=lambda: list(self._running),
                lose=self._lose,
            )
            await heartbeat.start()
            stack.push_async_callback(heartbeat.stop)
            if self._reconcile:
                await stack.enter_async_context(Reconciler(self._engine))
            self._claiming = asyncio.create_task(self._claim_while_wanted())
            self._claiming.add_done_callback(lambda _: self.stop())
            self._background = stack.pop_all()
        logger.info("worker %s serves %s", self.worker_instance_id, ", ".join(self.lanes))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Claim nothing more, let the running handlers end, and leave."""
        async with self._background:
            await self._drain()

    async def run(self) -> None:
        """Work until `stop()`, SIGTERM or SIGINT, then drain; a second signal does what it does by default."""
        with calling_on_interrupts(self.stop):
            async with self:
                await self._stopping.wait()

    def stop(self) -> None:
        """Claim nothing more; `run()` and the end of `async with` wait for what runs."""
        self._stopping.set()
        self._slot_freed.set()
        self._engine.wakeups.wake_all()

    async def _claim_while_wanted(self) -> None:
        if not self.kinds:
            logger.warning("worker %s has no handlers and takes no work", self.worker_instance_id)
            await self._stopping.wait()
            return
        wakeups = self._engine.wakeups
        retry_pauses = pauses(*FAULT_SECONDS)
        idle_pauses = pauses(IDLE_SECONDS, self._poll_seconds)
        while True:
            free = await self._free_slots()
            if self._stopping.is_set():
                return
            wakes = wakeups.wakes(self.lanes)
            asked_at = time.monotonic()
            wanted = min(free, CLAIM_SIZE)
            try:
                claimed = await self._engine.claim_many(
                    lanes=self.lanes,
                    worker_id=self.worker_id,
                    worker_instance_id=self.worker_instance_id,
                    capabilities=self.capabilities,
                    kinds=self.kinds,
                    namespace=self.namespace,
                    lease_ttl_ms=self._lease_ttl_ms,
                    limit=wanted,
                )
            except Exception as error:
                is_known = isinstance(error, EngineError)
                logger.warning("a claim failed and is repeated: %s", error, exc_info=None if is_known else error)
                await self._pause(next(retry_pauses))
                continue
            retry_pauses = pauses(*FAULT_SECONDS)
            if claimed:
                idle_pauses = pauses(IDLE_SECONDS, self._poll_seconds)
                self._start(claimed, asked_at)
                if len(claimed) < wanted:
                    # All there was is taken: what comes wakes, and what was held elsewhere is looked for soon.
                    await wakeups.wait_for_work(self.lanes, next(idle_pauses), since=wakes)
            elif not self._stopping.is_set():
                if self._reconcile and wakeups.hints.is_listening:
                    seconds = LISTENING_POLL_SECONDS * random.uniform(0.75, 1)
                else:
                    seconds = next(idle_pauses)
                await wakeups.wait_for_work(self.lanes, seconds, since=wakes)

    async def _free_slots(self) -> int:
        """How many slots are free, as soon as it pays to claim into them."""
        while len(self._running) >= self._concurrency and not self._stopping.is_set():
            self._slot_freed.clear()
            await self._slot_freed.wait()
        if self._running and self._concurrency - len(self._running) < self._worth_claiming:
            await self._pause(GATHER_SECONDS)
        return self._concurrency - len(self._running)

    def _start(self, claimed: Sequence[ClaimedExecution], asked_at: float) -> None:
        loop = asyncio.get_running_loop()
        for one in claimed:
            running = Running(one, asked_at)
            self._running.add(running)
            running.task = loop.create_task(self._run(running))

    async def _run(self, running: Running) -> None:
        running.has_started = True
        handler = self._handlers[running.claimed.execution_kind]
        outcome = await outcome_of(running, handler, self._engine, self._threads)
        running.has_ended = True
        match outcome:
            case Success(payload):
                self._reports.complete(running, payload)
            case Failure() as failure:
                await self._reports.fail(running, failure)
            case Dropped():
                self._release(running)

    def _release(self, running: Running) -> None:
        self._running.discard(running)
        self._slot_freed.set()

    def _lose(self, running: Running) -> None:
        """Stop a handler whose lease is lost; where it has returned or suspends, the store answers that."""
        if not running.has_ended and not running.is_suspending:
            logger.warning("the lease of %s is lost: %s", running.execution_id, running.lost)
            if running.waiter is not None and not running.waiter.done():
                running.waiter.set_result(None)
            self._drop(running)

    def _drop(self, running: Running) -> None:
        running.is_dropped = True
        if running.task is not None and not running.has_ended:
            running.task.cancel()
            if not running.has_started:
                # A task that is cancelled before its first step never enters its coroutine.
                self._release(running)

    async def _drain(self) -> None:
        self.stop()
        assert self._claiming is not None
        # Waited for, never cancelled: the answer of a claim under way holds leases.
        await asyncio.wait((self._claiming,))
        await self._until_empty(self._drain_seconds)
        for running in list(self._running):
            logger.warning("%s is left to another worker: its handler did not end in time", running.execution_id)
            self._drop(running)
        await self._until_empty(CANCEL_SECONDS)
        self._reports.close()
        self._threads.close()
        self._claiming.result()

    async def _until_empty(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._running:
                    self._slot_freed.clear()
                    await self._slot_freed.wait()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _leave(self) -> None:
        try:
            await self._registration.leave(self._engine)
        except Exception as error:
            logger.warning("the registration is left to lapse: %s", error)


def _is_handler(value: object) -> bool:
    return isinstance(value, Handler) or callable(value)


def _check_range(name: str, value: int, most: int | None = None) -> None:
    if type(value) is not int or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f", at most {most}"
        raise ValueError(f"{name}: a whole number, at least 1{limit}, got {shown(value)}")
