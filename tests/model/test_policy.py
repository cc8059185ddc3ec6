import dataclasses
import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.policy import (
    DurabilityMode,
    ExecutionPolicy,
    ExponentialBackoff,
    FallbackPolicy,
    FallbackTier,
    FixedBackoff,
    RetryPolicy,
    RoutingRequirements,
    StreamPolicy,
    SuspensionPolicy,
    TimeoutPolicy,
    parse_policy,
    parse_retry_policy,
    policy_json,
    read_stored_policy,
)
from flowfabric.model.states import TimeoutBehavior
from flowfabric.model.text import shown
from model.cases import for_each

FULL = {
    "priority": 7,
    "delay_until": 1_700_000_000_000,
    "retry_policy": {
        "max_retries": 5,
        "backoff": {
            "type": "exponential",
            "initial_delay_ms": 10,
            "max_delay_ms": 100,
            "multiplier": 1.5,
            "jitter": True,
        },
        "retryable_categories": ["transient", "timeout"],
    },
    "timeout_policy": {"attempt_timeout_ms": 1, "execution_deadline_ms": 2, "max_reclaim_count": 3},
    "max_reclaim_count": 4,
    "suspension_policy": {"default_timeout_ms": 5, "timeout_behavior": "escalate"},
    "fallback_policy": {"tiers": [{"provider": "p", "model": "m", "timeout_ms": 6}, {"provider": "q", "model": "n"}]},
    "max_replay_count": 8,
    "budget_ids": ["b1", "b2"],
    "quota_policy_id": "q1",
    "routing_requirements": {
        "required_capabilities": ["a", "b"],
        "preferred_locality": "eu",
        "isolation_level": "vm",
    },
    "dedup_window_ms": 9,
    "stream_policy": {"durability_mode": "durable", "retention_maxlen": 10, "retention_ttl_ms": 11},
    "max_signals_per_execution": 12,
}


def _refusal(value: Any) -> tuple[str, object]:
    with pytest.raises(InvalidInputError) as refused:
        parse_policy(value)
    return refused.value.code, refused.value.detail


def test_an_empty_policy_has_the_defaults() -> None:
    policy = parse_policy({})
    assert policy == ExecutionPolicy()
    assert policy is not None
    assert dataclasses.asdict(policy) == {
        "priority": 0,
        "delay_until": None,
        "retry_policy": None,
        "timeout_policy": None,
        "max_reclaim_count": 100,
        "suspension_policy": None,
        "fallback_policy": None,
        "max_replay_count": 10,
        "budget_ids": (),
        "quota_policy_id": None,
        "routing_requirements": None,
        "dedup_window_ms": None,
        "stream_policy": None,
        "max_signals_per_execution": 10_000,
    }


def test_an_empty_part_has_its_defaults() -> None:
    empty: dict[str, object] = {name: {} for name, value in FULL.items() if isinstance(value, dict)}
    assert parse_policy(empty) == ExecutionPolicy(
        retry_policy=RetryPolicy(
            max_retries=3,
            backoff=ExponentialBackoff(initial_delay_ms=1000, max_delay_ms=60_000, multiplier=2.0, jitter=False),
            retryable_categories=(),
        ),
        timeout_policy=TimeoutPolicy(attempt_timeout_ms=None, execution_deadline_ms=None, max_reclaim_count=100),
        suspension_policy=SuspensionPolicy(default_timeout_ms=None, timeout_behavior=TimeoutBehavior.FAIL),
        fallback_policy=FallbackPolicy(tiers=()),
        routing_requirements=RoutingRequirements(
            required_capabilities=(), preferred_locality=None, isolation_level=None
        ),
        stream_policy=StreamPolicy(
            durability_mode=DurabilityMode.BUFFERED, retention_maxlen=10_000, retention_ttl_ms=None
        ),
    )


@for_each("value", [None, "", b"", "null", b"null"])
def test_none_empty_text_and_null_mean_no_policy(value: str | bytes | None) -> None:
    assert parse_policy(value) is None
    assert parse_retry_policy(value) is None


