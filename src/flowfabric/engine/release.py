"""Ending and parking runs: one statement for every way a lease is given up."""

import random
from collections.abc import Sequence
from typing import Any

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import columns_of, statements_beside
from flowfabric.engine.fence import DONE, Verdict, lock_execution, verdict_of
from flowfabric.engine.lease import Leases
from flowfabric.engine.store import Store
from flowfabric.engine.transition import Release, completion_parameters, release_parameters
from flowfabric.engine.wakeups import LostLease, LostReason
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Fence, Handle
from flowfabric.model.ids import INDEX_PART, UUID_PART, ExecutionId, SuspensionId
from flowfabric.model.policy import ExecutionPolicy, may_retry, retry_delay_ms
from flowfabric.model.states import BlockingReason, HandleKind

SQL = statements_beside(__file__)

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
)
_COMPLETION_COLUMNS = ("partition_keys", "execution_ids", "lease_epochs", "lease_ids", "attempt_ids", "payloads")
_COMPLETION = completion_parameters()


class Parting:
    """How one run ends, is put aside or suspends; without a fence the row's own lease counts.

    `lost_epoch` names the lease that ends without its holder, who is told after the commit.
    """

    __slots__ = ("execution_id", "is_of_resumed", "lost_epoch", "move", "row")

    def __init__(
        self,
        execution_id: ExecutionId,
        move: Release,
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
        lost_epoch: int | None = None,
    ) -> None:
        self.execution_id = execution_id
        self.move = move
        self.lost_epoch = lost_epoch
        self.is_of_resumed = isinstance(fence, Handle) and fence.kind is HandleKind.RESUMED
        lease = (None, None, None) if fence is None else (fence.lease_epoch, fence.lease_id, fence.attempt_id)
        self.row: tuple[Any, ...] = (
            # Not by a function: every ending comes by here.
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
        )

    @property
    def completion(self) -> tuple[Any, ...]:
        """What a completion needs of the row: key, fence and result."""
        return self.row[:2] + self.row[3:7]


