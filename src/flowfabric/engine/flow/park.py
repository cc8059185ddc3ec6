"""Waits for children: a run gives up its lease until the executions that it depends on have ended."""

from flowfabric.db.batch import Locked
from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.row import Verdict, check_lease_handle, lock_execution
from flowfabric.engine.core.transition import Move
from flowfabric.engine.store import Store
from flowfabric.model.handle import Handle
from flowfabric.model.ids import split_execution_id

SQL = statements_beside(__file__)


class ChildWaits:
    """Interrupts runs that wait for other executions of their flow."""

    def __init__(self, store: Store, lease_ends: LeaseEnds) -> None:
        self._store = store
        self._lease_ends = lease_ends

    async def wait_children(self, handle: Handle) -> None:
        """Release a run until the executions that it depends on have ended; then a claim continues its attempt.

        Without an unsatisfied dependency it can be claimed again at once.
        """
        handle = check_lease_handle(handle)
        partition, uuid = split_execution_id(handle.execution_id)

        async def park(transaction: Transaction) -> tuple[LeaseEnd, Verdict | Locked]:
            # The resolution of an edge locks the child too: it comes before this decision, or finds the child waiting.
            await lock_execution(transaction, handle.execution_id)
            rows = await transaction.fetch(SQL.count_unsatisfied, partition_key=partition, execution_id=uuid)
            count = rows[0]["unsatisfied"] if rows else 0
            end = LeaseEnd(
                handle.execution_id,
                Move.WAITING_CHILDREN if count else Move.CHILDREN_DONE,
                fence=handle,
                detail=f"{count} dep(s) unresolved" if count else None,
            )
            (verdict,) = await self._lease_ends.within(transaction, [end])
            return end, verdict

        end, verdict = await self._store.transact(park, execution_id=handle.execution_id)
        await self._lease_ends.after_commit([end], [verdict])
        assert isinstance(verdict, Verdict), "the row is locked"
        if not verdict.is_done:
            raise verdict.refusal()
