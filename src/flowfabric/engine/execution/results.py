"""Waits for the results of executions."""

import asyncio
import math
import time

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import literal
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import Ended
from flowfabric.model.ids import ExecutionId, check_storable, parse_execution_id, split_execution_id
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.text import shown
from flowfabric.pauses import is_set_within
from flowfabric.tasks import create_shared_task

SQL = statements_beside(__file__)


class Results:
    """Queries the results that this process waits for, all in one statement: on a hint, and by polling.

    The first hints after a quiet time lead to a query at once. While hints keep coming, the pause between queries grows
    with their duration and with the number that found nothing, so that the number of queries stays bounded.
    """

    AT_ONCE = 2
    """Hinted queries without a pause after a quiet time: one for a new waiter, one for its result."""
    PAUSE_SECONDS = (0.001, 0.02)
    """The first and the longest pause after a hinted query that found nothing; each pause is twice the one before."""
    PAUSE_SHARE = 2
    """A hinted query is followed by a pause of at least this many times its duration."""
    POLL_SECONDS = (0.02, 1.0)
    """The first and the longest pause between two polls."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[ExecutionId, list[asyncio.Future[Ended]]] = {}
        self._unqueried: set[asyncio.Future[Ended]] = set()
        """Waiters that no query has covered yet."""
        self._task: asyncio.Task[None] | None = None
        self._refuses = False

    async def wait_for_ending(self, execution_id: ExecutionId | str, *, timeout: float | None = None) -> Ended:
        """Wait until an execution ends, and return its outcome and result."""
        parsed = parse_execution_id(execution_id)
        check_storable(parsed)
        seconds = None if timeout is None else _check_timeout(timeout)
        if self._refuses:
            raise _refusal()
        future = self._future(parsed)
        try:
            await asyncio.wait((future,), timeout=seconds)
            # Query at least once, however short the timeout.
            if future in self._unqueried and not future.done():
                await self._query([parsed])
            if future.done():
                return future.result()
        finally:
            future.cancel()
            self._unqueried.discard(future)
        raise error("timeout", {"op": "wait_for_ending", "elapsed_ms": int((seconds or 0) * 1000)})

    def refuse(self) -> None:
        """Fail current waiters and reject new ones."""
        self._refuses = True
        self._fail_all(_refusal())

    def _future(self, execution_id: ExecutionId) -> "asyncio.Future[Ended]":
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(execution_id, []).append(future)
        self._unqueried.add(future)
        self._store.wakeups.ended_event.set()
        if self._task is None or self._task.done():
            self._task = create_shared_task(self._query_loop())
        return future

    async def close(self) -> None:
        """Fail current waiters and stop querying."""
        self.refuse()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _query_loop(self) -> None:
        wakeups = self._store.wakeups
        await wakeups.hints.listen()
        shortest_pause, longest_pause = self.PAUSE_SECONDS
        shortest_poll, longest_poll = self.POLL_SECONDS
        pause, poll, at_once = shortest_pause, shortest_poll, self.AT_ONCE
        while self._waiting:
            is_hinted = await is_set_within(wakeups.ended_event, poll)
            wakeups.ended_event.clear()
            poll, at_once = (shortest_poll, at_once - 1) if is_hinted else (min(poll * 2, longest_poll), self.AT_ONCE)
            # Remove cancelled waiters.
            for execution_id in [each for each, waiters in self._waiting.items() if all(one.done() for one in waiters)]:
                del self._waiting[execution_id]
            if not self._waiting:
                return
            began = time.monotonic()
            has_answered = await self._query(list(self._waiting))
            duration = time.monotonic() - began
            if self._waiting and at_once < 0:
                pause = shortest_pause if has_answered else min(pause * 2, longest_pause)
                await asyncio.sleep(min(max(pause, duration * self.PAUSE_SHARE), longest_poll))

    async def _query(self, wanted: list[ExecutionId]) -> bool:
        """Query once, and answer the waiters whose execution has ended or is absent; return whether there were any."""
        pairs = [split_execution_id(execution_id) for execution_id in wanted]
        try:
            rows = await self._store.fetch(
                SQL.list_results,
                partition_keys=[partition for partition, _ in pairs],
                execution_ids=[uuid for _, uuid in pairs],
            )
        except EngineError as refused:
            if not refused.retryable:
                self._fail_all(refused)
            return False
        for execution_id in wanted:
            self._unqueried.difference_update(self._waiting.get(execution_id, ()))
        for row in rows:
            execution_id = wanted[row["nth"] - 1]
            ended = _ended(execution_id, row)
            for future in self._waiting.pop(execution_id, ()):
                if future.done():
                    continue
                if isinstance(ended, EngineError):
                    future.set_exception(ended)
                else:
                    future.set_result(ended)
        return bool(rows)

    def _fail_all(self, refused: EngineError) -> None:
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(refused)
        self._waiting.clear()


def _ended(execution_id: ExecutionId, row: Record) -> Ended | EngineError:
    """The end of an execution as stored; an unreadable one is the error for its own waiters only."""
    if row["terminal_outcome"] is None:
        return error("execution_not_found")
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


def _refusal() -> EngineError:
    return error("unavailable", "wait_for_ending: the engine is closing")
