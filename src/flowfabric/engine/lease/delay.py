"""Delays: a run gives up its lease now and continues the same attempt under a later one."""

from collections.abc import Mapping, Sequence
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.core.row import check_lease_handle, execution_keys, lock_execution_if_exists
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.core.transition import PROMOTED, Move
from flowfabric.engine.core.wakeups import Work
from flowfabric.engine.lease.expire import LATEST_TIME, SWEEP_LIMIT
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.handle import Handle
from flowfabric.model.ids import (
    ExecutionId,
    check_storable,
    format_execution_id,
    parse_execution_id,
)
from flowfabric.model.lease import AlreadySatisfied, Promoted
from flowfabric.model.policy_checks import MAX_MS
from flowfabric.model.states import EligibilityState, PublicState
from flowfabric.model.text import check_range

SQL = statements_beside(__file__)


class Delays:
    """Interrupts runs without ending their attempts, and makes delayed executions claimable when due."""

    def __init__(self, store: Store, lease_ends: LeaseEnds, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self._lease_ends = lease_ends

    async def delay(self, handle: Handle, delay_until: int | None = None, *, delay_ms: int | None = None) -> None:
        """Release a run until a time, or for a duration; the next claim after that continues its attempt."""
        handle = check_lease_handle(handle)
        if (delay_until is None) == (delay_ms is None):
            count = "neither" if delay_until is None else "both"
            raise error("invalid_input", f"delay_until: pass delay_until or delay_ms, got {count}")
        if delay_until is not None:
            check_range(delay_until, "delay_until", 0, LATEST_TIME)
        else:
            check_range(delay_ms, "delay_ms", 0, MAX_MS)
        end = LeaseEnd(handle.execution_id, Move.DELAYED, fence=handle, delay_until=delay_until, delay_ms=delay_ms)
        await self._release(end)

    async def hand_back(self, handle: Handle, *, was_started: bool = True) -> None:
        """Give up the lease of a run that cannot continue here; any worker may claim the same attempt at once.

        With `was_started=False`, the attempt keeps the timeout it had when it was claimed.
        """
        handle = check_lease_handle(handle)
        move = Move.HANDED_BACK if was_started else Move.NOT_STARTED
        await self._release(LeaseEnd(handle.execution_id, move, fence=handle))

    async def promote_delayed(self, execution_id: ExecutionId | str) -> Promoted | AlreadySatisfied:
        """Make a delayed execution claimable if it is due."""
        parsed = parse_execution_id(execution_id)
        check_storable(parsed)

        async def promote(transaction: Transaction) -> tuple[list[Record], str]:
            locked = await lock_execution_if_exists(transaction, parsed)
            if locked is None:
                return [], "execution_not_found"
            promoted = await transaction.fetch(SQL.promote_delayed, **_named([parsed]), lease_epoch=None, **PROMOTED)
            is_delayed = locked.eligibility_state == EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
            return promoted, "not_yet_due" if is_delayed else "not_delayed"

        promoted, reason = await self._store.transact(promote, execution_id=parsed)
        self._store.wakeups.work_of(promoted)
        return (
            Promoted(public_state=PublicState(promoted[0]["public_state"]))
            if promoted
            else AlreadySatisfied(reason=reason)
        )

    async def bring_forward(self, handle: Handle) -> None:
        """Make an execution that was delayed under this lease claimable at once, unless it was claimed since."""
        handle = check_lease_handle(handle)

        async def promote(transaction: Transaction) -> list[Record]:
            if await lock_execution_if_exists(transaction, handle.execution_id) is None:
                return []
            return await transaction.fetch(
                SQL.promote_delayed, **_named([handle.execution_id]), lease_epoch=handle.lease_epoch, **PROMOTED
            )

        self._store.wakeups.work_of(await self._store.transact(promote))

    async def promote_due(self) -> int:
        """Make due delayed executions claimable, the oldest first; return how many."""
        return (await self.promote_since(self._store.due_watermark.since)).done

    async def promote_since(self, since: int) -> SweepResult:
        """Promote a batch of executions due after `since`, except quarantined ones."""
        work: list[Work] = []

        async def promote(chosen: Mapping[str, object]) -> int:
            rows = await self._store.fetch(SQL.promote_delayed, **chosen, lease_epoch=None, **PROMOTED)
            work.extend(Work(row["lane_id"], row["route_no"], row["queue_no"], row["place"]) for row in rows)
            return len(rows)

        def due(skipped: Sequence[UUID]) -> dict[str, object]:
            return {"since": since, "skipped": skipped, "limit": SWEEP_LIMIT}

        async def batch(skipped: Sequence[UUID]) -> int:
            return await promote({"partition_keys": [], "execution_ids": None, **due(skipped)})

        async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
            rows = await self._store.fetch(SQL.list_delayed, **due(skipped))
            return [format_execution_id(row["partition_key"], row["execution_id"]) for row in rows]

        async def promote_items(execution_ids: Sequence[ExecutionId]) -> int:
            return await promote(_named(execution_ids))

        try:
            done = await self.quarantine.sweep_by_halves(batch, list_due, promote_items, limit=SWEEP_LIMIT)
        finally:
            self._store.wakeups.work(work)
        return SweepResult(done, done >= SWEEP_LIMIT, work)

    async def _release(self, end: LeaseEnd) -> None:
        verdict = await self._lease_ends.one(end)
        if not verdict.is_done:
            raise verdict.refusal()


def _named(execution_ids: Sequence[ExecutionId]) -> dict[str, object]:
    return {**execution_keys(execution_ids), "since": 0, "skipped": [], "limit": len(execution_ids)}
