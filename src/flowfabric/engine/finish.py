"""Finishing: complete and fail, and what a repeated call of either finds."""

import logging
from collections.abc import Sequence

from flowfabric.db.batch import Locked
from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.fence import DONE, Verdict, usable
from flowfabric.engine.release import Ending, Releases, retry_pause
from flowfabric.engine.store import Store
from flowfabric.engine.transition import Release
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, format_execution_id, split_execution_id
from flowfabric.model.outcomes import (
    ClaimedExecution,
    Completed,
    FailureClass,
    FailureReason,
    RetryScheduled,
    TerminalFailed,
    failure_category,
)
from flowfabric.model.policy import ExecutionPolicy, read_stored_policy, reclaim_cap
from flowfabric.model.states import PublicState
from flowfabric.model.text import storable

SQL = statements_beside(__file__)

logger = logging.getLogger(__name__)

MAX_BATCH = 1000
MAX_RECLAIMS_EXCEEDED = "max_reclaims_exceeded"


class Finish:
    """The finish family of operations."""

    def __init__(self, store: Store, releases: Releases) -> None:
        self._store = store
        self._releases = releases

    async def complete(self, handle: Handle, payload: bytes | None) -> None:
        """End in success; a repeat of the call that did so is success too."""
        ending = _completion(handle, payload)
        verdict = await self._releases.one(ending)
        if verdict is not DONE and not _was_completed(verdict, handle):
            raise verdict.refusal()

    async def complete_many(self, items: Sequence[tuple[Handle, bytes | None]]) -> list[Completed | EngineError]:
        """End up to a thousand runs in success in one statement, each with its own verdict."""
        if not 1 <= len(items) <= MAX_BATCH:
            raise error("invalid_input", f"items: 1 to {MAX_BATCH}, got {len(items)}")
        endings: list[Ending | EngineError] = []
        for handle, payload in items:
            try:
                endings.append(_completion(handle, payload))
            except EngineError as refused:
                endings.append(refused)
        good = [ending for ending in endings if isinstance(ending, Ending)]
        verdicts = iter(await self._releases.many(good) if good else ())
        answers: list[Completed | EngineError] = []
        for ending, (handle, _) in zip(endings, items, strict=True):
            verdict = ending if isinstance(ending, EngineError) else next(verdicts)
            if verdict is DONE or (isinstance(verdict, Verdict) and _was_completed(verdict, handle)):
                answers.append(Completed(execution_id=handle.execution_id, public_state=PublicState.COMPLETED))
            elif isinstance(verdict, Verdict):
                answers.append(verdict.refusal())
            else:
                answers.append(verdict)
        return answers

    async def fail(
        self,
        handle: Handle,
        reason: FailureReason | str,
        classification: FailureClass | str,
        claimed: ClaimedExecution | None,
    ) -> RetryScheduled | TerminalFailed:
        """End the attempt in failure: tried again after a pause where the policy says so, else ended."""
        handle = usable(handle)
        if isinstance(reason, str):
            reason = FailureReason(reason)
        message = storable(reason.message)
        try:
            classification = FailureClass(classification)
        except ValueError:
            raise error(
                "invalid_input", f"classification: one of {', '.join(FailureClass)}, got {classification!r}"
            ) from None
        category = storable(failure_category(reason, classification))
        if claimed is None:
            policy, retry_count = await self._retry_state(handle.execution_id)
        else:
            policy, retry_count = claimed.policy, claimed.retry_count
        delay_ms = retry_pause(policy, retry_count, category)
        ending = Ending(
            handle.execution_id,
            Release.FAILED if delay_ms is None else Release.RETRY,
            handle=handle,
            reason=message,
            category=category,
            delay_ms=delay_ms,
        )
        verdict = await self._releases.one(ending)
        if verdict is DONE:
            return TerminalFailed()
        if verdict.is_done and verdict.delay_until is not None:
            return RetryScheduled(delay_until=verdict.delay_until)
        return _was_failed(verdict, handle)

    async def end_at_reclaim_cap(self, execution_ids: Sequence[ExecutionId]) -> None:
        """End executions whose lease was lost once more than their policy allows."""
        pairs = [split_execution_id(execution_id) for execution_id in execution_ids]

        async def end(transaction: Transaction) -> tuple[list[Ending], list[Verdict | Locked]]:
            held = await transaction.fetch(
                SQL.lock_lost,
                partition_keys=[partition for partition, _ in pairs],
                execution_ids=[uuid for _, uuid in pairs],
            )
            endings = [
                Ending(
                    format_execution_id(row["partition_key"], row["execution_id"]),
                    Release.RECLAIM_CAP,
                    reason=MAX_RECLAIMS_EXCEEDED,
                )
                for row in held
                if row["reclaim_count"] >= reclaim_cap(read_stored_policy(row["policy"]))
            ]
            return endings, await self._releases.within(transaction, endings) if endings else []

        endings, verdicts = await self._store.transact(end)
        for ending in endings:
            logger.warning("%s ended: its lease was lost as often as its policy allows", ending.execution_id)
        await self._releases.settle(endings, verdicts)

    async def _retry_state(self, execution_id: ExecutionId) -> tuple[ExecutionPolicy | None, int]:
        partition, uuid = split_execution_id(execution_id)
        rows = await self._store.fetch(SQL.read_retry_state, partition_key=partition, execution_id=uuid)
        if not rows:
            raise error("execution_not_found")
        return read_stored_policy(rows[0]["policy"]), rows[0]["retry_count"]


def _completion(handle: Handle, payload: bytes | None) -> Ending:
    handle = usable(handle)
    if payload is not None and type(payload) is not bytes:
        if not isinstance(payload, bytearray | memoryview):
            raise error("invalid_input", f"payload: must be bytes, got {type(payload).__name__}")
        payload = bytes(payload)
    return Ending(handle.execution_id, Release.COMPLETED, handle=handle, payload=payload)


def _was_completed(verdict: Verdict, handle: Handle) -> bool:
    found = verdict.found
    return found is not None and found.terminal_outcome == "success" and found.is_run_of(handle)


def _was_failed(verdict: Verdict, handle: Handle) -> RetryScheduled | TerminalFailed:
    """What an earlier call of this run's failure answered, else why this one is refused."""
    found = verdict.found
    if found is not None:
        if found.terminal_outcome == "failed" and found.is_run_of(handle):
            return TerminalFailed()
        if (
            found.attempt_state == "pending_retry_attempt"
            and found.delay_until is not None
            and found.lease_epoch == handle.lease_epoch
            and found.previous_attempt_index == handle.attempt_index
        ):
            return RetryScheduled(delay_until=found.delay_until)
    raise verdict.refusal()
