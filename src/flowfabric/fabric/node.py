"""The nodes of a flow: what stands for a result that does not exist yet, and groups of nodes to wait for."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from flowfabric.model.edge import AllOfEdges, AnyOfEdges, EdgePolicy, OnSatisfied, QuorumOfEdges
from flowfabric.model.errors import EngineError, error
from flowfabric.model.text import listed, shown

if TYPE_CHECKING:
    from flowfabric.fabric.flow import Flow
    from flowfabric.fabric.task import Task

Value = TypeVar("Value")

_OPERATORS = (
    "await",
    "iter",
    "next",
    "aiter",
    "anext",
    "enter",
    "exit",
    "aenter",
    "aexit",
    "bool",
    "len",
    "getitem",
    "setitem",
    "delitem",
    "contains",
    "call",
    "str",
    "format",
    "bytes",
    "int",
    "float",
    "complex",
    "index",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "radd",
    "iadd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "floordiv",
    "rfloordiv",
    "mod",
    "rmod",
    "divmod",
    "pow",
    "rpow",
    "matmul",
    "and",
    "rand",
    "or",
    "ror",
    "xor",
    "rxor",
    "lshift",
    "rshift",
    "neg",
    "pos",
    "abs",
    "invert",
    "round",
    "reversed",
    "fspath",
)
"""The special methods that would use a node as if it were the result."""


class Pending:
    """Stands for a value that exists only while the flow runs, and refuses to be used as one."""

    __slots__ = ()

    def _what(self) -> str:
        raise NotImplementedError

    def _misuse(self) -> str:
        raise NotImplementedError

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to read an attribute of a result that does not exist yet."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{self._what()} has no {name!r} yet: {self._misuse()}")

    def __eq__(self, other: object) -> bool:
        """Compare with another node; refuse to compare with a value."""
        if self is other:
            return True
        if isinstance(other, Pending):
            return False
        raise TypeError(f"{self._what()} cannot be compared yet: {self._misuse()}")

    def __hash__(self) -> int:
        """Return a hash of the identity."""
        return id(self) >> 4


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Pending, *_: object) -> NoReturn:
        raise TypeError(f"{self._what()} has no value yet: {self._misuse()}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Refuse to use a result that does not exist yet."
    return refuse


for _name in _OPERATORS:
    setattr(Pending, f"__{_name}__", _refusing(f"__{_name}__"))


class Node(Pending):
    """An execution that a flow will have; to a type checker it is the result of its task."""

    __slots__ = ("_flow", "_group", "_index", "_task", "_upstreams", "_uuid")

    def __init__(self, flow: "Flow", index: int, task: "Task[..., ..., Any]", uuid: str) -> None:
        self._flow = flow
        self._index = index
        self._task = task
        self._uuid = uuid
        self._upstreams: dict[int, None] = {}
        """The indices of the nodes it waits for, in the order in which they were given."""
        self._group: Group | None = None
        """The any_of or quorum that it waits for."""

    def __repr__(self) -> str:
        """Return `<node 3 of flow 'nightly': task 'load'>`."""
        return f"<{self._what()}: task {self._task.name!r}>"

    def _what(self) -> str:
        return f"node {self._index + 1} of flow {self._flow.kind!r}"

    def _misuse(self) -> str:
        return (
            f"it is the result of task {self._task.name!r}, which runs after the flow is submitted; pass the node to "
            "another task with flow.add(...), or read the result with await flow_run.run(node).result()"
        )


class Group(Pending):
    """Nodes to wait for, made by `all_of`, `any_of` or `quorum`."""

    __slots__ = ("_cancels_remaining", "_name", "_needs", "_nodes")

    def __init__(self, name: str, nodes: Sequence[Node], needs: int | None, *, cancels_remaining: bool) -> None:
        self._name = name
        self._nodes = nodes
        self._needs = needs
        """How many must succeed; None for all of them."""
        self._cancels_remaining = cancels_remaining

    def __repr__(self) -> str:
        """Return `<any_of 3 nodes>`."""
        return f"<{self._what()}>"

    def _what(self) -> str:
        needs = f"({self._needs})" if self._name == "quorum" else ""
        return f"{self._name}{needs} of {len(self._nodes)} nodes"

    def _misuse(self) -> str:
        return "the results exist only after the flow is submitted; pass it to a task with flow.add(...)"

    @property
    def _policy(self) -> EdgePolicy:
        """What the engine stores for a node that waits for this group."""
        effect = OnSatisfied.CANCEL_REMAINING if self._cancels_remaining else OnSatisfied.LET_RUN
        if self._needs is None:
            return AllOfEdges()
        return AnyOfEdges(effect) if self._name == "any_of" else QuorumOfEdges(self._needs, effect)


def all_of(nodes: Iterable[Value]) -> list[Value]:
    """Wait for all of these nodes: the argument is the list of their results, in this order.

    A plain list of nodes means the same; `all_of` also takes any other iterable, and refuses an empty one.
    """
    return cast("list[Value]", Group("all_of", _nodes_of(nodes, "all_of"), None, cancels_remaining=False))


def any_of(nodes: Iterable[Value], *, cancel_remaining: bool = False) -> Value:
    """Wait for the first of these nodes that succeeds: the argument is its result.

    With `cancel_remaining` the others are cancelled then. The node that takes the result is skipped if none succeeds.
    """
    found = _distinct(_nodes_of(nodes, "any_of"), "any_of")
    return cast("Value", Group("any_of", found, 1, cancels_remaining=_checked_flag(cancel_remaining, "any_of")))


def quorum(k: int, *, of: Iterable[Value], cancel_remaining: bool = False) -> list[Value]:
    """Wait for the first k of these nodes that succeed: the argument is the list of their k results, the first first.

    With `cancel_remaining` the others are cancelled then. The node that takes the results is skipped as soon as fewer
    than k can still succeed.
    """
    found = _distinct(_nodes_of(of, "quorum"), "quorum")
    if type(k) is not int or not 1 <= k <= len(found):
        raise error(
            "invalid_input",
            f"quorum: k must be a whole number from 1 to {len(found)}, the number of nodes, got {shown(k)}",
        )
    return cast("list[Value]", Group("quorum", found, k, cancels_remaining=_checked_flag(cancel_remaining, "quorum")))


def _nodes_of(given: object, name: str) -> list[Node]:
    if isinstance(given, Node):
        raise TypeError(f"{name}: expected a list of nodes, got one node; write {name}([node])")
    if isinstance(given, Group):
        raise TypeError(f"{name}: expected a list of nodes, got {given!r}; groups cannot be nested")
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected a list of nodes made by flow.add(...), got {shown(given)}")
    nodes = list(given)
    if wrong := [each for each in nodes if not isinstance(each, Node)]:
        advice = "groups cannot be nested" if isinstance(wrong[0], Group) else "make nodes with flow.add(...)"
        raise TypeError(f"{name}: expected only nodes, got {shown(wrong[0])}; {advice}")
    if not nodes:
        advice = "pass the list itself where there may be none" if name == "all_of" else "it takes at least one"
        raise error("invalid_input", f"{name}: no nodes were given; {advice}")
    flows = list(dict.fromkeys(node._flow for node in nodes))
    if len(flows) > 1:
        raise _of_another_flow(nodes[[node._flow for node in nodes].index(flows[1])], flows[0], name)
    return nodes


def _distinct(nodes: list[Node], name: str) -> list[Node]:
    if len(set(map(id, nodes))) < len(nodes):
        twice = next(node for nth, node in enumerate(nodes) if any(node is other for other in nodes[:nth]))
        raise error("invalid_input", f"{name}: {twice!r} is given twice; it can succeed only once")
    return nodes


def _checked_flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise error("invalid_input", f"{name}: cancel_remaining must be True or False, got {shown(value)}")
    return value


def _of_another_flow(node: Node, flow: "Flow", where: str) -> EngineError:
    return error(
        "invalid_input",
        f"{where}: {node!r} belongs to another flow than {flow!r}; nodes can only be used in the flow that they were "
        "added to",
    )


def check_flow_of(nodes: Iterable[Node], flow: "Flow", where: str) -> None:
    """Refuse nodes of another flow."""
    for node in nodes:
        if node._flow is not flow:
            raise _of_another_flow(node, flow, where)


def shown_nodes(nodes: Iterable[Node]) -> str:
    """Return nodes for a message."""
    return listed([repr(node) for node in nodes], joint=" -> ", most=10)
