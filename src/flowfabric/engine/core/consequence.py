"""End leases: every operation that ends a lease or an execution goes through this module."""

import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import msgspec

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import short_columns, statements_beside
from flowfabric.engine.core.payload import INLINE_PAYLOAD_BYTES, any_large
from flowfabric.engine.core.row import DONE, Verdict, lock_execution, verdict_of
from flowfabric.engine.core.transition import MOVES, Move, completion_parameters, release_parameters
from flowfabric.engine.core.wakeups import CascadeKey, LostLease, LostReason, Work
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.handle import Fence, Handle
from flowfabric.model.ids import INDEX_PART, UUID_PART, ExecutionId, SuspensionId
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.retry import may_retry, retry_delay_ms
from flowfabric.model.states import BlockingReason, LifecyclePhase

SQL = statements_beside(__file__)
_read_keys = msgspec.json.Decoder(tuple[int, ...]).decode

_COLUMNS = (
    "partition_keys",
    "execution_ids",
    "moves",
    "lease_epochs",
    "lease_ids",
    "attempt_ids",
    "payloads",
    "encodings",
    "reasons",
    "categories",
    "delays_ms",
    "delays_until",
    "sources",
    "blockings",
    "details",
    "suspension_ids",
    "timeouts_at",
    "policies",
    "error_types",
    "tracebacks",
)
_COMPLETION_COLUMNS = ("partition_keys", "execution_ids", "lease_epochs", "lease_ids", "attempt_ids", "payloads")
_COMPLETION = completion_parameters()

_LOST = frozenset({Move.LEASE_EXPIRED, Move.LEASE_REVOKED})
"""Moves that take a lease away from its holder; its epoch is read from the row."""


class Attachment(IntFlag):
    """What can be attached to an execution: bits of execution.attached, set by the statement that attaches it."""

    GRANT = 1
    SUSPENSION = 2
    STREAM = 4
    SLOT = 8
    """Slots of quotas: the statement that ends the lease returns them."""
    RESERVATION = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedLease:
    """A lease or an execution with an attachment that the transaction has ended."""

    execution_id: ExecutionId
    move: Move

    @property
    def is_terminal(self) -> bool:
        """Whether the execution itself has ended, not only its lease."""
        return MOVES[self.move].target.phase is LifecyclePhase.TERMINAL

    @property
    def reason(self) -> str:
        """Why it ended, as stored with the event."""
        return MOVES[self.move].reason or ""


Consequence = Callable[[Transaction, Sequence[EndedLease]], Awaitable[None]]
"""Clean up one kind of attachment in the transaction that ended the leases or executions."""


class LeaseEnd:
    """A request to end one lease: complete, fail, park, suspend; without a fence it ends the current lease.

    If somebody other than the lease holder ends it, `lost_epoch` is its epoch, and the holder is notified after the
    commit.
    """

    __slots__ = ("execution_id", "lost_epoch", "move", "row")

    def __init__(
        self,
        execution_id: ExecutionId,
        move: Move,
        *,
        fence: Handle | Fence | None = None,
        payload: bytes | None = None,
        encoding: str | None = None,
        reason: str | None = None,
        category: str | None = None,
        delay_ms: int | None = None,
        delay_until: int | None = None,
        source: str | None = None,
        blocking: BlockingReason | None = None,
        detail: str | None = None,
        suspension_id: SuspensionId | None = None,
        timeout_at: int | None = None,
        next_policy: str | None = None,
        error_type: str | None = None,
        traceback: str | None = None,
        lost_epoch: int | None = None,
    ) -> None:
        self.execution_id = execution_id
        self.move = move
        self.lost_epoch = lost_epoch
        lease = (None, None, None) if fence is None else (fence.lease_epoch, fence.lease_id, fence.attempt_id)
        self.row: tuple[Any, ...] = (
            # Inlined: hot path.
            int(execution_id[INDEX_PART]),
            execution_id[UUID_PART],
            move.value,
            *lease,
            payload,
            encoding,
            reason,
            category,
            delay_ms,
            delay_until,
            source,
            blocking,
            detail,
            suspension_id,
            timeout_at,
            next_policy,
            error_type,
            traceback,
        )

    @property
    def completion(self) -> tuple[Any, ...]:
        """The columns that a completion needs: key, fence and result."""
        return self.row[:2] + self.row[3:7]