def test_a_policy_reads_the_same_from_object_text_and_bytes() -> None:
    text = json.dumps(FULL)
    policy = parse_policy(FULL)
    assert policy is not None
    assert policy == parse_policy(text) == parse_policy(text.encode()) == parse_policy(policy)
    assert json.loads(policy_json(policy)) == FULL


def test_a_null_field_has_its_default() -> None:
    nulls = {
        **dict.fromkeys(FULL),
        "retry_policy": {"max_retries": None, "backoff": None, "retryable_categories": None},
        "routing_requirements": {"required_capabilities": None},
    }
    assert parse_policy(nulls) == ExecutionPolicy(
        retry_policy=RetryPolicy(), routing_requirements=RoutingRequirements()
    )


def test_the_text_of_a_policy_omits_defaults() -> None:
    assert policy_json(ExecutionPolicy()) == "{}"
    assert policy_json(ExecutionPolicy(retry_policy=RetryPolicy(), priority=3)) == '{"priority":3,"retry_policy":{}}'
    fixed = ExecutionPolicy(retry_policy=RetryPolicy(backoff=FixedBackoff()))
    assert policy_json(fixed) == '{"retry_policy":{"backoff":{"type":"fixed","delay_ms":1000}}}'
    growing = ExecutionPolicy(retry_policy=RetryPolicy(backoff=ExponentialBackoff(multiplier=3)))
    assert json.loads(policy_json(growing))["retry_policy"]["backoff"] == {
        "type": "exponential",
        "initial_delay_ms": 1000,
        "max_delay_ms": 60_000,
        "multiplier": 3.0,
    }


millis = st.integers(0, 2**53 - 1)
counts = st.integers(0, 2**31 - 1)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
tokens = st.text(st.characters(codec="utf-8", exclude_characters=",\x7f", min_codepoint=0x21), min_size=1, max_size=8)
backoffs = st.one_of(
    st.builds(FixedBackoff, delay_ms=millis),
    st.builds(
        ExponentialBackoff,
        initial_delay_ms=millis,
        max_delay_ms=millis,
        multiplier=st.floats(0, 2**53 - 1, exclude_min=True),
        jitter=st.booleans(),
    ),
)


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


policies = st.builds(
    ExecutionPolicy,
    priority=st.integers(-(2**31), 2**31 - 1),
    delay_until=_maybe(millis),
    retry_policy=_maybe(
        st.builds(RetryPolicy, max_retries=counts, backoff=backoffs, retryable_categories=st.lists(words).map(tuple))
    ),
    timeout_policy=_maybe(
        st.builds(
            TimeoutPolicy,
            attempt_timeout_ms=_maybe(millis),
            execution_deadline_ms=_maybe(millis),
            max_reclaim_count=counts,
        )
    ),
    max_reclaim_count=counts,
    suspension_policy=_maybe(
        st.builds(
            SuspensionPolicy, default_timeout_ms=_maybe(millis), timeout_behavior=st.sampled_from(TimeoutBehavior)
        )
    ),
    fallback_policy=_maybe(
        st.builds(
            FallbackPolicy,
            tiers=st.lists(
                st.builds(FallbackTier, provider=words, model=words, timeout_ms=_maybe(millis)), max_size=3
            ).map(tuple),
        )
    ),
    max_replay_count=counts,
    budget_ids=st.lists(words, max_size=3).map(tuple),
    quota_policy_id=_maybe(words),
    routing_requirements=_maybe(
        st.builds(
            RoutingRequirements,
            required_capabilities=st.lists(tokens, max_size=5).map(tuple),
            preferred_locality=_maybe(words),
            isolation_level=_maybe(words),
        )
    ),
    dedup_window_ms=_maybe(st.integers(-(2**53) + 1, 2**53 - 1)),
    stream_policy=_maybe(
        st.builds(
            StreamPolicy,
            durability_mode=st.sampled_from(DurabilityMode),
            retention_maxlen=counts,
            retention_ttl_ms=_maybe(millis),
        )
    ),
    max_signals_per_execution=counts,
)


