"""Leases: renewing them, marking the lapsed ones, and reporting progress under them."""

import math
import time
from collections.abc import Mapping, Sequence

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.fence import GivenFence, lock_execution, lock_if_there, usable, verdict_of
from flowfabric.engine.store import Store
from flowfabric.engine.transition import LEASE_EXPIRED_PARAMETERS, PROMOTED
from flowfabric.engine.wakeups import LostLease, LostReason
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import MAX_LEASE_TTL_MS, Fence, Handle
from flowfabric.model.ids import (
    ExecutionId,
    WorkerInstanceId,
    format_execution_id,
    parse_execution_id,
    row_key,
    split_execution_id,
)
from flowfabric.model.outcomes import (
    AlreadySatisfied,
    ExpiredLease,
    ExpiredLeaseCursor,
    ExpiredLeases,
    Marked,
    Promoted,
    Renewed,
)
from flowfabric.model.states import EligibilityState, LifecyclePhase, OwnershipState, PublicState
from flowfabric.model.text import check_batch, check_limit, check_range, check_text

SQL = statements_beside(__file__)

SWEEP_LIMIT = 1000
MAX_INDEX = 2**31 - 1
DEFAULT_HISTORY_GRACE_MS = 60_000
DEFAULT_LISTED = 1000
MAX_LISTED = 10_000
LATEST_TIME = 2**62 - 1


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
        check_batch(handles, "handles")
        good: list[Handle] = []
        refused: dict[int, EngineError] = {}
        for at, handle in enumerate(handles):
            try:
                good.append(usable(handle))
            except EngineError as error_of_it:
                refused[at] = error_of_it
        answers = iter(await self._store.answers(self._batch.run(good)) if good else ())
        return [refused[at] if at in refused else next(answers) for at in range(len(handles))]

    async def renew_lease(
        self, execution_id: str, given: GivenFence, lease_ttl_ms: int, lease_history_grace_ms: int
    ) -> Renewed:
        """Extend a lease by a time, for a caller that knows its fence."""
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
                tell=self._store.rules.tell_renewals,
            )
            return fence, row

        fence, row = await self._store.transact(renew, execution_id=parsed)
        verdict = verdict_of(row)
        if verdict.code == "lease_expired":
            await self.mark_lapsed([parsed])
        if not verdict.is_done:
            raise verdict.refusal(stale="stale_lease")
        return Renewed(expires_at_ms=row["expires_at"], lease_epoch=fence.lease_epoch)

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

        verdict = verdict_of(await self._store.transact(write, execution_id=handle.execution_id))
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

    async def mark_if_due(self, execution_id: str) -> Marked | AlreadySatisfied:
        """Mark one lease as lapsed, where it is; else say why there is nothing to mark."""
        parsed = parse_execution_id(execution_id)
        row_key(parsed)

        async def mark(transaction: Transaction) -> tuple[list[Record], str]:
            held = await lock_if_there(transaction, parsed)
            if held is None:
                return [], "execution_not_found"
            marked = await transaction.fetch(SQL.mark_lapsed_leases, **_named([parsed]), **LEASE_EXPIRED_PARAMETERS)
            return marked, _why_unmarked(held)

        marked, reason = await self._store.transact(mark, execution_id=parsed)
        self._announce_expired(marked)
        return Marked() if marked else AlreadySatisfied(reason=reason)

    async def promote(self, execution_id: str) -> Promoted | AlreadySatisfied:
        """Make one delayed execution claimable, where its time has come; else say why there is nothing to do."""
        parsed = parse_execution_id(execution_id)
        row_key(parsed)

        async def bring(transaction: Transaction) -> tuple[list[Record], str]:
            held = await lock_if_there(transaction, parsed)
            if held is None:
                return [], "execution_not_found"
            promoted = await transaction.fetch(SQL.promote_delayed, **_named([parsed]), lease_epoch=None, **PROMOTED)
            is_delayed = held["eligibility_state"] == EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
            return promoted, "not_yet_due" if is_delayed else "not_delayed"

        promoted, reason = await self._store.transact(bring, execution_id=parsed)
        self._tell(promoted)
        return (
            Promoted(public_state=PublicState(promoted[0]["public_state"]))
            if promoted
            else AlreadySatisfied(reason=reason)
        )

    async def bring_forward(self, handle: Handle) -> None:
        """Make an execution that was put aside under this lease claimable at once, unless it was claimed since."""
        handle = usable(handle)

        async def bring(transaction: Transaction) -> list[Record]:
            if await lock_if_there(transaction, handle.execution_id) is None:
                return []
            return await transaction.fetch(
                SQL.promote_delayed, **_named([handle.execution_id]), lease_epoch=handle.lease_epoch, **PROMOTED
            )

        self._tell(await self._store.transact(bring))

    async def list_expired(
        self, as_of: int | None, after: tuple[int, str] | None, limit: int, namespace: str | None
    ) -> ExpiredLeases:
        """Leases that end by a time, marked or not, in the order of their end."""
        if as_of is not None:
            check_range(as_of, "as_of", 0, LATEST_TIME)
        limit = check_limit(limit, MAX_LISTED)
        if namespace is not None:
            check_text(namespace, "namespace")
        expires_at, id_text = _after(after)
        rows = await self._store.fetch(
            SQL.list_expired_leases,
            as_of=as_of,
            after_expires_at=expires_at,
            after_id=id_text,
            limit=limit,
            namespace=namespace,
        )
        entries = tuple(
            ExpiredLease(
                execution_id=ExecutionId(row["id"]),
                lease_id=row["lease_id"],
                lease_epoch=row["lease_epoch"],
                worker_instance_id=WorkerInstanceId(row["worker_instance_id"]),
                expires_at_ms=row["lease_expires_at"],
                attempt_index=row["attempt_index"],
            )
            for row in rows
        )
        cursor = None
        if entries and len(entries) == limit:
            cursor = ExpiredLeaseCursor(entries[-1].expires_at_ms, entries[-1].execution_id)
        return ExpiredLeases(entries=entries, cursor=cursor)

    async def catch_up(self, lanes: Sequence[str], *, within_seconds: float) -> bool:
        """Do what is due, unless that was done within this time or a reconciler does it; whether these lanes gained."""
        now = time.monotonic()
        if self.is_swept or now < self._caught_up_at + within_seconds:
            return False
        self._caught_up_at = now
        is_gain = False
        for bring in (self._mark_lapsed, self._promote_delayed):
            # A full batch of other lanes may stand before what is due on these.
            while rows := await bring(0):
                is_gain = is_gain or any(row["lane_id"] in lanes for row in rows)
                if is_gain or len(rows) < SWEEP_LIMIT:
                    break
        return is_gain

    async def _mark_lapsed(self, since: int, execution_ids: Sequence[ExecutionId] | None = None) -> list[Record]:
        rows = await self._store.fetch(
            SQL.mark_lapsed_leases, **_named(execution_ids, since), **LEASE_EXPIRED_PARAMETERS
        )
        self._announce_expired(rows)
        return rows

    async def _promote_delayed(self, since: int) -> list[Record]:
        rows = await self._store.fetch(SQL.promote_delayed, **_named(None, since), lease_epoch=None, **PROMOTED)
        self._tell(rows)
        return rows

    async def drain(self) -> None:
        """Wait until every renewal under way is answered."""
        await self._batch.drain()

    def _announce_expired(self, rows: Sequence[Record]) -> None:
        if rows:
            self._store.wakeups.lost(
                [
                    LostLease(
                        format_execution_id(row["partition_key"], row["execution_id"]),
                        row["lease_epoch"],
                        LostReason.LEASE_EXPIRED,
                    )
                    for row in rows
                ]
            )
        self._tell(rows)

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

        rows = await self._store.transact(renew, execution_id=handle.execution_id)
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


