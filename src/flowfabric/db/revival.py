"""Starting the embedded server again from an event loop, when it has died under its holder."""

import asyncio
import logging

from flowfabric.db.embedded import Embedded, EmbeddedError
from flowfabric.db.off_loop import off_loop
from flowfabric.tasks import create_shared_task

logger = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""How long a caller waits; the start goes on in the background."""


class Revival:
    """Starts the server again for the connections of one event loop; concurrent callers share one try."""

    def __init__(self, embedded: Embedded) -> None:
        self._embedded = embedded
        self._pid = embedded.pid
        self._trying: asyncio.Task[None] | None = None
        self._complaint = ""

    async def __call__(self) -> str | None:
        """The address of the server if it is another one than this loop knew, after starting it where it is dead."""
        before = self._pid
        if self._trying is None or self._trying.done():
            self._trying = create_shared_task(self._try())
        await asyncio.wait((self._trying,), timeout=WAIT_SECONDS)
        self._pid = self._embedded.pid
        return None if self._pid == before else self._embedded.url

    async def close(self) -> None:
        """Wait a moment for a start that is under way."""
        if self._trying is not None:
            await asyncio.wait((self._trying,), timeout=WAIT_SECONDS)

    async def _try(self) -> None:
        try:
            await off_loop(self._embedded.revive)
        except (EmbeddedError, OSError) as error:
            # A server that cannot start is asked for again and again; one line says why.
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.error("the embedded Postgres died and cannot be started again: %s", error)
        else:
            self._complaint = ""
