"""Reading: what an execution is, and waiting for what becomes of it."""

import asyncio
import contextlib
import time
from collections.abc import Mapping

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import ExecutionId, FlowId, LaneId, Namespace, parse_execution_id, row_key, split_execution_id
from flowfabric.model.outcomes import Ended, ExecutionInfo
from flowfabric.model.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    StateVector,
    TerminalOutcome,
)

SQL = statements_beside(__file__)


class View:
    """The view family of operations."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiters = _Waiters(store)

    async def state(self, execution_id: str) -> PublicState | None:
        """The public state of an execution."""
        rows = await self._store.fetch(SQL.read_state, **_key(execution_id))
        return PublicState(rows[0][0]) if rows else None

    async def info(self, execution_id: str) -> ExecutionInfo | None:
        """What an operator sees of an execution."""
        rows = await self._store.fetch(SQL.read_info, **_key(execution_id))
        if not rows:
            return None
        row = rows[0]
        return ExecutionInfo(
            execution_id=parse_execution_id(execution_id),
            namespace=Namespace(row["namespace"]),
            lane_id=LaneId(row["lane_id"]),
            priority=row["priority"],
            execution_kind=row["execution_kind"],
            state_vector=_vector(row),
            public_state=PublicState(row["public_state"]),
            created_at=row["created_at"],
            started_at=row["started_at"],
            completed_at=row["completed_at"],
            current_attempt_index=row["attempt_index"],
            flow_id=None if row["flow_id"] is None else FlowId(row["flow_id"]),
            blocking_detail=row["blocking_detail"] or "",
        )

    async def result(self, execution_id: str) -> bytes | None:
        """The result of a completed execution."""
        rows = await self._store.fetch(SQL.read_result, **_key(execution_id))
        return rows[0][0] if rows else None

    async def wait_for_ending(self, execution_id: str, timeout: float | None) -> Ended:
        """How an execution ended, as soon as it has; NotFound when there is no such execution."""
        parsed = parse_execution_id(execution_id)
        row_key(parsed)
        waiting = self._waiters.wait(parsed)
        try:
            return await asyncio.wait_for(waiting, timeout)
        except TimeoutError:
            raise error("timeout", {"op": "wait_for_ending", "elapsed_ms": int((timeout or 0) * 1000)}) from None

    async def clock(self) -> int:
        """The store's wall clock in milliseconds."""
        rows = await self._store.fetch(SQL.read_clock)
        now: int = rows[0][0]
        return now

    async def close(self) -> None:
        """Stop waiting for endings."""
        await self._waiters.close()


class _Waiters:
    """Looks for the endings this process waits for: together, on a hint, and from time to time without one."""

    BUSY_SECONDS = 0.02
    """The pause between two looks while hints keep coming."""
    LONGEST_SECONDS = 1.0

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[ExecutionId, list[asyncio.Future[Ended]]] = {}
        self._task: asyncio.Task[None] | None = None

    def wait(self, execution_id: ExecutionId) -> "asyncio.Future[Ended]":
        """The future of an execution's ending."""
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(execution_id, []).append(future)
        self._store.wakeups.ended_event.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        return future

    async def close(self) -> None:
        """Give up on what has not ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()
        self._waiting.clear()

    async def _look(self) -> None:
        wakeups = self._store.wakeups
        await wakeups.hints.listen()
        pause = self.BUSY_SECONDS
        while self._waiting:
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wakeups.ended_event.wait(), pause)
            is_hinted = wakeups.ended_event.is_set()
            wakeups.ended_event.clear()
            pause = self.BUSY_SECONDS if is_hinted else min(pause * 2, self.LONGEST_SECONDS)
            # Cancelled waiters drop out here.
            for execution_id in [key for key, futures in self._waiting.items() if all(f.done() for f in futures)]:
                del self._waiting[execution_id]
            if self._waiting:
                await self._settle()
            if self._waiting and is_hinted:
                await asyncio.sleep(max(0.0, began + self.BUSY_SECONDS - time.monotonic()))

    async def _settle(self) -> None:
        wanted = list(self._waiting)
        pairs = [split_execution_id(execution_id) for execution_id in wanted]
        try:
            rows = await self._store.fetch(
                SQL.list_endings,
                partition_keys=[partition for partition, _ in pairs],
                execution_ids=[uuid for _, uuid in pairs],
            )
        except EngineError as refused:
            if refused.retryable:
                return
            self._answer_all(refused)
            return
        for row in rows:
            execution_id = wanted[row["nth"] - 1]
            for future in self._waiting.pop(execution_id, ()):
                if future.done():
                    continue
                if row["terminal_outcome"] is None:
                    future.set_exception(error("execution_not_found"))
                else:
                    future.set_result(
                        Ended(
                            execution_id=execution_id,
                            outcome=TerminalOutcome(row["terminal_outcome"]),
                            result=row["result_payload"],
                            reason=row["reason"],
                        )
                    )

    def _answer_all(self, refused: EngineError) -> None:
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(refused)
        self._waiting.clear()


def _key(execution_id: str) -> Mapping[str, object]:
    partition, uuid = row_key(parse_execution_id(execution_id))
    return {"partition_key": partition, "execution_id": uuid}


def _vector(row: Record) -> StateVector:
    return StateVector(
        lifecycle_phase=LifecyclePhase(row["lifecycle_phase"]),
        ownership_state=OwnershipState(row["ownership_state"]),
        eligibility_state=EligibilityState(row["eligibility_state"]),
        blocking_reason=BlockingReason(row["blocking_reason"]),
        terminal_outcome=TerminalOutcome(row["terminal_outcome"]),
        attempt_state=AttemptState(row["attempt_state"]),
        public_state=PublicState(row["public_state"]),
    )
