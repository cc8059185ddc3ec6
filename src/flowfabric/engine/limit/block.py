"""Blocked executions: blocking and unblocking single ones, and the sweep that unblocks those that can run again."""

import logging
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import Statement, statements_beside
from flowfabric.engine.core.admission import LIMITED
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.core.row import execution_keys, lock_execution, not_active
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.core.transition import BLOCKS, LIMITED_STATES, UNBLOCKED, block_parameters
from flowfabric.engine.core.wakeups import Work
from flowfabric.engine.limit.quota import read_key_states
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import Blocked, Unblocked
from flowfabric.model.ids import (
    ExecutionId,
    format_execution_id,
    parse_execution_id,
    row_key,
)
from flowfabric.model.states import BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.model.text import check_text, shown, word_of

SQL = statements_beside(__file__)

PAGE_LIMIT = 500
"""How many blocked executions one page of the sweep looks at."""
PAGES_IN_A_ROW = 10
"""How many pages follow each other without the pause of the sweep."""
DEFAULT_DETAILS = {
    BlockingReason.WAITING_FOR_CAPABLE_WORKER: "no connected worker satisfies required_capabilities",
}

logger = logging.getLogger(__name__)


class Blocks:
    """The operations that block and unblock a waiting execution."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def block_execution_for_admission(
        self, execution_id: ExecutionId | str, reason: BlockingReason | str, reason_detail: str | None = None
    ) -> Blocked:
        """Hold a waiting execution back from claims; a grant that it has is deleted.

        An execution that a limit blocks may be claimed as soon as the limit allows it. The other reasons hold until
        it is unblocked.
        """
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        if reason_detail is not None:
            check_text(reason_detail, "reason_detail")

        async def block(transaction: Transaction) -> BlockingReason:
            locked = await lock_execution(transaction, parsed)
            if locked.lifecycle_phase == LifecyclePhase.TERMINAL:
                raise not_active(locked.found)
            if locked.lifecycle_phase != LifecyclePhase.RUNNABLE:
                raise error("execution_not_eligible", f"the execution is {locked.lifecycle_phase}")
            wanted = word_of(BlockingReason, reason)
            if wanted not in BLOCKS:
                raise error(
                    "invalid_blocking_reason", f"reason: must be one of {', '.join(BLOCKS)}, got {shown(reason)}"
                )
            assert wanted is not None, "a key of BLOCKS"
            (held,) = await transaction.fetch(SQL.read_held, partition_key=partition, execution_id=uuid)
            if held["blocking_reason"] == BlockingReason.PAUSED_BY_FLOW_CANCEL:
                raise error("execution_not_eligible", "the execution is held for the cancellation of its flow")
            parameters = block_parameters(wanted)
            freed = await transaction.fetch(
                SQL.block_locked,
                partition_key=partition,
                execution_id=uuid,
                detail=DEFAULT_DETAILS.get(wanted) if reason_detail is None else reason_detail,
                keeps_entry=BLOCKS[wanted] in LIMITED_STATES,
                slot_shard=self._store.slot_shard,
                **parameters,
            )
            self._store.wakeups.room_after(transaction, freed)
            return wanted

        return Blocked(execution_id=parsed, reason=await self._store.transact(block, execution_id=parsed))

    async def unblock_execution(
        self, execution_id: ExecutionId | str, expected_blocking_reason: BlockingReason | str | None = None
    ) -> Unblocked:
        """Make a blocked execution claimable, or delayed if its delay has not elapsed.

        With `expected_blocking_reason`, only if it is blocked for this reason. An execution that waits for its
        dependencies beside the block goes on waiting for them.
        """
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)

        async def unblock(transaction: Transaction) -> list[Record]:
            locked = await lock_execution(transaction, parsed)
            (held,) = await transaction.fetch(SQL.read_held, partition_key=partition, execution_id=uuid)
            is_held = held["blocking_reason"] == BlockingReason.PAUSED_BY_FLOW_CANCEL
            is_blocked = locked.eligibility_state in BLOCKS.values() and not is_held
            if not is_blocked or expected_blocking_reason not in (None, held["blocking_reason"]):
                raise error(
                    "execution_not_eligible",
                    f"the execution is {locked.lifecycle_phase}, {locked.eligibility_state}, {held['blocking_reason']}",
                )
            return await transaction.fetch(
                SQL.unblock_locked, partition_keys=[partition], execution_ids=[uuid], **UNBLOCKED
            )

        self._after_unblock(await self._store.transact(unblock, execution_id=parsed))
        return Unblocked()

    async def unblock_free(
        self, execution_ids: Sequence[ExecutionId], states: Sequence[EligibilityState]
    ) -> list[Work]:
        """Unblock those of these executions that are in one of these states and not locked; return their work."""

        async def unblock(transaction: Transaction) -> list[Record]:
            rows = await transaction.fetch(SQL.lock_blocked, **execution_keys(execution_ids), states=states)
            if not rows:
                return []
            return await transaction.fetch(
                SQL.unblock_locked,
                partition_keys=[row["partition_key"] for row in rows],
                execution_ids=[row["execution_id"] for row in rows],
                **UNBLOCKED,
            )

        return self._after_unblock(await self._store.transact(unblock))

    def _after_unblock(self, rows: Sequence[Record]) -> list[Work]:
        found = [row for row in rows if row["lane_id"] is not None]
        work = [Work(row["lane_id"], row["route_no"], row["queue_no"], row["place"]) for row in found]
        self._store.wakeups.work(work)
        for row in rows:
            if row["delay_ms"] is not None:
                self._store.wakeups.timer(row["delay_ms"])
        return work


class _Position(NamedTuple):
    """Where the next page of blocked executions begins."""

    at: int = -1
    execution_id: UUID = UUID(int=0)


class Unblocking:
    """Unblocks executions whose limits have room again, or whose route a worker serves."""

    def __init__(self, store: Store, blocks: Blocks, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self._blocks = blocks
        self._limited = _Position()
        self._served = _Position()
        self._pages = 0

    async def unblock_batch(self) -> SweepResult:
        """Unblock executions of the next page of each kind, the longest blocked first.

        The pages follow each other and begin again after the last, so those that stay blocked do not hide others.
        """
        rows, self._limited = await self._page(SQL.list_limited, self._limited)
        work = await self._unblock(await self._with_room(rows), tuple(LIMITED_STATES))
        rows, self._served = await self._page(SQL.list_served, self._served, reserved=LIMITED)
        work += await self._unblock([_id(row) for row in rows], (EligibilityState.BLOCKED_BY_ROUTE,))
        is_last = self._limited == self._served == _Position()
        self._pages = 0 if is_last or self._pages + 1 >= PAGES_IN_A_ROW else self._pages + 1
        return SweepResult(len(work), self._pages > 0, work)

    async def limit_detached(self) -> None:
        """Unblock executions that a limit has blocked which no longer limits them, the longest blocked first."""
        try:
            rows, _ = await self._page(SQL.list_limited, _Position())
            await self._unblock(await self._with_room(rows), tuple(LIMITED_STATES))
        except EngineError as fault:
            # The limit is detached. The sweep unblocks what is left.
            logger.warning("executions blocked by a detached limit are left to the sweep: %s", fault)

    async def worker_registered(self) -> None:
        """Unblock executions whose route the workers serve that are registered now, the longest blocked first."""
        try:
            rows, _ = await self._page(SQL.list_served, _Position(), reserved=LIMITED)
            await self._unblock([_id(row) for row in rows], (EligibilityState.BLOCKED_BY_ROUTE,))
        except EngineError as fault:
            # The worker is registered. The sweep unblocks what is left.
            logger.warning("executions blocked by their route are left to the sweep: %s", fault)

    async def _page(self, statement: Statement, since: _Position, **values: object) -> tuple[list[Record], _Position]:
        """The executions of a page that may be unblocked, and where the next page begins."""
        rows = await self._store.fetch(
            statement,
            since_at=since.at,
            since_id=since.execution_id,
            limit=PAGE_LIMIT,
            skipped=self.quarantine.skipped(),
            **values,
        )
        first = rows[0]
        is_last = first["seen"] < PAGE_LIMIT
        found = [row for row in rows if row["execution_id"] is not None]
        return found, _Position() if is_last else _Position(first["reached_at"], first["reached_id"])

    async def _with_room(self, rows: Sequence[Record]) -> list[ExecutionId]:
        """Those of these executions that fit together into their limits, in the order given."""
        budgets = {budget_id for row in rows for budget_id in row["budget_ids"]}
        spent: set[UUID] = set()
        if budgets:
            found = await self._store.fetch(SQL.list_spent_budgets, budget_ids=list(budgets))
            spent = {row["budget_id"] for row in found}
        keys = sorted({key for row in rows for key in row["quota_key_nos"]})
        now, states = await read_key_states(self._store, keys)
        fitting = []
        for row in rows:
            found_states = [states[key] for key in row["quota_key_nos"] if key in states]
            limiting = [state for state in found_states if state is not None]
            # A key whose limits are corrupt admits nothing.
            is_denied = len(limiting) < len(found_states) or not spent.isdisjoint(row["budget_ids"])
            weight = row["quota_weight"] or 1
            if not is_denied and not any(state.denial(now, weight=weight) for state in limiting):
                for state in limiting:
                    state.admit(now, weight=weight)
                fitting.append(_id(row))
        return fitting

    async def _unblock(self, execution_ids: Sequence[ExecutionId], states: Sequence[EligibilityState]) -> list[Work]:
        if not execution_ids:
            return []
        work: list[Work] = []

        async def unblock(found: Sequence[ExecutionId]) -> int:
            unblocked = await self._blocks.unblock_free(found, states)
            work.extend(unblocked)
            return len(found)

        await self.quarantine.process_found(execution_ids, unblock)
        return work


def _id(row: Record) -> ExecutionId:
    return format_execution_id(row["partition_key"], row["execution_id"])
