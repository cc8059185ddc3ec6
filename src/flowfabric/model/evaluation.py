"""When the signals of a suspension meet its condition, and what each of them did."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from flowfabric.model.conditions import (
    RESERVED_NAMES,
    AllOf,
    ByName,
    Composite,
    Condition,
    Count,
    CountKind,
    Matcher,
    Single,
    keys_of,
)
from flowfabric.model.ids import SignalId


class SignalEffect(StrEnum):
    """What a delivery did."""

    APPENDED_TO_WAITPOINT = "appended_to_waitpoint"
    RESUME_CONDITION_SATISFIED = "resume_condition_satisfied"
    BUFFERED_FOR_PENDING_WAITPOINT = "buffered_for_pending_waitpoint"


class SignalDisposition(StrEnum):
    """Why a delivery did what it did."""

    SIGNAL_IGNORED_NOT_IN_CONDITION = "signal_ignored_not_in_condition"
    SIGNAL_IGNORED_MATCHER_FAILED = "signal_ignored_matcher_failed"
    APPENDED_TO_WAITPOINT_DUPLICATE = "appended_to_waitpoint_duplicate"
    APPENDED_TO_WAITPOINT = "appended_to_waitpoint"
    NO_OP = "no_op"
    RESUME_CONDITION_SATISFIED = "resume_condition_satisfied"
    BUFFERED_FOR_PENDING_WAITPOINT = "buffered_for_pending_waitpoint"

    @property
    def effect(self) -> SignalEffect:
        """What the delivery did."""
        return _EFFECTS.get(self, SignalEffect.APPENDED_TO_WAITPOINT)

    @property
    def is_matched(self) -> bool:
        """Whether the signal counts as one the condition asks for."""
        return self in _MATCHED

    @property
    def is_adding(self) -> bool:
        """Whether the signal is a satisfier: the condition is nearer to being met by it, or met."""
        return self in _ADDING


_EFFECTS = {
    SignalDisposition.RESUME_CONDITION_SATISFIED: SignalEffect.RESUME_CONDITION_SATISFIED,
    SignalDisposition.BUFFERED_FOR_PENDING_WAITPOINT: SignalEffect.BUFFERED_FOR_PENDING_WAITPOINT,
}
_ADDING = frozenset({SignalDisposition.APPENDED_TO_WAITPOINT, SignalDisposition.RESUME_CONDITION_SATISFIED})
_MATCHED = _ADDING | {SignalDisposition.APPENDED_TO_WAITPOINT_DUPLICATE}


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalFacts:
    """What a condition looks at in a signal."""

    signal_id: SignalId
    signal_name: str
    waitpoint_key: str
    source_type: str
    source_identity: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutSignal:
    """The signal that tells a resumed attempt that its deadline ended the wait; no caller sends it."""

    waitpoint_key: str = "__timeout__"
    signal_name: str = "timeout"
    signal_category: str = "timeout"
    source_type: str = "system"
    source_identity: str = "suspension_timeout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What signals make of a condition.

    `satisfiers` are the signals that added something, in acceptance order, up to the closer that met the condition;
    `dispositions` tells of every signal, in the order given.
    """

    satisfied: bool
    satisfiers: tuple[SignalId, ...]
    closer: SignalId | None
    dispositions: tuple[SignalDisposition, ...]

    @property
    def last(self) -> SignalDisposition:
        """What the last signal did."""
        return self.dispositions[-1]


def evaluate(condition: Condition, signals: Iterable[SignalFacts]) -> Evaluation:
    """Judge a condition by the signals of its suspension, in acceptance order.

    Signals that were no satisfiers add nothing and may be left out: the earlier satisfiers and the newest signal
    lead to the same answer as all signals do.
    """
    tally = Tally(condition)
    satisfiers: list[SignalId] = []
    closer: SignalId | None = None
    dispositions: list[SignalDisposition] = []
    for signal in signals:
        disposition = tally.take(signal)
        dispositions.append(disposition)
        if disposition is SignalDisposition.RESUME_CONDITION_SATISFIED:
            closer = signal.signal_id
        if disposition.is_adding:
            satisfiers.append(signal.signal_id)
    return Evaluation(
        satisfied=tally.is_met,
        satisfiers=tuple(satisfiers),
        closer=closer,
        dispositions=tuple(dispositions),
    )


@dataclass(slots=True)
class _Leaf:
    """A node that names waitpoints, and what it has counted so far; no two nodes count together."""

    asks: Single | Count
    counted: set[Hashable] = field(default_factory=set)

    @property
    def is_met(self) -> bool:
        needs = self.asks.n if isinstance(self.asks, Count) else 1
        return 0 < needs <= len(self.counted)

    def passes(self, signal: SignalFacts) -> bool:
        return _passes(self.asks.matcher, signal.signal_name)

    def add(self, signal: SignalFacts) -> bool:
        """Count a signal; tells whether it was new."""
        before = len(self.counted)
        self.counted.add(_counts_as(self.asks, signal))
        return len(self.counted) > before


@dataclass(slots=True)
class _Branch:
    """A node that is met when it has members and all of them are."""

    members: "list[_Leaf | _Branch | None]"

    @property
    def is_met(self) -> bool:
        return bool(self.members) and all(member is not None and member.is_met for member in self.members)


class Tally:
    """A condition with what its nodes have counted of the signals it took."""

    def __init__(self, condition: Condition) -> None:
        """Begin with no signal."""
        self._is_composite = isinstance(condition, Composite)
        self._naming: defaultdict[str, list[_Leaf]] = defaultdict(list)
        self._root = self._grow(condition)
        self.is_met = False

    def _grow(self, node: Condition) -> _Leaf | _Branch | None:
        match node:
            case AllOf():
                return _Branch([self._grow(member) for member in node.members])
            case Single() | Count():
                leaf = _Leaf(node)
                for key in dict.fromkeys(keys_of(node)):
                    self._naming[key].append(leaf)
                return leaf
        # An operator's word, a deadline or what is not understood: no signal meets it.
        return None

    def take(self, signal: SignalFacts) -> SignalDisposition:
        """Count the next signal and tell what it did."""
        naming = self._naming.get(signal.waitpoint_key, [])
        passing = [leaf for leaf in naming if leaf.passes(signal)]
        if not passing:
            return self._ignored(is_named=bool(naming))
        if self.is_met or not sum(leaf.add(signal) for leaf in passing):
            return SignalDisposition.APPENDED_TO_WAITPOINT_DUPLICATE
        self.is_met = self._root is not None and self._root.is_met
        if self.is_met:
            return SignalDisposition.RESUME_CONDITION_SATISFIED
        return SignalDisposition.APPENDED_TO_WAITPOINT

    def _ignored(self, *, is_named: bool) -> SignalDisposition:
        if not self._is_composite:
            return SignalDisposition.NO_OP
        if is_named:
            return SignalDisposition.SIGNAL_IGNORED_MATCHER_FAILED
        return SignalDisposition.SIGNAL_IGNORED_NOT_IN_CONDITION


def _passes(matcher: Matcher | None, name: str) -> bool:
    if name in RESERVED_NAMES:
        return False
    return not isinstance(matcher, ByName) or matcher.name == name


def _counts_as(asks: Single | Count, signal: SignalFacts) -> Hashable:
    if isinstance(asks, Single):
        return None
    match asks.count_kind:
        case CountKind.DISTINCT_WAITPOINTS:
            return signal.waitpoint_key
        case CountKind.DISTINCT_SIGNALS:
            return signal.signal_id
        case CountKind.DISTINCT_SOURCES:
            return signal.source_type, signal.source_identity
