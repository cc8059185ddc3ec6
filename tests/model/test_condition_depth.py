"""Conditions nested too deeply are rejected with one error, at any depth and in any form."""

import uuid
from typing import Any

import pytest

from flowfabric.model.condition import (
    MAX_NODES,
    AllOf,
    ByName,
    OperatorOnly,
    Single,
    check_structure,
    condition_json,
    condition_value,
    parse_condition,
    read_stored_condition,
    required_signal_names,
    waitpoint_keys,
)
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.evaluation import SignalFacts, evaluate
from flowfabric.model.ids import SignalId
from model.cases import RUNS_WHOLE_SWEEPS, for_each

NEST_LESS = "; nest AllOf and Count at most 4 levels deep"
DEEP = f"depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]{NEST_LESS}"
TOO_LARGE = "resume_condition: must have at most 100000 nodes; a part used in several places counts each time"
# Far beyond the recursion limit; the deepest tree is built in sweeps only, as it takes a second.
DEPTHS = (5, 33, 400, 100_000 if RUNS_WHOLE_SWEEPS else 5_000)


SIGNAL = SignalFacts(
    signal_id=SignalId(uuid.uuid4()), signal_name="go", waitpoint_key="a", source_type="external", source_identity=""
)


def nested(depth: int) -> AllOf:
    condition = AllOf((Single(waitpoint_key="a"),))
    for _ in range(depth - 1):
        condition = AllOf((condition,))
    return condition


def plain_nested(depth: int) -> Any:
    plain: Any = "OperatorOnly"
    for _ in range(depth):
        plain = {"Composite": {"kind": "AllOf", "members": [plain]}}
    return plain


def in_itself() -> Any:
    members: list[Any] = []
    plain = {"Composite": {"kind": "AllOf", "members": members}}
    members.append(plain)
    return plain


def shared(depth: int) -> AllOf:
    condition = nested(1)
    for _ in range(depth - 1):
        condition = AllOf((condition, condition))
    return condition


TOO_DEEP = {
    **{f"objects-{depth}": nested(depth) for depth in DEPTHS},
    **{f"dict-{depth}": plain_nested(depth) for depth in DEPTHS},
    "dict-in-itself": in_itself(),
    "shared-objects": shared(500),
}


@for_each("form", TOO_DEEP)
def test_a_condition_nested_too_deeply_is_rejected_at_any_depth(form: str) -> None:
    condition = parse_condition(TOO_DEEP[form])
    with pytest.raises(InvalidInputError) as refused:
        check_structure(condition)
    assert (refused.value.code, refused.value.detail) == ("invalid_input", DEEP)


@for_each("depth", DEPTHS[1:])
def test_a_condition_nested_too_deeply_cannot_become_json(depth: int) -> None:
    for convert in (condition_value, condition_json):
        with pytest.raises(InvalidInputError) as refused:
            convert(nested(depth))
        assert (refused.value.code, refused.value.detail) == ("invalid_input", DEEP)


@for_each("condition", [nested(depth) for depth in DEPTHS] + [shared(500)])
def test_a_condition_of_any_depth_can_be_evaluated(condition: AllOf) -> None:
    assert evaluate(condition, [SIGNAL]).satisfied
    assert not evaluate(AllOf((condition, AllOf(()))), [SIGNAL]).satisfied
    assert required_signal_names(condition, "a") == ()
    assert waitpoint_keys(condition) == ("a",)


@for_each("depth", DEPTHS[1:])
def test_a_stored_tree_too_deep_to_read_is_never_met(depth: int) -> None:
    text = '{"Composite":{"kind":"AllOf","members":[' * depth + '"OperatorOnly"' + "]}}" * depth
    assert not evaluate(read_stored_condition(text), [SIGNAL]).satisfied


