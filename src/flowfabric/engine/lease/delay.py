"""Delaying: a run gives up its lease, and its attempt continues under a later one once it is promoted."""

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.row import hold_if_there, usable
from flowfabric.engine.core.transition import PROMOTED, Release
from flowfabric.engine.core.wakeups import Work
from flowfabric.engine.lease.expire import LATEST_TIME, named_or_due
from flowfabric.engine.store import Store
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, parse_execution_id, row_key
from flowfabric.model.lease import AlreadySatisfied, Promoted
from flowfabric.model.states import EligibilityState, PublicState
from flowfabric.model.text import check_range

SQL = statements_beside(__file__)


class Delays:
    """Puts runs aside without ending their attempts, and makes delayed executions claimable when due."""

    def __init__(self, store: Store, lease_ends: LeaseEnds) -> None:
        self._store = store
        self._lease_ends = lease_ends

    async def delay(self, handle: Handle, delay_until: int) -> None:
        """Put a run aside until a time; its attempt goes on with the next claim after it."""
        handle = usable(handle)
        check_range(delay_until, "delay_until", 0, LATEST_TIME)
        await self._park(LeaseEnd(handle.execution_id, Release.DELAYED, fence=handle, delay_until=delay_until))

    async def wait_children(self, handle: Handle) -> None:
        """Put a run aside until what it depends on has ended; its attempt goes on with the next claim after it."""
        handle = usable(handle)
        await self._park(LeaseEnd(handle.execution_id, _move_of_waiting(), fence=handle))

    async def hand_back(self, handle: Handle, *, was_started: bool = True) -> None:
        """Give up the lease of a run that cannot go on here: any worker may claim it at once, as the same attempt.

        Where it was not started, its attempt gets back the time it had at the claim.
        """
        handle = usable(handle)
        move = Release.HANDED_BACK if was_started else Release.NOT_STARTED
        await self._park(LeaseEnd(handle.execution_id, move, fence=handle))

    async def promote_delayed(self, execution_id: ExecutionId | str) -> Promoted | AlreadySatisfied:
        """Make a delayed execution claimable, where its time has come."""
        parsed = parse_execution_id(execution_id)
        row_key(parsed)

        async def bring(transaction: Transaction) -> tuple[list[Record], str]:
            held = await hold_if_there(transaction, parsed)
            if held is None:
                return [], "execution_not_found"
            promoted = await transaction.fetch(
                SQL.promote_delayed, **named_or_due([parsed]), lease_epoch=None, **PROMOTED
            )
            is_delayed = held.eligibility_state == EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
            return promoted, "not_yet_due" if is_delayed else "not_delayed"

        promoted, reason = await self._store.transact(bring, execution_id=parsed)
        self._store.wakeups.work_of(promoted)
        return (
            Promoted(public_state=PublicState(promoted[0]["public_state"]))
            if promoted
            else AlreadySatisfied(reason=reason)
        )

    async def bring_forward(self, handle: Handle) -> None:
        """Make an execution that was put aside under this lease claimable at once, unless it was claimed since."""
        handle = usable(handle)

        async def bring(transaction: Transaction) -> list[Record]:
            if await hold_if_there(transaction, handle.execution_id) is None:
                return []
            return await transaction.fetch(
                SQL.promote_delayed, **named_or_due([handle.execution_id]), lease_epoch=handle.lease_epoch, **PROMOTED
            )

        self._store.wakeups.work_of(await self._store.transact(bring))

    async def promote_due(self) -> int:
        """Make the delayed executions whose time has come claimable, the oldest first; returns how many."""
        return (await self.promote_since(self._store.due_watermark.since))[0]

    async def promote_since(self, since: int) -> tuple[int, list[Work]]:
        """Promote a batch of what is due after a time; returns how many, and what may be claimed."""
        rows = await self._store.fetch(SQL.promote_delayed, **named_or_due(None, since), lease_epoch=None, **PROMOTED)
        work = [Work(row["lane_id"], row["route_no"], row["queue_no"], row["place"]) for row in rows]
        self._store.wakeups.work(work)
        return len(rows), work

    async def _park(self, end: LeaseEnd) -> None:
        verdict = await self._lease_ends.one(end)
        if not verdict.is_done:
            raise verdict.refusal()


def _move_of_waiting() -> Release:
    """Where waiting for children leads; only a member of a flow can have an open dependency, and there are no flows."""
    return Release.CHILDREN_DONE
