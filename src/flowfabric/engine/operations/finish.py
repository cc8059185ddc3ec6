"""Operations of a run on itself: progress, and its end."""

from collections.abc import Sequence

from flowfabric.engine.families import Families
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.outcomes import (
    ClaimedExecution,
    Completed,
    FailureClass,
    FailureReason,
    RetryScheduled,
    TerminalFailed,
)


class FinishOperations(Families):
    """Operations of a run on itself: progress, and its end."""

    async def progress(self, handle: Handle, *, percent: int | None = None, message: str | None = None) -> None:
        """Overwrite what a run reports of itself; what is absent keeps its value."""
        await self.leases.progress(handle, percent=percent, message=message)

    async def complete(self, handle: Handle, payload: bytes | None = None) -> None:
        """End a run in success with its result; a repeat of the call is success too."""
        await self._finish.complete(handle, payload)

    async def complete_many(self, items: Sequence[tuple[Handle, bytes | None]]) -> list[Completed | EngineError]:
        """End up to a thousand runs in success in one statement, each with its own verdict."""
        return await self._finish.complete_many(items)

    async def fail(
        self,
        handle: Handle,
        *,
        reason: FailureReason | str,
        classification: FailureClass | str = FailureClass.TRANSIENT,
        claimed: ClaimedExecution | None = None,
    ) -> RetryScheduled | TerminalFailed:
        """End an attempt in failure: tried again where the policy says so; `claimed` saves reading the policy."""
        return await self._finish.fail(handle, reason, classification, claimed)