@given(policies)
def test_a_policy_survives_its_text(policy: ExecutionPolicy) -> None:
    assert parse_policy(policy_json(policy)) == policy
    assert parse_policy(json.loads(policy_json(policy))) == policy


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_value_in_any_field_is_accepted_or_rejected(value: object) -> None:
    for field in FULL:
        try:
            policy = parse_policy({field: value})
        except InvalidInputError:
            continue
        assert policy is not None
        assert parse_policy(policy_json(policy)) == policy


@for_each("text", ["{", "not json", b"\xff", "{'a': 1}", "[" * 100_000, '{"priority": NaN}', '"\\ud800"'])
def test_text_that_is_not_json_is_malformed(text: str | bytes) -> None:
    assert _refusal(text) == ("invalid_policy_json", f"malformed: expected a JSON object, got {shown(text)}")


@for_each("value", [[], "[]", "3", '"text"', 3, True])
def test_a_policy_must_be_an_object(value: object) -> None:
    code, detail = _refusal(value)
    assert code == "invalid_policy_json"
    assert str(detail).startswith("policy: must be an object, got ")


@for_each("value", [[], "x", 3, False])
def test_routing_requirements_must_be_an_object(value: object) -> None:
    rule = f"routing_requirements:not_object: expected an object, got {value!r}"
    refusal = ("invalid_policy_json", rule)
    assert _refusal({"routing_requirements": value}) == refusal
    assert _refusal(json.dumps({"routing_requirements": value})) == refusal


WHOLE = "must be a whole number from 0 to"
BACKOFF = {"type": "exponential", "initial_delay_ms": 1, "max_delay_ms": 2, "multiplier": 2.0}


