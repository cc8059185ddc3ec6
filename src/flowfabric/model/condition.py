"""Conditions: the tree of signals a suspension waits for, its JSON form and its structure checks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from flowfabric.model.errors import EngineError, error
from flowfabric.model.policy_checks import set_field
from flowfabric.model.text import Word, check_range, check_text, shorten, shown, word_of

MAX_DEPTH = 4
MAX_NODES = 100_000
"""The largest number of nodes of a tree; a subtree used in several places counts once for each, as in its JSON."""
MAX_COUNT = 2**32 - 1
OPERATOR_ONLY_NAME = "__operator_only__"
TIMEOUT_ONLY_NAME = "__timeout_only__"
RESERVED_NAMES = frozenset({OPERATOR_ONLY_NAME, TIMEOUT_ONLY_NAME})

# Deeper than any valid tree, and well within the recursion limit.
_DEEPEST_READ = 32
# The largest number of nodes in the repr of a tree.
_MAX_REPR_NODES = 200
_ROOT = "<root>"
_NEST_LESS = f"nest AllOf and Count at most {MAX_DEPTH} levels deep"


@dataclass(frozen=True, slots=True)
class ByName:
    """Matches signals of exactly this name."""

    name: str

    def __post_init__(self) -> None:
        """Reject a name that is not text."""
        check_text(self.name, "signal_name")


@dataclass(frozen=True, slots=True)
class Wildcard:
    """Matches signals of every name that is not reserved."""


Matcher: TypeAlias = ByName | Wildcard


class CountKind(StrEnum):
    """What a count counts."""

    DISTINCT_WAITPOINTS = "DistinctWaitpoints"
    DISTINCT_SIGNALS = "DistinctSignals"
    DISTINCT_SOURCES = "DistinctSources"


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """Met by one matching signal on one waitpoint."""

    waitpoint_key: str
    matcher: Matcher = Wildcard()

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        check_text(self.waitpoint_key, "waitpoint_key")
        if not isinstance(self.matcher, Matcher):
            raise error(
                "invalid_input",
                f"matcher: must be ByName or Wildcard, got {shown(self.matcher)}{_by_name(self.matcher)}",
            )


@dataclass(frozen=True, slots=True)
class OperatorOnly:
    """Met only by an operator; no signal meets it."""


@dataclass(frozen=True, slots=True)
class TimeoutOnly:
    """Ended only by the deadline; no signal meets it."""


# Some fields accept more types than they store. The `__init__` under TYPE_CHECKING declares the accepted types; the
# generated one runs.


@dataclass(frozen=True, slots=True)
class AllOf:
    """Met when all members are met."""

    members: "tuple[Condition, ...]"

    if TYPE_CHECKING:

        def __init__(self, members: "Sequence[Condition]") -> None: ...

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        set_field(self, "members", _items(self.members, "members"))
        for member in self.members:
            if not isinstance(member, Condition):
                advice = f"; write Single(waitpoint_key={shown(member)})" if isinstance(member, str) else ""
                raise error("invalid_input", f"members: must be conditions, got {_described(member)}{advice}")

    # The generated methods would recurse into every level and every place of a shared group.

    def __repr__(self) -> str:
        """Return the constructor call, shortened if the tree is very deep or very large."""
        return _repr(self, _DEEPEST_READ, iter(range(_MAX_REPR_NODES)))

    def __eq__(self, other: object) -> bool:
        """Compare the trees."""
        if not isinstance(other, AllOf):
            return NotImplemented
        return _are_equal(self, other)

    def __hash__(self) -> int:
        """Hash only the top two levels, to bound the cost."""
        return hash(tuple(len(each.members) if isinstance(each, AllOf) else each for each in self.members))


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Met when the matching signals on the waitpoints have n distinct waitpoints, signal ids or sources."""

    n: int
    count_kind: CountKind
    matcher: Matcher | None = None
    waitpoints: tuple[str, ...]

    if TYPE_CHECKING:

        def __init__(
            self, *, n: int, count_kind: CountKind | str, matcher: Matcher | None = None, waitpoints: Sequence[str]
        ) -> None: ...

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        check_range(self.n, "n", 0, MAX_COUNT)
        set_field(self, "count_kind", check_enum(CountKind, self.count_kind, "count_kind"))
        if not isinstance(self.matcher, Matcher | None):
            raise error(
                "invalid_input",
                f"matcher: must be ByName, Wildcard or None, got {shown(self.matcher)}{_by_name(self.matcher)}",
            )
        keys = _items(self.waitpoints, "waitpoints")
        set_field(self, "waitpoints", tuple(check_text(key, "waitpoint_key") for key in keys))


