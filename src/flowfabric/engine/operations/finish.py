"""Operations of a run on itself: progress, putting itself aside, and its end."""

from collections.abc import Mapping, Sequence
from uuid import UUID

from flowfabric.engine.core.row import GivenFence
from flowfabric.engine.families import Families
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.outcomes import (
    ClaimedExecution,
    Completed,
    FailureClass,
    FailureReason,
    RetryScheduled,
    TerminalFailed,
)
from flowfabric.model.policy import ExecutionPolicy, RetryPolicy
from flowfabric.model.states import CancelSource


class FinishOperations(Families):
    """Operations of a run on itself: progress, putting itself aside, and its end."""

    async def progress(self, handle: Handle, *, percent: int | None = None, message: str | None = None) -> None:
        """Overwrite what a run reports of itself; what is absent keeps its value."""
        await self._renewals.progress(handle, percent=percent, message=message)

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

    async def complete_execution(
        self,
        *,
        execution_id: ExecutionId | str,
        attempt_index: int | None = None,
        payload: bytes | None = None,
        result_encoding: str | None = None,
        source: str = CancelSource.LEASE_HOLDER,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
    ) -> Completed:
        """End a run in success on behalf of whoever holds its fence."""
        given = GivenFence.read(lease_id, lease_epoch, attempt_id, attempt_index, source=source)
        return await self._finish.complete_execution(execution_id, given, payload, result_encoding)

    async def fail_execution(
        self,
        *,
        execution_id: ExecutionId | str,
        failure_reason: str,
        failure_category: str = "",
        attempt_index: int | None = None,
        retry_policy_json: RetryPolicy | Mapping[str, object] | str | bytes | None = None,
        next_attempt_policy_json: ExecutionPolicy | Mapping[str, object] | str | bytes | None = None,
        source: str = CancelSource.LEASE_HOLDER,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
    ) -> RetryScheduled | TerminalFailed:
        """End an attempt in failure on behalf of whoever holds its fence: tried again where a policy says so."""
        given = GivenFence.read(lease_id, lease_epoch, attempt_id, attempt_index, source=source)
        return await self._finish.fail_execution(
            execution_id, given, failure_reason, failure_category, retry_policy_json, next_attempt_policy_json
        )

    async def delay(self, handle: Handle, delay_until: int) -> None:
        """Put a run aside until a time; its attempt goes on with the next claim after it."""
        await self.delays.delay(handle, delay_until)

    async def wait_children(self, handle: Handle) -> None:
        """Put a run aside until what it depends on has ended; its attempt goes on with the next claim after it."""
        await self.delays.wait_children(handle)

    async def hand_back(self, handle: Handle) -> None:
        """Give up the lease of a run that cannot go on here: any worker may claim it at once, as the same attempt."""
        await self.delays.hand_back(handle)
