"""Renewal of leases, and progress reported under them."""

from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.row import GivenFence, check_lease_handle, execution_keys, lock_execution, verdict_of
from flowfabric.engine.lease.expire import LeaseExpiry
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.handle import MAX_LEASE_TTL_MS, Fence, Handle
from flowfabric.model.ids import ExecutionId, parse_execution_id, row_key, split_execution_id
from flowfabric.model.lease import Renewed
from flowfabric.model.text import check_batch, check_range, check_text

SQL = statements_beside(__file__)

MAX_INDEX = 2**31 - 1
DEFAULT_HISTORY_GRACE_MS = 60_000


class Renewals:
    """Extends leases and stores the progress that runs report."""

    def __init__(self, store: Store, expiry: LeaseExpiry) -> None:
        self._store = store
        self._expiry = expiry
        # One stream: a second would find the claims locked by the first.
        self._batch: Batch[Handle, Renewed] = Batch(
            self._renew_together, self._renew_alone, keys=lambda handle: (handle.execution_id,), streams=1
        )

    async def renew(self, handle: Handle) -> Renewed:
        """Extend a lease by the duration in its handle."""
        return await self._store.answer(self._batch.put(check_lease_handle(handle)))

    async def renew_many(self, handles: Sequence[Handle]) -> list[Renewed | EngineError]:
        """Extend up to a thousand leases in one statement, each with its own verdict."""
        check_batch(handles, "handles")
        good: list[Handle] = []
        refused: dict[int, EngineError] = {}
        for at, handle in enumerate(handles):
            try:
                good.append(check_lease_handle(handle))
            except EngineError as refusal:
                refused[at] = refusal
        answers = iter(await self._store.answers(self._batch.run(good)) if good else ())
        return [refused[at] if at in refused else next(answers) for at in range(len(handles))]

    async def renew_lease(
        self,
        *,
        execution_id: ExecutionId | str,
        attempt_index: int,
        lease_ttl_ms: int,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
        lease_history_grace_ms: int = DEFAULT_HISTORY_GRACE_MS,
    ) -> Renewed:
        """Extend a lease by a duration for the caller that holds its fence."""
        given = GivenFence.read(lease_id, lease_epoch, attempt_id, attempt_index)
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        check_range(given.attempt_index, "attempt_index", 0, MAX_INDEX)
        check_range(lease_ttl_ms, "lease_ttl_ms", 1, MAX_LEASE_TTL_MS)
        check_range(lease_history_grace_ms, "lease_history_grace_ms", 0, MAX_LEASE_TTL_MS)

        async def renew(transaction: Transaction) -> tuple[Fence, Record]:
            fence = given.against(await lock_execution(transaction, parsed))
            (row,) = await transaction.fetch(
                SQL.renew_leases,
                partition_keys=[partition],
                execution_ids=[uuid],
                lease_epochs=[fence.lease_epoch],
                lease_ids=[fence.lease_id],
                attempt_ids=[fence.attempt_id],
                ttls_ms=[lease_ttl_ms],
                writes_events=self._store.rules.renewal_events,
                waits=True,
            )
            return fence, row

        fence, row = await self._store.transact(renew, execution_id=parsed)
        self._wake_feed([row])
        verdict = verdict_of(row)
        if verdict.code == "lease_expired":
            await self._expiry.mark_expired([parsed])
        if not verdict.is_done:
            raise verdict.refusal(stale="stale_lease")
        return Renewed(expires_at_ms=row["expires_at"], lease_epoch=fence.lease_epoch)

    async def progress(self, handle: Handle, *, percent: int | None = None, message: str | None = None) -> None:
        """Store the progress of a run; an argument that is None keeps its stored value."""
        handle = check_lease_handle(handle)
        if percent is not None:
            check_range(percent, "percent", 0, 255)
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

        verdict = verdict_of(await self._store.transact(write, execution_id=handle.execution_id))
        if verdict.code == "lease_expired":
            await self._expiry.mark_expired([handle.execution_id])
        if not verdict.is_done:
            raise verdict.refusal()

    async def drain(self) -> None:
        """Wait until every renewal in progress is answered."""
        await self._batch.drain()

    async def _renew_together(self, handles: Sequence[Handle]) -> Sequence[Renewed | Locked | Exception]:
        rows = await self._store.database.fetch(SQL.renew_leases, self._columns(handles, waits=False))
        await self._after_commit(handles, rows)
        return self._judge(handles, rows)

    async def _renew_alone(self, handle: Handle) -> Renewed:
        async def renew(transaction: Transaction) -> list[Record]:
            await lock_execution(transaction, handle.execution_id)
            return await transaction.fetch(SQL.renew_leases, **self._columns([handle], waits=True))

        rows = await self._store.transact(renew, execution_id=handle.execution_id)
        await self._after_commit([handle], rows)
        (answer,) = self._judge([handle], rows)
        if isinstance(answer, Renewed):
            return answer
        raise answer if isinstance(answer, Exception) else error("execution_not_found", handle.execution_id)

    async def _after_commit(self, handles: Sequence[Handle], rows: Sequence[Record]) -> None:
        self._wake_feed(rows)
        expired = [handles[row["nth"] - 1].execution_id for row in rows if row["verdict"] == "lease_expired"]
        if expired:
            await self._expiry.mark_expired(expired)

    def _wake_feed(self, rows: Sequence[Record]) -> None:
        if self._store.rules.renewal_events and any(row["verdict"] == "ok" for row in rows):
            self._store.wakeups.events(EventFamily.LEASE)

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

    def _columns(self, handles: Sequence[Handle], *, waits: bool) -> dict[str, object]:
        return {
            **execution_keys(handle.execution_id for handle in handles),
            "lease_epochs": [handle.lease_epoch for handle in handles],
            "lease_ids": [handle.lease_id for handle in handles],
            "attempt_ids": [handle.attempt_id for handle in handles],
            "ttls_ms": [handle.lease_ttl_ms for handle in handles],
            "writes_events": self._store.rules.renewal_events,
            "waits": waits,
        }