@dataclass(frozen=True, slots=True)
class UnknownCondition:
    """A condition that this version does not understand, kept as its JSON value; nothing meets it."""

    plain: object = field(hash=False)
    fault: str = field(default="resume_condition: not understood", compare=False)


Composite: TypeAlias = AllOf | Count
Condition: TypeAlias = Single | OperatorOnly | TimeoutOnly | AllOf | Count | UnknownCondition
_Read: TypeAlias = dict[tuple[int, int], tuple[object, Condition]]
"""Parsed parts of a caller's value by identity and depth, so that a shared part is parsed once."""


def all_of_waitpoints(keys: Iterable[str]) -> AllOf:
    """Return the condition that every waitpoint has received a signal."""
    return AllOf(tuple(Single(waitpoint_key=key) for key in keys))


def nodes(condition: Condition) -> Iterator[Condition]:
    """Yield every node of a tree depth first, without recursion; a shared group is yielded once."""
    waiting = [condition]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, AllOf):
            if id(node) in seen:
                continue
            seen.add(id(node))
            waiting.extend(reversed(node.members))
        yield node


def leaves(condition: Condition) -> Iterator[Condition]:
    """Yield the nodes without members, depth first."""
    return (node for node in nodes(condition) if not isinstance(node, AllOf))


def keys_of(leaf: Condition) -> tuple[str, ...]:
    """Return the waitpoint keys a leaf names."""
    match leaf:
        case Single():
            return (leaf.waitpoint_key,)
        case Count():
            return leaf.waitpoints
    return ()


def waitpoint_keys(condition: Condition) -> tuple[str, ...]:
    """Return every waitpoint key in the tree once, in order of first appearance."""
    return tuple(dict.fromkeys(key for leaf in leaves(condition) for key in keys_of(leaf)))


def required_signal_names(condition: Condition, waitpoint_key: str) -> tuple[str, ...]:
    """Return the signal names a waitpoint waits for; empty means any name."""
    names: list[str] = []
    for leaf in leaves(condition):
        match leaf:
            case OperatorOnly():
                names.append(OPERATOR_ONLY_NAME)
            case TimeoutOnly():
                names.append(TIMEOUT_ONLY_NAME)
            case Single(matcher=ByName(name)) | Count(matcher=ByName(name)) if waitpoint_key in keys_of(leaf):
                names.append(name)
    return tuple(dict.fromkeys(names))


def _repr(condition: Condition, levels: int, budget: Iterator[int]) -> str:
    if not isinstance(condition, AllOf):
        return repr(condition)
    if not levels:
        return "AllOf(...)"
    shown: list[str] = []
    for member in condition.members:
        if next(budget, None) is None:
            shown.append("...")
            break
        shown.append(_repr(member, levels - 1, budget))
    return f"AllOf(members=({', '.join(shown)}{',' if len(shown) == 1 else ''}))"


def _are_equal(one: Condition, other: Condition) -> bool:
    waiting = [(one, other)]
    seen: set[tuple[int, int]] = set()
    while waiting:
        one, other = waiting.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        if isinstance(one, AllOf) and isinstance(other, AllOf):
            if len(one.members) != len(other.members):
                return False
            seen.add((id(one), id(other)))
            waiting.extend(zip(one.members, other.members, strict=True))
        elif one != other:
            return False
    return True


def check_depth(condition: Condition, cap: int = MAX_DEPTH) -> None:
    """Reject a tree of more than `cap` levels; the error names the first path that is too deep, cut after level 4."""
    waiting: list[tuple[Condition, tuple[int, ...]]] = [(condition, ())]
    # A group used in several places of one level is visited once.
    seen: set[tuple[int, int]] = set()
    while waiting:
        node, indexes = waiting.pop()
        if isinstance(node, Composite) and len(indexes) >= cap:
            raise _too_deep(indexes)
        if isinstance(node, AllOf) and (id(node), len(indexes)) not in seen:
            seen.add((id(node), len(indexes)))
            waiting.extend((member, (*indexes, at)) for at, member in reversed(list(enumerate(node.members))))


