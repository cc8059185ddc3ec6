"""A process that calls the engine and records its answers: `python -m tests.faults.actor ROLE ...`."""

import asyncio
import contextlib
import logging
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.settings import Settings

from .history import History

Answer = TypeVar("Answer")

WORK, MANUAL = "work", "manual"
"""The lane of the workers, and the lane of the claimers, which call the engine directly."""
NAMESPACE = "faults"


def settings(url: str, *, submit_patience_ms: int = 2_000) -> Settings:
    """The settings of every process, with timeouts and intervals for a short run."""
    return Settings(
        database_url=url,
        database_pool_size=4,
        statement_timeout_ms=2_000,
        idle_in_transaction_timeout_ms=1_500,
        submit_patience_ms=submit_patience_ms,
        lease_expiry_interval_ms=500,
        delayed_promoter_interval_ms=300,
        lanes=(WORK, MANUAL),
    )


class Actor:
    """One process of a run: its engine, its history and its random numbers."""

    def __init__(self, url: str, history: History, seed: str, lease_ms: int) -> None:
        self.url = url
        self.history = history
        self.rng = random.Random(seed)
        self.lease_ms = lease_ms
        self.stopping = asyncio.Event()

    @asynccontextmanager
    async def engine(self, **changes: int) -> AsyncIterator[Engine]:
        """An engine; connecting is retried until it succeeds."""
        async with contextlib.AsyncExitStack() as stack:
            while True:
                try:
                    engine = await stack.enter_async_context(Engine.connect(settings=settings(self.url, **changes)))
                    break
                except EngineError as error:
                    if self.stopping.is_set():
                        raise SystemExit(0) from None
                    self.history.record("refused", operation="connect", detail=str(error))
                    await self.pause(0.2)
            self.history.record("ready")
            yield engine

    async def pause(self, seconds: float) -> None:
        """Wait for this time, or until the process is stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    async def call(
        self, operation: str, call: Coroutine[Any, Any, Answer], *, cancel_share: float = 0, **known: object
    ) -> Answer | None:
        """The answer of a call, or None; an error is recorded, and so is one of the random cancellations."""
        task = asyncio.create_task(call)
        if self.rng.random() < cancel_share:
            await self._cancel_soon(task)
        try:
            return await task
        except EngineError as error:
            is_unknown = isinstance(error, TransportError) and error.outcome_unknown
            event = "unknown" if is_unknown else "refused"
            self.history.record(event, operation=operation, detail=str(error), code=error.code, **known)
        except asyncio.CancelledError:
            self.history.record("unknown", operation=operation, detail="cancelled", **known)
        except Exception as error:
            self.history.record("unexpected error", operation=operation, detail=repr(error), **known)
        return None

    async def _cancel_soon(self, task: "asyncio.Task[Any]") -> None:
        """Cancel a call after a few turns of the event loop, or after a few milliseconds."""
        if self.rng.random() < 0.7:
            for _ in range(self.rng.randrange(8)):
                await asyncio.sleep(0)
        else:
            await asyncio.wait((task,), timeout=self.rng.random() * 0.01)
        task.cancel()

    async def repeat(self, step: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Repeat a step until the process is stopped, with pauses of about this length."""
        while not self.stopping.is_set():
            await step()
            await self.pause(seconds * self.rng.uniform(0.2, 1.8))


async def main(role: str, url: str, folder: str, name: str, seed: str, lease_ms: str) -> None:
    """Run a role until SIGTERM."""
    from .operating import operate, signal_waiters
    from .submitting import submit
    from .working import claim_by_hand, work

    roles = {
        "submitter": submit,
        "worker": work,
        "claimer": claim_by_hand,
        "signaller": signal_waiters,
        "operator": operate,
    }
    actor = Actor(url, History(Path(folder) / f"{name}.history", name), seed, int(lease_ms))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, actor.stopping.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    await roles[role](actor)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(main(*sys.argv[1:7]))
