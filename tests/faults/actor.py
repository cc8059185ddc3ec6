"""A process that works with the engine and writes down what it is told: `python -m tests.faults.actor ROLE ...`."""

import asyncio
import contextlib
import logging
import random
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.settings import Settings

from .history import History

Answer = TypeVar("Answer")

LEASE_MS = 2_000
WORK, MANUAL = "work", "manual"
"""The lane of the worker processes, and that of processes which claim by themselves."""
NAMESPACE = "faults"


def settings(url: str, *, submit_patience_ms: int = 2_000) -> Settings:
    """What every process of a run is configured with: limits and intervals fit for a run of a minute."""
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
    """One process of a run: its engine, its history, and its share of chance."""

    def __init__(self, url: str, history: History, seed: str) -> None:
        self.url = url
        self.history = history
        self.chance = random.Random(seed)
        self.stopping = asyncio.Event()

    @asynccontextmanager
    async def engine(self, **changes: int) -> AsyncIterator[Engine]:
        """An engine, as soon as there is a server."""
        async with contextlib.AsyncExitStack() as stack:
            while True:
                try:
                    engine = await stack.enter_async_context(Engine.connect(settings=settings(self.url, **changes)))
                    break
                except EngineError as error:
                    if self.stopping.is_set():
                        raise SystemExit(0) from None
                    self.history.tell("refused", of="connect", detail=str(error))
                    await self.pause(0.2)
            self.history.tell("ready")
            yield engine

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than this process is wanted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    async def ask(
        self, of: str, call: Coroutine[Any, Any, Answer], *, impatient: float = 0, **known: object
    ) -> Answer | None:
        """The answer of a call; an error is written down, and so is a call that is cancelled for impatience."""
        task = asyncio.create_task(call)
        if self.chance.random() < impatient:
            await self._lose_patience(task)
        try:
            return await task
        except EngineError as error:
            is_unknown = isinstance(error, TransportError) and error.outcome_unknown
            what = "unknown" if is_unknown else "refused"
            self.history.tell(what, of=of, detail=str(error), code=error.code, **known)
        except asyncio.CancelledError:
            self.history.tell("unknown", of=of, detail="cancelled", **known)
        except Exception as error:
            self.history.tell("surprise", of=of, detail=repr(error), **known)
        return None

    async def _lose_patience(self, task: "asyncio.Task[Any]") -> None:
        """Cancel a call after a few turns of the loop, where conversations begin, or after a few milliseconds."""
        if self.chance.random() < 0.7:
            for _ in range(self.chance.randrange(8)):
                await asyncio.sleep(0)
        else:
            await asyncio.wait((task,), timeout=self.chance.random() * 0.01)
        task.cancel()

    async def repeat(self, step: Any, seconds: float) -> None:
        """Take a step again and again, with pauses of about this length."""
        while not self.stopping.is_set():
            await step()
            await self.pause(seconds * self.chance.uniform(0.2, 1.8))


async def main(role: str, url: str, folder: str, name: str, seed: str) -> None:
    """Play a role until SIGTERM."""
    from .attending import operate, signal_waiters
    from .submitting import submit
    from .working import claim_by_hand, work

    roles = {
        "submitter": submit,
        "worker": work,
        "claimer": claim_by_hand,
        "signaller": signal_waiters,
        "operator": operate,
    }
    actor = Actor(url, History(Path(folder) / f"{name}.history", name), seed)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, actor.stopping.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    await roles[role](actor)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(main(*sys.argv[1:6]))
