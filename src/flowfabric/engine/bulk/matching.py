"""Operations on all executions that match a filter: cancel, replay, change the priority.

The executions are read page by page in the order of their creation, and each gets its own verdict: one that is refused
does not stop the others.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack
from uuid import UUID

from flowfabric.engine.bulk.replays import MatchingReplays
from flowfabric.engine.core.quarantine import is_connection_fault
from flowfabric.engine.execution.cancel_many import CancelDisposition, CancelMany, CancelResult
from flowfabric.engine.execution.priority import Priority, check_priority
from flowfabric.engine.flow.replay import ReplayRequest
from flowfabric.engine.read.filters import MAX_TIME, ExecutionFilters, check_lanes, check_states, check_texts
from flowfabric.engine.read.listing import MAX_LIMIT, Listing, ListOrder
from flowfabric.engine.read.view import View
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import BulkResult, Replayed
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import ENDED_STATES, PublicState
from flowfabric.model.text import check_options, check_range, check_text, shown

CONCURRENCY = 16
"""How many single calls of a page run at the same time."""
_LIVE_STATES = frozenset(PublicState) - ENDED_STATES
_CLAIMABLE_STATES = frozenset({PublicState.WAITING, PublicState.RESUMABLE})

_CODES = {
    CancelDisposition.ALREADY_TERMINAL: "execution_not_active",
    CancelDisposition.NOT_FOUND: "execution_not_found",
}

Apply = Callable[[Sequence[ExecutionId]], Awaitable[Sequence[str | None]]]
"""Change the executions of a page; return for each None or the code of its refusal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extent:
    """How many executions a call may change."""

    all_executions: bool
    dry_run: bool
    limit: int | None

    def __post_init__(self) -> None:
        for name in ("all_executions", "dry_run"):
            if type(getattr(self, name)) is not bool:
                raise error("invalid_input", f"{name}: expected True or False, got {shown(getattr(self, name))}")
        if self.limit is not None:
            check_range(self.limit, "limit", 0, MAX_TIME)

    def page_size(self, matched: int) -> int:
        """How many executions the next page has at most."""
        return MAX_LIMIT if self.limit is None else min(MAX_LIMIT, self.limit - matched)

    def room(self, matched: int) -> int | None:
        """How many more executions the call may try; None if it may try all."""
        return None if self.limit is None else self.limit - matched


