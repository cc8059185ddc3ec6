"""Operations on an execution as such: creating, cancelling, and what its timers bring."""

from collections.abc import Mapping, Sequence
from uuid import UUID

from flowfabric.engine.families import Families
from flowfabric.engine.lease.expire import ExpiryPhase
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import NewExecution
from flowfabric.model.explanation import Explanation
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.outcomes import (
    AlreadySatisfied,
    AlreadyTerminal,
    Cancelled,
    Created,
    Duplicate,
    Expired,
    NotYetDue,
    Promoted,
    RetryScheduled,
)
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.snapshots import TagsSet
from flowfabric.model.states import CancelSource


class ExecutionOperations(Families):
    """Operations on an execution as such: creating, cancelling, and what its timers bring."""

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
        delay_ms: int | None = None,
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
                delay_ms=delay_ms,
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

    async def promote_delayed(self, execution_id: ExecutionId | str) -> Promoted | AlreadySatisfied:
        """Make a delayed execution claimable, where its time has come."""
        return await self.delays.promote(execution_id)

    async def expire_execution(
        self, execution_id: ExecutionId | str, phase: ExpiryPhase | str
    ) -> Expired | RetryScheduled | AlreadyTerminal | NotYetDue:
        """Expire an execution whose attempt timeout or deadline has passed."""
        return await self.timeouts.expire_execution(execution_id, phase)

    async def set_execution_tag(self, execution_id: ExecutionId | str, key: str, value: str) -> None:
        """Store one tag of an execution, over what its key had before."""
        await self._tags.put(execution_id, key, value)

    async def set_execution_tags(self, execution_id: ExecutionId | str, tags: Mapping[str, str]) -> TagsSet:
        """Store tags of an execution in one transaction, over what their keys had before."""
        return await self._tags.put_many(execution_id, tags)

    async def get_execution_tag(self, execution_id: ExecutionId | str, key: str) -> str | None:
        """The value of one tag of an execution."""
        return await self._tags.get(execution_id, key)

    async def explain(self, execution_id: ExecutionId | str) -> Explanation:
        """Why an execution is where it is: everything that holds it, and one sentence for a person."""
        return await self._explain.explain(execution_id)
