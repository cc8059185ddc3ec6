"""Siblings: the other upstream executions of a decided group, which are cancelled if its policy says so."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import is_connection_fault
from flowfabric.engine.execution.cancel_many import CancelMany
from flowfabric.engine.flow.row import check_flow_id
from flowfabric.engine.store import Store
from flowfabric.model.edge import SiblingDrain, SiblingReconcile
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId, FlowId, format_execution_id, parse_execution_id, row_key
from flowfabric.model.states import CancelSource
from flowfabric.tasks import create_shared_task

SQL = statements_beside(__file__)

GROUP_LIMIT = 50
"""How many groups one pass handles."""
MEMBER_LIMIT = 1024
"""How many siblings of a group one pass cancels."""
DEFAULT_REASON = "sibling_quorum_satisfied"
SKIPPED_SECONDS = 1.0
"""How long a group is left aside after one of its siblings could not be cancelled."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """A group whose siblings are to be cancelled."""

    partition_key: int
    flow_id: FlowId
    downstream_id: UUID
    is_flagged: bool
    """Whether siblings are pending; None of it is left otherwise."""
    exists: bool
    members: Sequence[ExecutionId]
    reason: str

    @property
    def key(self) -> Mapping[str, object]:
        """The parameters that name the group in statements."""
        return {
            "partition_key": self.partition_key,
            "flow_id": self.flow_id,
            "downstream_id": self.downstream_id,
        }


class Siblings:
    """Cancels the siblings of decided groups: at once in this process, or by a sweep of any."""

    def __init__(self, store: Store, cancels: CancelMany) -> None:
        self._store = store
        self._cancels = cancels
        self._set_aside: dict[tuple[FlowId, UUID], float] = {}
        self._is_wanted = False
        self._task: asyncio.Task[None] | None = None
        store.wakeups.on_siblings = self._start

    async def drain_sibling_cancel_group(
        self, flow_id: UUID | str, downstream_execution_id: ExecutionId | str
    ) -> SiblingDrain:
        """Cancel the pending siblings of one group; raise what kept one of them from being cancelled."""
        group = await self._read(flow_id, downstream_execution_id)
        if group is None:
            return SiblingDrain.ALREADY_DRAINED
        drained, problem = await self._drain(group)
        if problem is not None:
            raise problem
        return drained

    async def reconcile_sibling_cancel_group(
        self, flow_id: UUID | str, downstream_execution_id: ExecutionId | str
    ) -> SiblingReconcile:
        """Remove the entry of a group whose siblings need no cancellation any more; this cancels nothing."""
        group = await self._read(flow_id, downstream_execution_id)
        return SiblingReconcile.NO_OP if group is None else await self._reconcile(group)

    async def dispatch(self, limit: int = GROUP_LIMIT) -> int:
        """Cancel the siblings of the groups that have waited longest; return how many groups are done."""
        done = 0
        for group in await self._list(limit):
            try:
                _, problem = await self._drain(group)
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                problem = fault
            if problem is None:
                done += 1
            else:
                self._leave_aside(group, problem)
        return done

    async def reconcile(self, limit: int = GROUP_LIMIT) -> int:
        """Remove finished entries of the dispatcher; return how many."""
        removed = 0
        for group in await self._list(limit):
            try:
                removed += await self._reconcile(group) is not SiblingReconcile.NO_OP
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                self._leave_aside(group, fault)
        return removed

    async def drain(self) -> None:
        """Wait until the groups that this process has decided are handled or left to the sweep."""
        while self._task is not None:
            await asyncio.wait({self._task})

    def _leave_aside(self, group: _Group, problem: EngineError) -> None:
        logger.warning("the siblings of %s are cancelled later: %s", group.downstream_id, problem)
        self._set_aside[group.flow_id, group.downstream_id] = time.monotonic() + SKIPPED_SECONDS

    def _start(self) -> None:
        self._is_wanted = True
        if self._task is None:
            self._task = create_shared_task(self._run())

    async def _run(self) -> None:
        try:
            while self._is_wanted:
                self._is_wanted = False
                while await self.dispatch():
                    pass
        except EngineError as fault:
            logger.debug("siblings are left to the sweep: %s", fault)
        finally:
            self._task = None

    async def _read(self, flow_id: UUID | str, downstream_execution_id: ExecutionId | str) -> _Group | None:
        partition, parsed = check_flow_id(self._store, flow_id)
        _, uuid = row_key(parse_execution_id(downstream_execution_id))
        rows = await self._store.fetch(
            SQL.read_pending_group,
            partition_key=partition,
            flow_id=parsed,
            downstream_id=uuid,
            members=MEMBER_LIMIT,
        )
        return _group(rows[0]) if rows else None

    async def _list(self, limit: int) -> list[_Group]:
        now = time.monotonic()
        self._set_aside = {key: until for key, until in self._set_aside.items() if until > now}
        aside = list(self._set_aside)
        rows = await self._store.fetch(
            SQL.list_pending_groups,
            limit=limit,
            members=MEMBER_LIMIT,
            skipped_flows=[flow_id for flow_id, _ in aside],
            skipped_ids=[downstream_id for _, downstream_id in aside],
        )
        return [_group(row) for row in rows]

    async def _drain(self, group: _Group) -> tuple[SiblingDrain, EngineError | None]:
        """Cancel siblings until none is pending; return what was done, or why a sibling is left."""
        left: _Group | None = group
        while left is not None and left.is_flagged and left.members:
            results = await self._cancels.cancel(
                left.members, reason=left.reason, source=CancelSource.OPERATOR_OVERRIDE
            )
            problems = [result for result in results if isinstance(result, EngineError)]
            # A short list stays whole: the next pass tries all of it. Of a longer one, the next pass sees the rest.
            if not problems or len(left.members) == MEMBER_LIMIT:
                handled = [
                    row_key(member)[1]
                    for member, result in zip(left.members, results, strict=True)
                    if not isinstance(result, EngineError)
                ]
                await self._store.fetch(SQL.set_siblings_handled, **left.key, handled=handled)
            if problems:
                return SiblingDrain.ALREADY_DRAINED, problems[0]
            left = await self._read(left.flow_id, format_execution_id(left.partition_key, left.downstream_id))

        async def finish(transaction: Transaction) -> None:
            await transaction.fetch(SQL.take_drained_group, **group.key)

        await self._store.transact(finish)
        if not group.exists:
            return SiblingDrain.DRAINED_SANS_GROUP, None
        return SiblingDrain.DRAINED if group.is_flagged else SiblingDrain.ALREADY_DRAINED, None

    async def _reconcile(self, group: _Group) -> SiblingReconcile:
        async def reconcile(transaction: Transaction) -> SiblingReconcile:
            (row,) = await transaction.fetch(SQL.take_finished_group, **group.key)
            return SiblingReconcile(row["action"])

        return await self._store.transact(reconcile)


def _group(row: Record) -> _Group:
    partition: int = row["partition_key"]
    return _Group(
        partition_key=partition,
        flow_id=FlowId(row["flow_id"]),
        downstream_id=row["downstream_id"],
        is_flagged=bool(row["is_flagged"]),
        exists=row["is_flagged"] is not None,
        members=[format_execution_id(partition, member) for member in row["members"] or ()],
        reason=row["reason"] or DEFAULT_REASON,
    )