class Matching:
    """The operations on all executions that match a filter."""

    def __init__(
        self, listing: Listing, view: View, cancel_many: CancelMany, replays: MatchingReplays, priority: Priority
    ) -> None:
        self._listing = listing
        self._view = view
        self._cancel_many = cancel_many
        self._replays = replays
        self._priority = priority

    async def cancel_matching(
        self,
        reason: str,
        *,
        all_executions: bool = False,
        dry_run: bool = False,
        limit: int | None = None,
        **filters: Unpack[ExecutionFilters],
    ) -> BulkResult:
        """Cancel the executions that match every filter and have not ended; the filters are those of `list_executions`.

        Executions created after the call began are left alone. If it is interrupted, a second call continues.
        """
        reason = check_text(reason, "reason")

        async def cancel(execution_ids: Sequence[ExecutionId]) -> Sequence[str | None]:
            return [_code(each) for each in await self._cancel_many.cancel(execution_ids, reason=reason)]

        extent = _Extent(all_executions=all_executions, dry_run=dry_run, limit=limit)
        return await self._apply(cancel, _LIVE_STATES, filters, extent)

    async def replay_matching(
        self,
        *,
        reason: str | None = None,
        requested_by: str | None = None,
        allow_cancelled_flow: bool = False,
        all_executions: bool = False,
        dry_run: bool = False,
        limit: int | None = None,
        **filters: Unpack[ExecutionFilters],
    ) -> BulkResult:
        """Replay the executions that match every filter and have ended; the filters are those of `list_executions`.

        Unless `public_state` says otherwise, those that succeeded are left alone. Members of a flow are replayed
        together, upstream executions first. An execution is replayed at most once by a call, even if it ends again.
        """
        request = ReplayRequest.check(
            reason=reason, requested_by=requested_by, allow_cancelled_flow=allow_cancelled_flow
        )

        async def replay(execution_ids: Sequence[ExecutionId]) -> Sequence[str | None]:
            return [_code(each) for each in await self._replays.replay_many(execution_ids, request)]

        is_narrowed = filters.get("public_state") is not None
        states = ENDED_STATES if is_narrowed else ENDED_STATES - {PublicState.COMPLETED}
        extent = _Extent(all_executions=all_executions, dry_run=dry_run, limit=limit)
        return await self._apply(replay, states, filters, extent, has_whole_flows=True)

    async def change_priority_matching(
        self,
        new_priority: int,
        *,
        all_executions: bool = False,
        dry_run: bool = False,
        limit: int | None = None,
        **filters: Unpack[ExecutionFilters],
    ) -> BulkResult:
        """Give the claimable executions that match every filter another priority.

        The filters are those of `list_executions`.
        """
        priority = check_priority(new_priority)

        async def change(execution_ids: Sequence[ExecutionId]) -> Sequence[str | None]:
            return await _each(
                execution_ids, lambda execution_id: self._priority.change_priority(execution_id, priority)
            )

        extent = _Extent(all_executions=all_executions, dry_run=dry_run, limit=limit)
        return await self._apply(change, _CLAIMABLE_STATES, filters, extent)

    async def _apply(
        self,
        apply: Apply,
        states: frozenset[PublicState],
        filters: ExecutionFilters,
        extent: _Extent,
        *,
        has_whole_flows: bool = False,
    ) -> BulkResult:
        """Apply a change to the matching executions in these states; to those of one flow together, if it must be."""
        narrowed = await self._narrow(filters, states, extent)
        matched, refused = 0, Counter[str]()
        cursor: str | None = None
        whole_flows: set[UUID] = set()
        while (size := extent.page_size(matched)) > 0:
            page = await self._listing.list_executions(**narrowed, order=ListOrder.OLDEST, cursor=cursor, limit=size)
            execution_ids = [one.execution_id for one in page.executions]
            if has_whole_flows and execution_ids and not extent.dry_run:
                execution_ids = await self._replays.with_later_members(page.executions, narrowed, whole_flows)
                execution_ids = execution_ids[: extent.room(matched)]
            matched += len(execution_ids)
            if execution_ids and not extent.dry_run:
                refused.update(code for code in await apply(execution_ids) if code is not None)
            cursor = page.next_cursor
            if cursor is None:
                break
        changed = 0 if extent.dry_run else matched - refused.total()
        return BulkResult(matched=matched, changed=changed, refused=dict(refused), is_dry_run=extent.dry_run)

    async def _narrow(
        self, filters: ExecutionFilters, states: frozenset[PublicState], extent: _Extent
    ) -> ExecutionFilters:
        """The checked filters, for these states only, and for executions created before now."""
        known = ExecutionFilters.__annotations__
        check_options(filters, known)
        if not extent.all_executions and all(value is None for value in filters.values()):
            raise error(
                "invalid_input",
                f"filters: give at least one of {', '.join(known)}, "
                "or all_executions=True for the executions of all namespaces",
            )
        narrowed = ExecutionFilters(**filters)
        # Iterators are read here, as every page needs the values.
        narrowed["namespace"] = check_texts(filters.get("namespace"), "namespace")
        narrowed["lane_id"] = check_lanes(filters.get("lane_id"))
        narrowed["execution_kind"] = check_texts(filters.get("execution_kind"), "execution_kind")
        given = check_states(filters.get("public_state"))
        narrowed["public_state"] = states if given is None else states & given
        before = filters.get("created_before")
        if before is not None:
            check_range(before, "created_before", -MAX_TIME, MAX_TIME)
        later = await self._view.server_time_ms() + 1
        narrowed["created_before"] = later if before is None else min(before, later)
        return narrowed


def _code(result: Replayed | CancelResult) -> str | None:
    """The code of a refusal, or None if the execution was changed."""
    if isinstance(result, EngineError):
        if is_connection_fault(result):
            raise result
        return result.code
    return None if isinstance(result, Replayed) else _CODES.get(result)


async def _each(
    execution_ids: Sequence[ExecutionId], call: Callable[[ExecutionId], Awaitable[object]]
) -> Sequence[str | None]:
    """Call an operation for each execution, some at a time; return the codes of the refusals in the same order."""
    codes: list[str | None] = [None] * len(execution_ids)

    async def run(items: Iterator[tuple[int, ExecutionId]]) -> None:
        for at, execution_id in items:
            try:
                await call(execution_id)
            except EngineError as refusal:
                if is_connection_fault(refusal):
                    # The other runs end after their call in progress: nothing is left running.
                    for _ in items:
                        pass
                    raise
                codes[at] = refusal.code

    items = enumerate(execution_ids)
    outcomes = await asyncio.gather(*(run(items) for _ in range(CONCURRENCY)), return_exceptions=True)
    for failure in outcomes:
        if failure is not None:
            raise failure
    return codes
