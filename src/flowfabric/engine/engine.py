"""Engine: every operation, on one Postgres."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from flowfabric.engine.lifecycle import Lifecycle
from flowfabric.engine.operations.claim import ClaimOperations
from flowfabric.engine.operations.execution import ExecutionOperations
from flowfabric.engine.operations.finish import FinishOperations
from flowfabric.engine.operations.keys import KeyOperations
from flowfabric.engine.operations.lease import LeaseOperations
from flowfabric.engine.operations.signals import SignalOperations
from flowfabric.engine.operations.suspend import SuspendOperations
from flowfabric.engine.operations.view import ViewOperations
from flowfabric.engine.operations.worker import WorkerOperations
from flowfabric.model.errors import error
from flowfabric.model.support import NAMED_OPERATIONS
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

    if not TYPE_CHECKING:
        # Type checkers know only what is offered. At run time any operation that has a name can be called.
        def __getattr__(self, name: str) -> object:
            """An operation that is named but not offered; whoever calls it is told so."""
            if name not in NAMED_OPERATIONS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

            async def refuse(*_: object, **__: object) -> None:
                raise error("unavailable", f"{name}: not offered by this version")

            async def refuse_each(*_: object, **__: object) -> AsyncIterator[object]:
                await refuse()
                yield

            return refuse_each if name.startswith("subscribe_") else refuse

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str | None = None, *, settings: Settings | None = None) -> AsyncIterator["Engine"]:
        """An engine on the named Postgres, on the configured one, or on the embedded one."""
        settings = settings or Settings()
        if url is not None:
            settings = settings.model_copy(update={"database_url": Settings(database_url=url).database_url})
        async with cls._on(await Lifecycle.open(settings)) as engine:
            yield engine

    @asynccontextmanager
    async def beside(self, *, pool_size: int = 1) -> AsyncIterator["Engine"]:
        """Another engine on the same store with connections of its own, for a thread with an event loop of its own."""
        settings = self._lifecycle.address.model_copy(update={"database_pool_size": pool_size})
        async with self._on(await Lifecycle.open(settings, beside=self._lifecycle)) as engine:
            yield engine

    @classmethod
    @asynccontextmanager
    async def _on(cls, lifecycle: Lifecycle) -> AsyncIterator["Engine"]:
        engine = cls(lifecycle)
        try:
            yield engine
        finally:
            await engine._close()
