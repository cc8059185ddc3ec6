"""Ending or parking runs: one statement for every way a lease is given up."""

from collections.abc import Sequence

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import columns_of, statements_beside
from flowfabric.engine.fence import lock_execution
from flowfabric.engine.lease import Leases
from flowfabric.engine.store import Store
from flowfabric.engine.transition import Release, release_parameters
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId

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
    "sources",
)


class Run:
    """One run to be released, and how; without a handle the row's own lease counts."""

    __slots__ = ("execution_id", "move", "row")

    def __init__(
        self,
        execution_id: ExecutionId,
        move: Release,
        *,
        handle: Handle | None = None,
        payload: bytes | None = None,
        encoding: str | None = None,
        reason: str | None = None,
        category: str | None = None,
        delay_ms: int | None = None,
        source: str | None = None,
    ) -> None:
        self.execution_id = execution_id
        self.move = move
        lease = (None, None, None) if handle is None else (handle.lease_epoch, handle.lease_id, handle.attempt_id)
        self.row = (
            int(execution_id[4:-38]),
            execution_id[-36:],
            move.value,
            *lease,
            payload,
            encoding,
            reason,
            category,
            delay_ms,
            source,
        )


class Releases:
    """Releases runs, alone in a caller's transaction or shared by concurrent callers."""

    def __init__(self, store: Store, leases: Leases) -> None:
        self._store = store
        self._leases = leases
        self._batch: Batch[Run, Record] = Batch(
            self._release_together, self._release_alone, key=lambda run: run.execution_id
        )

    async def one(self, run: Run) -> Record:
        """The row and the verdict on one run; concurrent callers share a statement."""
        return await self._store.answer(self._batch.put(run))

    async def many(self, runs: Sequence[Run]) -> list[Record | Exception]:
        """The rows and the verdicts on the runs of one caller, in their order."""
        return list(await self._store.answers(self._batch.run(runs)))

    async def within(self, transaction: Transaction, runs: Sequence[Run]) -> list[Record]:
        """Release runs whose rows the transaction holds already."""
        return await transaction.fetch(SQL.release_executions, **self._columns(runs))

    def tell(self, runs: Sequence[Run], rows: Sequence[Record]) -> None:
        """After the commit: wake who waits for endings or for the timers that were set."""
        has_ended = False
        for nth, verdict, is_ending, _, _ in rows:
            if verdict == "ok":
                if is_ending:
                    has_ended = True
                elif (delay_ms := runs[nth - 1].row[10]) is not None:
                    self._store.wakeups.timer(delay_ms)
        if has_ended:
            self._store.wakeups.ended()

    async def drain(self) -> None:
        """Wait until every release under way is answered."""
        await self._batch.drain()

    async def _release_together(self, runs: Sequence[Run]) -> Sequence[Record | Locked | Exception]:
        rows = await self._store.database.fetch(SQL.release_executions, self._columns(runs))
        answers: list[Record | Locked | Exception] = [LOCKED] * len(runs)
        lapsed = []
        for row in rows:
            verdict = row[1]
            if verdict is not None:
                answers[row[0] - 1] = row
                if verdict == "lease_expired":
                    lapsed.append(runs[row[0] - 1].execution_id)
        if lapsed:
            await self._leases.mark_lapsed(lapsed)
        self.tell(runs, rows)
        return answers

    async def _release_alone(self, run: Run) -> Record:
        async def release(transaction: Transaction) -> Record:
            await lock_execution(transaction, run.execution_id)
            (row,) = await self.within(transaction, [run])
            return row

        row = await self._store.transact(release)
        if row["verdict"] == "lease_expired":
            await self._leases.mark_lapsed([run.execution_id])
        self.tell([run], [row])
        return row

    def _columns(self, runs: Sequence[Run]) -> dict[str, object]:
        columns = columns_of(_COLUMNS, [run.row for run in runs])
        columns["retention_ms"] = self._store.rules.retention_ms
        columns.update(release_parameters(frozenset(run.move for run in runs)))
        return columns
