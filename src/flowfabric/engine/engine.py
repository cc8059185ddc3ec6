"""Engine: every operation, on one Postgres."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flowfabric.engine.boot import Boot
from flowfabric.engine.operations.claim import ClaimOperations
from flowfabric.engine.operations.execution import ExecutionOperations
from flowfabric.engine.operations.finish import FinishOperations
from flowfabric.engine.operations.keys import KeyOperations
from flowfabric.engine.operations.lease import LeaseOperations
from flowfabric.engine.operations.signals import SignalOperations
from flowfabric.engine.operations.suspend import SuspendOperations
from flowfabric.engine.operations.view import ViewOperations
from flowfabric.engine.operations.worker import WorkerOperations
from flowfabric.settings import Settings


class Engine(
    ExecutionOperations,
    ClaimOperations,
    LeaseOperations,
    FinishOperations,
    SuspendOperations,
    WorkerOperations,
    ViewOperations,
    KeyOperations,
    SignalOperations,
):
    """The engine on one Postgres; get one from `Engine.connect`."""

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str | None = None, *, settings: Settings | None = None) -> AsyncIterator["Engine"]:
        """An engine on the named Postgres, on the configured one, or on the embedded one."""
        settings = settings or Settings()
        if url is not None:
            settings = settings.model_copy(update={"database_url": Settings(database_url=url).database_url})
        boot = await Boot.open(settings)
        engine = cls(boot)
        try:
            yield engine
        finally:
            await engine._close()

    @asynccontextmanager
    async def beside(self, *, pool_size: int = 1) -> AsyncIterator["Engine"]:
        """Another engine on the same store with connections of its own, for a thread with an event loop of its own."""
        settings = self._boot.address.model_copy(update={"database_pool_size": pool_size})
        async with Engine.connect(settings=settings) as engine:
            yield engine
