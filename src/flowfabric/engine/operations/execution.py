"""Operations on an execution as such: creating, cancelling."""

from collections.abc import Mapping, Sequence
from uuid import UUID

from flowfabric.engine.families import Families
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import NewExecution
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.outcomes import (
    Cancelled,
    Created,
    Duplicate,
)
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.states import CancelSource


class ExecutionOperations(Families):
    """Operations on an execution as such: creating, cancelling."""

    async def create_execution(
        self,
        *,
        namespace: str,
        lane_id: str,
        execution_kind: str,
        input_payload: bytes,
        priority: int,
        creator_identity: str,
        execution_id: ExecutionId | str | None = None,
        payload_encoding: str | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy: ExecutionPolicy | Mapping[str, object] | str | bytes | None = None,
        delay_until: int | None = None,
        execution_deadline_at: int | None = None,
    ) -> Created | Duplicate:
        """Create an execution, once: a repeat of its id or of its live idempotency key is a `Duplicate`."""
        return await self._submit.create(
            NewExecution(
                namespace=namespace,
                lane_id=lane_id,
                execution_kind=execution_kind,
                input_payload=input_payload,
                priority=priority,
                creator_identity=creator_identity,
                execution_id=execution_id,
                payload_encoding=payload_encoding,
                idempotency_key=idempotency_key,
                tags=tags,
                policy=policy,
                delay_until=delay_until,
                execution_deadline_at=execution_deadline_at,
            )
        )

    async def create_many(self, items: Sequence[NewExecution]) -> list[Created | Duplicate | EngineError]:
        """Create up to a thousand executions in one statement, each with its own verdict."""
        return await self._submit.create_many(items)

    async def cancel(self, handle: Handle, reason: str) -> None:
        """End the run a handle holds as cancelled."""
        await self._cancel.cancel(handle, reason)

    async def cancel_execution(
        self,
        *,
        execution_id: ExecutionId | str,
        reason: str,
        source: str = CancelSource.OPERATOR_OVERRIDE,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
    ) -> Cancelled:
        """End an execution as cancelled from any state; cancelling it again changes nothing."""
        return await self._cancel.cancel_execution(execution_id, reason, source, lease_id, lease_epoch, attempt_id)