def wide(*widths: int) -> AllOf:
    """One leaf, and one group per level, each used in many places."""
    condition: Single | AllOf = Single(waitpoint_key="a", matcher=ByName("go"))
    for width in widths:
        condition = AllOf((condition,) * width)
    assert isinstance(condition, AllOf)
    return condition


def wide_plain(*widths: int) -> Any:
    plain: Any = "OperatorOnly"
    for width in widths:
        plain = {"Composite": {"kind": "AllOf", "members": [plain] * width}}
    return plain


def twice_in_itself() -> Any:
    members: list[Any] = []
    plain = {"Composite": {"kind": "AllOf", "members": members}}
    members += [plain, plain]
    return plain


def refusal(condition: Any) -> object:
    with pytest.raises(InvalidInputError) as refused:
        check_structure(parse_condition(condition))
    return refused.value.detail


@pytest.mark.timeout(10)
def test_a_shared_group_is_checked_once() -> None:
    check_structure(wide(10, 10, 10, 10))
    assert refusal(wide(1000, 1000, 1000, 1000)) == TOO_LARGE
    assert refusal(wide_plain(1000, 1000, 1000, 1000)) == TOO_LARGE
    assert refusal(wide(1000, 1000, 1000, 1000, 1000)) == DEEP
    assert refusal(wide_plain(1000, 1000, 1000, 1000, 1000)) == DEEP
    assert refusal(twice_in_itself()) == DEEP
    for convert in (condition_value, condition_json):
        with pytest.raises(InvalidInputError) as refused:
            convert(wide(1000, 1000, 1000, 1000))
        assert refused.value.detail == TOO_LARGE


def test_a_fault_in_a_shared_group_is_reported_at_its_first_place() -> None:
    empty = AllOf((AllOf(()),))
    place = "members[1].members[0]"
    assert (
        refusal(AllOf((nested(1), empty, empty)))
        == f"allof_empty_members at path {place}; give AllOf at least one member"
    )
    # The same group is within the limit in one place and too deep in another.
    group = AllOf((AllOf((Single(waitpoint_key="a"),)),))
    deeper = AllOf((AllOf((AllOf((Single(waitpoint_key="a"), group)),)),))
    place = "members[1].members[0].members[0].members[1]"
    assert refusal(AllOf((group, deeper))) == f"depth 5 exceeds cap 4 at path {place}{NEST_LESS}"


def test_a_condition_has_a_maximum_size() -> None:
    leaf = Single(waitpoint_key="a")
    check_structure(AllOf((leaf,) * (MAX_NODES - 1)))
    assert refusal(AllOf((leaf,) * MAX_NODES)) == TOO_LARGE


@pytest.mark.timeout(10)
@for_each("make", [lambda: nested(900), lambda: nested(DEPTHS[-1]), lambda: shared(500)])
def test_a_condition_of_any_depth_prints_hashes_and_compares(make: Any) -> None:
    one, other = make(), make()
    assert len(repr(one)) < 20_000
    assert repr(one).startswith("AllOf(members=(AllOf(members=(")
    assert hash(one) == hash(other)
    assert one == other
    assert one != AllOf((other,))
    assert one != AllOf((Single(waitpoint_key="b"),))
    assert AllOf((one, Single(waitpoint_key="a"))) != AllOf((other, Single(waitpoint_key="b")))


def test_a_small_condition_prints_as_its_constructor_call() -> None:
    condition = AllOf([Single(waitpoint_key="a"), AllOf([OperatorOnly()]), AllOf([])])
    text = (
        "AllOf(members=(Single(waitpoint_key='a', matcher=Wildcard()), AllOf(members=(OperatorOnly(),)), "
        "AllOf(members=())))"
    )
    assert repr(condition) == text
    assert condition == AllOf((Single(waitpoint_key="a"), AllOf((OperatorOnly(),)), AllOf(())))
    assert condition != Single(waitpoint_key="a")
    assert condition != condition.members
    assert len({condition, AllOf(condition.members), AllOf([])}) == 2
