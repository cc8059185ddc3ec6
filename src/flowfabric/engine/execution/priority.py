"""The priority of a waiting execution, which an operator may change."""

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.row import lock_execution
from flowfabric.engine.execution.checking import MAX_PRIORITY
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.event import EventFamily
from flowfabric.model.execution import Changed
from flowfabric.model.feed import OperatorEventType
from flowfabric.model.ids import ExecutionId, parse_execution_id, row_key
from flowfabric.model.states import EligibilityState
from flowfabric.model.text import shown

SQL = statements_beside(__file__)


def check_priority(value: object) -> int:
    """Return a new priority, clamped to 0…9000."""
    if type(value) is not int:
        raise error("invalid_input", f"new_priority: must be an integer, got {shown(value)}")
    return max(0, min(value, MAX_PRIORITY))


class Priority:
    """The operation that changes a priority."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def change_priority(self, execution_id: ExecutionId | str, new_priority: int) -> Changed:
        """Give an execution that can be claimed now another priority, clamped to 0…9000.

        Among equal priorities it keeps its place in the order of creation. The priority it has already changes nothing
        and writes no event.
        """
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        priority = check_priority(new_priority)

        async def change(transaction: Transaction) -> list[Record]:
            locked = await lock_execution(transaction, parsed)
            if locked.eligibility_state != EligibilityState.ELIGIBLE_NOW:
                raise error(
                    "execution_not_eligible",
                    f"only the priority of a claimable execution can be changed, this one is {locked.lifecycle_phase},"
                    f" {locked.eligibility_state}",
                )
            return await transaction.fetch(
                SQL.set_priority,
                partition_key=partition,
                execution_id=uuid,
                inverse_priority=MAX_PRIORITY - priority,
                max_priority=MAX_PRIORITY,
                event_type=OperatorEventType.PRIORITY_CHANGED.value,
            )

        moved = await self._store.transact(change, execution_id=parsed)
        if moved:
            self._store.wakeups.work_of(moved)
            self._store.wakeups.events(EventFamily.OPERATOR)
        return Changed(execution_id=parsed)
