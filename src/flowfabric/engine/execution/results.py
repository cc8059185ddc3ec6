"""Waits for the results of executions."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.row import execution_keys
from flowfabric.engine.core.stored import literal
from flowfabric.engine.core.waits import SharedWaits
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import Ended
from flowfabric.model.ids import ExecutionId, check_storable, parse_execution_id
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.text import shown

SQL = statements_beside(__file__)


class Results(SharedWaits[ExecutionId, Ended]):
    """Waits for the results of executions, which the hints of their ends wake."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.wakeups, operation="wait_for_ending")
        self._store = store

    async def wait_for_ending(self, execution_id: ExecutionId | str, *, timeout: float | None = None) -> Ended:
        """Wait until an execution ends, and return its outcome and result."""
        parsed = parse_execution_id(execution_id)
        check_storable(parsed)
        seconds = None if timeout is None else _check_timeout(timeout)
        ended = await self._wait_for(parsed, seconds)
        if ended is None:
            raise error("timeout", {"op": "wait_for_ending", "elapsed_ms": int((seconds or 0) * 1000)})
        return ended

    def _watch(self) -> AbstractContextManager[asyncio.Event]:
        return nullcontext(self._store.wakeups.ended_event)

    async def _find(self, wanted: Sequence[ExecutionId]) -> Sequence[tuple[ExecutionId, Ended | EngineError]]:
        """The executions that have ended or are absent."""
        rows = await self._store.fetch(SQL.list_results, **execution_keys(wanted))
        return [(wanted[row["nth"] - 1], _ended(wanted[row["nth"] - 1], row)) for row in rows]


def _ended(execution_id: ExecutionId, row: Record) -> Ended | EngineError:
    """The end of an execution as stored; an unreadable one is the error for its own waiters only."""
    if row["terminal_outcome"] is None:
        return error("execution_not_found", execution_id)
    try:
        outcome = literal(
            TerminalOutcome,
            row["terminal_outcome"],
            context=f"wait_for_ending {execution_id}",
            field="terminal_outcome",
        )
    except EngineError as unreadable:
        return unreadable
    error_type, traceback = row["error"] or (None, None)
    return Ended(
        execution_id=execution_id,
        outcome=outcome,
        result=row["result_payload"],
        reason=row["reason"],
        result_encoding=row["result_encoding"],
        error_type=error_type,
        traceback=traceback,
    )


def _check_timeout(value: object) -> float:
    """The seconds of a wait."""
    try:
        seconds = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    except OverflowError:
        seconds = math.inf
    if not seconds >= 0:
        raise error("invalid_input", f"timeout: must be seconds >= 0, or None to wait forever, got {shown(value)}")
    return seconds