def _too_deep(indexes: Sequence[int]) -> EngineError:
    path = ".".join(f"members[{at}]" for at in indexes[:MAX_DEPTH])
    return _fault(f"depth {MAX_DEPTH + 1} exceeds cap {MAX_DEPTH}", path, _NEST_LESS)


def check_structure(condition: Condition) -> None:
    """Reject a tree that is too deep, too large or contains a node that no signal could meet."""
    _check_node(condition, "", 0, set())
    _check_size(condition)


def _check_size(condition: Condition) -> None:
    """Reject a tree of too many nodes; its depth must have been checked."""
    if _size(condition, {}) > MAX_NODES:
        raise error(
            "invalid_input",
            f"resume_condition: must have at most {MAX_NODES} nodes; a part used in several places counts each time",
        )


def _size(node: Condition, known: dict[int, int]) -> int:
    if not isinstance(node, AllOf):
        return 1
    if id(node) not in known:
        known[id(node)] = 1 + sum(_size(member, known) for member in node.members)
    return known[id(node)]


def _check_node(node: Condition, path: str, above: int, seen: set[tuple[int, int]]) -> None:
    if isinstance(node, Single):
        _check_name(node, path)
    if not isinstance(node, Composite):
        return
    if above >= MAX_DEPTH:
        raise _fault(f"depth {above + 1} exceeds cap {MAX_DEPTH}", path, _NEST_LESS)
    if isinstance(node, AllOf):
        if not node.members:
            raise _fault("allof_empty_members", path, "give AllOf at least one member")
        if (id(node), above) not in seen:
            seen.add((id(node), above))
            for index, member in enumerate(node.members):
                _check_node(member, _member(path, index), above + 1, seen)
        return
    if node.n == 0:
        raise _fault("count_n_zero", path, "n must be at least 1")
    if not node.waitpoints:
        raise _fault("count_waitpoints_empty", path, "name at least one waitpoint key")
    distinct = len(set(node.waitpoints))
    if node.count_kind is CountKind.DISTINCT_WAITPOINTS and node.n > distinct:
        rule = f"count_exceeds_waitpoint_set: n={node.n} > waitpoints.len()={distinct}"
        raise _fault(rule, path, "n must be at most the number of distinct waitpoint keys")
    _check_name(node, path)


def _check_name(leaf: Single | Count, path: str) -> None:
    if isinstance(leaf.matcher, ByName) and leaf.matcher.name in RESERVED_NAMES:
        raise _fault(f"reserved_signal_name: {leaf.matcher.name}", path, "choose another signal name")


def condition_value(condition: Condition) -> object:
    """Return the JSON value of a condition; reject one too deep to be read again or too large."""
    check_depth(condition, _DEEPEST_READ)
    _check_size(condition)
    return _plain(condition)


def _plain(condition: Condition) -> object:
    match condition:
        case Single():
            return {"Single": {"waitpoint_key": condition.waitpoint_key, "matcher": _matcher_plain(condition.matcher)}}
        case OperatorOnly() | TimeoutOnly():
            return type(condition).__name__
        case AllOf():
            return {"Composite": {"kind": "AllOf", "members": [_plain(each) for each in condition.members]}}
        case Count():
            matcher = {} if condition.matcher is None else {"matcher": _matcher_plain(condition.matcher)}
            head = {"kind": "Count", "n": condition.n, "count_kind": condition.count_kind.value}
            return {"Composite": {**head, **matcher, "waitpoints": list(condition.waitpoints)}}
        case UnknownCondition():
            return condition.plain


def condition_json(condition: Condition) -> str:
    """Return the JSON text of a condition, as it is stored."""
    return msgspec.json.encode(condition_value(condition)).decode()


def parse_condition(value: object) -> Condition:
    """Return the condition of a JSON value; reject one that is not understood.

    check_structure rejects a tree that is too deep; its levels beyond 32 are not parsed here.
    """
    condition = value if isinstance(value, Condition) else _read(value, "", 1, {})
    for leaf in leaves(condition):
        if isinstance(leaf, UnknownCondition):
            raise error("invalid_input", leaf.fault)
    return condition


