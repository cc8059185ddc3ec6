"""Operations on what suspended executions wait for: signals, resumes and timeouts."""

from uuid import UUID

from flowfabric.engine.families import Families
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, SignalId, WaitpointId
from flowfabric.model.outcomes import AlreadySatisfied
from flowfabric.model.signals import (
    DEFAULT_DEDUP_TTL_MS,
    DEFAULT_MAXLEN,
    Accepted,
    NewSignal,
    Resumed,
    ResumeSignal,
    ResumeTrigger,
    SignalDuplicate,
    SuspensionExpired,
)
from flowfabric.model.tokens import WaitpointToken


class SignalOperations(Families):
    """Operations on what suspended executions wait for."""

    async def deliver_signal(
        self,
        *,
        execution_id: ExecutionId | str,
        waitpoint_id: WaitpointId | UUID | str,
        waitpoint_token: WaitpointToken | str | None,
        signal_name: str,
        signal_category: str = "external",
        source_type: str = "external",
        source_identity: str = "",
        signal_id: SignalId | UUID | str | None = None,
        payload: bytes | None = None,
        payload_encoding: str = "json",
        correlation_id: str | None = None,
        idempotency_key: str | None = None,
        target_scope: str = "waitpoint",
        created_at: int | None = None,
        dedup_ttl_ms: int = DEFAULT_DEDUP_TTL_MS,
        resume_delay_ms: int | None = None,
        max_signals_per_execution: int | None = None,
        signal_maxlen: int = DEFAULT_MAXLEN,
    ) -> Accepted | SignalDuplicate:
        """Record a signal on a waitpoint, once, and resume the execution where that is what it waits for."""
        return await self._signals.deliver(
            NewSignal.of(
                execution_id=execution_id,
                waitpoint_id=waitpoint_id,
                waitpoint_token=waitpoint_token,
                signal_name=signal_name,
                signal_category=signal_category,
                source_type=source_type,
                source_identity=source_identity,
                signal_id=signal_id,
                payload=payload,
                payload_encoding=payload_encoding,
                correlation_id=correlation_id,
                idempotency_key=idempotency_key,
                target_scope=target_scope,
                created_at=created_at,
                dedup_ttl_ms=dedup_ttl_ms,
                resume_delay_ms=resume_delay_ms,
                max_signals_per_execution=max_signals_per_execution,
                signal_maxlen=signal_maxlen,
            )
        )

    async def deliver_approval_signal(
        self,
        *,
        execution_id: ExecutionId | str,
        waitpoint_id: WaitpointId | UUID | str,
        signal_name: str,
        idempotency_suffix: str,
        source_identity: str = "",
        signal_dedup_ttl_ms: int = DEFAULT_DEDUP_TTL_MS,
        lane_id: str | None = None,
        maxlen: int | None = None,
        max_signals_per_execution: int | None = None,
    ) -> Accepted | SignalDuplicate:
        """Record the approval of an operator, who need not hold the token; a repeat of the suffix is a duplicate.

        `source_identity` says who the operator is: a condition that counts distinct sources counts distinct operators.
        """
        return await self._signals.approve(
            execution_id,
            waitpoint_id,
            signal_name,
            idempotency_suffix,
            source_identity,
            signal_dedup_ttl_ms,
            lane_id,
            maxlen,
            max_signals_per_execution,
        )

    async def observe_signals(self, handle: Handle, *, suspension_id: UUID | str | None = None) -> list[ResumeSignal]:
        """Every signal of a suspension, usually the current one of the handle's attempt, in the order of acceptance."""
        return await self._signals.observe(handle, suspension_id)

    async def resume_execution(
        self,
        *,
        execution_id: ExecutionId | str,
        trigger_type: ResumeTrigger | str = ResumeTrigger.SIGNAL,
        resume_delay_ms: int = 0,
    ) -> Resumed:
        """Resume a suspended execution, whatever it waits for."""
        return await self._resumes.resume_execution(execution_id, trigger_type, resume_delay_ms)

    async def expire_suspension(self, execution_id: ExecutionId | str) -> SuspensionExpired | AlreadySatisfied:
        """Do what the timeout of a suspension says, where its time has come."""
        return await self.suspension_timeouts.expire_suspension(execution_id)
