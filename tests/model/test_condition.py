"""Conditions: their JSON form, which of them are rejected, and which signals meet them."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.condition import (
    OPERATOR_ONLY_NAME,
    RESERVED_NAMES,
    TIMEOUT_ONLY_NAME,
    AllOf,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    UnknownCondition,
    Wildcard,
    all_of_waitpoints,
    check_structure,
    condition_json,
    condition_value,
    parse_condition,
    read_stored_condition,
    required_signal_names,
    waitpoint_keys,
)
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.evaluation import Evaluation, SignalFacts, evaluate
from flowfabric.model.ids import SignalId
from flowfabric.model.signal import SignalDisposition, SignalEffect
from model.cases import for_each

KEYS = ("a", "b", "c")
NAMES = ("go", "stop")
RESERVED = ByName(OPERATOR_ONLY_NAME)
WITH_RESERVED_NAME = AllOf((Count(n=1, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=("a",), matcher=RESERVED),))

matchers = st.one_of(st.just(Wildcard()), st.sampled_from(NAMES).map(ByName))
singles = st.builds(Single, waitpoint_key=st.sampled_from(KEYS), matcher=matchers)
counts = st.builds(
    Count,
    n=st.integers(1, 3),
    count_kind=st.sampled_from(CountKind),
    matcher=st.none() | matchers,
    waitpoints=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(tuple),
)
signal_leaves = st.one_of(singles, counts)
all_leaves = st.one_of(signal_leaves, st.just(OperatorOnly()), st.just(TimeoutOnly()))


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Condition]:
    return st.recursive(leaves, lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple).map(AllOf))


@st.composite
def signals(draw: st.DrawFn, most: int = 8) -> list[SignalFacts]:
    facts = st.builds(
        SignalFacts,
        signal_id=st.uuids().map(SignalId),
        signal_name=st.sampled_from((*NAMES, *RESERVED_NAMES)),
        waitpoint_key=st.sampled_from((*KEYS, "elsewhere")),
        source_type=st.sampled_from(("user", "worker")),
        source_identity=st.sampled_from(("x", "y")),
    )
    return draw(st.lists(facts, max_size=most, unique_by=lambda signal: signal.signal_id))


def signal(key: str = "a", name: str = "go", source: str = "x", source_type: str = "user") -> SignalFacts:
    return SignalFacts(
        signal_id=SignalId(uuid.uuid4()),
        signal_name=name,
        waitpoint_key=key,
        source_type=source_type,
        source_identity=source,
    )


def count(n: int, kind: CountKind, *keys: str, matcher: Any = None) -> Count:
    return Count(n=n, count_kind=kind, waitpoints=keys, matcher=matcher)


def dispositions(condition: Condition, *delivered: SignalFacts) -> list[str]:
    return [each.value for each in evaluate(condition, delivered).dispositions]


def nested(depth: int) -> AllOf:
    condition = AllOf((Single(waitpoint_key="a"),))
    for _ in range(depth - 1):
        condition = AllOf((condition,))
    return condition


COUNT_JSON = {"kind": "Count", "n": 1, "count_kind": "DistinctSignals", "waitpoints": ["a"]}
JSON_FORMS: list[tuple[Condition, object]] = [
    (
        Single(waitpoint_key="k", matcher=ByName("ready")),
        {"Single": {"waitpoint_key": "k", "matcher": {"ByName": "ready"}}},
    ),
    (Single(waitpoint_key="k"), {"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}}),
    (OperatorOnly(), "OperatorOnly"),
    (TimeoutOnly(), "TimeoutOnly"),
    (
        AllOf((OperatorOnly(), TimeoutOnly())),
        {"Composite": {"kind": "AllOf", "members": ["OperatorOnly", "TimeoutOnly"]}},
    ),
    (
        count(2, CountKind.DISTINCT_SOURCES, "a", "b"),
        {"Composite": {"kind": "Count", "n": 2, "count_kind": "DistinctSources", "waitpoints": ["a", "b"]}},
    ),
    (
        count(1, CountKind.DISTINCT_SIGNALS, "a", matcher=ByName("go")),
        {"Composite": {**COUNT_JSON, "matcher": {"ByName": "go"}}},
    ),
]

UNKNOWN_FORMS: list[object] = [
    None,
    5,
    [],
    "Whenever",
    {},
    {"Single": {"waitpoint_key": "a", "matcher": "Wildcard"}, "version": 2},
    {"Single": {"waitpoint_key": "a"}},
    {"Single": {"waitpoint_key": 5, "matcher": "Wildcard"}},
    {"Single": {"waitpoint_key": "a", "matcher": "Regex"}},
    {"Single": {"waitpoint_key": "a", "matcher": {"ByName": None}}},
    {"Single": {"waitpoint_key": "a", "matcher": {"ByName": "x", "case": "folded"}}},
    {"Single": {"waitpoint_key": "a", "matcher": "Wildcard", "after": 5}},
    {"Single": "a"},
    {"Composite": {"kind": "AnyOf", "members": ["OperatorOnly"]}},
    {"Composite": {"members": ["OperatorOnly"]}},
    {"Composite": []},
    {"Composite": {"kind": "AllOf", "members": "OperatorOnly"}},
    {"Composite": {"kind": "AllOf", "members": ["OperatorOnly"], "within_ms": 5}},
    {"Composite": {**COUNT_JSON, "n": -1}},
    {"Composite": {**COUNT_JSON, "n": 2**32}},
    {"Composite": {**COUNT_JSON, "n": True}},
    {"Composite": {**COUNT_JSON, "n": 1.0}},
    {"Composite": {**COUNT_JSON, "count_kind": "DistinctDays"}},
    {"Composite": {**COUNT_JSON, "matcher": "Regex"}},
    {"Composite": {**COUNT_JSON, "waitpoints": "a"}},
    {"Composite": {**COUNT_JSON, "waitpoints": [5]}},
    {"Composite": {**COUNT_JSON, "weights": [1]}},
    {"Composite": {**COUNT_JSON, "waitpoints": ["a\0"]}},
]


@for_each("condition, plain", JSON_FORMS)
def test_a_condition_is_written_as_json_and_read_from_it(condition: Condition, plain: object) -> None:
    assert condition_value(condition) == plain
    assert parse_condition(plain) == condition
    assert json.loads(condition_json(condition)) == plain


@given(trees(all_leaves))
def test_a_condition_is_equal_after_a_json_round_trip(condition: Condition) -> None:
    assert parse_condition(condition_value(condition)) == condition
    assert read_stored_condition(condition_json(condition)) == condition
    assert parse_condition(condition) is condition


def test_a_null_matcher_is_read_as_no_matcher() -> None:
    assert parse_condition({"Composite": {**COUNT_JSON, "matcher": None}}) == parse_condition({"Composite": COUNT_JSON})


@for_each("plain", UNKNOWN_FORMS)
def test_an_unknown_condition_is_rejected_as_an_argument_and_never_met_if_stored(plain: object) -> None:
    mixed = {"Composite": {"kind": "AllOf", "members": [{"Composite": COUNT_JSON}, plain]}}
    for value in (plain, mixed):
        with pytest.raises(InvalidInputError, match="invalid_input: "):
            parse_condition(value)
        stored = read_stored_condition(json.dumps(value))
        assert condition_value(stored) == value
        assert not evaluate(stored, [signal("a"), signal("b")]).satisfied
        with pytest.raises(InvalidInputError, match="invalid_input: "):
            parse_condition(stored)
    assert dispositions(read_stored_condition(json.dumps(mixed)), signal("a")) == ["appended_to_waitpoint"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(("AllOf", "Count", "Single", "a", "Wildcard")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("Single", "Composite", "kind", "members", "n", "matcher", "ByName", "waitpoints")), inner
        )
    ),
)


@given(trees(signal_leaves), json_values, signals())
def test_a_group_with_an_unknown_member_is_never_met(
    known: Condition, plain: object, delivered: list[SignalFacts]
) -> None:
    stored = read_stored_condition(json.dumps({"Composite": {"kind": "AllOf", "members": [plain]}}))
    assert not evaluate(stored, delivered).satisfied
    assert not evaluate(AllOf((known, UnknownCondition(plain))), delivered).satisfied


def test_stored_text_that_is_not_json_is_never_met() -> None:
    assert read_stored_condition("{") == read_stored_condition("[" * 100_000) == UnknownCondition(None)


@for_each(
    "build",
    [
        lambda: Single(waitpoint_key=5),  # type: ignore[arg-type]
        lambda: Single(waitpoint_key="a", matcher="go"),  # type: ignore[arg-type]
        lambda: ByName(None),  # type: ignore[arg-type]
        lambda: AllOf("ab"),  # type: ignore[arg-type]
        lambda: AllOf(("a",)),  # type: ignore[arg-type]
        lambda: count(-1, CountKind.DISTINCT_SIGNALS, "a"),
        lambda: count(1, "Distinct", "a"),  # type: ignore[arg-type]
        lambda: count(1, CountKind.DISTINCT_SIGNALS, "a", matcher="go"),
        lambda: Count(n=1, count_kind=CountKind.DISTINCT_SIGNALS, waitpoints="ab"),
    ],
)
def test_a_condition_with_invalid_fields_cannot_be_built(build: Any) -> None:
    with pytest.raises(InvalidInputError, match="invalid_input: "):
        build()


def test_lists_of_members_become_tuples() -> None:
    members: Any = [OperatorOnly()]
    assert AllOf(members) == AllOf((OperatorOnly(),))


@for_each(
    "condition, detail",
    [
        (nested(5), "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]"),
        (nested(5000), "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]"),
        (AllOf((nested(3), nested(4))), "depth 5 exceeds cap 4 at path members[1].members[0].members[0].members[0]"),
        (AllOf(()), "allof_empty_members at path <root>"),
        (AllOf((OperatorOnly(), AllOf(()))), "allof_empty_members at path members[1]"),
        (count(0, CountKind.DISTINCT_SIGNALS), "count_n_zero at path <root>"),
        (
            AllOf((nested(1), AllOf((count(0, CountKind.DISTINCT_SIGNALS),)))),
            "count_n_zero at path members[1].members[0]",
        ),
        (count(5, CountKind.DISTINCT_WAITPOINTS), "count_waitpoints_empty at path <root>"),
        (count(1, CountKind.DISTINCT_SOURCES), "count_waitpoints_empty at path <root>"),
        (
            AllOf((count(3, CountKind.DISTINCT_WAITPOINTS, "a", "b"),)),
            "count_exceeds_waitpoint_set: n=3 > waitpoints.len()=2 at path members[0]",
        ),
        (
            count(2, CountKind.DISTINCT_WAITPOINTS, "a", "a"),
            "count_exceeds_waitpoint_set: n=2 > waitpoints.len()=1 at path <root>",
        ),
        (Single(waitpoint_key="a", matcher=RESERVED), "reserved_signal_name: __operator_only__ at path <root>"),
        (WITH_RESERVED_NAME, "reserved_signal_name: __operator_only__ at path members[0]"),
    ],
)
def test_a_condition_that_can_never_be_met_is_rejected_with_its_path(condition: Condition, detail: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_structure(condition)
    assert refused.value.code == "invalid_input"
    assert str(refused.value.detail).startswith(f"{detail}; ")


@for_each(
    "condition",
    [
        nested(4),
        OperatorOnly(),
        TimeoutOnly(),
        Single(waitpoint_key="a"),
        count(2, CountKind.DISTINCT_WAITPOINTS, "a", "b"),
        count(9, CountKind.DISTINCT_SIGNALS, "a"),
        count(9, CountKind.DISTINCT_SOURCES, "a"),
    ],
)
def test_a_condition_that_can_be_met_is_accepted(condition: Condition) -> None:
    check_structure(condition)


def test_required_names_are_those_of_the_waitpoint_in_order_without_duplicates() -> None:
    condition = AllOf(
        (
            Single(waitpoint_key="a", matcher=ByName("second")),
            TimeoutOnly(),
            AllOf((Single(waitpoint_key="b", matcher=ByName("other")), OperatorOnly())),
            count(1, CountKind.DISTINCT_SIGNALS, "a", "b", matcher=ByName("first")),
            Single(waitpoint_key="a", matcher=ByName("second")),
            Single(waitpoint_key="a"),
        )
    )
    assert required_signal_names(condition, "a") == ("second", TIMEOUT_ONLY_NAME, OPERATOR_ONLY_NAME, "first")
    assert required_signal_names(condition, "b") == (TIMEOUT_ONLY_NAME, "other", OPERATOR_ONLY_NAME, "first")
    assert required_signal_names(count(1, CountKind.DISTINCT_SIGNALS, "a"), "a") == ()
    assert required_signal_names(OperatorOnly(), "any") == ("__operator_only__",)
    assert required_signal_names(TimeoutOnly(), "any") == ("__timeout_only__",)


def test_the_keys_of_a_tree_are_in_order_without_duplicates() -> None:
    condition = AllOf((AllOf((count(1, CountKind.DISTINCT_SIGNALS, "b", "a"),)), Single(waitpoint_key="c")))
    assert waitpoint_keys(condition) == ("b", "a", "c")
    assert waitpoint_keys(OperatorOnly()) == ()


def test_one_signal_of_the_name_meets_a_single_condition() -> None:
    condition = Single(waitpoint_key="a", matcher=ByName("ready"))
    other, wrong_case, elsewhere, ready = (
        signal(name="x"),
        signal(name="Ready"),
        signal("b", "ready"),
        signal("a", "ready"),
    )
    outcome = evaluate(condition, [other, wrong_case, elsewhere, ready])
    assert outcome == Evaluation(
        satisfied=True,
        satisfiers=(ready.signal_id,),
        closing_signal=ready.signal_id,
        dispositions=(SignalDisposition.NO_OP,) * 3 + (SignalDisposition.RESUME_CONDITION_SATISFIED,),
    )
    assert outcome.last.effect is SignalEffect.RESUME_CONDITION_SATISFIED


@for_each("condition", [OperatorOnly(), TimeoutOnly()])
def test_no_signal_meets_operator_only_and_timeout_only(condition: Condition) -> None:
    assert dispositions(condition, signal(), signal(name=OPERATOR_ONLY_NAME)) == ["no_op", "no_op"]
    mixed = AllOf((Single(waitpoint_key="a"), condition))
    assert dispositions(mixed, signal(), signal()) == ["appended_to_waitpoint", "appended_to_waitpoint_duplicate"]


@for_each("name", sorted(RESERVED_NAMES))
def test_a_reserved_name_satisfies_nothing(name: str) -> None:
    assert dispositions(Single(waitpoint_key="a"), signal(name=name)) == ["no_op"]
    assert dispositions(Single(waitpoint_key="a", matcher=ByName(name)), signal(name=name)) == ["no_op"]
    condition = count(1, CountKind.DISTINCT_SIGNALS, "a")
    assert dispositions(condition, signal(name=name)) == ["signal_ignored_matcher_failed"]


def test_a_count_of_sources_needs_distinct_sources() -> None:
    condition = count(2, CountKind.DISTINCT_SOURCES, "a", matcher=ByName("approve"))
    first, again, rejected, elsewhere, second = (
        signal(name="approve"),
        signal(name="approve"),
        signal(name="reject", source="y"),
        signal("b", "approve", "y"),
        signal(name="approve", source_type="worker"),
    )
    outcome = evaluate(condition, [first, again, rejected, elsewhere, second])
    assert [each.value for each in outcome.dispositions] == [
        "appended_to_waitpoint",
        "appended_to_waitpoint_duplicate",
        "signal_ignored_matcher_failed",
        "signal_ignored_not_in_condition",
        "resume_condition_satisfied",
    ]
    assert (outcome.satisfiers, outcome.closing_signal) == ((first.signal_id, second.signal_id), second.signal_id)


def test_distinct_signals_and_distinct_waitpoints_are_counted_once_each() -> None:
    first = signal()
    counted = ["appended_to_waitpoint", "appended_to_waitpoint_duplicate", "resume_condition_satisfied"]
    assert dispositions(count(2, CountKind.DISTINCT_SIGNALS, "a"), first, first, signal()) == counted
    condition = count(2, CountKind.DISTINCT_WAITPOINTS, "a", "b", "c")
    assert dispositions(condition, signal("b"), signal("b", source="y"), signal("c")) == counted


def test_all_of_waitpoints_needs_a_signal_at_each_in_any_order() -> None:
    condition = all_of_waitpoints(["a", "b", "c"])
    assert condition == AllOf(tuple(Single(waitpoint_key=key, matcher=Wildcard()) for key in "abc"))
    delivered = [signal("c"), signal("c"), signal("a"), signal("b")]
    outcome = evaluate(condition, delivered)
    assert outcome.satisfied
    assert outcome.satisfiers == tuple(delivered[index].signal_id for index in (0, 2, 3))
    assert not evaluate(condition, delivered[:3]).satisfied


def test_one_signal_may_meet_several_leaves_of_a_waitpoint() -> None:
    condition = AllOf(
        (
            Single(waitpoint_key="a", matcher=ByName("go")),
            Single(waitpoint_key="a", matcher=ByName("stop")),
            Single(waitpoint_key="a"),
        )
    )
    assert dispositions(condition, signal(name="go"), signal(name="stop")) == [
        "appended_to_waitpoint",
        "resume_condition_satisfied",
    ]


def test_an_empty_group_a_zero_count_and_a_single_without_signals_are_not_met() -> None:
    for condition in (AllOf(()), AllOf((Single(waitpoint_key="a"), AllOf(())))):
        assert not evaluate(condition, [signal()]).satisfied
    assert not evaluate(count(0, CountKind.DISTINCT_SIGNALS, "a"), [signal()]).satisfied
    assert not evaluate(Single(waitpoint_key="a"), []).satisfied


def test_signals_after_the_closing_signal_are_duplicates() -> None:
    closing_signal = signal()
    for condition in (Single(waitpoint_key="a"), count(1, CountKind.DISTINCT_SIGNALS, "a")):
        outcome = evaluate(condition, [closing_signal, signal()])
        assert (outcome.satisfiers, outcome.closing_signal) == ((closing_signal.signal_id,), closing_signal.signal_id)
        assert outcome.last is SignalDisposition.APPENDED_TO_WAITPOINT_DUPLICATE


def test_each_disposition_has_an_effect_and_tells_whether_the_signal_matched() -> None:
    assert {each.value: (each.effect.value, each.is_matched) for each in SignalDisposition} == {
        "signal_ignored_not_in_condition": ("appended_to_waitpoint", False),
        "signal_ignored_matcher_failed": ("appended_to_waitpoint", False),
        "appended_to_waitpoint_duplicate": ("appended_to_waitpoint", True),
        "appended_to_waitpoint": ("appended_to_waitpoint", True),
        "no_op": ("appended_to_waitpoint", False),
        "resume_condition_satisfied": ("resume_condition_satisfied", True),
        "buffered_for_pending_waitpoint": ("buffered_for_pending_waitpoint", False),
    }


def meets(condition: Condition, delivered: Sequence[SignalFacts]) -> bool:
    """Whether signals meet a condition, by the simplest possible implementation."""
    usable = [each for each in delivered if each.signal_name not in RESERVED_NAMES]
    match condition:
        case AllOf(members):
            return bool(members) and all(meets(member, delivered) for member in members)
        case Single(waitpoint_key=key, matcher=matcher):
            return any(
                each.waitpoint_key == key and matcher in (Wildcard(), ByName(each.signal_name)) for each in usable
            )
        case Count():
            matching = [
                each
                for each in usable
                if each.waitpoint_key in condition.waitpoints
                and condition.matcher in (None, Wildcard(), ByName(each.signal_name))
            ]
            counted: dict[CountKind, set[object]] = {
                CountKind.DISTINCT_WAITPOINTS: {each.waitpoint_key for each in matching},
                CountKind.DISTINCT_SIGNALS: {each.signal_id for each in matching},
                CountKind.DISTINCT_SOURCES: {(each.source_type, each.source_identity) for each in matching},
            }
            return len(counted[condition.count_kind]) >= condition.n
    return False


@given(trees(all_leaves), signals())
def test_evaluate_agrees_with_a_simple_implementation(condition: Condition, delivered: list[SignalFacts]) -> None:
    assert evaluate(condition, delivered).satisfied is meets(condition, delivered)


@given(trees(signal_leaves), signals(), st.randoms())
def test_the_order_of_signals_does_not_matter(condition: Condition, delivered: list[SignalFacts], random: Any) -> None:
    shuffled = random.sample(delivered, len(delivered))
    assert evaluate(condition, shuffled).satisfied is evaluate(condition, delivered).satisfied


@given(trees(signal_leaves), signals(), signals(3))
def test_more_signals_never_undo_a_met_condition(
    condition: Condition, delivered: list[SignalFacts], more: list[SignalFacts]
) -> None:
    before, after = evaluate(condition, delivered), evaluate(condition, [*delivered, *more])
    if before.satisfied:
        assert after.satisfied
        assert (after.satisfiers, after.closing_signal) == (before.satisfiers, before.closing_signal)


@given(trees(signal_leaves), signals())
def test_earlier_satisfiers_and_the_newest_signal_give_the_result_of_all_signals(
    condition: Condition, delivered: list[SignalFacts]
) -> None:
    kept: list[SignalFacts] = []
    for at, newest in enumerate(delivered):
        step, whole = evaluate(condition, [*kept, newest]), evaluate(condition, delivered[: at + 1])
        assert (step.satisfied, step.closing_signal) == (whole.satisfied, whole.closing_signal)
        assert (step.satisfiers, step.last) == (whole.satisfiers, whole.last)
        kept = [each for each in delivered[: at + 1] if each.signal_id in whole.satisfiers]


@given(st.lists(counts, min_size=2, max_size=4), signals(12))
def test_the_counts_of_one_tree_are_independent(members: list[Count], delivered: list[SignalFacts]) -> None:
    alone = [evaluate(member, delivered).satisfied for member in members]
    assert evaluate(AllOf(tuple(members)), delivered).satisfied is all(alone)


@given(trees(signal_leaves), signals())
def test_satisfiers_are_the_signals_that_were_appended_or_met_the_condition(
    condition: Condition, delivered: list[SignalFacts]
) -> None:
    outcome = evaluate(condition, delivered)
    satisfying = (SignalDisposition.APPENDED_TO_WAITPOINT, SignalDisposition.RESUME_CONDITION_SATISFIED)
    dispositions = zip(delivered, outcome.dispositions, strict=True)
    expected = [each.signal_id for each, disposition in dispositions if disposition in satisfying]
    assert list(outcome.satisfiers) == expected
    assert outcome.closing_signal == (expected[-1] if outcome.satisfied else None)
