"""Restarts of an embedded server that has died, shared by the connections of an event loop."""

import asyncio
import logging

from flowfabric.db.embedded import Embedded, EmbeddedError
from flowfabric.db.off_loop import off_loop
from flowfabric.tasks import create_shared_task

logger = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""How long a caller waits; the start continues in the background."""


class Revival:
    """Restarts the server for the connections of one event loop; concurrent callers share one attempt."""

    def __init__(self, embedded: Embedded) -> None:
        self._embedded = embedded
        self._pid = embedded.pid
        self._attempt: asyncio.Task[None] | None = None
        self._last_error = ""

    async def __call__(self) -> str | None:
        """Start the server if it is dead; return its address if its process has changed, else None."""
        before = self._pid
        if self._attempt is None or self._attempt.done():
            self._attempt = create_shared_task(self._start())
        await asyncio.wait((self._attempt,), timeout=WAIT_SECONDS)
        self._pid = self._embedded.pid
        return None if self._pid == before else self._embedded.url

    async def close(self) -> None:
        """Wait for a running start, for a limited time."""
        if self._attempt is not None:
            await asyncio.wait((self._attempt,), timeout=WAIT_SECONDS)

    async def _start(self) -> None:
        try:
            await off_loop(self._embedded.revive)
        except (EmbeddedError, OSError) as error:
            # Every reconnect tries again; log the same reason only once.
            if str(error) != self._last_error:
                self._last_error = str(error)
                logger.error("the embedded Postgres died and cannot be started again: %s", error)
        else:
            self._last_error = ""
