"""Siblings: the other upstream executions of a decided group, which are cancelled if its policy says so."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import Quarantine, is_connection_fault
from flowfabric.engine.core.sweep import PASS_SECONDS, SweepResult
from flowfabric.engine.execution.cancel_many import (
    PATIENCE_SECONDS,
    PAUSE_SECONDS,
    CancelDisposition,
    CancelMany,
)
from flowfabric.engine.flow.row import check_flow_id
from flowfabric.engine.store import Store
from flowfabric.model.edge import SiblingDrain, SiblingReconcile
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import ExecutionId, FlowId, format_execution_id, parse_execution_id, row_key
from flowfabric.pauses import pauses
from flowfabric.tasks import create_shared_task

SQL = statements_beside(__file__)

GROUP_LIMIT = 50
"""How many groups one pass handles."""
MEMBER_LIMIT = 1024
"""How many siblings of a group one pass cancels."""
RUN_PATIENCE_SECONDS = 0.2
"""How long the process that decided a group tries locked siblings again; the sweep leaves them, as others share it."""
GROUP_PATIENCE_SECONDS = 0.2
"""How long a pass tries a locked group again: the cascade locks it for a moment while it settles ends of siblings."""
DEFAULT_REASON = "sibling_quorum_satisfied"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """A group whose siblings are to be cancelled."""

    partition_key: int
    flow_id: FlowId
    downstream_id: UUID
    is_flagged: bool
    exists: bool
    members: Sequence[ExecutionId]
    reason: str

    @property
    def execution_id(self) -> ExecutionId:
        """The downstream execution of the group."""
        return format_execution_id(self.partition_key, self.downstream_id)

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

    def __init__(self, store: Store, cancel_many: CancelMany, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self._cancel_many = cancel_many
        self._is_wanted = False
        self._task: asyncio.Task[None] | None = None
        store.wakeups.on_siblings = self._start

    async def drain_sibling_cancel_group(
        self, flow_id: UUID | str, downstream_execution_id: ExecutionId | str
    ) -> SiblingDrain:
        """Cancel the pending siblings of one group; raise what kept one of them from being cancelled."""
        drained: SiblingDrain | None = None
        while drained is None:
            group = await self._read(flow_id, downstream_execution_id)
            if group is None:
                return SiblingDrain.ALREADY_DRAINED
            drained = await self._drain(group, patience_seconds=PATIENCE_SECONDS)
        return drained

    async def reconcile_sibling_cancel_group(
        self, flow_id: UUID | str, downstream_execution_id: ExecutionId | str
    ) -> SiblingReconcile:
        """Remove the entry of a group whose siblings need no cancellation any more; this cancels nothing."""
        group = await self._read(flow_id, downstream_execution_id)
        return SiblingReconcile.NO_OP if group is None else await self._reconcile(group)

    async def dispatch(self, limit: int = GROUP_LIMIT) -> SweepResult:
        """Cancel siblings of the groups that have waited longest, for a limited time; return of how many groups.

        Leaves them to the dispatcher of this process while it works: both would take the same siblings, and each would
        find those locked that the other is cancelling.
        """
        return SweepResult(0, is_full=False) if self._task is not None else await self._dispatch(limit)

    async def _dispatch(self, limit: int = GROUP_LIMIT, *, patience_seconds: float = 0.0) -> SweepResult:
        """Cancel siblings of the groups that have waited longest.

        Siblings that other sessions have locked are tried again for `patience_seconds`, then with their whole group by
        a later pass. Behind a group that stayed locked, the pass waits for no other.
        """
        until = time.monotonic() + PASS_SECONDS + patience_seconds
        groups = await self._list(limit)
        tried = done = 0
        is_cut = False
        for group in groups:
            if tried and time.monotonic() > until:
                break
            tried += 1
            try:
                is_cut |= await self._drain(group, patience_seconds=patience_seconds) is None
                done += 1
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                self.quarantine.failed(group.execution_id, fault)
                patience_seconds = 0.0
        # Those that failed are skipped by the next pass, so it sees others.
        return SweepResult(done, is_full=is_cut or tried < len(groups) or len(groups) == limit)

    async def reconcile(self) -> int:
        """Remove finished entries of the dispatcher; return how many."""
        removed = 0
        for group in await self._list(GROUP_LIMIT):
            try:
                removed += await self._reconcile(group) is not SiblingReconcile.NO_OP
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                self.quarantine.failed(group.execution_id, fault)
        return removed

    async def drain(self) -> None:
        """Wait until the groups that this process has decided are handled or left to the sweep."""
        while self._task is not None:
            await asyncio.wait({self._task})

    def _start(self) -> None:
        self._is_wanted = True
        if self._task is None:
            self._task = create_shared_task(self._run())

    async def _run(self) -> None:
        try:
            while self._is_wanted:
                self._is_wanted = False
                # Among many running siblings, one is mostly locked for a moment, by a call of its worker.
                while (swept := await self._dispatch(patience_seconds=RUN_PATIENCE_SECONDS)).done and swept.is_full:
                    pass
        except EngineError as fault:
            logger.debug("siblings are left to the sweep: %s", fault)
        finally:
            self._task = None

    async def _read(self, flow_id: UUID | str, downstream_execution_id: ExecutionId | str) -> _Group | None:
        partition, parsed = check_flow_id(self._store, flow_id)
        own_partition, uuid = row_key(parse_execution_id(downstream_execution_id))
        if own_partition != partition:
            return None
        rows = await self._store.fetch(
            SQL.read_pending_group,
            partition_key=partition,
            flow_id=parsed,
            downstream_id=uuid,
            members=MEMBER_LIMIT,
        )
        return _group(rows[0]) if rows else None

    async def _list(self, limit: int) -> list[_Group]:
        rows = await self._store.fetch(
            SQL.list_pending_groups, limit=limit, members=MEMBER_LIMIT, skipped=self.quarantine.skipped()
        )
        return [_group(row) for row in rows]

    async def _drain(self, group: _Group, *, patience_seconds: float = 0.0) -> SiblingDrain | None:
        """Cancel the listed siblings of a group; return what was done, or None if others are pending.

        Raise what kept one of them from being cancelled.
        """

        async def still_pending(transaction: Transaction, uuids: Sequence[str]) -> set[str]:
            rows = await transaction.fetch(SQL.list_pending_siblings, **group.key, execution_ids=uuids)
            return {str(row["execution_id"]) for row in rows}

        results = await self._cancel_many.cancel(
            group.members,
            reason=group.reason,
            patience_seconds=patience_seconds,
            still_wanted=still_pending,
        )
        problems = [result for result in results if isinstance(result, EngineError)]
        # A short list stays whole: the next pass tries all of it. Of a longer one, the next pass sees the rest.
        if problems and len(group.members) < MEMBER_LIMIT:
            raise problems[0]
        handled = [
            row_key(member)[1]
            for member, result in zip(group.members, results, strict=True)
            if not isinstance(result, EngineError) and result is not CancelDisposition.WITHDRAWN
        ]
        became = await self._take(group, handled, max(patience_seconds, GROUP_PATIENCE_SECONDS))
        # The next pass goes on with the rest of a long list, as long as each pass cancels some of it.
        if problems and not handled:
            raise problems[0]
        if problems or became == "pending":
            return None
        if became == "gone" or (group.exists and not group.is_flagged):
            return SiblingDrain.ALREADY_DRAINED
        return SiblingDrain.DRAINED if group.exists else SiblingDrain.DRAINED_SANS_GROUP

    async def _take(self, group: _Group, handled: Sequence[str], patience_seconds: float) -> str:
        """Remove siblings from the list of a group, with the last one its entry; return what became of the entry."""
        deadline = time.monotonic() + patience_seconds
        for pause in pauses(*PAUSE_SECONDS):
            (row,) = await self._store.fetch(SQL.take_siblings, **group.key, handled=handled)
            became: str = row["became"]
            if became != "locked":
                return became
            if time.monotonic() + pause > deadline:
                break
            await asyncio.sleep(pause)
        raise error(
            "retry_exhausted",
            f"the dependencies of execution {group.execution_id} are locked by another session; their siblings are "
            "cancelled, but still recorded as pending",
        )

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
        members=[format_execution_id(partition, member) for member in (row["is_flagged"] and row["members"]) or ()],
        reason=row["reason"] or DEFAULT_REASON,
    )
