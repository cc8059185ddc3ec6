"""Replay of ended executions: they run again, with a new attempt that follows the earlier ones."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Self, TypeAlias
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.row import execution_keys, lock_executions
from flowfabric.engine.core.transition import REPLAYED, REPLAYED_BLOCKED, target_parameters
from flowfabric.engine.execution.retained import take_ends
from flowfabric.engine.flow.cascade import Cascade
from flowfabric.engine.flow.resolve import ResolvedEdges, Resolver
from flowfabric.engine.flow.row import LockedFlow, lock_flows
from flowfabric.engine.flow.state import FAILED_OUTCOMES, MemberChange, change_members
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import CompletionOutcome, EventFamily
from flowfabric.model.execution import Replayed
from flowfabric.model.flow import FlowState
from flowfabric.model.ids import (
    ExecutionId,
    FlowId,
    format_execution_id,
    parse_execution_id,
    row_key,
    split_execution_id,
)
from flowfabric.model.policy import ExecutionPolicy, read_stored_policy
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.model.text import check_text, shown

SQL = statements_beside(__file__)

TRIES = 5
"""How often a replay is tried that finds ends of its flow still queued, before it gives up."""
FLOW_LOCK_TIMEOUT = "200ms"
"""How long a replay of many executions waits for a locked flow before the others are tried."""
_DEFAULTS = ExecutionPolicy()
_TARGETS = {
    **target_parameters(REPLAYED),
    "blocked_eligibility": REPLAYED_BLOCKED.eligibility,
    "blocked_blocking": REPLAYED_BLOCKED.blocking,
}

ReplayVerdict: TypeAlias = Replayed | EngineError
"""The answer for one execution: it runs again, or why not."""


Upstreams: TypeAlias = Mapping[ExecutionId, Sequence[ExecutionId]]
"""The upstream executions without which executions are not replayed, as they would be skipped again."""


class WaitsFor(Enum):
    """The rows for which a replay waits while another session has locked them."""

    NOTHING = auto()
    FLOWS = auto()
    FLOWS_AND_EXECUTIONS = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    """The checked arguments of a replay, except the executions."""

    reason: str | None
    requested_by: str | None
    allows_cancelled_flow: bool

    @classmethod
    def check(cls, *, reason: str | None, requested_by: str | None, allow_cancelled_flow: bool) -> Self:
        """Check the arguments of a caller."""
        if type(allow_cancelled_flow) is not bool:
            raise error(
                "invalid_input", f"allow_cancelled_flow: expected True or False, got {shown(allow_cancelled_flow)}"
            )
        return cls(
            reason=None if reason is None else check_text(reason, "reason"),
            requested_by=None if requested_by is None else check_text(requested_by, "requested_by"),
            allows_cancelled_flow=allow_cancelled_flow,
        )


@dataclass(kw_only=True, slots=True)
class _Item:
    """An ended execution that the transaction has locked, and what its replay writes."""

    execution_id: ExecutionId
    ended: Record
    policy: ExecutionPolicy
    flow: LockedFlow | None
    is_blocked: bool = False
    unsatisfied: int = 0
    succeeded: Sequence[UUID] = ()
    """The edges made unsatisfied again whose upstream has succeeded since they became impossible."""

    @property
    def is_skipped(self) -> bool:
        return self.flow is not None and self.ended["terminal_outcome"] == TerminalOutcome.SKIPPED

    @property
    def detail(self) -> str | None:
        """What the execution waits for."""
        return f"{self.unsatisfied} dep(s) unsatisfied after replay" if self.is_blocked else None


@dataclass(kw_only=True, slots=True)
class _Written:
    """What a transaction has decided and written."""

    verdicts: dict[ExecutionId, ReplayVerdict] = field(default_factory=dict)
    work: list[Record] = field(default_factory=list)
    resolved: list[ResolvedEdges] = field(default_factory=list)
    unsettled: list[tuple[int, FlowId]] = field(default_factory=list)
    """The flows with members whose end must be settled before they are replayed."""


class Replays:
    """The replay operation."""

    def __init__(self, store: Store, resolver: Resolver, cascade: Cascade) -> None:
        self._store = store
        self._resolver = resolver
        self._cascade = cascade

    async def replay_execution(
        self,
        execution_id: ExecutionId | str,
        *,
        reason: str | None = None,
        requested_by: str | None = None,
        allow_cancelled_flow: bool = False,
    ) -> Replayed:
        """Make an ended execution runnable again, whatever its outcome; its next claim opens a new attempt.

        Its earlier attempts stay, but its result cannot be read any more. A member of a flow whose dependencies are not
        satisfied waits for them.
        """
        parsed = parse_execution_id(execution_id)
        row_key(parsed)
        request = ReplayRequest.check(
            reason=reason, requested_by=requested_by, allow_cancelled_flow=allow_cancelled_flow
        )
        for _ in range(TRIES):
            written = await self._transact([parsed], request, waits_for=WaitsFor.FLOWS_AND_EXECUTIONS)
            # The edges behind an end are resolved by its outcome, not by that of the replay.
            for partition_key, flow_id in written.unsettled:
                await self._cascade.settle_flow(partition_key, flow_id)
            verdict = written.verdicts.get(parsed)
            if isinstance(verdict, EngineError):
                raise verdict
            if verdict is not None:
                return verdict
        raise error(
            "retry_exhausted",
            f"the edges behind the end of execution {parsed} are still being resolved: {TRIES} tries failed; "
            "nothing was written, repeat the call",
        )

    async def replay_together(
        self,
        execution_ids: Sequence[ExecutionId],
        request: ReplayRequest,
        verdicts: dict[ExecutionId, ReplayVerdict],
        *,
        upstreams: Upstreams,
        waits_for: WaitsFor = WaitsFor.NOTHING,
    ) -> None:
        """Replay executions in one transaction, and add the verdicts of those that need no further one.

        The others have become members of a flow meanwhile, had an end that is settled only now or not yet, are locked
        by another session, or have upstream executions that neither have a verdict nor are replayed with them. Each
        execution must be given behind its upstream executions.
        """
        ready = _behind_upstreams(execution_ids, upstreams, verdicts)
        if not ready:
            return
        written = await self._transact(ready, request, upstreams=upstreams, earlier=verdicts, waits_for=waits_for)
        verdicts.update(written.verdicts)
        for partition_key, flow_id in written.unsettled:
            await self._cascade.settle_free(partition_key, flow_id)

    async def read_flows_of(self, execution_ids: Sequence[ExecutionId]) -> dict[ExecutionId, UUID]:
        """The flows of those of the executions that are members of one."""
        rows = await self._store.fetch(SQL.list_flows_of, **execution_keys(execution_ids))
        return {execution_id: flow_id for execution_id, flow_id in _flows_of(rows).items() if flow_id is not None}

    async def _transact(
        self,
        execution_ids: Sequence[ExecutionId],
        request: ReplayRequest,
        *,
        upstreams: Upstreams = MappingProxyType({}),
        earlier: Mapping[ExecutionId, ReplayVerdict] = MappingProxyType({}),
        waits_for: WaitsFor,
    ) -> _Written:
        """Replay executions in one transaction, and do what follows its commit; `earlier` has the verdicts so far."""

        async def replay(transaction: Transaction) -> _Written:
            written = _Written()
            items = await self._lock(transaction, execution_ids, request, written.verdicts, waits_for)
            items = await self._settled(transaction, items, written)
            locked = {item.execution_id for item in items}
            given = [each for each in execution_ids if each in locked]
            ready = set(_behind_upstreams(given, upstreams, earlier, written.verdicts))
            await self._replay(transaction, [item for item in items if item.execution_id in ready], request, written)
            return written

        written = await self._store.transact(replay, execution_id=execution_ids[0] if len(execution_ids) == 1 else None)
        await self._after_commit(written)
        return written

    async def _replay(
        self, transaction: Transaction, items: list[_Item], request: ReplayRequest, written: _Written
    ) -> None:
        items = await self._reset(transaction, items, written.verdicts)
        if not items:
            return
        ended_at = {item.execution_id: item.ended["ended_at"] for item in items}
        likely = [(item.execution_id, at) for item in items for at in self._retain_untils(item)]
        await take_ends(transaction, ended_at, likely)
        timeouts = [item.policy.timeout_policy for item in items]
        written.work = await transaction.fetch(
            SQL.replay_locked,
            **_keys(items),
            **_TARGETS,
            are_blocked=[item.is_blocked for item in items],
            deadlines_ms=[None if each is None else each.execution_deadline_ms for each in timeouts],
            details=[item.detail for item in items],
            replay_types=["skipped_flow_member" if item.is_skipped else "normal" for item in items],
            reason=request.reason,
            requested_by=request.requested_by,
        )
        await self._follow(transaction, items, written)
        states = await transaction.fetch(SQL.list_replayed, **_keys(items))
        for item, row in zip(items, states, strict=True):
            written.verdicts[item.execution_id] = Replayed(public_state=PublicState(row["public_state"]))

    async def _lock(
        self,
        transaction: Transaction,
        execution_ids: Sequence[ExecutionId],
        request: ReplayRequest,
        verdicts: dict[ExecutionId, ReplayVerdict],
        waits_for: WaitsFor,
    ) -> list[_Item]:
        """Lock the flows and the executions, and refuse those that may not be replayed."""
        rows = await transaction.fetch(SQL.list_flows_of, **execution_keys(execution_ids))
        flow_of = _flows_of(rows)
        flows = await self._lock_flows(transaction, flow_of, waits_for)
        waits = waits_for is WaitsFor.FLOWS_AND_EXECUTIONS
        free = [
            each
            for each in sorted(execution_ids, key=split_execution_id)
            if waits_for is not WaitsFor.NOTHING or flow_of.get(each) is None or flow_of[each] in flows
        ]
        if not free:
            return []
        _, locked = await lock_executions(transaction, free, waits=waits)
        ended: list[ExecutionId] = []
        for execution_id, row in zip(free, locked, strict=True):
            if row is None:
                if waits or execution_id not in flow_of:
                    verdicts[execution_id] = error("execution_not_found", str(execution_id))
            elif row.lifecycle_phase != "terminal":
                verdicts[execution_id] = error(
                    "execution_not_terminal",
                    f"execution {execution_id} is {row.lifecycle_phase}; only ended ones are replayed",
                )
            else:
                ended.append(execution_id)
        items: list[_Item] = []
        found = await transaction.fetch(SQL.read_ended, **execution_keys(ended)) if ended else ()
        for execution_id, row in zip(ended, found, strict=True):
            if row["flow_id"] != flow_of.get(execution_id):
                # It has become a member since: the next transaction locks the flow before it.
                continue
            flow = flows.get(row["flow_id"])
            policy = read_stored_policy(row["policy"]) or _DEFAULTS
            refusal = _refusal(request, execution_id, flow, row, policy)
            if refusal is not None:
                verdicts[execution_id] = refusal
            else:
                items.append(_Item(execution_id=execution_id, ended=row, policy=policy, flow=flow))
        return items

    async def _lock_flows(
        self, transaction: Transaction, flow_of: dict[ExecutionId, UUID | None], waits_for: WaitsFor
    ) -> dict[UUID, LockedFlow]:
        members = {each: flow_id for each, flow_id in flow_of.items() if flow_id is not None}
        if not members:
            return {}
        if waits_for is WaitsFor.FLOWS:
            await transaction.fetch(SQL.set_lock_timeout, lock_timeout=FLOW_LOCK_TIMEOUT)
        keys = [(split_execution_id(each)[0], flow_id) for each, flow_id in members.items()]
        locked = await lock_flows(transaction, keys, waits=waits_for is not WaitsFor.NOTHING)
        return {flow.flow_id: flow for flow in locked}

    async def _settled(self, transaction: Transaction, items: list[_Item], written: _Written) -> list[_Item]:
        """The executions without those of flows in which an end of one of them is still queued."""
        members = [item for item in items if item.flow is not None]
        if not members:
            return items
        rows = await transaction.fetch(SQL.list_queued_flows, **_member_keys(members))
        written.unsettled = [(row["partition_key"], FlowId(row["flow_id"])) for row in rows]
        unsettled = {flow_id for _, flow_id in written.unsettled}
        return [item for item in items if item.flow is None or item.flow.flow_id not in unsettled]

    async def _reset(
        self, transaction: Transaction, items: list[_Item], verdicts: dict[ExecutionId, ReplayVerdict]
    ) -> list[_Item]:
        """Reset the dependencies of members that were impossible; refuse those that cannot be satisfied any more.

        A member that was cancelled before its dependencies became impossible is treated like a skipped one, as it would
        run without them otherwise. One with a quorum of more than all its edges waits as long as one of them is not
        resolved, and is skipped by its next result. If all have succeeded, it runs, like a blocked member that has
        nothing left to wait for.
        """
        for item in items:
            if item.ended["group_state"] == "pending":
                item.unsatisfied = item.ended["unresolved"]
                item.is_blocked = item.unsatisfied > 0
        impossible = {item.execution_id: item for item in items if item.ended["group_state"] == "impossible"}
        if not impossible:
            return items
        rows = await transaction.fetch(
            SQL.reset_groups,
            **_member_keys(impossible.values()),
            replayed=[split_execution_id(item.execution_id)[1] for item in items],
        )
        for row in rows:
            item = impossible[format_execution_id(row["partition_key"], row["execution_id"])]
            if not row["is_reset"]:
                verdicts[item.execution_id] = _deleted_upstreams(item.execution_id, row)
                continue
            item.is_blocked = row["unresolved"] > 0
            item.succeeded = row["succeeded"] or ()
            item.unsatisfied = row["unresolved"] - len(item.succeeded)
        return [item for item in items if item.execution_id not in verdicts]

    def _retain_untils(self, item: _Item) -> set[int]:
        """When the retention of an execution ends: counted from its own end, or from that of its flow."""
        retention_ms = item.ended["retention_ms"]
        if retention_ms is None:
            retention_ms = self._store.rules.retention_ms
        ends = {item.ended["ended_at"], None if item.flow is None else item.flow.ended_at} - {None}
        return {at + retention_ms for at in ends}

    async def _follow(self, transaction: Transaction, items: Sequence[_Item], written: _Written) -> None:
        """Count members as live again, and resolve their edges from upstreams that have succeeded meanwhile."""
        by_flow: defaultdict[UUID, list[_Item]] = defaultdict(list)
        for item in items:
            if item.flow is not None:
                by_flow[item.flow.flow_id].append(item)
        if not by_flow:
            return
        await transaction.fetch(
            SQL.delete_pending_cancels, **_member_keys(item for item in items if item.flow is not None)
        )
        await change_members(transaction, [_change(members) for members in by_flow.values()])
        for members in by_flow.values():
            edges = [(edge_id, CompletionOutcome.SUCCESS) for member in members for edge_id in member.succeeded]
            flow = members[0].flow
            if edges and flow is not None:
                written.resolved.append(await self._resolver.resolve_edges(transaction, flow, edges))

    async def _after_commit(self, written: _Written) -> None:
        wakeups = self._store.wakeups
        if any(isinstance(verdict, Replayed) for verdict in written.verdicts.values()):
            wakeups.events(EventFamily.LEASE, EventFamily.OPERATOR)
        if written.work:
            wakeups.work_of(written.work)
        for resolved in written.resolved:
            await self._resolver.after_commit(resolved)


def _behind_upstreams(
    execution_ids: Sequence[ExecutionId], upstreams: Upstreams, *verdicts: Container[ExecutionId]
) -> list[ExecutionId]:
    """Those of the executions whose upstream executions have a verdict, or come before them in the answer."""
    found: dict[ExecutionId, None] = {}
    for execution_id in execution_ids:
        for each in upstreams.get(execution_id, ()):
            if each not in found and not any(each in known for known in verdicts):
                break
        else:
            found[execution_id] = None
    return list(found)


def _flows_of(rows: Iterable[Record]) -> dict[ExecutionId, UUID | None]:
    """The flow of each execution that exists, None outside of flows."""
    return {format_execution_id(row["partition_key"], row["execution_id"]): row["flow_id"] for row in rows}


def _keys(items: Iterable[_Item]) -> dict[str, object]:
    return execution_keys(item.execution_id for item in items)


def _member_keys(items: Iterable[_Item]) -> dict[str, object]:
    """The keys of members with their flows, as parameters."""
    members = [(item, item.flow) for item in items if item.flow is not None]
    return {**_keys(item for item, _ in members), "flow_ids": [flow.flow_id for _, flow in members]}


def _change(members: Sequence[_Item]) -> MemberChange:
    """What the replay of members changes in the counts of their flow."""
    flow = members[0].flow
    assert flow is not None
    return MemberChange(
        partition_key=flow.partition_key,
        flow_id=flow.flow_id,
        live=len(members),
        failed=-sum(member.ended["terminal_outcome"] in FAILED_OUTCOMES for member in members),
        now_live=FlowState.BLOCKED if all(member.is_blocked for member in members) else FlowState.OPEN,
    )


def _refusal(
    request: ReplayRequest,
    execution_id: ExecutionId,
    flow: LockedFlow | None,
    row: Record,
    policy: ExecutionPolicy,
) -> EngineError | None:
    """The error for an ended execution that may not be replayed."""
    if flow is None and row["flow_id"] is not None:
        return error("flow_not_found", str(row["flow_id"]))
    replay_count = row["replay_count"]
    if flow is not None and flow.public_flow_state == FlowState.CANCELLED and not request.allows_cancelled_flow:
        return error(
            "flow_already_terminal",
            f"execution {execution_id} belongs to flow {flow.flow_id}, which was cancelled; "
            "to replay it nevertheless, set allow_cancelled_flow",
        )
    if replay_count >= policy.max_replay_count:
        return error(
            "max_replays_exhausted",
            f"execution {execution_id} was replayed {replay_count} times, and its policy allows "
            f"{policy.max_replay_count} (max_replay_count); submit it again as a new execution",
        )
    return None


def _deleted_upstreams(execution_id: ExecutionId, row: Record) -> EngineError:
    """The error for a member whose dependencies cannot be satisfied without deleted executions."""
    partition, _ = split_execution_id(execution_id)
    named = ", ".join(format_execution_id(partition, uuid) for uuid in row["deleted_ids"])
    others = row["deleted"] - len(row["deleted_ids"])
    return error(
        "replay_not_allowed",
        f"execution {execution_id} depends on {named}{f' and {others} more' if others else ''}, which did not succeed "
        "and are deleted since their retention is over; submit the flow again",
    )