def _named(execution_ids: Sequence[ExecutionId] | None, since: int = 0) -> Mapping[str, object]:
    """What tells a statement its rows: these executions, or whatever is due after a time."""
    pairs = [split_execution_id(execution_id) for execution_id in execution_ids or ()]
    return {
        "partition_keys": [partition for partition, _ in pairs],
        "execution_ids": None if execution_ids is None else [uuid for _, uuid in pairs],
        "since": since,
        "limit": SWEEP_LIMIT,
    }


_UNMARKED = {
    OwnershipState.LEASE_EXPIRED_RECLAIMABLE: "already_expired",
    OwnershipState.LEASE_REVOKED: "already_revoked",
    OwnershipState.UNOWNED: "unowned",
    OwnershipState.LEASED: "not_yet_expired",
}


def _why_unmarked(held: Record) -> str:
    if held["lifecycle_phase"] != LifecyclePhase.ACTIVE:
        return "not_active"
    return _UNMARKED[OwnershipState(held["ownership_state"])]


def _after(cursor: object) -> tuple[int | None, str | None]:
    if cursor is None:
        return None, None
    if not isinstance(cursor, tuple) or len(cursor) != 2:
        raise error("invalid_input", "after: must be a cursor of an earlier page")
    check_range(cursor[0], "after.expires_at_ms", 0, 2**63 - 1)
    return cursor[0], parse_execution_id(cursor[1])