class Releases:
    """Ends and parks runs, alone in a caller's transaction or shared by concurrent callers."""

    def __init__(self, store: Store, leases: Leases) -> None:
        self._store = store
        self._leases = leases
        self._batch: Batch[Parting, Verdict] = Batch(
            self._release_together, self._release_alone, keys=lambda parting: (parting.execution_id,)
        )

    async def one(self, parting: Parting) -> Verdict:
        """The verdict on one run; concurrent callers share a statement."""
        return await self._store.answer(self._batch.put(parting))

    async def many(self, partings: Sequence[Parting]) -> list[Verdict | EngineError]:
        """The verdicts on the partings of one caller, in their order, from one statement."""
        return await self._store.answers(self._batch.run(partings))

    async def within(self, transaction: Transaction, partings: Sequence[Parting]) -> list[Verdict | Locked]:
        """End runs whose rows the transaction holds already; `settle` follows the commit."""
        return self._judge(partings, await transaction.fetch(SQL.release_executions, **self._columns(partings)))

    async def settle(self, partings: Sequence[Parting], verdicts: Sequence[Verdict | Locked]) -> None:
        """After the commit: tell holders of leases that were ended, mark lapsed leases, wake waiters for the rest."""
        wakeups = self._store.wakeups
        lapsed = []
        lost = []
        has_ended = False
        for parting, verdict in zip(partings, verdicts, strict=True):
            if parting.lost_epoch is not None and isinstance(verdict, Verdict) and verdict.is_done:
                lost.append(LostLease(parting.execution_id, parting.lost_epoch, LostReason(parting.move.value)))
            if verdict is DONE:
                has_ended = True
            elif isinstance(verdict, Verdict):
                if verdict.delay_ms is not None:
                    wakeups.timer(verdict.delay_ms)
                elif verdict.work is not None:
                    lane_id, queue_no, place = verdict.work
                    wakeups.work(lane_id, {queue_no: place})
                elif verdict.code == "lease_expired":
                    lapsed.append(parting.execution_id)
        if lost:
            wakeups.lost(lost)
        if has_ended:
            wakeups.ended()
        if lapsed:
            await self._leases.mark_lapsed(lapsed)

    async def drain(self) -> None:
        """Wait until every release under way is answered."""
        await self._batch.drain()

    async def _release_together(self, partings: Sequence[Parting]) -> Sequence[Verdict | Locked | Exception]:
        is_completion = all(parting.move is Release.COMPLETED for parting in partings)
        # The attempt of a resumed run is stored already, which complete_held leaves to the other statement.
        if not is_completion or all(parting.is_of_resumed for parting in partings):
            return await self._release_each(partings)
        completed = await self._complete_held(partings)
        if len(completed) == len(partings):
            return [DONE] * len(partings)
        done = {nth - 1 for nth in completed}
        left = iter(await self._release_each([parting for at, parting in enumerate(partings) if at not in done]))
        return [DONE if at in done else next(left) for at in range(len(partings))]

    async def _release_each(self, partings: Sequence[Parting]) -> Sequence[Verdict | Locked]:
        verdicts = self._judge(
            partings, await self._store.database.fetch(SQL.release_executions, self._columns(partings))
        )
        await self.settle(partings, verdicts)
        return verdicts

    async def _complete_held(self, partings: Sequence[Parting]) -> Sequence[int]:
        """Complete the runs whose fence holds at less cost than judging each; answers which, counted from 1."""
        columns = columns_of(_COMPLETION_COLUMNS, [parting.completion for parting in partings])
        if columns["attempt_ids"] == columns["lease_ids"]:
            columns["attempt_ids"] = ()
        columns["retention_ms"] = self._store.rules.retention_ms
        columns.update(_COMPLETION)
        try:
            (row,) = await self._store.database.fetch(SQL.complete_held, columns, attempts=1)
        except StoreFault as fault:
            if fault.kind != "contention":
                raise
            return ()
        completed: Sequence[int] = row["completed"] or ()
        if completed:
            self._store.wakeups.ended()
        return completed

    async def _release_alone(self, parting: Parting) -> Verdict:
        async def release(transaction: Transaction) -> list[Verdict | Locked]:
            await lock_execution(transaction, parting.execution_id)
            return await self.within(transaction, [parting])

        verdicts = await self._store.transact(release, execution_id=parting.execution_id)
        await self.settle([parting], verdicts)
        verdict = verdicts[0]
        assert isinstance(verdict, Verdict), "the row is held"
        return verdict

    @staticmethod
    def _judge(partings: Sequence[Parting], rows: Sequence[Record]) -> list[Verdict | Locked]:
        verdicts: list[Verdict | Locked] = [DONE] * len(partings)
        ended = 0
        for row in rows:
            nth, code, count, delay_until, delay_ms, lane_id, queue_no, place, _ = row
            if nth == 0:
                ended = count
            elif code is None:
                verdicts[nth - 1] = LOCKED
            elif code == "ok":
                work = None if lane_id is None else (lane_id, queue_no, place)
                verdicts[nth - 1] = Verdict(code, delay_until=delay_until, delay_ms=delay_ms, work=work)
            else:
                verdicts[nth - 1] = verdict_of(row)
        if ended + len(rows) - 1 != len(partings):
            raise error("internal", f"{len(partings)} partings were given, {ended + len(rows) - 1} were judged")
        return verdicts

    def _columns(self, partings: Sequence[Parting]) -> dict[str, object]:
        columns = columns_of(_COLUMNS, [parting.row for parting in partings])
        if columns["attempt_ids"] == columns["lease_ids"]:
            columns["attempt_ids"] = ()
        columns["retention_ms"] = self._store.rules.retention_ms
        columns.update(release_parameters(frozenset(parting.move for parting in partings)))
        return columns


def retry_pause(policy: ExecutionPolicy | None, retry_count: int, category: str) -> int | None:
    """The milliseconds before the next attempt, or None when there is none."""
    retry_policy = policy.retry_policy if policy is not None else None
    if retry_policy is None or not may_retry(retry_policy, retry_count=retry_count, category=category):
        return None
    return retry_delay_ms(retry_policy.backoff, retry_count, draw=random.random())
