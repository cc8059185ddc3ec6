"""Completion and failure of runs; a repeated call gets the answer of the first."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from uuid import UUID

from flowfabric.db.batch import Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds, retry_pause
from flowfabric.engine.core.row import (
    DONE,
    GivenFence,
    Verdict,
    check_lease_handle,
    execution_keys,
    lock_execution,
    lock_executions,
)
from flowfabric.engine.core.transition import Move, after_failure
from flowfabric.engine.store import Store
from flowfabric.model.attempt import FailureClass, FailureReason, failure_category
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Handle
from flowfabric.model.ids import (
    ExecutionId,
    check_storable,
    format_execution_id,
    parse_execution_id,
    row_key,
    split_execution_id,
)
from flowfabric.model.lease import ClaimedExecution, Completed, RetryScheduled, TerminalFailed
from flowfabric.model.policy import (
    ExecutionPolicy,
    RetryPolicy,
    parse_retry_policy,
    policy_json,
    read_stored_policy,
)
from flowfabric.model.states import CancelSource, PublicState
from flowfabric.model.text import check_batch, check_text, json_text, shown, storable

SQL = statements_beside(__file__)

logger = logging.getLogger(__name__)

WARN_EVERY_RECLAIMS = 100
MAX_RECLAIMS_EXCEEDED = "max_reclaims_exceeded"


class Finish:
    """The operations that end a run."""

    def __init__(self, store: Store, lease_ends: LeaseEnds) -> None:
        self._store = store
        self._lease_ends = lease_ends

    async def complete(self, handle: Handle, payload: bytes | None = None) -> None:
        """End a run in success with its result; repeating the call succeeds."""
        lease_end = _completion(handle, payload)
        verdict = await self._lease_ends.one(lease_end)
        if not verdict.is_done and not _was_completed(verdict, handle):
            raise verdict.refusal()

    async def complete_many(self, items: Sequence[tuple[Handle, bytes | None]]) -> list[Completed | EngineError]:
        """End up to a thousand runs in success in one statement, each with its own verdict."""
        check_batch(items, "items")
        lease_ends: list[LeaseEnd | EngineError] = []
        for item in items:
            try:
                if not isinstance(item, tuple | list) or len(item) != 2:
                    raise error("invalid_input", f"items: each must be a (handle, payload) pair, got {shown(item)}")
                lease_ends.append(_completion(*item))
            except EngineError as refused:
                lease_ends.append(refused)
        good = [lease_end for lease_end in lease_ends if isinstance(lease_end, LeaseEnd)]
        verdicts = iter(await self._lease_ends.many(good) if good else ())
        answers: list[Completed | EngineError] = []
        for lease_end, item in zip(lease_ends, items, strict=True):
            verdict = lease_end if isinstance(lease_end, EngineError) else next(verdicts)
            if verdict is DONE or (
                isinstance(verdict, Verdict) and (verdict.is_done or _was_completed(verdict, item[0]))
            ):
                answers.append(Completed(execution_id=item[0].execution_id, public_state=PublicState.COMPLETED))
            elif isinstance(verdict, Verdict):
                answers.append(verdict.refusal())
            else:
                answers.append(verdict)
        return answers

    async def fail(
        self,
        handle: Handle,
        *,
        reason: FailureReason | str,
        classification: FailureClass | str = FailureClass.TRANSIENT,
        claimed: ClaimedExecution | None = None,
    ) -> RetryScheduled | TerminalFailed:
        """End an attempt in failure, and retry if the policy says so; pass `claimed` to save reading the policy."""
        handle = check_lease_handle(handle)
        reason = _failure_reason(reason).bounded()
        try:
            classification = FailureClass(classification)
        except ValueError:
            raise error(
                "invalid_input", f"classification: expected one of {', '.join(FailureClass)}, got {classification!r}"
            ) from None
        category = storable(failure_category(reason, classification))
        if claimed is None or claimed.handle != handle:
            policy, retry_count = await self._retry_state(handle.execution_id)
        else:
            policy, retry_count = claimed.policy, claimed.retry_count
        delay_ms = retry_pause(policy, retry_count, category)
        lease_end = LeaseEnd(
            handle.execution_id,
            after_failure(delay_ms),
            fence=handle,
            reason=reason.message,
            category=category,
            error_type=reason.error_type,
            traceback=reason.traceback,
            delay_ms=delay_ms,
        )
        verdict = await self._lease_ends.one(lease_end)
        if verdict.is_done:
            return TerminalFailed() if verdict.delay_until is None else RetryScheduled(delay_until=verdict.delay_until)
        return _was_failed(verdict, handle)

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
        """End a run in success for the caller that holds its fence."""
        given = GivenFence.read(lease_id, lease_epoch, attempt_id, attempt_index, source=source)
        parsed = parse_execution_id(execution_id)
        check_storable(parsed)
        payload = _bytes_of(payload)
        if result_encoding is not None:
            check_text(result_encoding, "result_encoding")

        async def end(transaction: Transaction) -> tuple[LeaseEnd, list[Verdict | Locked]]:
            fence = given.against(await lock_execution(transaction, parsed))
            lease_end = LeaseEnd(
                parsed,
                Move.COMPLETED,
                fence=fence,
                payload=payload,
                encoding=result_encoding,
                lost_epoch=fence.lease_epoch if given.fence is None else None,
            )
            return lease_end, await self._lease_ends.within(transaction, [lease_end])

        await self._finish_service(*await self._store.transact(end, execution_id=parsed))
        return Completed(execution_id=parsed, public_state=PublicState.COMPLETED)

    async def fail_execution(
        self,
        *,
        execution_id: ExecutionId | str,
        failure_reason: str,
        failure_category: str = "",
        error_type: str | None = None,
        traceback: str | None = None,
        attempt_index: int | None = None,
        retry_policy_json: RetryPolicy | Mapping[str, object] | str | bytes | None = None,
        next_attempt_policy_json: ExecutionPolicy | Mapping[str, object] | str | bytes | None = None,
        source: str = CancelSource.LEASE_HOLDER,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
    ) -> RetryScheduled | TerminalFailed:
        """End an attempt in failure for the caller that holds its fence, and retry if a policy says so."""
        given = GivenFence.read(lease_id, lease_epoch, attempt_id, attempt_index, source=source)
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        _check_error(error_type, traceback)
        message = _text(failure_reason, "failure_reason")
        reason = FailureReason(message, error_type=error_type, traceback=traceback).bounded()
        category = storable(_text(failure_category, "failure_category"))
        retry_policy = parse_retry_policy(retry_policy_json)
        next_policy = _policy_text(next_attempt_policy_json)

        async def end(transaction: Transaction) -> tuple[LeaseEnd, list[Verdict | Locked], int]:
            locked = await lock_execution(transaction, parsed)
            fence = given.against(locked)
            (row,) = await transaction.fetch(SQL.read_retry_state, partition_key=partition, execution_id=uuid)
            stored = read_stored_policy(row["policy"])
            policy = stored if retry_policy is None else ExecutionPolicy(retry_policy=retry_policy)
            delay_ms = retry_pause(policy, row["retry_count"], category)
            lease_end = LeaseEnd(
                parsed,
                after_failure(delay_ms),
                fence=fence,
                reason=reason.message,
                category=category or None,
                error_type=reason.error_type,
                traceback=reason.traceback,
                delay_ms=delay_ms,
                next_policy=next_policy,
                lost_epoch=fence.lease_epoch if given.fence is None else None,
            )
            verdicts = await self._lease_ends.within(transaction, [lease_end])
            return lease_end, verdicts, locked.attempt_count

        lease_end, verdicts, attempt_count = await self._store.transact(end, execution_id=parsed)
        verdict = await self._finish_service(lease_end, verdicts)
        if verdict.delay_until is None:
            return TerminalFailed()
        return RetryScheduled(delay_until=verdict.delay_until, next_attempt_index=attempt_count)

    async def end_at_reclaim_limit(self, lost: Sequence[tuple[ExecutionId, int]]) -> None:
        """End executions that reached their reclaim limit, unless their lease epoch has changed since.

        The caller has compared the count with the limit. The limit is fixed and the count changes only with the epoch,
        so the comparison still holds. An execution that cannot be ended now is left for a later claim.
        """
        epochs = dict(lost)

        async def end(transaction: Transaction) -> tuple[list[LeaseEnd], list[Verdict | Locked]]:
            _, rows = await lock_executions(transaction, list(epochs), waits=False)
            lease_ends = [
                LeaseEnd(locked.id, Move.RECLAIM_LIMIT, reason=MAX_RECLAIMS_EXCEEDED)
                for locked in rows
                if locked is not None and locked.is_lost and locked.lease_epoch == epochs[locked.id]
            ]
            return lease_ends, await self._lease_ends.within(transaction, lease_ends) if lease_ends else []

        try:
            lease_ends, verdicts = await self._store.transact(end)
        except EngineError as problem:
            if len(lost) > 1 and (not problem.retryable or problem.code == "retry_exhausted"):
                # One bad row must not block the others.
                for each in lost:
                    await self.end_at_reclaim_limit([each])
                return
            for execution_id, _ in lost:
                logger.warning("cannot end %s at its reclaim limit, will retry: %s", execution_id, problem)
            return
        for lease_end in lease_ends:
            logger.error("%s failed: its lease was lost as often as its policy allows", lease_end.execution_id)
        await self._lease_ends.after_commit(lease_ends, verdicts)

    async def warn_of_reclaims(self, execution_ids: Sequence[ExecutionId]) -> None:
        """Log a warning for each execution at its hundredth reclaim, and at every hundred after that."""
        rows: Sequence[Record] = ()
        # The claim must return its leases even if the warning fails.
        with contextlib.suppress(EngineError):
            rows = await self._store.fetch(
                SQL.list_often_reclaimed, **execution_keys(execution_ids), every=WARN_EVERY_RECLAIMS
            )
        for row in rows:
            execution_id = format_execution_id(row["partition_key"], row["execution_id"])
            logger.warning("%s was reclaimed %d times", execution_id, row["reclaim_count"])

    async def _finish_service(self, lease_end: LeaseEnd, verdicts: list[Verdict | Locked]) -> Verdict:
        await self._lease_ends.after_commit([lease_end], verdicts)
        (verdict,) = verdicts
        assert isinstance(verdict, Verdict), "the row is locked"
        if not verdict.is_done:
            raise verdict.refusal(stale="stale_lease")
        return verdict

    async def _retry_state(self, execution_id: ExecutionId) -> tuple[ExecutionPolicy | None, int]:
        partition, uuid = split_execution_id(execution_id)
        rows = await self._store.fetch(SQL.read_retry_state, partition_key=partition, execution_id=uuid)
        if not rows:
            raise error("execution_not_found", execution_id)
        return read_stored_policy(rows[0]["policy"]), rows[0]["retry_count"]


def _completion(handle: Handle, payload: bytes | None) -> LeaseEnd:
    handle = check_lease_handle(handle)
    if payload is not None and type(payload) is not bytes:
        payload = _bytes_of(payload)
    return LeaseEnd(handle.execution_id, Move.COMPLETED, fence=handle, payload=payload)


def _failure_reason(given: object) -> FailureReason:
    if isinstance(given, str):
        return FailureReason(given)
    if not isinstance(given, FailureReason):
        raise error("invalid_input", f"reason: must be text or a FailureReason, got {shown(given)}")
    _text(given.message, "reason.message")
    if not isinstance(given.detail, str | bytes | None):
        raise error("invalid_input", f"reason.detail: must be text or bytes, got {shown(given.detail)}")
    _check_error(given.error_type, given.traceback, "reason.")
    return given


def _check_error(error_type: object, traceback: object, prefix: str = "") -> None:
    for field, value in (("error_type", error_type), ("traceback", traceback)):
        if value is not None:
            _text(value, f"{prefix}{field}")


def _text(value: object, field: str) -> str:
    """Return any text; characters that the store cannot hold are replaced when it is written."""
    if not isinstance(value, str):
        raise error("invalid_input", f"{field}: must be text, got {shown(value)}")
    return value


def _bytes_of(payload: object) -> bytes | None:
    if payload is None or type(payload) is bytes:
        return payload
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise error("invalid_input", f"payload: must be bytes, got {shown(payload)}")
    return bytes(payload)


def _policy_text(value: ExecutionPolicy | Mapping[str, object] | str | bytes | None) -> str | None:
    """Return the policy of the next attempt as text; the engine stores it and only the worker interprets it."""
    if isinstance(value, ExecutionPolicy):
        return policy_json(value)
    if value is None or value == "" or value == b"":
        return None
    try:
        text = json_text(value)
    except ValueError as wrong:
        raise error("invalid_policy_json", str(wrong)) from None
    if not text.startswith("{"):
        raise error("invalid_policy_json", "next_attempt_policy:not_object")
    return text


def _was_completed(verdict: Verdict, handle: Handle) -> bool:
    found = verdict.found
    return found is not None and found.terminal_outcome == "success" and found.is_run_of(handle)


def _was_failed(verdict: Verdict, handle: Handle) -> RetryScheduled | TerminalFailed:
    """Return the answer of an earlier call for this run, or raise the refusal."""
    found = verdict.found
    if found is not None:
        if found.terminal_outcome == "failed" and found.is_run_of(handle):
            return TerminalFailed()
        if (
            found.attempt_state == "pending_retry_attempt"
            and found.delay_until is not None
            and found.lease_epoch == handle.lease_epoch
            and found.attempt_count - 1 == handle.attempt_index
        ):
            return RetryScheduled(delay_until=found.delay_until)
    raise verdict.refusal()
