"""Submit a whole flow: its members, edges and groups in one transaction."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Any
from uuid import UUID

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import short_column, short_columns, statements_beside
from flowfabric.engine.core.payload import INLINE_PAYLOAD_BYTES, any_large
from flowfabric.engine.core.wakeups import Work
from flowfabric.engine.execution.create import lane_refusal
from flowfabric.engine.execution.limits import LimitRules
from flowfabric.engine.execution.submit import until_deadline
from flowfabric.engine.flow.draft import Draft, Drafts, NewFlow
from flowfabric.engine.flow.limits import flow_limits, limit_columns
from flowfabric.engine.flow.row import check_flow_id, flow_exists
from flowfabric.engine.store import Store, error_of
from flowfabric.model.edge import EdgePolicy, edge_policy_columns
from flowfabric.model.errors import EngineError, TransportError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.flow import FlowAlreadySatisfied, FlowEdge, FlowNode, FlowSubmitted
from flowfabric.model.ids import EdgeId, format_execution_id, uuid7

SQL = statements_beside(__file__)

ROWS_PER_STATEMENT = 1_000
"""How many members, edges and groups, of each, one statement inserts: it takes much less than the statement timeout."""
BYTES_PER_STATEMENT = 8 * 2**20
"""How many bytes of inputs one statement inserts, if it inserts several."""
LOCK_TIMEOUT = "5s"
"""How long each try of a submission waits for another one of the same flow."""

_EMPTY = slice(0, 0)

_MEMBER_COLUMNS = (
    "execution_ids",
    "priorities",
    "input_payloads",
    "delays_until",
    "delays_ms",
    "deadlines_at",
    "instance_tags",
    "tags",
    "inbound_counts",
)
_SHAPE_COLUMNS = (
    "queue_nos",
    "route_nos",
    "lane_nos",
    "creator_identities",
    "payload_encodings",
    "policies",
    "deadlines_ms",
    "retentions_ms",
    "quota_weights",
)
_of_shape = itemgetter(
    "queue_no",
    "route_no",
    "lane_no",
    "creator_identity",
    "payload_encoding",
    "policy",
    "deadline_ms",
    "retention_ms",
    "quota_weight",
)
_EDGE_COLUMNS = ("edge_ids", "upstream_ids", "downstream_ids", "dependency_kinds", "data_passing_refs")
_GROUP_COLUMNS = ("group_policies", "ks", "effects", "group_edge_counts")


class SubmitFlow:
    """Submits whole flows, and retries for a limited time what failed by a fault of the store."""

    def __init__(self, store: Store, rules: LimitRules, *, patience_ms: int) -> None:
        self._store = store
        self._rules = rules
        self._drafts = Drafts(store, rules)
        self._patience = patience_ms / 1000

    async def submit_flow(
        self,
        *,
        flow_kind: str,
        namespace: str,
        nodes: Sequence[FlowNode | Mapping[str, Any]],
        edges: Sequence[FlowEdge | Mapping[str, Any]] = (),
        groups: Mapping[str, EdgePolicy | Mapping[str, Any]] | None = None,
        tags: Mapping[str, str] | None = None,
        flow_id: UUID | str | None = None,
        budget_ids: Sequence[UUID | str] = (),
        quota_policy_id: UUID | str | None = None,
    ) -> FlowSubmitted | FlowAlreadySatisfied:
        """Create a flow with all its members, edges and groups in one transaction; every member has its limits.

        The flow id is the idempotency key: if it is in use, nothing is compared or written. Give one, so that the call
        can be repeated when its answer was lost.
        """
        partition_key, parsed = check_flow_id(self._store, uuid7() if flow_id is None else flow_id)
        limits = flow_limits(budget_ids, quota_policy_id)
        draft: Draft | None = None

        async def submit() -> FlowSubmitted | FlowAlreadySatisfied:
            nonlocal draft
            if draft is None:
                if flow_id is not None and await flow_exists(self._store, partition_key, parsed):
                    return FlowAlreadySatisfied(flow_id=parsed)
                if self._rules.is_due:
                    await self._rules.refresh()
                new = NewFlow(flow_kind, namespace, tags, nodes, edges, groups, limits)
                draft = await self._drafts.check(partition_key, parsed, new)
            return await self._insert(draft, is_minted=flow_id is None)

        try:
            return await submit()
        except TransportError as fault:
            if not fault.retryable or not self._patience:
                raise
            failed = fault
        async for _ in until_deadline(self._patience):
            try:
                return await submit()
            except TransportError as fault:
                fault.outcome_unknown |= failed.outcome_unknown
                failed = fault
                if not fault.retryable:
                    break
            except EngineError as refused:
                # Another session holds the id: perhaps the first try, whose session has not ended yet.
                if refused.code != "retry_exhausted":
                    raise
        raise failed

    async def _insert(self, draft: Draft, *, is_minted: bool) -> FlowSubmitted | FlowAlreadySatisfied:
        await self._drafts.register(draft)
        namespace_no = await self._store.namespace_no(draft.namespace)
        first, *others = await self._parts(draft, namespace_no)

        async def insert(transaction: Transaction) -> list[Record]:
            rows = await transaction.fetch(SQL.insert_flow, **first)
            if rows[0]["is_new"]:
                for values in others:
                    rows += await transaction.fetch(SQL.insert_part, **values)
            return rows

        database = self._store.database
        while True:
            try:
                work = await (database.transact(insert) if others else database.fetch(SQL.insert_flow, first))
                if work[0]["is_new"]:
                    break
                flow = {"partition_key": draft.partition_key, "flow_id": draft.flow_id, **_own_ids(draft)}
                found = await database.fetch(SQL.read_submitted_flow, flow)
            except StoreFault as fault:
                if draft.given_ids and not fault.is_store_failure:
                    await self._refuse_existing(draft)
                raise error_of(fault, f"flow {draft.flow_id}") from fault
            if found and not found[0]["is_ours"] and not is_minted:
                return FlowAlreadySatisfied(flow_id=draft.flow_id)
            if found:
                # An earlier try has created it.
                break
            if (lane_no := work[0]["refusing_lane_no"]) is not None:
                raise self._refusal(draft, lane_no, work[0]["refusing_lane_state"])
            # The flow was deleted in between.
        self._wake(draft, work)
        return FlowSubmitted(
            flow_id=draft.flow_id,
            execution_ids=draft.execution_ids,
            edge_ids=[EdgeId(UUID(text)) for text in draft.edge_uuids],
            graph_revision=draft.graph_revision,
        )

    async def _refuse_existing(self, draft: Draft) -> None:
        """Raise if an id that the caller has given for a node is that of an execution."""
        ids = list(draft.given_ids)
        for first in range(0, len(ids), ROWS_PER_STATEMENT):
            part = ids[first : first + ROWS_PER_STATEMENT]
            rows = await self._store.fetch(
                SQL.list_existing_members, partition_key=draft.partition_key, execution_ids=part
            )
            if rows:
                uuid = str(rows[0]["execution_id"])
                execution_id = format_execution_id(draft.partition_key, uuid)
                raise error(
                    "idempotency_conflict",
                    f"nodes[{draft.given_ids[uuid]}].execution_id: execution {execution_id} exists already; leave "
                    "the id out, or give one that is not in use",
                )

    def _refusal(self, draft: Draft, lane_no: int, lane_state: str) -> EngineError:
        nth = next(nth for nth, member in enumerate(draft.members) if member.shape.columns["lane_no"] == lane_no)
        return lane_refusal(self._store.lane_id(lane_no), lane_state, f"nodes[{nth}].lane_id")

    def _wake(self, draft: Draft, rows: Sequence[Record]) -> None:
        """Wake the waiters for the work and the timers of a committed flow."""
        wakeups = self._store.wakeups
        work = []
        for row in rows:
            if row["place"] is not None:
                work.append(Work(self._store.lane_id(row["lane_no"]), row["route_no"], row["queue_no"], row["place"]))
            elif row["due_in_ms"] is not None:
                wakeups.timer(row["due_in_ms"])
        wakeups.work(work)
        if not rows[0]["is_new"]:
            # An earlier try has created the flow and did not learn where its executions are.
            for lane_id in {member.shape.lane_id for member in draft.members}:
                wakeups.lane(lane_id)
        instance_key = self._store.rules.instance_tag
        if any(member.tags and instance_key in member.tags for member in draft.members):
            wakeups.events(EventFamily.INSTANCE_TAG)

    async def _parts(self, draft: Draft, namespace_no: int) -> list[dict[str, object]]:
        """The values of the statements that insert a flow, one for each part of its members, edges and groups."""
        of_flow = {
            "partition_key": draft.partition_key,
            "flow_id": draft.flow_id,
            "namespace_no": namespace_no,
            "graph_revision": draft.graph_revision,
            "inline_payload_bytes": INLINE_PAYLOAD_BYTES,
        }
        found: list[dict[str, object]] = []
        parts = zip_longest(
            _slices([len(member.payload) for member in draft.members]),
            _slices([0] * len(draft.edge_uuids)),
            _slices([0] * len(draft.graph.policies)),
            fillvalue=_EMPTY,
        )
        for members, edges, groups in list(parts) or [(_EMPTY, _EMPTY, _EMPTY)]:
            of_part = {
                **self._member_columns(draft, members),
                **_edge_columns(draft, edges),
                **_group_columns(draft, groups),
            }
            found.append({**of_flow, **of_part})
            # Other tasks of the event loop have a turn.
            await asyncio.sleep(0)
        found[0] |= {**_flow_values(draft), "retention_ms": self._store.rules.retention_ms}
        return found

    def _member_columns(self, draft: Draft, part: slice) -> dict[str, object]:
        instance_tag = self._store.rules.instance_tag
        members, inbound = draft.members[part], draft.graph.inbound[part]
        own = [
            (
                member.uuid,
                member.priority,
                member.payload,
                member.delay_until,
                member.delay_ms,
                member.deadline_at,
                member.tags and member.tags.get(instance_tag),
                member.tags and msgspec.json.encode(member.tags).decode(),
                count,
            )
            for member, count in zip(members, inbound, strict=True)
        ]
        return {
            **short_columns(_MEMBER_COLUMNS, own),
            **short_columns(_SHAPE_COLUMNS, [_of_shape(member.shape.columns) for member in members]),
            "has_large_inputs": any_large(member.payload for member in members),
        }


def _own_ids(draft: Draft) -> dict[str, object]:
    """An id that only this call has minted, by which it recognises a flow that an earlier try has created.

    There is none if the caller has given the ids of all nodes and there are no edges.
    """
    if draft.edge_uuids:
        return {"minted_execution_id": None, "minted_edge_id": draft.edge_uuids[0]}
    return {"minted_execution_id": draft.minted_uuid, "minted_edge_id": None}


def _flow_values(draft: Draft) -> dict[str, object]:
    members = draft.members
    return {
        "flow_kind": draft.flow_kind,
        "node_count": len(draft.uuids),
        "edge_count": len(draft.edge_uuids),
        "latest_delay_until": max(
            (member.delay_until for member in members if member.delay_until is not None), default=0
        ),
        "longest_delay_ms": max((member.delay_ms for member in members if member.delay_ms is not None), default=0),
        "flow_lane_nos": list(dict.fromkeys(member.shape.columns["lane_no"] for member in members)),
        "tag_keys": list(draft.tags),
        "tag_values": list(draft.tags.values()),
        **limit_columns(draft.limits),
        "lock_timeout": LOCK_TIMEOUT,
    }


def _edge_columns(draft: Draft, part: slice) -> dict[str, object]:
    uuids, graph = draft.uuids, draft.graph
    columns = (
        draft.edge_uuids[part],
        [uuids[node] for node in graph.upstreams[part]],
        [uuids[node] for node in graph.downstreams[part]],
        graph.dependency_kinds[part],
        graph.data_passing_refs[part],
    )
    short = {name: short_column(column) for name, column in zip(_EDGE_COLUMNS, columns, strict=True)}
    return {"edges_before": part.start, **short}


def _group_columns(draft: Draft, part: slice) -> dict[str, object]:
    groups = list(islice(draft.graph.policies.items(), part.start, part.stop))
    rows = [(*edge_policy_columns(policy), draft.graph.inbound[node]) for node, policy in groups]
    return {"group_ids": [draft.uuids[node] for node, _ in groups], **short_columns(_GROUP_COLUMNS, rows)}


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Slices of items with these sizes in bytes, each for one statement."""
    first = size = 0
    for at, each in enumerate(sizes):
        if at - first == ROWS_PER_STATEMENT or (size + each > BYTES_PER_STATEMENT and at > first):
            yield slice(first, at)
            first, size = at, 0
        size += each
    if first < len(sizes):
        yield slice(first, len(sizes))
