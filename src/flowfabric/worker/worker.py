"""The worker: claims executions into its free slots and runs their handlers."""

import asyncio
import contextlib
import contextvars
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from flowfabric.engine.core.wakeups import LostLease, LostReason
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
from flowfabric.model.states import AttemptType
from flowfabric.model.text import check_items, check_short, shown
from flowfabric.pauses import is_set_within, pauses
from flowfabric.reconcile.loop import Reconciler
from flowfabric.worker import presence
from flowfabric.worker.context import Running
from flowfabric.worker.faults import FAULT_SECONDS, Contact, is_passing, level_of_loss, level_of_retry, loss_text
from flowfabric.worker.handler import Handler
from flowfabric.worker.heartbeat import Heartbeat, Registration
from flowfabric.worker.interrupts import calling_on_interrupts
from flowfabric.worker.log_lines import Drain, log_begin, log_start
from flowfabric.worker.logs import add_fields_to_records, current_run, log_about
from flowfabric.worker.options import check_count, is_handler
from flowfabric.worker.outcome import Dropped, Failure, Outcome, PutOff, Success, outcome_of
from flowfabric.worker.reports import Reports
from flowfabric.worker.slots import Slots
from flowfabric.worker.threads import Threads
from flowfabric.worker.timeouts import TimeLimits

logger = logging.getLogger(__name__)

MAX_THREADS = 32
LISTENING_POLL_SECONDS = 5.0
"""The longest pause between two looks at the lanes while hints arrive and due work is announced."""
IDLE_SECONDS = 0.05
"""The first pause between two looks at the lanes while no hints arrive; each further one is longer."""
DEFAULT_NAMESPACE = "default"
"""Where a worker that serves every namespace is registered."""
CANCEL_SECONDS = 5.0
"""How long cancelled handlers may take to clean up."""
CLAIM_SECONDS = 3.0
"""How long stopping waits, at least, for the answer of a claim under way."""
HAND_BACK_SECONDS = 1.0
"""How long what such a claim has brought may take to be handed back."""
EARLIER_SECONDS = 10.0
"""How long a run waits at most for an earlier run of its execution, which should have stopped."""
PUT_OFF_MS = 5000
"""How long an execution whose earlier run has not stopped is delayed; the delay ends when that run returns."""


