"""Cancellation of flows: close the graph in one transaction, then cancel the members that the policy covers."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import literal
from flowfabric.engine.core.transition import HELD_FOR_CANCEL
from flowfabric.engine.flow.backlog import CancelBacklog
from flowfabric.engine.flow.row import LockedFlow, check_flow_id, lock_flow
from flowfabric.engine.store import Store, error_of
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.flow import (
    NO_WAIT,
    CancellationPolicy,
    CancellationScheduled,
    CancelWait,
    FlowAlreadyTerminal,
    FlowCancellation,
    FlowCancelled,
    FlowHeaderCancelled,
    FlowState,
    NoWait,
    PartiallyCancelled,
    WaitIndefinite,
    WaitUpTo,
    check_cancel_grace,
    covers,
    parse_cancellation_policy,
)
from flowfabric.model.ids import ExecutionId, FlowId
from flowfabric.model.text import check_range, check_text, shown
from flowfabric.pauses import is_set_within
from flowfabric.tasks import Answer, create_shared_task

SQL = statements_beside(__file__)

logger = logging.getLogger(__name__)

MEMBER_CHUNK = 1000
"""How many members one statement of the header locks or holds back."""
MAX_MEMBERS = 2**31 - 1
REPEATED_CALL_MEMBERS = 1000
"""How many members a repeated `cancel_flow` returns at most."""
MAX_WAIT_MS = 300_000
POLL_SECONDS = 0.1
DRAIN_SECONDS = 15.0
"""How long closing the engine waits for the members that are being cancelled; the others are left to the sweep."""
REQUESTER = "operator"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    """A cancelled flow: all of its members, and those it owes; or what an earlier cancellation stored."""

    policy: CancellationPolicy | None
    reason: str | None
    members: Sequence[ExecutionId]
    owed: Sequence[ExecutionId] = ()
    is_new: bool


class FlowCancel:
    """The operations that cancel flows."""

    def __init__(self, store: Store, backlog: CancelBacklog, *, grace_ms: int) -> None:
        self._store = store
        self._backlog = backlog
        self._grace_ms = grace_ms
        self._tasks: set[asyncio.Task[Any]] = set()
        """Calls that cancel their flow, and those that then cancel its members."""
        self._refuses = asyncio.Event()

    async def cancel_flow_header(
        self,
        flow_id: UUID | str,
        *,
        reason: str,
        cancellation_policy: CancellationPolicy | str,
        grace_ms: int | None = None,
    ) -> FlowHeaderCancelled | FlowAlreadyTerminal:
        """Cancel a flow and hold back the members that the policy covers; the caller cancels and acknowledges them.

        A sweep cancels those that are not acknowledged within `grace_ms`, by default FF_CANCEL_GRACE_MS.
        """
        policy = parse_cancellation_policy(cancellation_policy)
        header = await self._cancel_header(flow_id, reason, policy, grace_ms)
        if header.is_new:
            return FlowHeaderCancelled(cancellation_policy=policy, member_execution_ids=header.members)
        return FlowAlreadyTerminal(
            stored_cancellation_policy=header.policy,
            stored_cancel_reason=header.reason,
            member_execution_ids=header.members,
        )

    async def cancel_flow(
        self,
        flow_id: UUID | str,
        *,
        reason: str,
        cancellation_policy: CancellationPolicy | str,
        wait: CancelWait = NO_WAIT,
        grace_ms: int | None = None,
    ) -> FlowCancellation:
        """Cancel a flow and the members that the policy covers: in the background, or with `wait` before it returns.

        A flow that is cancelled already keeps its policy and reason; with `wait`, the call waits for its members too.
        """
        policy = parse_cancellation_policy(cancellation_policy)
        seconds = _wait_seconds(wait)
        began = time.monotonic()
        partition, parsed = check_flow_id(self._store, flow_id)

        async def start() -> tuple[_Header, asyncio.Task[list[ExecutionId]] | None]:
            header = await self._cancel_header(parsed, reason, policy, grace_ms, member_limit=REPEATED_CALL_MEMBERS)
            if not header.owed:
                return header, None
            dispatch = self._create_task(self._backlog.dispatch(partition, parsed, header.owed, reason))
            dispatch.add_done_callback(_log_failure)
            return header, dispatch

        # A caller that is cancelled while the flow is, must not leave its members to the sweep.
        header, dispatch = await asyncio.shield(self._create_task(start()))
        if not header.is_new:
            if seconds is not None:
                await self._wait_for_members(partition, parsed, began, seconds)
            return FlowCancelled(cancellation_policy=header.policy or policy, member_execution_ids=header.members)
        if dispatch is None:
            return FlowCancelled(cancellation_policy=policy, member_execution_ids=header.members)
        if seconds is None:
            return CancellationScheduled(
                cancellation_policy=policy, member_count=len(header.owed), member_execution_ids=header.members
            )
        failed = await self._finished(dispatch, began, seconds)
        if not failed:
            return FlowCancelled(cancellation_policy=policy, member_execution_ids=header.members)
        return PartiallyCancelled(
            cancellation_policy=policy, member_execution_ids=header.members, failed_member_execution_ids=failed
        )

    def refuse(self) -> None:
        """Fail current waits and reject new ones."""
        self._refuses.set()

    async def drain(self) -> None:
        """Wait until the members of every flow cancelled by this engine are cancelled."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Drain for a limited time, and leave the other members to the sweep of another process."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self.drain()
        for task in (left := tuple(self._tasks)):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _cancel_header(
        self,
        flow_id: UUID | str,
        reason: str,
        policy: CancellationPolicy,
        grace_ms: int | None,
        *,
        member_limit: int = MAX_MEMBERS,
    ) -> _Header:
        partition, parsed = check_flow_id(self._store, flow_id)
        reason = check_text(reason, "reason")
        grace = self._grace_ms if grace_ms is None else check_cancel_grace(grace_ms)

        async def cancel(transaction: Transaction) -> _Header:
            locked = await lock_flow(transaction, partition, parsed)
            if locked.is_closed:
                return await _stored(transaction, locked, member_limit)
            rows = await transaction.fetch(SQL.list_members, flow_id=parsed, limit=MAX_MEMBERS)
            covered = [row["execution_id"] for row in rows if covers(policy, row["lifecycle_phase"])]
            owed: list[ExecutionId] = []
            for start in range(0, len(covered), MEMBER_CHUNK):
                chunk = covered[start : start + MEMBER_CHUNK]
                owed += [locked.member(uuid) for uuid in await self._hold(transaction, locked, policy, chunk)]
            await transaction.fetch(
                SQL.set_flow_cancelled,
                partition_key=partition,
                flow_id=parsed,
                to_state=FlowState.CANCELLED.value,
                reason=reason,
                cancellation_policy=policy.value,
                requester=REQUESTER,
                grace_ms=grace,
                member_count=len(owed),
            )
            members = [locked.member(row["execution_id"]) for row in rows]
            return _Header(policy=policy, reason=reason, members=members, owed=owed, is_new=True)

        try:
            header = await self._store.database.transact(cancel)
        except StoreFault as fault:
            raise error_of(fault, f"flow {parsed} or one of its members") from fault
        if header.is_new:
            self._store.wakeups.events(EventFamily.OPERATOR)
        return header

    async def _hold(
        self, transaction: Transaction, flow: LockedFlow, policy: CancellationPolicy, uuids: Sequence[UUID]
    ) -> list[UUID]:
        """Lock members and hold back those that the policy covers; return these."""
        rows = await transaction.fetch(SQL.lock_members, partition_key=flow.partition_key, execution_ids=uuids)
        # A member may have moved while the statement waited for it, so its locked row decides.
        owed = [row["execution_id"] for row in rows if covers(policy, row["lifecycle_phase"])]
        if owed:
            freed = await transaction.fetch(
                SQL.hold_owed_members,
                partition_key=flow.partition_key,
                flow_id=flow.flow_id,
                execution_ids=owed,
                slot_shard=self._store.slot_shard,
                **HELD_FOR_CANCEL,
            )
            self._store.wakeups.room_after(transaction, freed)
        return owed

    def _create_task(self, work: Coroutine[Any, Any, Answer]) -> "asyncio.Task[Answer]":
        task = create_shared_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _finished(
        self, dispatch: "asyncio.Task[list[ExecutionId]]", began: float, seconds: float
    ) -> list[ExecutionId]:
        """Wait for a dispatch, which goes on if the wait ends before."""
        refused = asyncio.ensure_future(self._refuses.wait())
        try:
            left = max(0.0, began + seconds - time.monotonic())
            await asyncio.wait((dispatch, refused), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            refused.cancel()
        if dispatch.done():
            return dispatch.result()
        raise _refusal() if self._refuses.is_set() else _timeout(seconds)

    async def _wait_for_members(self, partition: int, flow_id: FlowId, began: float, seconds: float) -> None:
        """Wait until no member of a flow is owed or held back by an earlier cancellation, or the flow is gone."""
        while True:
            rows = await self._store.fetch(SQL.read_cancellation, partition_key=partition, flow_id=flow_id)
            if not rows or not rows[0]["has_live_members"]:
                return
            if self._refuses.is_set():
                raise _refusal()
            left = began + seconds - time.monotonic()
            if left <= 0:
                raise _timeout(seconds)
            await is_set_within(self._refuses, min(POLL_SECONDS, left))


async def _stored(transaction: Transaction, locked: LockedFlow, limit: int) -> _Header:
    """What an earlier cancellation of a flow stored, and the members of the flow."""
    rows = await transaction.fetch(SQL.list_members, flow_id=locked.flow_id, limit=limit)
    policy = locked.cancellation_policy
    return _Header(
        policy=None
        if policy is None
        else literal(CancellationPolicy, policy, context=f"flow {locked.flow_id}", field="cancellation_policy"),
        reason=locked.cancel_reason,
        members=[locked.member(row["execution_id"]) for row in rows],
        is_new=False,
    )


def _wait_seconds(wait: object) -> float | None:
    """How long a call waits for the members, None if it does not wait."""
    match wait:
        case NoWait():
            return None
        case WaitUpTo(ms):
            check_range(ms, "wait: ms", 0, MAX_WAIT_MS)
            return ms / 1000
        case WaitIndefinite():
            return MAX_WAIT_MS / 1000
        case _:
            raise error("invalid_input", f"wait: expected NoWait, WaitUpTo or WaitIndefinite, got {shown(wait)}")


def _log_failure(task: "asyncio.Task[list[ExecutionId]]") -> None:
    if not task.cancelled() and (problem := task.exception()) is not None:
        logger.error("the members of a cancelled flow are left to the sweep: %s", problem, exc_info=problem)


def _refusal() -> EngineError:
    return error("unavailable", "cancel_flow: the engine is shutting down; the flow is cancelled")


def _timeout(seconds: float) -> EngineError:
    return error("timeout", {"op": "cancel_flow", "elapsed_ms": round(seconds * 1000)})
