"""The log lines about the start of a worker, the start of runs, and the drain."""

import logging
import time
from collections.abc import Collection

from flowfabric.model.states import HandleKind
from flowfabric.model.text import listed
from flowfabric.worker.heartbeat import Registration
from flowfabric.worker.logs import log_about
from flowfabric.worker.running import Running

logger = logging.getLogger("flowfabric.worker")

MAX_LISTED = 20
"""How many lanes or tasks one line lists at most."""


def log_worker_start(worker: Registration, concurrency: int) -> None:
    """Log that a worker has started, and what it serves."""
    logger.info(
        "worker %s started: lanes %s; tasks %s; concurrency %d; %s",
        worker.worker_instance_id,
        listed(worker.lanes, most=MAX_LISTED),
        listed(worker.kinds, most=MAX_LISTED),
        concurrency,
        "every namespace" if worker.serves_all_namespaces else f"namespace {worker.namespace}",
    )


def log_run_start(running: Running) -> None:
    """Log that a run begins; as a warning if its last attempt lost its lease."""
    # Not by the type of the attempt: the same attempt continues after a wait, and after it was handed back.
    if running.claimed.handle.kind is HandleKind.RECLAIMED:
        logger.warning(
            "%s is reclaimed as attempt %d: attempt %d lost its lease", running, running.attempt, running.attempt - 1
        )
    else:
        logger.debug("%s begins, attempt %d", running, running.attempt)


def log_stop(running: Running, level: int, why: str) -> None:
    """Log that a run is stopped before its handler has returned, and why."""
    text = "%s is stopped: %s"
    if running.is_in_thread:
        text = "%s is abandoned: %s; its thread cannot be stopped, and its result will be discarded"
    log_about(running.claimed, logger, level, text, running, why)


def log_expired(running: Running) -> None:
    """Log that the execution of a run has expired."""
    log_about(running.claimed, logger, logging.ERROR, "%s has expired for good", running)


class Drain:
    """Logs the start of a drain, its timeout, and its end."""

    def __init__(self, worker_instance_id: str, held: Collection[Running]) -> None:
        self.began = time.monotonic()
        self._worker = worker_instance_id
        self._held = held
        self._begun = list(held)

    def begin(self, seconds: float, *, is_by_signal: bool) -> None:
        """Log how many handlers run and how long the drain waits for them."""
        count = sum(running.has_slot for running in self._begun)
        waits = ""
        if count:
            waits = f", waiting up to {seconds:g} s"
            if is_by_signal:
                waits += "; a second signal ends at once"
        logger.info("worker %s stops: %s running%s", self._worker, _handlers(count), waits)

    def log_time_up(self, seconds: float) -> None:
        """Log how many handlers are cancelled, if any."""
        if count := sum(not running.has_ended and not running.is_dropped for running in self._held):
            logger.info("worker %s has waited %g s: cancelling %s", self._worker, seconds, _handlers(count))

    def end(self, *, handed_back: int) -> None:
        """Log how many runs finished, how many were handed back, and which ones keep their lease until it expires."""
        for running in self._held:
            what = "has ended, which could not be stored" if running.has_ended else "does not stop"
            seconds = running.claimed.handle.lease_ttl_ms / 1000
            log_about(
                running.claimed,
                logger,
                logging.WARNING,
                "%s %s: another worker can claim it when its lease expires, within %g s",
                running,
                what,
                seconds,
            )
        finished = sum(
            running.has_ended and (running.is_suspended or not running.is_dropped) and running not in self._held
            for running in self._begun
        )
        left = f", {len(self._held)} left until their leases expire" if self._held else ""
        seconds = time.monotonic() - self.began
        logger.info(
            "worker %s has stopped after %.1f s: %d finished while it stopped, %d handed back%s",
            self._worker,
            seconds,
            finished,
            handed_back,
            left,
        )


def _handlers(count: int) -> str:
    return "1 handler" if count == 1 else f"{count or 'no'} handlers"
