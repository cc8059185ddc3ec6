"""Evaluation of a condition: whether signals meet it, and the disposition of each signal."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flowfabric.model.condition import (
    RESERVED_NAMES,
    AllOf,
    ByName,
    Composite,
    Condition,
    Count,
    CountKind,
    Single,
    keys_of,
    nodes,
)
from flowfabric.model.ids import SignalId
from flowfabric.model.signal import SignalDisposition


@dataclass(kw_only=True, slots=True)
class SignalFacts:
    """The fields of a signal that conditions look at."""

    signal_id: SignalId
    signal_name: str
    waitpoint_key: str
    source_type: str
    source_identity: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The result of evaluating a condition over signals.

    `satisfiers` are the signals that counted, in acceptance order; the last one, the closing signal, met the condition.
    `dispositions` has one entry per signal, in the order given.
    """

    satisfied: bool
    satisfiers: tuple[SignalId, ...]
    closing_signal: SignalId | None
    dispositions: tuple[SignalDisposition, ...]

    @property
    def last(self) -> SignalDisposition:
        """The disposition of the last signal."""
        return self.dispositions[-1]


def evaluate(condition: Condition, signals: Iterable[SignalFacts]) -> Evaluation:
    """Evaluate a condition over the signals of its suspension, in acceptance order.

    Earlier signals that are not satisfiers may be omitted: the earlier satisfiers and the newest signal lead to the
    same result as all signals.
    """
    tally = Tally(Outline(condition))
    satisfiers: list[SignalId] = []
    closing_signal: SignalId | None = None
    dispositions: list[SignalDisposition] = []
    for signal in signals:
        disposition = tally.count(signal)
        dispositions.append(disposition)
        if disposition is SignalDisposition.RESUME_CONDITION_SATISFIED:
            closing_signal = signal.signal_id
        if disposition.is_satisfier:
            satisfiers.append(signal.signal_id)
    return Evaluation(
        satisfied=tally.is_met,
        satisfiers=tuple(satisfiers),
        closing_signal=closing_signal,
        dispositions=tuple(dispositions),
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A node that names waitpoints; each leaf counts on its own."""

    node: Single | Count
    position: int
    needed: int

    def matches(self, name: str) -> bool:
        """Whether the matcher accepts a signal of this name."""
        matcher = self.node.matcher
        return not isinstance(matcher, ByName) or matcher.name == name


class Outline:
    """The leaves of a condition by waitpoint key; shared by all waits for that condition."""

    __slots__ = ("can_be_met", "is_composite", "is_count_of_signals", "leaves", "leaves_by_key")

    def __init__(self, condition: Condition) -> None:
        """Collect the leaves; every group needs all of its members, so only the leaves count."""
        by_key: defaultdict[str, list[_Leaf]] = defaultdict(list)
        leaves: list[_Leaf] = []
        self.can_be_met = True
        """Whether signals can meet every node."""
        for node in nodes(condition):
            if isinstance(node, Single | Count):
                leaf = _Leaf(node, len(leaves), node.n if isinstance(node, Count) else 1)
                leaves.append(leaf)
                for key in dict.fromkeys(keys_of(node)):
                    by_key[key].append(leaf)
            elif not isinstance(node, AllOf) or not node.members:
                self.can_be_met = False
        self.leaves = tuple(leaves)
        self.leaves_by_key: Mapping[str, Sequence[_Leaf]] = dict(by_key)
        self.is_composite = isinstance(condition, Composite)
        self.is_count_of_signals = isinstance(condition, Count) and condition.count_kind is CountKind.DISTINCT_SIGNALS
        """Whether the number of earlier satisfiers is enough to continue the count: recorded signals are distinct."""


@lru_cache(maxsize=1024)
def outline_of(condition: Condition) -> Outline:
    """Return the outline of a condition."""
    return Outline(condition)


class Tally:
    """The signals counted so far for each leaf of a condition."""

    __slots__ = ("_before", "_counted", "_outline", "is_met")

    def __init__(self, outline: Outline, before: int = 0) -> None:
        """Start without signals, or with a number of earlier ones if `is_count_of_signals`."""
        self._outline = outline
        self._before = before
        self._counted: dict[int, set[Hashable]] = {}
        self.is_met = before > 0 and self._is_all_met()

    def count(self, signal: SignalFacts) -> SignalDisposition:
        """Count the next signal and return its disposition."""
        leaves = self._outline.leaves_by_key.get(signal.waitpoint_key, ())
        name = signal.signal_name
        is_matched = is_new = False
        if name not in RESERVED_NAMES:
            for leaf in leaves:
                if leaf.matches(name):
                    is_matched = True
                    is_new |= not self.is_met and self._add(leaf, signal)
        if not is_matched:
            return self._ignored(is_key_named=bool(leaves))
        if not is_new:
            return SignalDisposition.APPENDED_TO_WAITPOINT_DUPLICATE
        self.is_met = self._is_all_met()
        if self.is_met:
            return SignalDisposition.RESUME_CONDITION_SATISFIED
        return SignalDisposition.APPENDED_TO_WAITPOINT

    def _add(self, leaf: _Leaf, signal: SignalFacts) -> bool:
        """Count a signal for a leaf; return whether it was new for it."""
        counted = self._counted.setdefault(leaf.position, set())
        before = len(counted)
        counted.add(_counted_value(leaf.node, signal))
        return len(counted) > before

    def _is_all_met(self) -> bool:
        outline = self._outline
        return outline.can_be_met and all(
            0 < leaf.needed <= self._before + len(self._counted.get(leaf.position, ())) for leaf in outline.leaves
        )

    def _ignored(self, *, is_key_named: bool) -> SignalDisposition:
        if not self._outline.is_composite:
            return SignalDisposition.NO_OP
        if is_key_named:
            return SignalDisposition.SIGNAL_IGNORED_MATCHER_FAILED
        return SignalDisposition.SIGNAL_IGNORED_NOT_IN_CONDITION


def _counted_value(node: Single | Count, signal: SignalFacts) -> Hashable:
    """The value whose distinct occurrences a node counts."""
    if isinstance(node, Single):
        return None
    match node.count_kind:
        case CountKind.DISTINCT_WAITPOINTS:
            return signal.waitpoint_key
        case CountKind.DISTINCT_SIGNALS:
            return signal.signal_id
        case CountKind.DISTINCT_SOURCES:
            return signal.source_type, signal.source_identity
