"""A handler that waits, and what its tests submit."""

import asyncio

from flowfabric.worker.context import Context

LONG_TTL_MS = 600_000
"""A lease that is not renewed while a test runs: nothing but a hint can tell of its end."""
RETRIED = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}


class Waiting:
    """A handler that waits until it is stopped; it remembers its contexts and whether it was cancelled."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []
        self.is_cancelled = asyncio.Event()

    async def __call__(self, ctx: Context) -> str:
        self.contexts.append(ctx)
        if ctx.attempt_index > 0:
            return "again"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        return "unreachable"
