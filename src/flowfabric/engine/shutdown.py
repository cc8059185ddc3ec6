"""Shutting down: nobody is kept waiting, and what is under way is answered."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from flowfabric.model.errors import error
from flowfabric.model.text import check_range

MAX_GRACE_MS = 2**32 - 1


class Shutdown:
    """Sends away who waits, then waits itself for what is under way."""

    def __init__(self, refusals: Sequence[Callable[[], None]], drains: Sequence[Callable[[], Awaitable[None]]]) -> None:
        self._refusals = refusals
        self._drains = drains

    async def prepare(self, grace_ms: int) -> None:
        """Refuse and end waits, and answer what is under way within the grace; what is left is a timeout."""
        check_range(grace_ms, "grace_ms", 0, MAX_GRACE_MS)
        began = time.monotonic()
        for refuse in self._refusals:
            refuse()
        try:
            async with asyncio.timeout(grace_ms / 1000):
                for drain in self._drains:
                    await drain()
        except TimeoutError:
            elapsed_ms = round((time.monotonic() - began) * 1000)
            raise error("timeout", {"op": "shutdown_prepare", "elapsed_ms": elapsed_ms}) from None
