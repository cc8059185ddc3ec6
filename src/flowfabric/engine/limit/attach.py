"""Attach budgets and quotas to lanes, namespaces, execution kinds and flows."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.queues import QuotaKey, insert_quota_keys, lock_limits, set_queue_limits
from flowfabric.engine.execution.limits import LimitRules
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.ids import FlowId, check_lane_id, flow_partition, parse_uuid
from flowfabric.model.limit import (
    MAX_BUDGETS,
    AlreadyAttached,
    Attached,
    Attachments,
    Detached,
    NotAttached,
    ScopeType,
    other_quota,
    too_many_budgets,
)
from flowfabric.model.text import check_short, shown, word_of

SQL = statements_beside(__file__)

BUDGET, QUOTA = "budget", "quota"


class Scope(NamedTuple):
    """What limits are attached to."""

    scope_type: ScopeType
    scope_id: str

    def __str__(self) -> str:
        """Return how messages name it."""
        return f"{self.scope_type} {shown(self.scope_id)}"


class Attach:
    """The operations that attach limits."""

    def __init__(self, store: Store, rules: LimitRules, detached: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._rules = rules
        self._detached = detached

    async def attach_budget(
        self, scope_type: ScopeType | str, scope_id: UUID | str, budget_id: UUID | str
    ) -> Attached | AlreadyAttached:
        """Let a budget limit all executions of a lane, a namespace, a kind or a flow, also those that are queued.

        A flow gets its limits before its first member.
        """
        scope = check_scope(scope_type, scope_id)
        return await self._attach(scope, BUDGET, parse_uuid(budget_id, "budget_id"))

    async def attach_quota(
        self, scope_type: ScopeType | str, scope_id: UUID | str, quota_policy_id: UUID | str
    ) -> Attached | AlreadyAttached:
        """Let a quota limit all executions of a lane, a namespace, a kind or a flow, also those that are queued.

        A quota that takes its key from the executions counts those that are queued already by the key `default`.
        """
        scope = check_scope(scope_type, scope_id)
        return await self._attach(scope, QUOTA, parse_uuid(quota_policy_id, "quota_policy_id"))

    async def detach_budget(
        self, scope_type: ScopeType | str, scope_id: UUID | str, budget_id: UUID | str
    ) -> Detached | NotAttached:
        """End what attach_budget began; the members of a flow keep its limits, so it can do so before its first."""
        scope = check_scope(scope_type, scope_id)
        return await self._detach(scope, BUDGET, parse_uuid(budget_id, "budget_id"))

    async def detach_quota(
        self, scope_type: ScopeType | str, scope_id: UUID | str, quota_policy_id: UUID | str
    ) -> Detached | NotAttached:
        """End what attach_quota began; the members of a flow keep its limits, so it can do so before its first."""
        scope = check_scope(scope_type, scope_id)
        return await self._detach(scope, QUOTA, parse_uuid(quota_policy_id, "quota_policy_id"))

    async def list_attachments(self, scope_type: ScopeType | str, scope_id: UUID | str) -> Attachments:
        """The limits of a lane, a namespace, a kind or a flow; none if it does not exist."""
        scope = check_scope(scope_type, scope_id)
        rows = await self._store.fetch(SQL.list_attachments, **scope._asdict())
        return Attachments(
            budget_ids=tuple(row["limit_id"] for row in rows if row["limit_type"] == BUDGET),
            quota_policy_id=next((row["limit_id"] for row in rows if row["limit_type"] == QUOTA), None),
        )

    async def list_quotas_of_kinds(self, kinds: Sequence[str]) -> dict[str, UUID]:
        """The quota policies that are attached to execution kinds, by kind."""
        rows = await self._store.fetch(SQL.list_quotas_of_kinds, kinds=list(kinds)) if kinds else []
        return {row["scope_id"]: row["limit_id"] for row in rows}

    async def _attach(self, scope: Scope, limit_type: str, limit_id: UUID) -> Attached | AlreadyAttached:
        async def attach(transaction: Transaction) -> tuple[Attached | AlreadyAttached, list[str]]:
            has_members = await self._lock(transaction, scope)
            attached = await transaction.fetch(SQL.list_attachments, **scope._asdict())
            if any(row["limit_id"] == limit_id and row["limit_type"] == limit_type for row in attached):
                return AlreadyAttached(), []
            _check_room(scope, limit_type, limit_id, attached)
            if has_members:
                raise _has_members(scope, limit_type)
            quota_key_no = None
            if limit_type == QUOTA and scope.scope_type is not ScopeType.FLOW:
                key = QuotaKey(limit_id)
                quota_key_no = (await insert_quota_keys(transaction, [key], self._store.rules.partitions.quota))[key]
            await transaction.fetch(
                SQL.insert_attachment,
                **scope._asdict(),
                limit_type=limit_type,
                limit_id=limit_id,
                quota_key_no=quota_key_no,
            )
            return Attached(), await self._apply(transaction, scope)

        answer, lanes = await self._store.transact(attach)
        self._wake(lanes)
        return answer

    async def _detach(self, scope: Scope, limit_type: str, limit_id: UUID) -> Detached | NotAttached:
        async def detach(transaction: Transaction) -> tuple[Detached | NotAttached, list[str]]:
            has_members = await self._lock(transaction, scope)
            attached = await transaction.fetch(SQL.list_attachments, **scope._asdict())
            if not any(row["limit_id"] == limit_id and row["limit_type"] == limit_type for row in attached):
                return NotAttached(), []
            if has_members:
                raise _has_members(scope, limit_type)
            await transaction.fetch(SQL.take_attachment, **scope._asdict(), limit_type=limit_type, limit_id=limit_id)
            return Detached(), await self._apply(transaction, scope)

        answer, lanes = await self._store.transact(detach)
        self._wake(lanes)
        if lanes:
            # Claims without admission pass over what is blocked.
            await self._detached()
        return answer

    async def _lock(self, transaction: Transaction, scope: Scope) -> bool:
        """Lock what decides about the attachments of a scope; return whether it is a flow with members."""
        if scope.scope_type is not ScopeType.FLOW:
            await lock_limits(transaction)
            return False
        flow_id = FlowId(UUID(scope.scope_id))
        rows = await transaction.fetch(
            SQL.lock_limited_flow,
            partition_key=flow_partition(flow_id, self._store.rules.partitions.flow),
            flow_id=flow_id,
        )
        if not rows:
            raise error("flow_not_found", scope.scope_id)
        return bool(rows[0]["node_count"])

    async def _apply(self, transaction: Transaction, scope: Scope) -> list[str]:
        """Give the queues of a scope their limits; return their lanes."""
        if scope.scope_type is ScopeType.FLOW:
            return []
        queues = await transaction.fetch(SQL.list_limited_queues, **scope._asdict())
        if queues:
            await set_queue_limits(transaction, [row["queue_no"] for row in queues])
        return sorted({row["lane_id"] for row in queues})

    def _wake(self, lanes: list[str]) -> None:
        self._rules.forget()
        for lane_id in lanes:
            self._store.wakeups.lane(lane_id)


def check_scope(scope_type: object, scope_id: object) -> Scope:
    """Return what limits are to be attached to."""
    kind = word_of(ScopeType, scope_type)
    if kind is None:
        raise error("invalid_input", f"scope_type: must be one of {', '.join(ScopeType)}, got {shown(scope_type)}")
    if kind is ScopeType.FLOW:
        return Scope(kind, str(parse_uuid(scope_id, "scope_id")))
    if kind is ScopeType.LANE:
        return Scope(kind, check_lane_id(scope_id, "scope_id"))
    return Scope(kind, check_short(scope_id, "scope_id"))


def _check_room(scope: Scope, limit_type: str, limit_id: UUID, attached: list[Record]) -> None:
    """Raise unless another limit of this type may be attached."""
    others = [row["limit_id"] for row in attached if row["limit_type"] == limit_type]
    if limit_type == QUOTA and others:
        raise other_quota(str(scope), limit_id, others[0])
    if limit_type == BUDGET and len(others) >= MAX_BUDGETS:
        raise too_many_budgets(str(scope), [*others, limit_id])


def _has_members(scope: Scope, limit_type: str) -> Exception:
    return error(
        "quota_attach_conflict" if limit_type == QUOTA else "budget_attach_conflict",
        f"{scope} has members: the limits of a flow are attached before its first member, or given when it is created",
    )
