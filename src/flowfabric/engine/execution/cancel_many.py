"""Cancellation of many executions: each with its own verdict, and a locked one does not delay the others."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from flowfabric.db.batch import Locked
from flowfabric.db.database import Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.row import Verdict, execution_keys
from flowfabric.engine.core.transition import Move
from flowfabric.engine.store import Store, error_of
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import ExecutionId, split_execution_id
from flowfabric.model.states import CancelSource, LifecyclePhase
from flowfabric.pauses import pauses

SQL = statements_beside(__file__)

BATCH = 256
"""How many executions one transaction cancels: its locks are held for some tens of milliseconds."""
CONCURRENCY = 2
"""How many transactions of one call run at the same time."""
PATIENCE_SECONDS = 2.0
"""How long rows that other sessions have locked are tried again: as long as a single call waits for a row."""
PAUSE_SECONDS = (0.02, 0.2)
"""The first and the longest pause between two tries of locked rows."""


class CancelDisposition(StrEnum):
    """What became of an execution that was to be cancelled."""

    CANCELLED = "cancelled"
    ALREADY_TERMINAL = "already_terminal"
    """It had ended, also if it was cancelled before."""
    NOT_FOUND = "not_found"
    WITHDRAWN = "withdrawn"
    """It was not to be cancelled any more."""


CancelResult = CancelDisposition | EngineError
StillWanted = Callable[[Transaction, Sequence[str]], Awaitable[Collection[str]]]
"""Which executions are still to be cancelled, of those with these UUIDs, which the transaction has locked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """Why executions are cancelled, and whether they still are to be."""

    reason: str
    still_wanted: StillWanted | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    """The results of one transaction, and the executions that it could not lock."""

    results: dict[ExecutionId, CancelResult]
    locked: list[ExecutionId]
    lease_ends: list[LeaseEnd]
    verdicts: list[Verdict | Locked]


class CancelMany:
    """Cancels executions in any state, whoever holds their leases; many in one transaction."""

    def __init__(self, store: Store, lease_ends: LeaseEnds) -> None:
        self._store = store
        self._lease_ends = lease_ends

    async def cancel(
        self,
        execution_ids: Sequence[ExecutionId],
        *,
        reason: str,
        patience_seconds: float = PATIENCE_SECONDS,
        still_wanted: StillWanted | None = None,
    ) -> list[CancelResult]:
        """Cancel executions and return what became of each, in the order given.

        Those that other sessions have locked are tried again once the others are cancelled. They get the error
        `retry_exhausted` if they are still locked `patience_seconds` after that. `still_wanted` is asked once they are
        locked, for a caller whose list may be out of date.
        """
        order = _Order(reason=reason, still_wanted=still_wanted)
        results: dict[ExecutionId, CancelResult] = {}
        waits = pauses(*PAUSE_SECONDS)
        # Every statement over several executions takes them in ascending order.
        remaining = await self._pass(sorted(dict.fromkeys(execution_ids), key=split_execution_id), results, order)
        deadline = time.monotonic() + patience_seconds
        while remaining and time.monotonic() + (pause := next(waits)) <= deadline:
            await asyncio.sleep(pause)
            remaining = await self._pass(remaining, results, order)
        for execution_id in remaining:
            results[execution_id] = error(
                "retry_exhausted", f"execution {execution_id} is locked by another session; it was not cancelled"
            )
        return [results[execution_id] for execution_id in execution_ids]

    async def _pass(
        self, execution_ids: Sequence[ExecutionId], results: dict[ExecutionId, CancelResult], order: _Order
    ) -> list[ExecutionId]:
        """Cancel those that are not locked, and return those that are."""
        batches = iter([execution_ids[start : start + BATCH] for start in range(0, len(execution_ids), BATCH)])
        locked: list[ExecutionId] = []

        async def run(batches: Iterator[Sequence[ExecutionId]]) -> None:
            for batch in batches:
                locked.extend(await self._try(batch, results, order))

        await asyncio.gather(*(run(batches) for _ in range(CONCURRENCY)))
        return sorted(locked, key=split_execution_id)

    async def _try(
        self, execution_ids: Sequence[ExecutionId], results: dict[ExecutionId, CancelResult], order: _Order
    ) -> list[ExecutionId]:
        """Cancel a batch in one transaction, or in halves if that fails because of an item; return those locked."""

        async def cancel(transaction: Transaction) -> _Tried:
            return await self._within(transaction, execution_ids, order)

        failure: EngineError
        try:
            tried = await self._store.database.transact(cancel)
        except StoreFault as fault:
            failure = error_of(fault)
            if fault.is_store_failure:
                results.update(dict.fromkeys(execution_ids, failure))
                return []
            if len(execution_ids) == 1 and fault.kind == "contention":
                return list(execution_ids)
        except EngineError as problem:
            failure = problem
        else:
            results.update(tried.results)
            await self._lease_ends.after_commit(tried.lease_ends, tried.verdicts)
            return tried.locked
        if len(execution_ids) == 1:
            results[execution_ids[0]] = failure
            return []
        middle = len(execution_ids) // 2
        halves = execution_ids[:middle], execution_ids[middle:]
        return [execution_id for half in halves for execution_id in await self._try(half, results, order)]

    async def _within(self, transaction: Transaction, execution_ids: Sequence[ExecutionId], order: _Order) -> _Tried:
        uuids = [split_execution_id(execution_id)[1] for execution_id in execution_ids]
        rows = await transaction.fetch(SQL.lock_live_executions, **execution_keys(execution_ids))
        tried = _Tried(results={}, locked=[], lease_ends=[], verdicts=[])
        wanted = {uuid for uuid, row in zip(uuids, rows, strict=True) if row["lifecycle_phase"] is not None}
        if wanted and order.still_wanted is not None:
            # A statement of its own: it sees what those have withdrawn that held the locks before.
            wanted = set(await order.still_wanted(transaction, sorted(wanted)))
        for execution_id, uuid, row in zip(execution_ids, uuids, rows, strict=True):
            if row["lifecycle_phase"] is not None and uuid not in wanted:
                tried.results[execution_id] = CancelDisposition.WITHDRAWN
            elif row["lifecycle_phase"] is not None:
                tried.lease_ends.append(
                    LeaseEnd(
                        execution_id,
                        Move.CANCELLED,
                        reason=order.reason,
                        source=CancelSource.OPERATOR_OVERRIDE,
                        lost_epoch=row["lease_epoch"] if row["lifecycle_phase"] == LifecyclePhase.ACTIVE else None,
                    )
                )
            elif row["seen_phase"] is None:
                tried.results[execution_id] = CancelDisposition.NOT_FOUND
            elif row["seen_phase"] == LifecyclePhase.TERMINAL:
                tried.results[execution_id] = CancelDisposition.ALREADY_TERMINAL
            else:
                tried.locked.append(execution_id)
        if tried.lease_ends:
            tried.verdicts.extend(await self._lease_ends.within(transaction, tried.lease_ends, is_shared=True))
        for lease_end, verdict in zip(tried.lease_ends, tried.verdicts, strict=True):
            if isinstance(verdict, Locked):
                tried.locked.append(lease_end.execution_id)
            elif verdict.is_done:
                tried.results[lease_end.execution_id] = CancelDisposition.CANCELLED
            else:
                tried.results[lease_end.execution_id] = verdict.refusal()
        return tried