@lru_cache(maxsize=1024)
def read_stored_condition(text: str) -> Condition:
    """Return the condition stored in a row; parts this version does not understand are kept and never met."""
    try:
        return _read(msgspec.json.decode(text), "", 1, None)
    except (msgspec.DecodeError, RecursionError):
        return UnknownCondition(None)


def _read(plain: Any, path: str, depth: int, given: _Read | None) -> Condition:
    """Return the condition of a JSON value: a caller's with its parts parsed so far, or a stored one with None."""
    if given is not None and (known := given.get((id(plain), depth))) is not None:
        return known[1]
    try:
        read = _read_known(plain, path, depth, given)
    except EngineError as refused:
        read = UnknownCondition(plain, fault=str(refused.detail))
    if given is not None:
        given[id(plain), depth] = (plain, read)
    return read


def _read_known(plain: Any, path: str, depth: int, given: _Read | None) -> Condition:
    # An unknown field may restrict what the node matches, so a node with one is not understood.
    match plain:
        case "OperatorOnly":
            return OperatorOnly()
        case "TimeoutOnly":
            return TimeoutOnly()
        case {"Single": body} if len(plain) == 1:
            named = _fields(body, path, "waitpoint_key", "matcher")
            return Single(waitpoint_key=named["waitpoint_key"], matcher=_matcher(named["matcher"], path))
        case {"Composite": {"kind": "AllOf"} as body} if len(plain) == 1:
            if depth > _DEEPEST_READ:
                if given is not None:
                    return AllOf(())
                raise _fault("resume_condition: nested too deeply", path, _NEST_LESS)
            members = enumerate(_items(_fields(body, path, "kind", "members")["members"], "members"))
            return AllOf(tuple(_read(each, _member(path, at), depth + 1, given) for at, each in members))
        case {"Composite": {"kind": "Count"} as body} if len(plain) == 1:
            named = _fields({"matcher": None, **body}, path, "kind", "n", "count_kind", "matcher", "waitpoints")
            matcher = None if named["matcher"] is None else _matcher(named["matcher"], path)
            keys = named["waitpoints"]
            return Count(n=named["n"], count_kind=named["count_kind"], matcher=matcher, waitpoints=keys)
    raise _fault(
        f"resume_condition: unknown condition {_described(plain)}",
        path,
        "write Single, Composite (of kind AllOf or Count), OperatorOnly or TimeoutOnly",
    )


def check_enum(words: type[Word], value: object, field: str) -> Word:
    """Return the member of an enum that equals the argument."""
    word = word_of(words, value)
    if word is None:
        raise error("invalid_input", f"{field}: must be one of {', '.join(words)}, got {shown(value)}")
    return word


def _matcher(plain: Any, path: str) -> Matcher:
    match plain:
        case "Wildcard":
            return Wildcard()
        case {"ByName": str(name)} if len(plain) == 1:
            return ByName(name)
    advice = 'write "Wildcard" or {"ByName": "<signal name>"}'
    raise _fault(f"resume_condition: unknown matcher {_described(plain)}", path, advice)


def _matcher_plain(matcher: Matcher) -> object:
    return {"ByName": matcher.name} if isinstance(matcher, ByName) else "Wildcard"


def _fields(body: object, path: str, *names: str) -> Mapping[str, Any]:
    if not isinstance(body, Mapping) or set(body) != set(names):
        raise _fault(f"resume_condition: must have the fields {', '.join(names)}, got {_described(body)}", path)
    return body


def _items(value: object, field: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise error("invalid_input", f"{field}: must be a list, got {_described(value)}")
    return tuple(value)


def _member(path: str, index: int) -> str:
    return f"{path}.members[{index}]" if path else f"members[{index}]"


def _fault(rule: str, path: str, advice: str = "") -> EngineError:
    return error("invalid_input", f"{rule} at path {path or _ROOT}{advice and f'; {advice}'}")


def _by_name(matcher: object) -> str:
    return f"; write ByName({shown(matcher)})" if isinstance(matcher, str) else ""


def _described(plain: object) -> str:
    # Not the repr of an object: it repeats a shared part wherever that is used, which may never end.
    if isinstance(plain, Mapping):
        return f"an object with the fields {shorten(', '.join(map(str, plain)))}" if plain else "an empty object"
    return "a list" if isinstance(plain, list | tuple) else shown(plain)
