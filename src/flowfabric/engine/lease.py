"""Leases: renewing them, marking the lapsed ones, and reporting progress under them."""

import math
import time
from collections.abc import Sequence

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.fence import lock_execution, usable, verdict_of
from flowfabric.engine.store import Store
from flowfabric.engine.transition import LEASE_EXPIRED_PARAMETERS, PROMOTED
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, split_execution_id
from flowfabric.model.outcomes import Renewed
from flowfabric.model.text import check_text

SQL = statements_beside(__file__)

SWEEP_LIMIT = 1000
MAX_BATCH = 1000


class Leases:
    """The lease family of operations."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batch: Batch[Handle, Renewed] = Batch(
            self._renew_together, self._renew_alone, keys=lambda handle: (handle.execution_id,)
        )
        self._caught_up_at = -math.inf
        self.is_swept = False
        """Set while a reconciler of this process does what is due; a claim then need not."""

    async def renew(self, handle: Handle) -> Renewed:
        """Extend one lease by the time its handle holds; concurrent callers share a statement."""
        return await self._store.answer(self._batch.put(usable(handle)))

    async def renew_many(self, handles: Sequence[Handle]) -> list[Renewed | EngineError]:
        """Extend the leases of up to a thousand handles in one statement, each with its own verdict."""
        if not 1 <= len(handles) <= MAX_BATCH:
            raise error("invalid_input", f"handles: 1 to {MAX_BATCH}, got {len(handles)}")
        good: list[Handle] = []
        refused: dict[int, EngineError] = {}
        for at, handle in enumerate(handles):
            try:
                good.append(usable(handle))
            except EngineError as error_of_it:
                refused[at] = error_of_it
        answers = iter(await self._store.answers(self._batch.run(good)) if good else ())
        return [refused[at] if at in refused else next(answers) for at in range(len(handles))]

    async def progress(self, handle: Handle, *, percent: int | None, message: str | None) -> None:
        """Overwrite what the run reports of itself; what is absent keeps its value."""
        handle = usable(handle)
        if percent is not None and (type(percent) is not int or not 0 <= percent <= 255):
            raise error("invalid_input", f"percent: 0 to 255, got {percent!r}")
        if message is not None:
            check_text(message, "message")
        partition, uuid = split_execution_id(handle.execution_id)

        async def write(transaction: Transaction) -> Record:
            await lock_execution(transaction, handle.execution_id)
            (row,) = await transaction.fetch(
                SQL.set_progress,
                partition_key=partition,
                execution_id=uuid,
                lease_epoch=handle.lease_epoch,
                lease_id=handle.lease_id,
                attempt_id=handle.attempt_id,
                percent=percent,
                message=message,
            )
            return row

        verdict = verdict_of(await self._store.transact(write))
        if verdict.code == "lease_expired":
            await self.mark_lapsed([handle.execution_id])
        if not verdict.is_done:
            raise verdict.refusal()

    async def mark_lapsed(self, execution_ids: Sequence[ExecutionId] | None = None) -> int:
        """Mark lapsed leases, the named ones or the oldest due, so that the next claim takes them; answers how many."""
        return len(await self._mark_lapsed(self._store.due.since, execution_ids))

    async def promote_delayed(self) -> int:
        """Make the delayed executions whose time has come claimable, the oldest first; answers how many."""
        return len(await self._promote_delayed(self._store.due.since))

    async def catch_up(self, lanes: Sequence[str], *, within_seconds: float) -> bool:
        """Do what is due, unless that was done within this time or a reconciler does it; whether these lanes gained."""
        now = time.monotonic()
        if self.is_swept or now < self._caught_up_at + within_seconds:
            return False
        self._caught_up_at = now
        rows = await self._mark_lapsed(0) + await self._promote_delayed(0)
        return any(row["lane_id"] in lanes for row in rows)

    async def _mark_lapsed(self, since: int, execution_ids: Sequence[ExecutionId] | None = None) -> list[Record]:
        pairs = [split_execution_id(execution_id) for execution_id in execution_ids or ()]
        rows = await self._store.fetch(
            SQL.mark_lapsed_leases,
            partition_keys=[partition for partition, _ in pairs],
            execution_ids=None if execution_ids is None else [uuid for _, uuid in pairs],
            since=since,
            limit=SWEEP_LIMIT,
            **LEASE_EXPIRED_PARAMETERS,
        )
        self._tell(rows)
        return rows

    async def _promote_delayed(self, since: int) -> list[Record]:
        rows = await self._store.fetch(SQL.promote_delayed, since=since, limit=SWEEP_LIMIT, **PROMOTED)
        self._tell(rows)
        return rows

    async def drain(self) -> None:
        """Wait until every renewal under way is answered."""
        await self._batch.drain()

    def _tell(self, rows: Sequence[Record]) -> None:
        lowest: dict[str, dict[int, int]] = {}
        for row in rows:
            places = lowest.setdefault(row["lane_id"], {})
            place = places.get(row["queue_no"], row["place"])
            places[row["queue_no"]] = min(place, row["place"])
        for lane_id, places in lowest.items():
            self._store.wakeups.work(lane_id, places)

    async def _renew_together(self, handles: Sequence[Handle]) -> Sequence[Renewed | Locked | Exception]:
        rows = await self._store.database.fetch(SQL.renew_leases, self._columns(handles))
        await self._mark(handles, rows)
        return self._judge(handles, rows)

    async def _renew_alone(self, handle: Handle) -> Renewed:
        async def renew(transaction: Transaction) -> list[Record]:
            await lock_execution(transaction, handle.execution_id)
            return await transaction.fetch(SQL.renew_leases, **self._columns([handle]))

        rows = await self._store.transact(renew)
        await self._mark([handle], rows)
        (answer,) = self._judge([handle], rows)
        if isinstance(answer, Renewed):
            return answer
        raise answer if isinstance(answer, Exception) else error("execution_not_found")

    async def _mark(self, handles: Sequence[Handle], rows: Sequence[Record]) -> None:
        lapsed = [handles[row["nth"] - 1].execution_id for row in rows if row["verdict"] == "lease_expired"]
        if lapsed:
            await self.mark_lapsed(lapsed)

    @staticmethod
    def _judge(handles: Sequence[Handle], rows: Sequence[Record]) -> list[Renewed | Locked | Exception]:
        answers: list[Renewed | Locked | Exception] = [LOCKED] * len(rows)
        for row in rows:
            at = row["nth"] - 1
            if row["verdict"] == "ok":
                answers[at] = Renewed(expires_at_ms=row["expires_at"], lease_epoch=handles[at].lease_epoch)
            elif row["verdict"] is not None:
                answers[at] = verdict_of(row).refusal()
        return answers

    def _columns(self, handles: Sequence[Handle]) -> dict[str, object]:
        pairs = [split_execution_id(handle.execution_id) for handle in handles]
        return {
            "partition_keys": [partition for partition, _ in pairs],
            "execution_ids": [uuid for _, uuid in pairs],
            "lease_epochs": [handle.lease_epoch for handle in handles],
            "lease_ids": [handle.lease_id for handle in handles],
            "attempt_ids": [handle.attempt_id for handle in handles],
            "ttls_ms": [handle.lease_ttl_ms for handle in handles],
            "tell": self._store.rules.tell_renewals,
        }
