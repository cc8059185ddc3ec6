from typing import Any

import pytest

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.policy import RoutingRequirements, check_capabilities, parse_policy
from model.cases import for_each


def _required(values: object) -> tuple[str, ...]:
    policy = parse_policy({"routing_requirements": {"required_capabilities": values}})
    assert policy is not None
    return policy.required_capabilities


def _long(size: int) -> list[str]:
    return ["a" * (size - 2), "b"]


FAULTS = [
    ("gpu", "not_array"),
    ({"gpu": 1}, "not_array"),
    (3, "not_array"),
    ([3], "non_string_token"),
    ([["gpu"]], "non_string_token"),
    ([None], "non_string_token"),
    (["\ud800"], "non_string_token"),
    ([""], "empty_token"),
    (["a,b"], "comma_in_token"),
    (["a b"], "control_or_whitespace"),
    (["a\n"], "control_or_whitespace"),
    (["a\x7f"], "control_or_whitespace"),
    (["\0"], "control_or_whitespace"),
    ([f"t{index}" for index in range(257)], "too_many_tokens"),
    (_long(4097), "too_many_bytes"),
    (["é" * 2049], "too_many_bytes"),
]


@for_each("values, fault", FAULTS)
def test_malformed_required_capabilities_are_rejected_with_the_fault(values: object, fault: str) -> None:
    made: Any = RoutingRequirements
    for attempt in (lambda: _required(values), lambda: made(required_capabilities=values)):
        with pytest.raises(InvalidInputError) as refused:
            attempt()
        assert refused.value.code == "invalid_capabilities"
        assert str(refused.value.detail).startswith(f"required:{fault}: ")


@for_each("values, fault", FAULTS)
def test_malformed_worker_capabilities_are_rejected_with_the_fault(values: object, fault: str) -> None:
    for given_values in (values, tuple(values) if isinstance(values, list) else values):
        with pytest.raises(InvalidInputError) as refused:
            check_capabilities(given_values)
        assert refused.value.code == "invalid_capabilities"
        assert str(refused.value.detail).startswith(f"worker:{fault}: ")


def test_only_worker_capabilities_reject_unicode_whitespace() -> None:
    for token in ("a\u00a0b", "a\u2003b", "a\x85b"):
        assert _required([token]) == (token,)
        with pytest.raises(InvalidInputError, match="worker:control_or_whitespace"):
            check_capabilities([token])


def test_both_limits_on_capabilities_are_inclusive() -> None:
    many = [f"t{index}" for index in range(256)]
    assert len(_required(many)) == len(check_capabilities(many)) == 256
    assert len(",".join(_required(_long(4096)))) == len(",".join(check_capabilities(_long(4096)))) == 4096


def test_capabilities_are_sorted_by_bytes_without_duplicates() -> None:
    given_values = ["b", "é", "\U0001f600", "\uffff", "B", "b"] + ["t"] * 300
    expected = tuple(sorted(set(given_values), key=str.encode))
    assert (
        _required(given_values) == check_capabilities(given_values) == check_capabilities(set(given_values)) == expected
    )


def test_missing_and_empty_requirements_mean_no_requirement() -> None:
    for text in ("{}", '{"routing_requirements":{}}', '{"routing_requirements":{"required_capabilities":[]}}'):
        policy = parse_policy(text)
        assert policy is not None
        assert policy.required_capabilities == ()


def test_the_errors_of_capabilities_say_what_to_write() -> None:
    messages = {}
    for values in ("gpu", [3], [""], ["a,b"], ["a b"]):
        with pytest.raises(InvalidInputError) as refused:
            check_capabilities(values)
        messages[str(values)] = refused.value.detail
    assert messages == {
        "gpu": "worker:not_array: expected a list, got 'gpu'; write ['gpu']",
        "[3]": "worker:non_string_token: each capability must be text in valid Unicode, got 3",
        "['']": "worker:empty_token: a capability must not be empty",
        "['a,b']": "worker:comma_in_token: 'a,b' must not contain a comma; write two capabilities",
        "['a b']": "worker:control_or_whitespace: 'a b' must not contain whitespace or control characters",
    }
