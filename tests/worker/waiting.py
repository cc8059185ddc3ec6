"""Handlers that wait."""

import asyncio

from flowfabric.worker.context import Context

LONG_TTL_MS = 600_000
"""A lease that is not renewed while a test runs: only a notification can end the run."""
RETRIED = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}


class Waiting:
    """A handler that waits until it is cancelled; it remembers its contexts and its cancellation."""

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


class Gate:
    """A handler that waits until the test opens it."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.started = 0

    async def __call__(self, luck: str = "good") -> str:
        self.started += 1
        await self.opened.wait()
        if luck == "bad":
            raise ValueError("no luck")
        return "done"