class LeaseEnds:
    """Ends leases, and executions that have no lease.

    Concurrent callers share one statement for executions without attachments. For the others, the consequence of each
    kind of attachment runs once per batch in the same transaction.
    """

    def __init__(self, store: Store, consequences: Mapping[Attachment, Consequence]) -> None:
        self._store = store
        self._consequences = consequences
        self._batch: Batch[LeaseEnd, Verdict] = Batch(
            self._end_together, self._end_alone, keys=lambda end: (end.execution_id,)
        )

    async def one(self, end: LeaseEnd) -> Verdict:
        """End one lease and return the verdict; concurrent callers share a statement."""
        return await self._store.answer(self._batch.put(end))

    async def many(self, ends: Sequence[LeaseEnd]) -> list[Verdict | EngineError]:
        """End the leases of one caller in one statement; return the verdicts in the same order."""
        return await self._store.answers(self._batch.run(ends))

    async def within(
        self, transaction: Transaction, ends: Sequence[LeaseEnd], *, is_shared: bool = False
    ) -> list[Verdict | Locked]:
        """End leases in the caller's transaction; the caller calls `after_commit` once it has committed.

        Several leases, and leases of several callers (`is_shared`), wait only briefly for a locked row: if one of them
        is locked longer, the transaction fails by contention, and the caller ends them one by one.
        """
        columns = self._columns(ends, is_thorough=True, waits_briefly=is_shared or len(ends) > 1)
        verdicts = self._judge(ends, await transaction.fetch(SQL.end_leases, **columns))
        for attachment, follow in self._consequences.items():
            ended = [
                EndedLease(execution_id=end.execution_id, move=end.move)
                for end, verdict in zip(ends, verdicts, strict=True)
                if isinstance(verdict, Verdict) and verdict.is_done and verdict.attached & attachment
            ]
            if ended:
                await follow(transaction, ended)
        return verdicts

    async def after_commit(self, ends: Sequence[LeaseEnd], verdicts: Sequence[Verdict | Locked | Exception]) -> None:
        """Notify the holders of lost leases, mark leases found to be expired, and wake waiters."""
        wakeups = self._store.wakeups
        expired: list[ExecutionId] = []
        lost: list[LostLease] = []
        work: list[Work] = []
        streams: list[ExecutionId] = []
        entries: list[CascadeKey] = []
        freed: set[int] = set()
        has_ended = has_lease_events = False
        for end, verdict in zip(ends, verdicts, strict=True):
            if verdict is DONE:
                has_ended = has_lease_events = True
            elif isinstance(verdict, Verdict):
                if verdict.is_done:
                    has_lease_events = True
                    has_ended = has_ended or MOVES[end.move].target.phase is LifecyclePhase.TERMINAL
                    if verdict.entry is not None:
                        entries.append(verdict.entry)
                if verdict.delay_ms is not None:
                    wakeups.timer(verdict.delay_ms)
                elif verdict.work is not None:
                    work.append(verdict.work)
                elif verdict.code == "lease_expired":
                    expired.append(end.execution_id)
            if isinstance(verdict, Verdict) and verdict.is_done:
                epoch = verdict.lease_epoch if end.move in _LOST else end.lost_epoch
                if epoch is not None:
                    lost.append(LostLease(end.execution_id, epoch, LostReason(end.move.value)))
                if verdict.attached & Attachment.STREAM:
                    streams.append(end.execution_id)
                freed.update(verdict.slot_keys)
        if lost:
            wakeups.lost(lost)
        if work:
            wakeups.work(work)
        if freed:
            wakeups.room(sorted(freed))
        if has_ended:
            wakeups.ended()
        if entries:
            wakeups.members_ended(entries)
        if has_lease_events:
            wakeups.events(EventFamily.LEASE)
        if streams:
            wakeups.stream(streams)
        if expired:
            # The ends are committed. If a lease cannot be marked now, the sweep marks it.
            with contextlib.suppress(EngineError):
                await self.expire(expired)

    async def expire(self, execution_ids: Sequence[ExecutionId]) -> list[Work]:
        """Mark the leases of these executions that have expired; return where they can be claimed now."""
        ends = [LeaseEnd(execution_id, Move.LEASE_EXPIRED) for execution_id in execution_ids]

        async def end(transaction: Transaction) -> list[Verdict | Locked]:
            return await self.within(transaction, ends)

        verdicts = await self._store.transact(end)
        await self.after_commit(ends, verdicts)
        return [verdict.work for verdict in verdicts if isinstance(verdict, Verdict) and verdict.work is not None]

    async def drain(self) -> None:
        """Wait until every call in progress is answered."""
        await self._batch.drain()

    async def _end_together(self, ends: Sequence[LeaseEnd]) -> Sequence[Verdict | Locked | Exception]:
        if not all(end.move is Move.COMPLETED for end in ends):
            return await self._end_each(ends)
        completed = await self._complete(ends)
        if len(completed) == len(ends):
            return [DONE] * len(ends)
        done = {nth - 1 for nth in completed}
        others = iter(await self._end_each([end for at, end in enumerate(ends) if at not in done]))
        return [DONE if at in done else next(others) for at in range(len(ends))]

    async def _complete(self, ends: Sequence[LeaseEnd]) -> Sequence[int]:
        """Complete the runs whose fence is current by a cheaper statement; return their positions, counted from 1."""
        columns = short_columns(_COMPLETION_COLUMNS, [end.completion for end in ends])
        if columns["attempt_ids"] == columns["lease_ids"]:
            columns["attempt_ids"] = ()
        self._add_limits(columns)
        columns.update(_COMPLETION)
        try:
            (row,) = await self._store.database.fetch(SQL.complete_leases, columns, attempts=1)
        except StoreFault as fault:
            if fault.kind != "contention":
                raise
            return ()
        completed: Sequence[int] = row["completed"] or ()
        if completed:
            self._store.wakeups.ended()
            self._store.wakeups.events(EventFamily.LEASE)
            if row["freed_keys"]:
                self._store.wakeups.room(row["freed_keys"])
            if row["event_ids"]:
                self._store.wakeups.members_ended(
                    [CascadeKey(*key) for key in zip(row["entry_partitions"], row["event_ids"], strict=True)]
                )
        return completed

    async def _end_each(self, ends: Sequence[LeaseEnd]) -> Sequence[Verdict | Locked | Exception]:
        columns = self._columns(ends, is_thorough=False)
        verdicts: list[Verdict | Locked | Exception] = [
            *self._judge(ends, await self._store.database.fetch(SQL.end_leases, columns))
        ]
        # A lease whose renewal is in progress still shows its old expiry, so it is checked again under a lock.
        unclear = [
            at
            for at, verdict in enumerate(verdicts)
            if isinstance(verdict, Verdict) and verdict.code in ("attached", "lease_expired")
        ]
        if unclear:
            for at, checked in zip(unclear, await self._end_thoroughly([ends[at] for at in unclear]), strict=True):
                verdicts[at] = checked
        await self.after_commit(ends, verdicts)
        return verdicts

    async def _end_thoroughly(self, ends: Sequence[LeaseEnd]) -> Sequence[Verdict | Locked | Exception]:
        async def end(transaction: Transaction) -> list[Verdict | Locked]:
            return await self.within(transaction, ends, is_shared=True)

        try:
            return await self._store.database.transact(end)
        except StoreFault as fault:
            # Not raised: the others of the batch have ended already, and must not be repeated.
            if fault.is_store_failure:
                return [fault.copy() for _ in ends]
            return [LOCKED] * len(ends)

    async def _end_alone(self, end: LeaseEnd) -> Verdict:
        async def release(transaction: Transaction) -> list[Verdict | Locked]:
            await lock_execution(transaction, end.execution_id)
            return await self.within(transaction, [end])

        verdicts = await self._store.transact(release, execution_id=end.execution_id)
        await self.after_commit([end], verdicts)
        verdict = verdicts[0]
        assert isinstance(verdict, Verdict), "the row is locked"
        return verdict

    @staticmethod
    def _judge(ends: Sequence[LeaseEnd], rows: Sequence[Record]) -> list[Verdict | Locked]:
        verdicts: list[Verdict | Locked] = [DONE] * len(ends)
        ended = 0
        entries: dict[str, CascadeKey] = {}
        for row in rows:
            (
                nth,
                code,
                count,
                delay_until,
                delay_ms,
                lane_id,
                route_no,
                queue_no,
                place,
                lease_epoch,
                attached,
                found,
            ) = row
            if nth is None:
                # The row of an entry has its event, its partition and its execution, as a JSON text, in these columns.
                event_id, partition_key, execution_id = count, delay_until, found[1:-1]
                entries[execution_id] = CascadeKey(partition_key, event_id)
            elif nth == 0:
                ended = count
            elif code is None:
                verdicts[nth - 1] = LOCKED
            elif code == "ok":
                work = None if lane_id is None else Work(lane_id, route_no, queue_no, place)
                verdicts[nth - 1] = Verdict(
                    code,
                    delay_until=delay_until,
                    delay_ms=delay_ms,
                    work=work,
                    lease_epoch=lease_epoch,
                    attached=attached,
                    slot_keys=_read_keys(found) if found else (),
                )
            else:
                verdicts[nth - 1] = verdict_of(row)
        answered = ended + len(rows) - 1 - len(entries)
        if answered != len(ends):
            raise error("internal", f"end_leases: {len(ends)} items given, {answered} verdicts returned")
        if entries:
            for at, end in enumerate(ends):
                verdict = verdicts[at]
                if isinstance(verdict, Verdict) and (entry := entries.get(end.execution_id[UUID_PART])) is not None:
                    verdicts[at] = msgspec.structs.replace(verdict, entry=entry)
        return verdicts

    def _columns(
        self, ends: Sequence[LeaseEnd], *, is_thorough: bool, waits_briefly: bool = False
    ) -> dict[str, object]:
        columns = short_columns(_COLUMNS, [end.row for end in ends])
        if columns["attempt_ids"] == columns["lease_ids"]:
            columns["attempt_ids"] = ()
        self._add_limits(columns)
        columns["is_thorough"] = is_thorough
        columns["waits_briefly"] = waits_briefly
        columns["has_errors"] = bool(columns["error_types"] or columns["tracebacks"])
        columns.update(release_parameters(frozenset(end.move for end in ends)))
        return columns

    def _add_limits(self, columns: dict[str, Any]) -> None:
        columns["retention_ms"] = self._store.rules.retention_ms
        columns["slot_shard"] = self._store.slot_shard
        columns["inline_payload_bytes"] = INLINE_PAYLOAD_BYTES
        columns["has_large_results"] = any_large(columns["payloads"])


def retry_pause(policy: ExecutionPolicy | None, retry_count: int, category: str) -> int | None:
    """The milliseconds before the next attempt, or None if the policy allows none."""
    retry_policy = policy.retry_policy if policy is not None else None
    if retry_policy is None or not may_retry(retry_policy, retry_count=retry_count, category=category):
        return None
    return retry_delay_ms(retry_policy.backoff, retry_count, draw=random.random())
