"""Submission of executions, with retries while the store is unreachable; a retry uses the ids of the first try."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from flowfabric.db.statements import statements_beside
from flowfabric.engine.execution.create import Create, Submitted
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.model.execution import Created, Duplicate, NewExecution
from flowfabric.model.ids import ExecutionId, mint_uuid_texts, row_key
from flowfabric.model.policy import ExecutionPolicy, parse_policy
from flowfabric.model.states import PublicState
from flowfabric.model.text import check_batch
from flowfabric.pauses import pauses

SQL = statements_beside(__file__)

PAUSE_SECONDS = (0.05, 0.5)
"""The first and the longest pause before a retry."""

Answer = Submitted | EngineError


class Submit:
    """Submits executions, and retries for a limited time what failed by a fault of the store."""

    def __init__(self, create: Create, store: Store, *, patience_ms: int) -> None:
        self._create = create
        self._store = store
        self._patience = patience_ms / 1000

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
        parent_execution_id: ExecutionId | str | None = None,
    ) -> Created | Duplicate:
        """Create an execution; return a `Duplicate` if its id or its unexpired idempotency key is already in use.

        It has the budgets and the quota of its parent too.
        """
        new = NewExecution(
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
            parent_execution_id=parent_execution_id,
        )
        minted = mint_uuid_texts(1)[0]
        try:
            return await self._create.create(new, minted)
        except TransportError as fault:
            if not fault.retryable or not self._patience:
                raise
            (answer,) = await self._retry([new], [minted], [fault])
        if isinstance(answer, EngineError):
            raise answer
        return answer

    async def create_many(self, items: Sequence[NewExecution]) -> list[Created | Duplicate | EngineError]:
        """Create up to a thousand executions in one call, each with its own verdict."""
        check_batch(items, "items")
        minted = mint_uuid_texts(len(items))
        try:
            answers = await self._create.create_many(items, minted)
        except TransportError as fault:
            if not fault.retryable or not self._patience:
                raise
            answers = [fault.copy() for _ in items]
        if self._patience and any(map(_is_transient, answers)):
            answers = await self._retry(items, minted, answers)
            faults = [answer for answer in answers if isinstance(answer, TransportError)]
            if len(faults) == len(answers):
                faults[0].outcome_unknown = any(fault.outcome_unknown for fault in faults)
                raise faults[0]
        return answers

    async def drain(self) -> None:
        """Wait until every submission in progress is answered."""
        await self._create.drain()

    async def _retry(
        self, items: Sequence[NewExecution], minted: Sequence[str], answers: Sequence[Answer]
    ) -> list[Answer]:
        """Retry the answers that are faults of the store until none is left or the time is up; return all answers."""
        answers = [*answers]
        async for _ in until_deadline(self._patience):
            failed = [at for at, answer in enumerate(answers) if _is_transient(answer)]
            if not failed:
                break
            retried: Sequence[Answer]
            try:
                retried = await self._retry_once([items[at] for at in failed], [minted[at] for at in failed])
                retried = [
                    await self._created_if_ours(items[at], minted[at], answer)
                    for at, answer in zip(failed, retried, strict=True)
                ]
            except TransportError as fault:
                retried = [fault.copy() for _ in failed]
            for at, answer in zip(failed, retried, strict=True):
                answers[at] = _after_retry(answers[at], answer)
        return answers

    async def _retry_once(self, items: Sequence[NewExecution], minted: Sequence[str]) -> list[Answer]:
        if len(items) > 1:
            return await self._create.create_many(items, minted, is_repeat=True)
        # The single call lets concurrent callers share statements.
        try:
            return [await self._create.create(items[0], minted[0], is_repeat=True)]
        except TransportError:
            raise
        except EngineError as refused:
            return [refused]

    async def _created_if_ours(self, new: NewExecution, minted: str, answer: Answer) -> Answer:
        """Turn a duplicate of the generated id into Created: only an earlier try of this call can have used that id."""
        if isinstance(answer, EngineError | Created) or new.execution_id is not None:
            return answer
        if not answer.execution_id.endswith(minted):
            return answer
        return Created(execution_id=answer.execution_id, public_state=await self._first_state(new, answer.execution_id))

    async def _first_state(self, new: NewExecution, execution_id: ExecutionId) -> PublicState:
        if new.delay_ms is not None:
            return PublicState.DELAYED if new.delay_ms else PublicState.WAITING
        policy = parse_policy(new.policy)
        delay_until = policy.delay_until if new.delay_until is None and policy is not None else new.delay_until
        if delay_until is None:
            return PublicState.WAITING
        partition_key, uuid = row_key(execution_id)
        rows = await self._store.fetch(SQL.read_creation, partition_key=partition_key, execution_id=uuid)
        return PublicState.DELAYED if rows and rows[0]["created_at"] < delay_until else PublicState.WAITING


async def until_deadline(seconds: float) -> AsyncIterator[None]:
    """Yield once after each pause before a retry, and a last time when the time is up."""
    deadline = time.monotonic() + seconds
    for pause in pauses(*PAUSE_SECONDS):
        await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
        yield
        if time.monotonic() >= deadline:
            return


def _is_transient(answer: Answer) -> bool:
    return isinstance(answer, TransportError) and answer.retryable


def _after_retry(before: Answer, answer: Answer) -> Answer:
    """The answer after a retry; an unknown outcome of an earlier try stays unknown until the store answers."""
    if not isinstance(before, TransportError):
        return answer
    if isinstance(answer, TransportError):
        answer.outcome_unknown |= before.outcome_unknown
    elif isinstance(answer, EngineError) and answer.code == "retry_exhausted":
        # Another session holds the id or the key: perhaps the first try, whose session has not ended yet.
        return before
    return answer
