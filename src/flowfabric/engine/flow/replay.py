"""Replay of ended executions: they run again, with a new attempt that follows the earlier ones."""

from dataclasses import dataclass, field
from uuid import UUID

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.row import lock_execution
from flowfabric.engine.core.transition import REPLAYED, REPLAYED_BLOCKED, target_parameters
from flowfabric.engine.execution.retention import RECHECK_MS
from flowfabric.engine.flow.cascade import Cascade
from flowfabric.engine.flow.resolve import ResolvedEdges, Resolver
from flowfabric.engine.flow.row import LockedFlow, lock_flow, read_flow_of
from flowfabric.engine.flow.state import MemberChange, change_members
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.event import CompletionOutcome, EventFamily
from flowfabric.model.execution import Replayed
from flowfabric.model.flow import FlowState
from flowfabric.model.ids import ExecutionId, FlowId, parse_execution_id, row_key
from flowfabric.model.policy import ExecutionPolicy, read_stored_policy
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.model.text import check_text, shown

SQL = statements_beside(__file__)

SETTLEMENTS = 5
"""How often a replay settles the ends of a flow that are still queued before it gives up."""
_UNHAPPY = frozenset({TerminalOutcome.FAILED, TerminalOutcome.CANCELLED, TerminalOutcome.EXPIRED})
_DEFAULTS = ExecutionPolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """The checked arguments of a replay."""

    execution_id: ExecutionId
    partition_key: int
    uuid: UUID | str
    flow_id: FlowId | None
    reason: str | None
    requested_by: str | None
    allows_cancelled_flow: bool

    @property
    def key(self) -> dict[str, object]:
        """The key of the execution, as parameters."""
        return {"partition_key": self.partition_key, "execution_id": self.uuid}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """The dependencies of a replayed execution."""

    unsatisfied: int = 0
    has_been_reset: bool = False
    succeeded: list[UUID] = field(default_factory=list)
    """The edges made unsatisfied again whose upstream has succeeded since they became impossible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """A replay that the transaction has written."""

    public_state: PublicState
    work: list[Record]
    has_flow_changed: bool = False
    resolved: ResolvedEdges | None = None


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
        partition_key, uuid = row_key(parsed)
        reason = None if reason is None else check_text(reason, "reason")
        requested_by = None if requested_by is None else check_text(requested_by, "requested_by")
        if type(allow_cancelled_flow) is not bool:
            raise error(
                "invalid_input", f"allow_cancelled_flow: expected True or False, got {shown(allow_cancelled_flow)}"
            )

        async def replay(transaction: Transaction) -> _Done | FlowId:
            flow_id = await read_flow_of(transaction, partition_key, uuid)
            request = _Request(
                execution_id=parsed,
                partition_key=partition_key,
                uuid=uuid,
                flow_id=flow_id,
                reason=reason,
                requested_by=requested_by,
                allows_cancelled_flow=allow_cancelled_flow,
            )
            return await self._replay(transaction, request)

        for _ in range(SETTLEMENTS):
            done = await self._store.transact(replay, execution_id=parsed)
            if isinstance(done, _Done):
                await self._after_commit(done)
                return Replayed(public_state=done.public_state)
            # The edges behind the end are resolved by its outcome, not by that of the replay.
            await self._cascade.settle_flow(partition_key, done)
        raise error(
            "retry_exhausted",
            f"the edges behind the end of execution {parsed} are still being resolved: {SETTLEMENTS} tries failed; "
            "nothing was written, repeat the call",
        )

    async def _replay(self, transaction: Transaction, request: _Request) -> _Done | FlowId:
        """Replay an execution, or return its flow if its end must be settled before."""
        flow = None
        if request.flow_id is not None:
            flow = await lock_flow(transaction, request.partition_key, request.flow_id)
        locked = await lock_execution(transaction, request.execution_id)
        if locked.lifecycle_phase != "terminal":
            raise error(
                "execution_not_terminal",
                f"execution {request.execution_id} is {locked.lifecycle_phase}; only ended ones are replayed",
            )
        (ended,) = await transaction.fetch(SQL.read_ended, **request.key)
        policy = read_stored_policy(ended["policy"]) or _DEFAULTS
        self._check(request, flow, ended["replay_count"], policy)
        if flow is not None and await self._is_queued(transaction, request):
            return FlowId(flow.flow_id)

        is_skipped = flow is not None and locked.terminal_outcome == TerminalOutcome.SKIPPED
        group = await self._group(transaction, request, ended, is_skipped=is_skipped)
        await self._take_end(transaction, request, ended)
        details: dict[str, object] = {"branch": "skipped_flow_member" if is_skipped else "normal"}
        if is_skipped:
            details["groups_reset"] = int(group.has_been_reset)
        timeouts = policy.timeout_policy
        work = await transaction.fetch(
            SQL.replay_locked,
            **request.key,
            **target_parameters(REPLAYED_BLOCKED if group.unsatisfied else REPLAYED),
            deadline_ms=None if timeouts is None else timeouts.execution_deadline_ms,
            detail=f"{group.unsatisfied} dep(s) unsatisfied after replay" if group.unsatisfied else None,
            reason=request.reason,
            requested_by=request.requested_by,
            replay_type=details["branch"],
            event_details=msgspec.json.encode(details).decode(),
        )
        if flow is None:
            return _Done(public_state=PublicState.WAITING, work=work)
        return await self._follow(transaction, request, flow, group, ended["terminal_outcome"], work)

    @staticmethod
    def _check(request: _Request, flow: LockedFlow | None, replay_count: int, policy: ExecutionPolicy) -> None:
        if flow is not None and flow.public_flow_state == FlowState.CANCELLED and not request.allows_cancelled_flow:
            raise error(
                "flow_already_terminal",
                f"execution {request.execution_id} belongs to flow {flow.flow_id}, which was cancelled; "
                "to replay it nevertheless, set allow_cancelled_flow",
            )
        if replay_count >= policy.max_replay_count:
            raise error(
                "max_replays_exhausted",
                f"execution {request.execution_id} was replayed {replay_count} times, and its policy allows "
                f"{policy.max_replay_count} (max_replay_count); submit it again as a new execution",
            )

    @staticmethod
    async def _is_queued(transaction: Transaction, request: _Request) -> bool:
        rows = await transaction.fetch(SQL.read_is_queued, **request.key, flow_id=request.flow_id)
        return bool(rows[0]["is_queued"])

    @staticmethod
    async def _group(transaction: Transaction, request: _Request, ended: Record, *, is_skipped: bool) -> _Group:
        """Reset the dependencies of a member that were impossible, and return what it waits for.

        A member that was cancelled before its dependencies became impossible is treated like a skipped one, as it would
        run without them otherwise.
        """
        if ended["group_state"] == "impossible" or (is_skipped and ended["group_state"] is not None):
            (row,) = await transaction.fetch(SQL.reset_group, **request.key, flow_id=request.flow_id)
            return _Group(unsatisfied=row["unsatisfied"], has_been_reset=True, succeeded=row["succeeded"])
        return _Group(unsatisfied=ended["unresolved"] if ended["group_state"] == "pending" else 0)

    async def _take_end(self, transaction: Transaction, request: _Request, ended: Record) -> None:
        """Remove the execution from the entry of retained with its end, which counts it."""
        retention_ms = self._store.rules.retention_ms if ended["retention_ms"] is None else ended["retention_ms"]
        end = {**request.key, "ended_at": ended["ended_at"]}
        found = await transaction.fetch(SQL.lock_end, **end, retain_until=ended["ended_at"] + retention_ms)
        # Retention has held it with its flow, or the setting was another one when it ended.
        for within_ms in (RECHECK_MS, None):
            found = found or await transaction.fetch(SQL.lock_end_anywhere, **end, within_ms=within_ms)
        if found:
            await transaction.fetch(SQL.take_end, **end, retain_until=found[0]["retain_until"])

    async def _follow(
        self,
        transaction: Transaction,
        request: _Request,
        flow: LockedFlow,
        group: _Group,
        outcome: str,
        work: list[Record],
    ) -> _Done:
        """Count the member as live again, and resolve its edges from upstreams that have succeeded meanwhile."""
        await transaction.fetch(SQL.delete_pending_cancels, **request.key, flow_id=request.flow_id)
        change = MemberChange(
            partition_key=flow.partition_key,
            flow_id=flow.flow_id,
            live=1,
            unhappy=-int(outcome in _UNHAPPY),
            now_live=FlowState.BLOCKED if group.unsatisfied else FlowState.OPEN,
        )
        has_flow_changed = await change_members(transaction, [change])
        if not group.unsatisfied:
            return _Done(public_state=PublicState.WAITING, work=work, has_flow_changed=has_flow_changed)
        resolved = None
        public_state = PublicState.WAITING_CHILDREN
        if group.succeeded:
            edges = [(edge_id, CompletionOutcome.SUCCESS) for edge_id in group.succeeded]
            resolved = await self._resolver.resolve_edges(transaction, flow, edges)
            (row,) = await transaction.fetch(SQL.read_replayed, **request.key)
            public_state = PublicState(row["public_state"])
        return _Done(public_state=public_state, work=[], has_flow_changed=has_flow_changed, resolved=resolved)

    async def _after_commit(self, done: _Done) -> None:
        wakeups = self._store.wakeups
        wakeups.events(EventFamily.LEASE, EventFamily.OPERATOR)
        if done.work:
            wakeups.work_of(done.work)
        if done.resolved is not None:
            await self._resolver.after_commit(done.resolved)