@for_each(
    "value, detail",
    [
        ({"retry": {}}, "retry: unknown field; the fields are "),
        ({3: 1}, "3: unknown field; the fields are "),
        ({"\ud800": 1}, "\\ud800: unknown field; the fields are "),
        ({"priority": "high"}, "priority: must be a whole number from -2147483648 to 2147483647"),
        ({"priority": 2**31}, "priority: must be a whole number"),
        ({"priority": True}, "priority: must be a whole number"),
        ({"priority": 1.0}, "priority: must be a whole number"),
        ({"delay_until": -1}, f"delay_until: {WHOLE} 9007199254740991"),
        ({"max_reclaim_count": -1}, f"max_reclaim_count: {WHOLE} 2147483647"),
        ({"max_replay_count": 2**31}, f"max_replay_count: {WHOLE} 2147483647"),
        ({"max_signals_per_execution": "x"}, f"max_signals_per_execution: {WHOLE}"),
        ({"dedup_window_ms": 1.5}, "dedup_window_ms: must be a whole number"),
        ({"dedup_window_ms": 2**63}, "dedup_window_ms: must be a whole number"),
        ({"budget_ids": "b1"}, "budget_ids: must be a list"),
        ({"budget_ids": [3]}, "budget_ids: must be text"),
        ({"budget_ids": ["\0"]}, "budget_ids: must not contain NUL"),
        ({"quota_policy_id": 3}, "quota_policy_id: must be text"),
        ({"quota_policy_id": "\ud800"}, "quota_policy_id: is not valid Unicode"),
        ({"retry_policy": []}, "retry_policy: must be an object"),
        ({"retry_policy": {"retries": 3}}, "retry_policy.retries: unknown field; the fields are "),
        ({"retry_policy": {"max_retries": -1}}, f"retry_policy.max_retries: {WHOLE}"),
        ({"retry_policy": {"max_retries": 2**31}}, f"retry_policy.max_retries: {WHOLE}"),
        ({"retry_policy": {"retryable_categories": "x"}}, "retry_policy.retryable_categories: must be a list"),
        ({"retry_policy": {"retryable_categories": [1]}}, "retry_policy.retryable_categories: must be text"),
        ({"retry_policy": {"backoff": 3}}, "retry_policy.backoff: must be an object"),
        ({"retry_policy": {"backoff": {}}}, "retry_policy.backoff.type: must be 'fixed' or 'exponential', got None"),
        ({"retry_policy": {"backoff": {"type": "linear"}}}, "retry_policy.backoff.type: must be 'fixed' or"),
        ({"retry_policy": {"backoff": {"type": []}}}, "retry_policy.backoff.type: must be 'fixed' or"),
        ({"retry_policy": {"backoff": {"type": "fixed", "delay_ms": -1}}}, f"retry_policy.backoff.delay_ms: {WHOLE}"),
        (
            {"retry_policy": {"backoff": {"type": "fixed", "jitter": True}}},
            "retry_policy.backoff.jitter: unknown field; the fields are ",
        ),
        (
            {"retry_policy": {"backoff": {"type": "exponential", "initial_delay_ms": 1, "max_delay_ms": 2}}},
            "retry_policy.backoff.multiplier: is missing",
        ),
        (
            {"retry_policy": {"backoff": {**BACKOFF, "initial_delay_ms": None}}},
            "retry_policy.backoff.initial_delay_ms: is missing",
        ),
        ({"retry_policy": {"backoff": {**BACKOFF, "max_delay_ms": -1}}}, f"retry_policy.backoff.max_delay_ms: {WHOLE}"),
        (
            {"retry_policy": {"backoff": {**BACKOFF, "multiplier": 0}}},
            "retry_policy.backoff.multiplier: must be above 0",
        ),
        (
            {"retry_policy": {"backoff": {**BACKOFF, "multiplier": float("nan")}}},
            "retry_policy.backoff.multiplier: must be above 0",
        ),
        (
            {"retry_policy": {"backoff": {**BACKOFF, "multiplier": float("inf")}}},
            "retry_policy.backoff.multiplier: must be above 0",
        ),
        (
            {"retry_policy": {"backoff": {**BACKOFF, "multiplier": "2"}}},
            "retry_policy.backoff.multiplier: must be a number",
        ),
        (
            {"retry_policy": {"backoff": {**BACKOFF, "multiplier": True}}},
            "retry_policy.backoff.multiplier: must be a number",
        ),
        (
            {"retry_policy": {"backoff": {**BACKOFF, "jitter": 1}}},
            "retry_policy.backoff.jitter: must be true or false",
        ),
        ({"timeout_policy": 3}, "timeout_policy: must be an object"),
        ({"timeout_policy": {"attempt_timeout_ms": -1}}, f"timeout_policy.attempt_timeout_ms: {WHOLE}"),
        ({"timeout_policy": {"execution_deadline_ms": "1"}}, f"timeout_policy.execution_deadline_ms: {WHOLE}"),
        ({"timeout_policy": {"max_reclaim_count": -1}}, f"timeout_policy.max_reclaim_count: {WHOLE}"),
        ({"suspension_policy": {"default_timeout_ms": -1}}, f"suspension_policy.default_timeout_ms: {WHOLE}"),
        (
            {"suspension_policy": {"timeout_behavior": "Fail"}},
            "suspension_policy.timeout_behavior: must be one of fail, cancel, expire, auto_resume_with_timeout_signal, "
            "escalate",
        ),
        ({"suspension_policy": {"timeout_behavior": []}}, "suspension_policy.timeout_behavior: must be one of"),
        ({"fallback_policy": {"tiers": {}}}, "fallback_policy.tiers: must be a list"),
        ({"fallback_policy": {"tiers": ["x"]}}, "fallback_policy.tiers: must be an object"),
        ({"fallback_policy": {"tiers": [{"provider": "p"}]}}, "fallback_policy.tiers.model: is missing"),
        (
            {"fallback_policy": {"tiers": [{"provider": 3, "model": "m"}]}},
            "fallback_policy.tiers.provider: must be text",
        ),
        (
            {"fallback_policy": {"tiers": [{"provider": "p", "model": "m", "timeout_ms": -1}]}},
            f"fallback_policy.tiers.timeout_ms: {WHOLE}",
        ),
        (
            {"routing_requirements": {"capabilities": []}},
            "routing_requirements.capabilities: unknown field; the fields are ",
        ),
        (
            {"routing_requirements": {"preferred_locality": 3}},
            "routing_requirements.preferred_locality: must be text",
        ),
        (
            {"routing_requirements": {"isolation_level": "\0"}},
            "routing_requirements.isolation_level: must not contain NUL",
        ),
        (
            {"stream_policy": {"durability_mode": "fast"}},
            "stream_policy.durability_mode: must be one of buffered, durable",
        ),
        ({"stream_policy": {"retention_maxlen": -1}}, f"stream_policy.retention_maxlen: {WHOLE}"),
        ({"stream_policy": {"retention_ttl_ms": True}}, f"stream_policy.retention_ttl_ms: {WHOLE}"),
    ],
)
def test_an_invalid_field_is_rejected_with_its_path(value: object, detail: str) -> None:
    code, found = _refusal(value)
    assert code == "invalid_policy_json"
    assert str(found).startswith(detail)


