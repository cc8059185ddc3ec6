"""Conditions nested too deeply: refused with one literal, however deep they are and in whatever form they come."""

import uuid
from typing import Any

import pytest

from flowfabric.model.conditions import (
    AllOf,
    Single,
    check_structure,
    condition_json,
    condition_plain,
    parse_condition,
    read_stored_condition,
    required_signal_names,
    waitpoint_keys,
)
from flowfabric.model.errors import ValidationError
from flowfabric.model.evaluation import SignalFacts, evaluate
from flowfabric.model.ids import SignalId

DEEP = "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]"
DEPTHS = (5, 33, 400, 5_000, 100_000)


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


@pytest.mark.parametrize("form", TOO_DEEP)
def test_a_condition_nested_too_deeply_is_refused_however_deep_it_is(form: str) -> None:
    condition = parse_condition(TOO_DEEP[form])
    with pytest.raises(ValidationError) as refused:
        check_structure(condition)
    assert (refused.value.code, refused.value.detail) == ("invalid_input", DEEP)


@pytest.mark.parametrize("depth", [33, 400, 5_000, 100_000])
def test_a_condition_nested_too_deeply_has_no_json(depth: int) -> None:
    for give in (condition_plain, condition_json):
        with pytest.raises(ValidationError) as refused:
            give(nested(depth))
        assert (refused.value.code, refused.value.detail) == ("invalid_input", DEEP)


@pytest.mark.parametrize("condition", [nested(depth) for depth in DEPTHS] + [shared(500)])
def test_a_condition_of_any_depth_can_be_evaluated(condition: AllOf) -> None:
    assert evaluate(condition, [SIGNAL]).satisfied
    assert not evaluate(AllOf((condition, AllOf(()))), [SIGNAL]).satisfied
    assert required_signal_names(condition, "a") == ()
    assert waitpoint_keys(condition) == ("a",)


@pytest.mark.parametrize("depth", [33, 100, 400, 5_000, 100_000])
def test_a_stored_tree_far_too_deep_to_read_is_never_met(depth: int) -> None:
    text = '{"Composite":{"kind":"AllOf","members":[' * depth + '"OperatorOnly"' + "]}}" * depth
    assert not evaluate(read_stored_condition(text), [SIGNAL]).satisfied
