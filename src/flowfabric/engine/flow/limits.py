"""The limits of flows: those that a flow is created with, and those that a new member gets."""

from collections.abc import Mapping, Sequence
from uuid import UUID

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.queues import UNLIMITED, QueueNames, QueueNumbers, plain_capabilities
from flowfabric.engine.execution.limits import NOTHING, Inherited, LimitRules, joined_limits
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.ids import FlowId, parse_uuid
from flowfabric.model.limit import Facts, check_budget_ids
from flowfabric.model.states import LifecyclePhase

SQL = statements_beside(__file__)

_read_tags = msgspec.json.Decoder(dict[str, str]).decode


def flow_limits(budget_ids: Sequence[UUID | str], quota_policy_id: UUID | str | None) -> Inherited | None:
    """Return the limits that every member of a new flow gets, None without any."""
    quota = None if quota_policy_id is None else parse_uuid(quota_policy_id, "quota_policy_id")
    budgets = check_budget_ids(budget_ids, "budget_ids")
    return None if quota is None and not budgets else Inherited(quota, None, budgets)


def limit_columns(limits: Inherited | None) -> dict[str, object]:
    """The parameters of a statement that stores the limits of a new flow."""
    budgets, quota = ((), None) if limits is None else (limits.budget_ids, limits.quota_policy_id)
    return {
        "limit_types": ["budget" for _ in budgets] + ([] if quota is None else ["quota"]),
        "limit_ids": [*budgets, *(() if quota is None else (quota,))],
    }


class MemberQueue:
    """The queue of an execution that becomes a member, with the limits of the flow; found before rows are locked."""

    def __init__(
        self,
        limits: Inherited,
        old_queue_no: int | None = None,
        queue: QueueNumbers | None = None,
        weight: int | None = None,
    ) -> None:
        self._limits = limits
        self._old_queue_no = old_queue_no
        self._queue = queue
        self._weight = weight

    async def move(
        self, transaction: Transaction, flow_id: FlowId, member: Record, key: Mapping[str, object]
    ) -> list[Record] | None:
        """Move a locked execution to the queue; return where it can be claimed now, None if the queue is outdated."""
        limits = limits_of_rows(await transaction.fetch(SQL.list_flow_limits, flow_id=str(flow_id)))
        if limits != self._limits or (self._queue is not None and member["queue_no"] != self._old_queue_no):
            return None
        if limits == NOTHING or (self._queue is not None and self._queue.queue_no == self._old_queue_no):
            return []
        if self._queue is None:
            # It was created, or left another flow with its deletion, since the queue was looked up.
            return None
        if member["lifecycle_phase"] in (LifecyclePhase.ACTIVE, LifecyclePhase.TERMINAL):
            raise error(
                "budget_attach_conflict" if self._limits.budget_ids else "quota_attach_conflict",
                f"flow {flow_id} has limits, and an execution that is {member['lifecycle_phase']} cannot get them: "
                "add it before a worker claims it, or create it with these limits",
            )
        return await transaction.fetch(
            SQL.move_to_queue,
            **key,
            queue_no=self._queue.queue_no,
            route_no=self._queue.route_no,
            quota_weight=self._weight,
        )


def limits_of_rows(rows: Sequence[Record]) -> Inherited:
    """The limits of a flow from its attachments."""
    budgets = tuple(row["limit_id"] for row in rows if row["limit_type"] == "budget")
    quota = next((row["limit_id"] for row in rows if row["limit_type"] == "quota"), None)
    return Inherited(quota, None, budgets)


class FlowLimits:
    """Finds the queues of new members."""

    def __init__(self, store: Store, rules: LimitRules) -> None:
        self._store = store
        self._rules = rules

    async def queue_of(self, flow_id: FlowId, key: Mapping[str, object]) -> MemberQueue:
        """The queue that an execution has as a member of a flow."""
        limits = limits_of_rows(await self._store.fetch(SQL.list_flow_limits, flow_id=str(flow_id)))
        if limits == NOTHING:
            return MemberQueue(limits)
        rows = await self._store.fetch(SQL.read_member_queue, **key)
        if not rows or (row := rows[0])["flow_id"] is not None:
            return MemberQueue(limits)
        own = Inherited(row["quota_policy_id"], row["key"], tuple(row["own_budget_ids"] or ()), row["fair_key"] or "")
        joined = joined_limits(own, limits)
        if self._rules.is_due:
            await self._rules.refresh()
        names = QueueNames(
            row["lane_id"], row["execution_kind"], row["namespace"], plain_capabilities(row["required"]), UNLIMITED
        )
        found = None
        while found is None:
            looked = await self._rules.look_up((), () if (policy := joined.quota_policy_id) is None else (policy,))
            found = self._rules.limits_of(names, None, joined, looked.undefined)
        admission, weight = found.of(Facts(_read_tags(row["tags"] or "{}"), row["input_payload"]))
        queue = await self._store.add_queue(names._replace(admission=admission), registered_by=row["creator_identity"])
        return MemberQueue(limits, row["queue_no"], queue, weight)