class Worker:
    """Runs the executions of its lanes with handlers by kind: `async with worker:` in the background, or `run()`.

    It takes only the kinds it has handlers for, and with a namespace only the work of that one. At most `concurrency`
    handlers run at a time. While a backlog is worked off by handlers that return within moments, it also claims what it
    will start in the next tenth of a second; what has not begun is handed back when it stops.

    A handler is cancelled when its execution is cancelled, its time is up or its lease is lost, and its result is not
    written. The next run of the same execution in this process begins when the earlier has returned; where that does
    not return soon, the execution is left to other workers. A handler that suspends ends there, and runs again from its
    start when it is resumed. Stopping waits for the running handlers; one that is still running at the end of that time
    is cancelled and its lease handed back, so that any worker can claim the execution at once.
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
        self.worker_id = check_worker_id(worker_id or host, "worker_id")
        self.worker_instance_id = check_worker_id(
            worker_instance_id or f"{self.worker_id[:200]}-{os.getpid()}-{secrets.token_hex(4)}", "worker_instance_id"
        )
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
        self._contact = Contact()
        self._slots = Slots(concurrency, self._begin, self._contact)
        self._reports = Reports(engine, self._release, self._contact)
        self._limits = TimeLimits(self._reports)
        self._threads = Threads(threads)
        self._put_off: set[asyncio.Task[None]] = set()
        """The tasks of runs that were put off, which wait for the earlier runs to leave."""
        self._claiming: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._is_stopped_by_signal = False
        self._handed_back_before = 0
        """Executions that were handed back before this worker began to stop."""
        self._context: contextvars.Context
        """What handlers see of context variables: those of whoever started this worker."""
        self._reconciler: Reconciler | None = None
        self._heartbeat: Heartbeat | None = None
        self._ignore_losses: Callable[[], None] = lambda: None

    @property
    def running(self) -> int:
        """How many executions have begun here whose endings are not committed; those claimed ahead have not begun."""
        return self._slots.started

    async def __aenter__(self) -> Self:
        """Register, and begin to claim in the background."""
        for handler in self._handlers.values():
            _ = handler.shape
        add_fields_to_records()
        self._context = contextvars.copy_context()
        async with AsyncExitStack() as stack:
            await self._register()
            stack.push_async_callback(self._registration.leave, self._engine)
            heartbeat = Heartbeat(
                self._engine,
                lease_ttl_ms=self._lease_ttl_ms,
                registration=self._registration,
                running=lambda: list(self._slots.held),
                lose=self._lose,
                contact=self._contact,
            )
            await heartbeat.start()
            stack.push_async_callback(heartbeat.stop)
            if self._reconcile:
                self._reconciler = await stack.enter_async_context(
                    Reconciler(self._engine, on_tick=self._contact.reconciled)
                )
            self._heartbeat = heartbeat
            # A run may be lost while its worker is too busy to wait for work.
            self._parts.wakeups.hints.start_listening()
            self._ignore_losses = self._parts.wakeups.on_lost(self._lose_named)
            self._claiming = asyncio.create_task(self._claim_while_wanted())
            self._claiming.add_done_callback(self._claimed_last)
            stack.pop_all()
        log_start(self._registration, self._slots.concurrency)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Claim nothing more, let the running handlers end, and leave; this takes a bounded time in any case."""
        try:
            await self._drain()
        finally:
            # Also where the drain was cancelled: the store may be closed next.
            self._reports.close()
            self._ignore_losses()
            await asyncio.gather(self._stop_reconciler(), self._stop_heartbeat())

    async def run(self) -> None:
        """Work until `stop()`, SIGTERM or SIGINT, then drain; a second signal ends the process at once."""
        interrupted = asyncio.Event()
        with calling_on_interrupts(interrupted.set):
            await self._run_until(interrupted)

    async def _run_until(self, interrupted: asyncio.Event) -> None:
        """Work until `stop()` or an event that a signal sets, then drain."""
        # A signal that came before is noted in the next turn of the event loop.
        await asyncio.sleep(0)
        if interrupted.is_set():
            return
        watching = asyncio.create_task(self._stop_when(interrupted))
        try:
            async with AsyncExitStack() as working:
                try:
                    await working.enter_async_context(self)
                except EngineError as error:
                    if not interrupted.is_set() or not is_passing(error):
                        raise
                    logger.info("worker %s stopped before it was registered: %s", self.worker_instance_id, error)
                    return
                await self._stopping.wait()
        finally:
            watching.cancel()

    def stop(self) -> None:
        """Claim nothing more; `run()` and the end of `async with` wait for what runs."""
        if not self._stopping.is_set():
            self._handed_back_before = self._reports.handed_back
        self._stopping.set()
        self._slots.close()
        self._parts.wakeups.wake_all()

    async def _stop_when(self, interrupted: asyncio.Event) -> None:
        await interrupted.wait()
        self._is_stopped_by_signal = True
        self.stop()

    async def _register(self) -> None:
        """Enter the registry, as soon as the store can take the entry."""
        for pause in pauses(*FAULT_SECONDS):
            asked_at = time.monotonic()
            try:
                await self._registration.enter(self._engine)
                self._contact.answered()
                return
            except EngineError as error:
                if not is_passing(error) or self._stopping.is_set():
                    raise
                self._contact.failed(error, asked_at)
                logger.log(level_of_retry(error), "registering failed and is retried in %.2f s: %s", pause, error)
            await is_set_within(self._stopping, pause)

    async def _claim_while_wanted(self) -> None:
        if not self.kinds:
            logger.warning("worker %s has no handlers and takes no work", self.worker_instance_id)
            await self._stopping.wait()
            return
        wakeups = self._parts.wakeups
        retry_pauses = pauses(*FAULT_SECONDS)
        idle_pauses = pauses(IDLE_SECONDS, self._poll_seconds)
        while True:
            wanted = await self._slots.room()
            if self._stopping.is_set():
                return
            wakes = wakeups.wakes(self.lanes)
            asked_at = time.monotonic()
            free = self._slots.free
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
                    slots=free,
                )
            except Exception as error:
                self._contact.failed(error, asked_at)
                level, trace = level_of_retry(error), None if isinstance(error, EngineError) else error
                pause = next(retry_pauses)
                logger.log(level, "a claim failed and is retried in %.2f s: %s", pause, error, exc_info=trace)
                self._slots.hand_back_waiting()
                await is_set_within(self._stopping, pause)
                continue
            self._contact.answered()
            retry_pauses = pauses(*FAULT_SECONDS)
            self._slots.ahead.claimed(is_full=len(claimed) == wanted)
            if claimed:
                idle_pauses = pauses(IDLE_SECONDS, self._poll_seconds)
                self._start(claimed, asked_at)
            if len(claimed) >= min(wanted, free):
                # There may be more: what could not be claimed ahead is claimed when a slot is free.
                continue
            if claimed:
                # All there was is taken: what comes wakes, and what was held elsewhere is looked for soon.
                await wakeups.wait_for_work(self.lanes, next(idle_pauses), since=wakes)
            elif not self._stopping.is_set():
                if self._reconcile and wakeups.hints.is_listening:
                    seconds = LISTENING_POLL_SECONDS * random.uniform(0.75, 1)
                else:
                    seconds = next(idle_pauses)
                await wakeups.wait_for_work(self.lanes, seconds, since=wakes)

    def _claimed_last(self, _: asyncio.Task[None]) -> None:
        # No further claim finds out that the store answers again, and runs that drain need their leases.
        self._contact.forget_silence()
        self.stop()

    def _start(self, claimed: Sequence[ClaimedExecution], asked_at: float) -> None:
        loop = asyncio.get_running_loop()
        is_stopping = self._stopping.is_set()
        for one in claimed:
            running = Running(one, asked_at, loop)
            self._slots.held.add(running)
            if (earlier := presence.enter(self._parts.store_key, running)) is not None:
                self._follow(running, earlier)
            if is_stopping:
                running.is_dropped = running.is_given_back = True
            self._slots.enter(running)
            if one.attempt_timeout_ms is not None or one.execution_deadline_at is not None:
                self._limits.begin(running)

    def _begin(self, running: Running) -> None:
        # Not asyncio.create_task, which asks the system for the process id to find the loop. Not in the context of
        # the caller, who may be another run that has ended and made room.
        running.task = running.loop.create_task(self._run(running), context=self._context.copy())

    def _follow(self, running: Running, earlier: Running) -> None:
        """Let a run begin when the earlier one has left, whose lease is gone."""
        running.earlier = earlier
        if earlier.loop is asyncio.get_running_loop():
            self._lose(earlier)
        else:
            with contextlib.suppress(RuntimeError):
                earlier.loop.call_soon_threadsafe(self._lose, earlier)

    async def _run(self, running: Running) -> None:
        outcome: Outcome = Dropped()
        claimed = running.claimed
        current_run.set(claimed)
        if not running.is_dropped:
            running.has_started = True
            handler = self._handlers[claimed.execution_kind]
            if claimed.attempt_type is AttemptType.RECLAIM or logger.isEnabledFor(logging.DEBUG):
                log_begin(running)
            if running.earlier is None:
                outcome = await outcome_of(running, handler, self._engine, self._threads)
            else:
                outcome = await self._outcome_after_earlier(running, handler)
        running.has_ended = True
        running.ended_at = time.monotonic()
        self._slots.returned(running)
        if running.timer is not None:
            running.timer.cancel()
        match outcome:
            case Success(payload):
                self._reports.complete(running, payload)
            case Failure() as failure:
                await self._reports.fail(running, failure)
            case PutOff():
                is_put_off = False
                try:
                    is_put_off = await self._reports.put_off(running, PUT_OFF_MS)
                finally:
                    self._release(running)
                if is_put_off:
                    await self._bring_forward(running)
            case Dropped():
                try:
                    if running.expiry is not None:
                        await running.expiry
                    elif running.is_given_back:
                        await self._reports.hand_back(running)
                    elif running.is_suspended:
                        logger.debug("%s is suspended in attempt %d", running, running.attempt)
                finally:
                    self._release(running)

    async def _outcome_after_earlier(self, running: Running, handler: Handler) -> Outcome:
        try:
            async with asyncio.timeout(_patience(running)):
                await presence.earlier_has_left(running)
        except asyncio.CancelledError:
            return Dropped()
        except TimeoutError:
            if (earlier := running.earlier) is not None:
                level = logging.INFO if earlier.is_stuck else logging.WARNING
                text = "%s is delayed by %g s: an earlier run of it in this process does not return"
                logger.log(level, text, running, PUT_OFF_MS / 1000)
                earlier.is_stuck = True
                return PutOff()
        return await outcome_of(running, handler, self._engine, self._threads)

    async def _bring_forward(self, running: Running) -> None:
        """Let any worker claim an execution that was put off as soon as its earlier run has left."""
        assert running.task is not None
        self._put_off.add(running.task)
        try:
            async with asyncio.timeout(PUT_OFF_MS / 1000):
                await presence.earlier_has_left(running)
            await self._reports.bring_forward(running)
        except TimeoutError:
            pass
        finally:
            self._put_off.discard(running.task)

    def _release(self, running: Running) -> None:
        self._slots.release(running)
        presence.leave(self._parts.store_key, running)

    def _lose(self, running: Running) -> None:
        """Stop a handler whose lease is lost; where it has returned or suspends, the store answers that."""
        running.lost = running.lost or LostReason.RECLAIMED
        if not running.has_ended and not running.is_suspending and not running.is_dropped:
            level, why = level_of_loss(running.lost), loss_text(running.lost)
            log_about(running.claimed, logger, level, "%s is stopped: %s", running, why)
            running.stop()

    def _lose_named(self, leases: Sequence[LostLease] | None) -> None:
        """Stop the runs that are named by a hint; one that names none has every lease checked."""
        if leases is None:
            if self._heartbeat is not None:
                self._heartbeat.check_all()
            return
        for execution_id, lease_epoch, reason in leases:
            running = presence.latest(self._parts.store_key, execution_id)
            if running is not None and running in self._slots.held and running.claimed.lease_epoch == lease_epoch:
                running.lost = running.lost or reason
                self._lose(running)

    async def _drain(self) -> None:
        self.stop()
        assert self._claiming is not None
        drain = Drain(self.worker_instance_id, self._slots.held)
        drain.begin(self._drain_seconds, is_by_signal=self._is_stopped_by_signal)
        for running in self._slots.held:
            if running.earlier is not None:
                self._give_back(running)
        await self._slots.until_empty(self._drain_seconds)
        drain.time_is_up(self._drain_seconds)
        for running in list(self._slots.held):
            self._give_back(running)
        await self._slots.until_empty(CANCEL_SECONDS)
        # Not cancelled while it may still be answered: the answer holds leases, which are handed back.
        await asyncio.wait((self._claiming,), timeout=max(0.0, drain.began + CLAIM_SECONDS - time.monotonic()))
        if not self._claiming.done():
            seconds = self._lease_ttl_ms / 1000
            logger.warning("a claim was not answered: what it has leased may be claimed again within %g s", seconds)
            self._claiming.cancel()
        await self._slots.until_empty(HAND_BACK_SECONDS)
        self._reports.close()
        self._threads.close()
        for task in self._put_off:
            task.cancel()
        drain.end(handed_back=self._reports.handed_back - self._handed_back_before)
        for running in self._slots.held:
            if running.has_ended and running.task is not None:
                running.task.cancel()
        await asyncio.wait((self._claiming,))
        if not self._claiming.cancelled():
            self._claiming.result()

    def _give_back(self, running: Running) -> None:
        """Stop a run and hand its lease back when its handler has returned; one that has returned is being ended."""
        if not running.has_ended and not running.is_dropped:
            running.is_given_back = True
            running.stop()

    async def _stop_reconciler(self) -> None:
        if self._reconciler is not None:
            await self._reconciler.stop()

    async def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            await self._heartbeat.stop()
        # After the last beat, which would register this worker again.
        await self._registration.leave(self._engine)


def _patience(running: Running) -> float:
    """How long a run waits for an earlier one: not at all where one before it has waited in vain."""
    if running.earlier is not None and running.earlier.is_stuck:
        return 0.0
    timeout_ms = running.claimed.attempt_timeout_ms
    return EARLIER_SECONDS if timeout_ms is None else min(EARLIER_SECONDS, timeout_ms / 2000)
