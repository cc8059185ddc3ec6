"""Drafts of flows: checked as a whole before anything is written, with the ids of all their parts."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from flowfabric.engine.core.queues import QueueNames
from flowfabric.engine.execution.checking import Submission, Submissions
from flowfabric.engine.execution.limits import NOTHING, Inherited, LimitRules, Looked, own_limits, quota_policy_of
from flowfabric.engine.store import Store
from flowfabric.model.edge import EdgePolicy
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import NewExecution
from flowfabric.model.flow import FlowEdge, FlowNode
from flowfabric.model.graph import CheckedGraph, add_name, check_graph, check_sizes, part_of
from flowfabric.model.ids import (
    ExecutionId,
    FlowId,
    check_lane_id,
    id_prefix,
    mint_uuid_texts,
    parse_execution_id,
    row_key,
)
from flowfabric.model.policy import ExecutionPolicy, parse_policy
from flowfabric.model.tag import check_tags
from flowfabric.model.text import check_short, check_text

NODES_PER_TURN = 1_000
"""How many nodes are checked before other tasks of the event loop have a turn."""

_FIELDS = {"invalid_tag_key": "tags: ", "invalid_policy_json": "policy: ", "invalid_capabilities": "policy: "}
"""The field of a node that errors are about whose message does not begin with it."""

_Policies: TypeAlias = dict[int, tuple[Mapping[str, Any], ExecutionPolicy | None]]
"""Parsed policies by the ids of their mappings, which are kept: a new object may get the id of a deleted one."""


class NewFlow(NamedTuple):
    """A flow as the caller gives it."""

    flow_kind: str
    namespace: str
    tags: Mapping[str, str] | None
    nodes: Sequence[FlowNode | Mapping[str, Any]]
    edges: Sequence[FlowEdge | Mapping[str, Any]]
    groups: Mapping[str, EdgePolicy | Mapping[str, Any]] | None
    limits: Inherited | None
    """The limits of the flow, None without any."""


@dataclass(kw_only=True, slots=True)
class Draft:
    """A checked flow; every try to insert it uses the same ids."""

    partition_key: int
    flow_id: FlowId
    flow_kind: str
    namespace: str
    tags: Mapping[str, str]
    names: Mapping[str, int]
    graph: CheckedGraph
    news: Sequence[NewExecution]
    uuids: Sequence[str]
    given_ids: Mapping[str, int]
    """The positions of the nodes whose ids the caller has given, by these ids."""
    edge_uuids: Sequence[str]
    limits: Inherited | None
    members: Sequence[Submission]
    """The nodes in order; those that need something of the store are missing until `Drafts.register`."""
    policies: Sequence[ExecutionPolicy | None]
    """The policies of those that are missing."""

    @property
    def execution_ids(self) -> dict[str, ExecutionId]:
        """The ids of the members by the names of their nodes."""
        prefix = id_prefix(self.partition_key)
        return {name: ExecutionId(prefix + uuid) for name, uuid in zip(self.names, self.uuids, strict=True)}

    @property
    def minted_uuid(self) -> str | None:
        """The id of a node that only this call knows; None if the caller has given all ids."""
        return next((uuid for uuid in self.uuids if uuid not in self.given_ids), None)

    @property
    def graph_revision(self) -> int:
        """The revision after every member and every edge was added."""
        return len(self.uuids) + len(self.edge_uuids)


class Drafts:
    """Checks flows, and caches what many of their nodes share."""

    def __init__(self, store: Store, rules: LimitRules) -> None:
        self._store = store
        self._rules = rules
        self._submissions = Submissions(store, rules)

    async def check(self, partition_key: int, flow_id: FlowId, new: NewFlow) -> Draft:
        """Check a whole flow without writing anything."""
        check_short(new.flow_kind, "flow_kind")
        check_short(new.namespace, "namespace")
        tags = check_tags(new.tags)
        check_sizes(new.nodes, new.edges)
        prefix = id_prefix(partition_key)
        uuids = mint_uuid_texts(len(new.nodes))
        given_ids: dict[str, int] = {}
        names: dict[str, int] = {}
        news: list[NewExecution] = []
        members: list[Submission] = []
        missing: list[ExecutionPolicy | None] = []
        policies: _Policies = {}
        looked = Looked({}, flow=new.limits)
        for nth, (given, uuid) in enumerate(zip(new.nodes, tuple(uuids), strict=True)):
            node = part_of(given, FlowNode, f"nodes[{nth}]")
            add_name(names, node.name, f"nodes[{nth}]")
            if node.execution_id is not None:
                uuids[nth] = uuid = _given_uuid(node.execution_id, partition_key, flow_id, given_ids, nth)
            try:
                execution = _execution_of(node, new.namespace, prefix + uuid, policies)
                member = self._submissions.check(execution, uuid, looked)
                if member is None:
                    missing.append(_policy_of(execution, new.limits))
                else:
                    members.append(member)
            except EngineError as refused:
                raise _error_of_node(nth, refused) from None
            news.append(execution)
            if nth % NODES_PER_TURN == NODES_PER_TURN - 1:
                await asyncio.sleep(0)
        graph = check_graph(names, new.edges, new.groups)
        return Draft(
            partition_key=partition_key,
            flow_id=flow_id,
            flow_kind=new.flow_kind,
            namespace=new.namespace,
            tags=tags,
            names=names,
            graph=graph,
            news=news,
            uuids=uuids,
            given_ids=given_ids,
            edge_uuids=mint_uuid_texts(len(graph.upstreams)),
            limits=new.limits,
            members=members,
            policies=missing,
        )

    async def register(self, draft: Draft) -> None:
        """Create the queues that the store does not have yet, so that every member has the numbers of its queue."""
        if len(draft.members) == len(draft.uuids):
            return
        named = {policy for each in draft.policies if (policy := quota_policy_of(each)) is not None}
        if draft.limits is not None and draft.limits.quota_policy_id is not None:
            named.add(draft.limits.quota_policy_id)
        # What is known of limits may change in between, and then the queues too.
        while len(draft.members) < len(draft.uuids):
            looked = await self._rules.look_up((), named, draft.limits)
            queues: dict[QueueNames, str] = {}
            for execution in draft.news:
                if (names := self._submissions.queue_names(execution, looked)) is not None:
                    queues.setdefault(names, execution.creator_identity)
            await self._store.add_queues(queues)
            members = []
            for execution, uuid in zip(draft.news, draft.uuids, strict=True):
                if (member := self._submissions.check(execution, uuid, looked)) is not None:
                    members.append(member)
            draft.members = members


def _error_of_node(nth: int, refused: EngineError) -> EngineError:
    return error(refused.code, f"nodes[{nth}].{_FIELDS.get(refused.code, '')}{refused.detail}")


def _given_uuid(given: object, partition_key: int, flow_id: FlowId, given_ids: dict[str, int], nth: int) -> str:
    """Return the UUID of an execution id given for a node; no other node may have it."""
    try:
        partition, uuid = row_key(parse_execution_id(given))
    except EngineError as refused:
        raise error(refused.code, f"nodes[{nth}].execution_id: {refused.detail}") from None
    if partition != partition_key:
        raise error(
            "invalid_input",
            f"nodes[{nth}].execution_id: {given} is of partition {partition}, but flow {flow_id} is of partition "
            f"{partition_key}; make it with mint_for_flow or deterministic_for_flow",
        )
    if (first := given_ids.setdefault(uuid, nth)) != nth:
        raise error("invalid_input", f"nodes[{nth}].execution_id: nodes[{first}] has the id {given} too")
    return uuid


def _execution_of(node: FlowNode, namespace: str, execution_id: str, policies: _Policies) -> NewExecution:
    policy = node.policy
    if isinstance(policy, Mapping):
        # A dictionary cannot be hashed, so one that many nodes share is parsed once here.
        if (known := policies.get(id(policy))) is None:
            known = policies[id(policy)] = (policy, parse_policy(policy))
        policy = known[1]
    return NewExecution(
        namespace=namespace,
        lane_id=node.lane_id,
        execution_kind=node.execution_kind,
        input_payload=node.input_payload,
        priority=node.priority,
        creator_identity=node.creator_identity,
        execution_id=execution_id,
        payload_encoding=node.payload_encoding,
        tags=node.tags,
        policy=policy,
        delay_until=node.delay_until,
        delay_ms=node.delay_ms,
        execution_deadline_at=node.execution_deadline_at,
    )


def _policy_of(execution: NewExecution, limits: Inherited | None) -> ExecutionPolicy | None:
    """The policy of an execution that could not be checked without the store; raises if that cannot help."""
    check_lane_id(execution.lane_id)
    check_text(execution.execution_kind, "execution_kind")
    check_text(execution.creator_identity, "creator_identity")
    check_tags(execution.tags)
    policy = parse_policy(execution.policy)
    own_limits(policy, limits or NOTHING)
    return policy