def _build(kind: Any, **fields: Any) -> None:
    kind(**fields)


@for_each(
    "kind, fields",
    [
        (ExecutionPolicy, {"max_replay_count": None}),
        (ExecutionPolicy, {"retry_policy": {"max_retries": 3}}),
        (ExecutionPolicy, {"stream_policy": TimeoutPolicy()}),
        (ExecutionPolicy, {"budget_ids": "b1"}),
        (RetryPolicy, {"max_retries": -1}),
        (RetryPolicy, {"backoff": None}),
        (ExponentialBackoff, {"multiplier": -2.0}),
        (FixedBackoff, {"delay_ms": 0.5}),
        (FallbackPolicy, {"tiers": ({"provider": "p", "model": "m"},)}),
        (StreamPolicy, {"durability_mode": "fast"}),
    ],
)
def test_a_policy_built_in_python_is_checked_too(kind: Any, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match="invalid_policy_json: "):
        _build(kind, **fields)


def test_a_policy_built_in_python_is_normalised() -> None:
    made: Any = ExecutionPolicy
    budget = uuid.uuid4()
    policy = made(budget_ids=[budget, "b2"], quota_policy_id=budget)
    assert policy.budget_ids == (str(budget), "b2")
    assert policy.quota_policy_id == str(budget)
    assert hash(policy) == hash(parse_policy(policy_json(policy)))


def test_auto_resume_is_an_alias_of_a_timeout_behaviour() -> None:
    policy = parse_policy({"suspension_policy": {"timeout_behavior": "auto_resume"}})
    assert policy is not None
    assert policy.suspension_policy is not None
    assert policy.suspension_policy.timeout_behavior is TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL


def test_a_retry_policy_can_be_parsed_alone() -> None:
    assert parse_retry_policy('{"max_retries":1}') == RetryPolicy(max_retries=1)
    assert parse_retry_policy({"backoff": {"type": "fixed"}}) == RetryPolicy(backoff=FixedBackoff(delay_ms=1000))
    assert parse_retry_policy(RetryPolicy()) == RetryPolicy()
    with pytest.raises(InvalidInputError, match="invalid_policy_json: malformed"):
        parse_retry_policy("{")


def test_unknown_fields_of_a_stored_policy_are_ignored() -> None:
    newer = {"retry_policy": {"max_retries": 2, "newer": True}, "stream_policy": {"durability_mode": "newer"}}
    text = json.dumps({"from_the_future": 1, **newer})
    read = read_stored_policy(text)
    assert read == ExecutionPolicy(retry_policy=RetryPolicy(max_retries=2))
    assert read_stored_policy(None) is None
    with pytest.raises(InvalidInputError):
        parse_policy(text)
