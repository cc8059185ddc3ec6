"""What cancelled flows owe: members to cancel, each recorded until it has ended."""

import logging
import time
from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import Quarantine, is_connection_fault
from flowfabric.engine.core.sweep import PASS_SECONDS, SweepResult
from flowfabric.engine.execution.cancel_many import PATIENCE_SECONDS, CancelMany, CancelResult
from flowfabric.engine.flow.row import check_flow_id
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId, FlowId, format_execution_id, parse_execution_id, split_execution_id

SQL = statements_beside(__file__)

logger = logging.getLogger(__name__)

FLOW_LIMIT = 50
MEMBER_LIMIT = 500
SWEEP_LIMIT = 1000
"""How many members a batch of the sweep cancels: the sweeps share a loop, and others must not wait for long."""
SWEEP_PATIENCE_SECONDS = 0.2
DISPATCH_LIMIT = 512
"""How many members are cancelled before they are acknowledged."""
DEFAULT_REASON = "flow_cancelled"

_POISON = frozenset({"validation", "bug"})
"""Categories of errors that another try would meet again."""


class CancelBacklog:
    """Cancels the members that cancelled flows owe, and forgets those that have ended."""

    def __init__(self, store: Store, cancel_many: CancelMany, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self._cancel_many = cancel_many

    async def ack_cancel_member(self, flow_id: UUID | str, execution_id: ExecutionId | str) -> None:
        """Record that a cancelled flow owes a member no longer; acknowledging it again changes nothing."""
        partition, parsed = check_flow_id(self._store, flow_id)
        member = parse_execution_id(execution_id)
        # The members of a flow are of its partition.
        await self._ack(partition, parsed, [member] if split_execution_id(member)[0] == partition else [])

    async def dispatch(
        self, partition_key: int, flow_id: FlowId, execution_ids: Sequence[ExecutionId], reason: str
    ) -> list[ExecutionId]:
        """Cancel owed members and acknowledge those that have ended; return the others, in the order given.

        Members that other sessions have locked are tried again once all others are cancelled.
        """
        failed: list[ExecutionId] = []
        for start in range(0, len(execution_ids), DISPATCH_LIMIT):
            batch = execution_ids[start : start + DISPATCH_LIMIT]
            try:
                failed += await self._cancel(partition_key, flow_id, batch, reason, patience_seconds=0)
            except EngineError as problem:
                logger.warning("the members of flow %s are left to the sweep: %s", flow_id, problem)
                return [*failed, *execution_ids[start:]]
        if not failed:
            return []
        try:
            return await self._cancel(partition_key, flow_id, failed, reason, patience_seconds=PATIENCE_SECONDS)
        except EngineError as problem:
            logger.warning("members of flow %s are left to the sweep: %s", flow_id, problem)
            return failed

    async def reconcile_due(self) -> SweepResult:
        """Cancel members of flows whose grace has passed, for a limited time; return how many are owed no longer."""
        until = time.monotonic() + PASS_SECONDS
        rows = await self._list_due()
        taken = members = flows = 0
        for row in rows:
            if members >= SWEEP_LIMIT or (flows and time.monotonic() > until):
                break
            flows += 1
            members += len(row["execution_ids"])
            taken += await self._reconcile(row)
        has_more = (
            flows < len(rows)
            or len(rows) == FLOW_LIMIT
            or any(len(row["execution_ids"]) == MEMBER_LIMIT for row in rows)
        )
        # Those that failed are skipped by the next pass, so it sees others.
        return SweepResult(taken, is_full=has_more)

    async def _list_due(self) -> list[Record]:
        return await self._store.fetch(
            SQL.list_due_backlogs, skipped=self.quarantine.skipped(), flow_limit=FLOW_LIMIT, member_limit=MEMBER_LIMIT
        )

    async def _reconcile(self, row: Record) -> int:
        """Cancel owed members of one flow; return how many it owes no longer, 1 if only its header was left."""
        partition_key, flow_id = row["partition_key"], FlowId(row["flow_id"])
        if not row["has_flow"]:
            await self._drop(partition_key, flow_id)
            return 1
        owed = [format_execution_id(partition_key, uuid) for uuid in row["execution_ids"]]
        if not owed:
            await self._ack(partition_key, flow_id, [])
            return 1
        reason = row["reason"] or DEFAULT_REASON
        results = await self._cancel_owed(partition_key, flow_id, owed, reason, patience_seconds=SWEEP_PATIENCE_SECONDS)
        ended: list[ExecutionId] = []
        for execution_id, result in zip(owed, results, strict=True):
            if not isinstance(result, EngineError):
                ended.append(execution_id)
            elif is_connection_fault(result):
                raise result
            elif result.category in _POISON:
                logger.warning("%s of flow %s cannot be cancelled, giving it up: %s", execution_id, flow_id, result)
                ended.append(execution_id)
            else:
                self.quarantine.failed(execution_id, result)
        if ended:
            await self._ack(partition_key, flow_id, ended)
        return len(ended)

    async def _cancel_owed(
        self,
        partition_key: int,
        flow_id: FlowId,
        execution_ids: Sequence[ExecutionId],
        reason: str,
        *,
        patience_seconds: float,
    ) -> list[CancelResult]:
        """Cancel members unless they are owed no longer, as those that were replayed meanwhile."""

        async def still_owed(transaction: Transaction, uuids: Sequence[str]) -> set[str]:
            key = {"partition_key": partition_key, "flow_id": flow_id}
            rows = await transaction.fetch(SQL.list_owed_members, **key, execution_ids=uuids)
            return {str(row["execution_id"]) for row in rows}

        return await self._cancel_many.cancel(
            execution_ids, reason=reason, patience_seconds=patience_seconds, still_wanted=still_owed
        )

    async def _cancel(
        self,
        partition_key: int,
        flow_id: FlowId,
        execution_ids: Sequence[ExecutionId],
        reason: str,
        *,
        patience_seconds: float,
    ) -> list[ExecutionId]:
        """Cancel members and acknowledge them; return those that failed, or raise if the store is unreachable."""
        failed: list[ExecutionId] = []
        ended: list[ExecutionId] = []
        results = await self._cancel_owed(
            partition_key, flow_id, execution_ids, reason, patience_seconds=patience_seconds
        )
        for execution_id, result in zip(execution_ids, results, strict=True):
            if not isinstance(result, EngineError):
                ended.append(execution_id)
            elif is_connection_fault(result) and not ended and len(failed) == len(execution_ids) - 1:
                raise result
            else:
                failed.append(execution_id)
        if ended:
            try:
                await self._ack(partition_key, flow_id, ended)
            except EngineError as problem:
                # They have ended. The sweep acknowledges them.
                logger.warning("members of flow %s are cancelled, but not acknowledged yet: %s", flow_id, problem)
        return failed

    async def _ack(self, partition_key: int, flow_id: FlowId, execution_ids: Sequence[ExecutionId]) -> None:
        key = {"partition_key": partition_key, "flow_id": flow_id}

        async def ack(transaction: Transaction) -> None:
            # Of two calls that acknowledge the last members, the second must see what the first has deleted.
            await transaction.fetch(SQL.lock_backlog, **key)
            uuids = [split_execution_id(execution_id)[1] for execution_id in execution_ids]
            await transaction.fetch(SQL.take_members, **key, execution_ids=uuids)

        await self._store.transact(ack)

    async def _drop(self, partition_key: int, flow_id: FlowId) -> None:
        key = {"partition_key": partition_key, "flow_id": flow_id}

        async def drop(transaction: Transaction) -> None:
            await transaction.fetch(SQL.lock_backlog, **key)
            await transaction.fetch(SQL.take_backlog, **key)

        await self._store.transact(drop)
