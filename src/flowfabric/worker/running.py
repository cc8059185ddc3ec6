"""What a worker knows about one execution that it has claimed."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from uuid import UUID

from flowfabric.engine.core.wakeups import LostReason
from flowfabric.engine.execution.limits import Inherited
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.signal import ResumeSignal
from flowfabric.worker.streaming import FrameQueue


class Running:
    """One claimed execution, from its claim until its end is committed."""

    __slots__ = (
        "claimed",
        "claimed_at",
        "earlier",
        "ended_at",
        "expiry",
        "failures",
        "frames",
        "has_ended",
        "has_left",
        "has_slot",
        "has_started",
        "heritage",
        "is_dropped",
        "is_handed_back",
        "is_in_thread",
        "is_stuck",
        "is_suspended",
        "is_suspending",
        "left",
        "loop",
        "lost",
        "on_stop",
        "overspent",
        "renewed_at",
        "signals",
        "spent_calls",
        "spent_keys",
        "task",
        "timer",
        "waiter",
        "waits",
    )

    def __init__(self, claimed: ClaimedExecution, at: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.claimed = claimed
        self.claimed_at = at
        """When the claim was sent, by the monotonic clock."""
        self.renewed_at = at
        """When the claim or the latest successful renewal was sent, by the monotonic clock."""
        self.failures = 0
        """Renewals that have failed since the latest successful one."""
        self.has_slot = False
        """Whether its handler occupies a slot."""
        self.has_started = False
        """Whether its handler may have been called."""
        self.has_ended = False
        """Whether its handler has returned; its end may not be committed yet."""
        self.ended_at = 0.0
        """When its handler returned, by the monotonic clock."""
        self.has_left = False
        """Whether its handler has returned and its end is committed or given up."""
        self.earlier: Running | None = None
        """The run of the same execution that had not left this process when this one was claimed."""
        self.left: Future[None] | None = None
        """Done when this run has left this process; set only if the next run of the execution waits for it."""
        self.is_dropped = False
        """Whether its result is discarded: it is suspended, its lease is lost, or the worker is stopping."""
        self.is_handed_back = False
        """Whether its lease is handed back once its handler has returned."""
        self.is_in_thread = False
        """Whether a thread executes its handler, which no cancellation stops."""
        self.is_stuck = False
        """Whether a later run of the same execution has waited for this one and timed out."""
        self.is_suspending = False
        """Whether a suspend is in progress or done. Lease errors are ignored meanwhile: a suspend ends the lease."""
        self.is_suspended = False
        self.signals: tuple[ResumeSignal, ...] = ()
        """The signals of the wait that is over."""
        self.frames: FrameQueue | None = None
        """The frames that its handler has written; set only if the handler uses its stream or its summary."""
        self.lost: EngineError | LostReason | None = None
        """Why its lease is lost, if it is known to be."""
        self.on_stop: Callable[[Running], None] | None = None
        """Called if it is stopped while it waits for a slot."""
        self.loop = loop or asyncio.get_running_loop()
        """The event loop of its worker."""
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Stops the run at its attempt timeout or its execution deadline."""
        self.expiry: asyncio.Task[None] | None = None
        """The task that then ends the attempt or the execution in the store."""
        self.waiter: asyncio.Future[None] | None = None
        """Done when the lease is lost; set only if the handler has asked for it."""
        self.waits: dict[str, int] = {}
        """How many times its handler has waited for a signal, by the name of the signal."""
        self.spent_calls = 0
        """How many times its handler has reserved or spent something without naming a key."""
        self.spent_keys: set[tuple[UUID, str]] = set()
        """The keys that its handler has named, with their budgets."""
        self.overspent: Exception | None = None
        """The breach of a budget that fails the execution, whatever its handler does afterwards."""
        self.heritage: Inherited | None = None
        """The limits that what its handler submits gets from it; None before they are read."""

    def __str__(self) -> str:
        """Return `<execution id> (<kind>)`."""
        return f"{self.claimed.execution_id} ({self.claimed.execution_kind})"

    @property
    def execution_id(self) -> ExecutionId:
        """The id of the execution."""
        return self.claimed.execution_id

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.claimed.attempt_index + 1

    @property
    def is_lease_expired(self) -> bool:
        """Whether the lease has expired, by the clock of this process."""
        return time.monotonic() - self.renewed_at >= self.claimed.handle.lease_ttl_ms / 1000

    @property
    def is_lease_held(self) -> bool:
        """Whether the lease is still held, as far as this process knows."""
        return self.lost is None and not self.is_suspended and not self.is_lease_expired

    def stop(self) -> None:
        """Discard the result and cancel the handler, or never call it if it has not started."""
        self.is_dropped = True
        if self.on_stop is not None:
            self.on_stop(self)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        if self.task is not None and self.has_started and not self.has_ended:
            self.task.cancel()
