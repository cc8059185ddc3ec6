"""The graph that a flow is submitted with: its nodes and edges by name, checked as a whole."""

from collections.abc import Mapping, Sequence
from operator import lt
from typing import Any, NamedTuple, TypeVar

from flowfabric.model.edge import MAX_REF_CHARACTERS, AllOfEdges, EdgePolicy, QuorumOfEdges, parse_edge_policy
from flowfabric.model.errors import EngineError, error
from flowfabric.model.flow import MAX_EDGES, MAX_NODES, FlowEdge, FlowNode
from flowfabric.model.text import check_length, check_short, did_you_mean, listed, shown

Part = TypeVar("Part", FlowNode, FlowEdge)

MAX_SHOWN_NODES = 20
"""How many nodes of a cycle a message names."""


class CheckedGraph(NamedTuple):
    """The edges of a checked graph as columns, with the positions of its nodes."""

    upstreams: Sequence[int]
    downstreams: Sequence[int]
    dependency_kinds: Sequence[str]
    data_passing_refs: Sequence[str | None]
    inbound: Sequence[int]
    """The number of inbound edges of each node."""
    policies: Mapping[int, EdgePolicy]
    """The policy of each node with inbound edges."""


def check_sizes(nodes: object, edges: object) -> None:
    """Reject anything except lists of as many nodes and edges as a call may have."""
    for field, items, most in (("nodes", nodes, MAX_NODES), ("edges", edges, MAX_EDGES)):
        if isinstance(items, str | bytes | bytearray) or not isinstance(items, Sequence):
            raise error("invalid_input", f"{field}: expected a list, got {shown(items)}")
        if len(items) > most:
            raise error("invalid_input", f"{field}: must have at most {most} items, got {len(items)}")


def part_of(value: Part | Mapping[str, Any], kind: type[Part], place: str) -> Part:
    """Return a node or an edge that is given as one, or as a mapping of its fields."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise error("invalid_input", f"{place}: expected a {kind.__name__} or a mapping, got {shown(value)}")
    fields = kind.__struct_fields__
    if unknown := [name for name in value if name not in fields]:
        hint = did_you_mean(str(unknown[0]), fields)
        raise error("invalid_input", f"{place}: has no field {shown(unknown[0])}{hint}")
    try:
        return kind(**value)
    except TypeError as refused:
        raise error("invalid_input", f"{place}: {str(refused).lower()}") from None


def add_name(names: dict[str, int], name: object, place: str) -> None:
    """Add the name of the next node, which no other node may have."""
    text = check_short(name, f"{place}.name")
    position = len(names)
    if names.setdefault(text, position) != position:
        raise error("invalid_input", f"{place}.name: nodes[{names[text]}] has the name {shown(text)} too")


def check_graph(
    names: Mapping[str, int],
    edges: Sequence[FlowEdge | Mapping[str, Any]],
    groups: Mapping[str, EdgePolicy | Mapping[str, Any]] | None,
) -> CheckedGraph:
    """Return the checked graph of these nodes, edges and groups; it has no cycle."""
    upstreams: list[int] = []
    downstreams: list[int] = []
    kinds: list[str] = []
    refs: list[str | None] = []
    inbound = [0] * len(names)
    kind: object = _UNCHECKED
    for nth, given in enumerate(edges):
        edge = given if type(given) is FlowEdge else part_of(given, FlowEdge, f"edges[{nth}]")
        # Most names are known; only the others pay for the text of an error.
        try:
            upstream, downstream = names[edge.upstream], names[edge.downstream]
        except (KeyError, TypeError):
            raise _unknown_node(edge, names, f"edges[{nth}]") from None
        if upstream == downstream:
            raise error("self_referencing_edge", f"edges[{nth}]: node {shown(edge.upstream)} cannot depend on itself")
        if edge.dependency_kind is not kind:
            kind = check_short(edge.dependency_kind, f"edges[{nth}].dependency_kind")
        ref = edge.data_passing_ref
        upstreams.append(upstream)
        downstreams.append(downstream)
        kinds.append(edge.dependency_kind)
        refs.append(
            None if ref is None else check_length(ref, f"edges[{nth}].data_passing_ref", MAX_REF_CHARACTERS) or None
        )
        inbound[downstream] += 1
    policies = {node: _DEFAULT for node, count in enumerate(inbound) if count} | _policies(groups, names, inbound)
    if cycle := find_cycle(len(names), upstreams, downstreams):
        texts = list(names)
        shown_nodes = listed([texts[node] for node in (*cycle, cycle[0])], joint=" -> ", most=MAX_SHOWN_NODES)
        raise error("cycle_detected", f"edges: {shown_nodes} is a cycle; remove one of these edges")
    return CheckedGraph(upstreams, downstreams, kinds, refs, inbound, policies)


_DEFAULT: EdgePolicy = AllOfEdges()
_UNCHECKED = object()


def _unknown_node(edge: FlowEdge, names: Mapping[str, int], place: str) -> EngineError:
    field = "downstream" if isinstance(edge.upstream, str) and edge.upstream in names else "upstream"
    name = getattr(edge, field)
    hint = did_you_mean(name, names) if isinstance(name, str) and len(names) <= MAX_SHOWN_NODES else ""
    return error("invalid_input", f"{place}.{field}: no node has the name {shown(name)}{hint}")


def _policies(
    groups: Mapping[str, EdgePolicy | Mapping[str, Any]] | None, names: Mapping[str, int], inbound: Sequence[int]
) -> dict[int, EdgePolicy]:
    """The policies that are given, by the positions of their nodes."""
    if groups is None:
        return {}
    if not isinstance(groups, Mapping):
        raise error("invalid_input", f"groups: expected a mapping of node names to policies, got {shown(groups)}")
    found: dict[int, EdgePolicy] = {}
    for name, given in groups.items():
        place = f"groups[{shown(name)}]"
        if name not in names:
            raise error("invalid_input", f"{place}: no node has this name")
        node = names[name]
        policy = parse_edge_policy(given, place)
        if not inbound[node]:
            raise error("invalid_input", f"{place}: the node has no inbound edges, so it needs no policy")
        if isinstance(policy, QuorumOfEdges) and policy.k > inbound[node]:
            raise error(
                "invalid_input",
                f"{place}: quorum k must be at most {inbound[node]}, the number of inbound edges, got {policy.k}",
            )
        found[node] = policy
    return found


def find_cycle(count: int, upstreams: Sequence[int], downstreams: Sequence[int]) -> list[int]:
    """Return the nodes of a cycle in the order of its edges, or an empty list if there is none."""
    if all(map(lt, upstreams, downstreams)):
        # Every edge leads to a later node.
        return []
    followers: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for upstream, downstream in zip(upstreams, downstreams, strict=True):
        followers[upstream].append(downstream)
        waiting[downstream] += 1
    free = [node for node in range(count) if not waiting[node]]
    for node in free:
        for downstream in followers[node]:
            waiting[downstream] -= 1
            if not waiting[downstream]:
                free.append(downstream)
    if len(free) == count:
        return []
    # Every node that still waits has an upstream node that does, so a walk upstream ends in a cycle.
    before = {
        downstream: upstream
        for upstream, downstream in zip(upstreams, downstreams, strict=True)
        if waiting[upstream] and waiting[downstream]
    }
    node = next(iter(before))
    seen: dict[int, int] = {}
    while node not in seen:
        seen[node] = len(seen)
        node = before[node]
    cycle = list(seen)[seen[node] :][::-1]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]
