import json
import re
import uuid
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.condition import (
    AllOf,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    all_of_waitpoints,
    condition_value,
)
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.ids import SuspensionId, WaitpointId
from flowfabric.model.lease import AlreadySatisfied
from flowfabric.model.policy import SuspensionPolicy
from flowfabric.model.resume import ResumePolicy
from flowfabric.model.states import BlockingReason, TimeoutBehavior
from flowfabric.model.suspension import (
    AlreadyMet,
    SuspendArgs,
    SuspensionReason,
    SuspensionRequester,
    blocking_reason_of,
    check_suspend,
    check_timeout_at,
    parse_timeout_behavior,
    read_stored_timeout_behavior,
    replay_window_ms,
    resolve_timeout,
)
from flowfabric.model.waitpoint import Binding, Fresh, UsePending, default_binding, parse_binding
from model.cases import for_each

NOW = 1_700_000_000_000
SUSPENSION = SuspensionId(uuid.UUID(int=1))


def waitpoint(number: int) -> WaitpointId:
    return WaitpointId(uuid.UUID(int=number))


def fresh(key: str, number: int | None = None) -> Fresh:
    return Fresh(waitpoint_id=waitpoint(number or sum(key.encode())), waitpoint_key=key)


PENDING = UsePending(waitpoint_id=waitpoint(9))


def plain_binding(binding: Binding) -> dict[str, dict[str, str]]:
    return {type(binding).__name__: {name: str(value) for name, value in asdict(binding).items()}}


def suspend(condition: Any, *bindings: Any, **others: Any) -> SuspendArgs:
    given = {"suspension_id": SUSPENSION, "reason_code": SuspensionReason.WAITING_FOR_SIGNAL, **others}
    return SuspendArgs(resume_condition=condition, waitpoints=bindings, **given)


def single(key: str = "a", name: str = "go") -> Single:
    return Single(waitpoint_key=key, matcher=ByName(name))


def count(n: int, *keys: str, name: str = "go", kind: CountKind = CountKind.DISTINCT_WAITPOINTS) -> Count:
    return Count(n=n, count_kind=kind, waitpoints=keys, matcher=ByName(name))


BOTH = all_of_waitpoints("ab")
EMPTY_NAME = "resume_condition: empty signal name (use Wildcard instead)"
MISSING = "referenced_waitpoint_key_missing_binding"
EXTRA = "extra_binding_not_referenced_by_condition"


@for_each(
    "condition, bindings, detail",
    [
        (single(), [], "waitpoints_empty"),
        (single("b"), [fresh("a")], "waitpoint_key_mismatch"),
        (single("b"), [fresh("a"), PENDING], "waitpoint_key_mismatch"),
        (BOTH, [fresh("a"), PENDING], "additional_waitpoint_binding_must_be_fresh at waitpoints[1]"),
        (BOTH, [fresh("a"), fresh("b"), PENDING], "additional_waitpoint_binding_must_be_fresh at waitpoints[2]"),
        (BOTH, [fresh("a"), fresh("", 5)], "additional_waitpoint_binding_empty_key at waitpoints[1]"),
        (BOTH, [fresh("a"), fresh("", 5), PENDING], "additional_waitpoint_binding_empty_key at waitpoints[1]"),
        (all_of_waitpoints("abc"), [fresh("a"), fresh("b")], f"{MISSING}: c"),
        (all_of_waitpoints("ac"), [fresh("a"), fresh("b")], f"{MISSING}: c"),
        (BOTH, [fresh("a"), fresh("b"), fresh("c")], f"{EXTRA}: c"),
        (single(), [fresh("a"), fresh("b")], f"{EXTRA}: b"),
        (TimeoutOnly(), [fresh("a"), fresh("b")], f"{EXTRA}: a"),
        (BOTH, [PENDING, fresh("b")], f"{MISSING}: a"),
        (all_of_waitpoints("b"), [PENDING, fresh("b")], f"{EXTRA}: {waitpoint(9)}"),
        (TimeoutOnly(), [fresh("a")], "timeout_only_without_deadline"),
        (single(name=""), [fresh("a")], EMPTY_NAME),
        (AllOf((single(), AllOf((single("b", ""), AllOf(()))))), [fresh("a"), fresh("b")], EMPTY_NAME),
        (count(0, "a", name=""), [fresh("a")], EMPTY_NAME),
        (count(0, "a"), [fresh("a")], "count_n_zero at path <root>"),
        (AllOf((single(), AllOf(()))), [fresh("a")], "allof_empty_members at path members[1]"),
        (count(0, "a", "b"), [fresh("a"), fresh("b"), fresh("a", 7)], "count_n_zero at path <root>"),
        (BOTH, [fresh("a", 1), fresh("b", 2), fresh("a", 3)], "duplicate_waitpoint_binding"),
        (BOTH, [fresh("a", 1), fresh("b", 1)], "duplicate_waitpoint_binding"),
        (BOTH, [fresh("a")], f"{MISSING}: b"),
        (count(1, "b"), [fresh("a")], f"{MISSING}: b"),
        (AllOf((OperatorOnly(),)), [fresh("a")], f"{EXTRA}: a"),
    ],
)
def test_arguments_that_do_not_fit_together_are_rejected_by_the_first_violated_rule(
    condition: Condition, bindings: list[Binding], detail: str
) -> None:
    args = suspend(condition, *bindings)
    with pytest.raises(InvalidInputError) as refused:
        check_suspend(args)
    assert refused.value.code == "invalid_input"
    assert re.match(rf"{re.escape(detail)}($|: |; )", str(refused.value.detail)), refused.value


@for_each("depth", [5, 33, 5_000])
@for_each("bindings", [[fresh("a")], [fresh("a"), fresh("b")], [fresh("b")], [PENDING]])
def test_a_condition_nested_too_deeply_is_rejected_with_any_bindings(depth: int, bindings: list[Binding]) -> None:
    plain: Any = condition_value(single())
    typed: Condition = single()
    for _ in range(depth):
        plain, typed = {"Composite": {"kind": "AllOf", "members": [plain]}}, AllOf((typed,))
    for condition in (plain, typed):
        args = suspend(condition, *bindings)
        with pytest.raises(InvalidInputError) as refused:
            check_suspend(args)
        shown = "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]; "
        assert refused.value.code == "invalid_input"
        assert str(refused.value.detail).startswith(shown)


@for_each(
    "args",
    [
        suspend(single(), fresh("a")),
        suspend(single(), PENDING),
        suspend(Single(waitpoint_key="a"), PENDING),
        suspend(BOTH, fresh("b"), fresh("a")),
        suspend(BOTH, PENDING),
        suspend(count(2, "a", "b"), fresh("a"), fresh("b")),
        suspend(count(2, "a", kind=CountKind.DISTINCT_SOURCES), fresh("a")),
        suspend(OperatorOnly(), fresh("any")),
        suspend(TimeoutOnly(), fresh("any"), timeout_at=NOW),
        suspend(AllOf((single(), TimeoutOnly())), fresh("a")),
        suspend(Single(waitpoint_key=""), fresh("", 5)),
    ],
)
def test_arguments_that_fit_together_are_accepted(args: SuspendArgs) -> None:
    check_suspend(args)


def test_omitted_arguments_have_their_defaults() -> None:
    args = suspend(single(), fresh("a"))
    assert args.resume_policy == ResumePolicy()
    assert args.requested_by is SuspensionRequester.WORKER
    assert (args.timeout_at, args.timeout_behavior) == (None, None)
    assert (args.continuation_metadata_pointer, args.idempotency_key) == (None, None)


def test_arguments_may_be_json_values() -> None:
    typed = suspend(
        BOTH,
        fresh("a"),
        fresh("b"),
        resume_policy=ResumePolicy(resume_delay_ms=5),
        requested_by=SuspensionRequester.OPERATOR,
        timeout_behavior=TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL,
    )
    plain = SuspendArgs(
        suspension_id=str(SUSPENSION),
        waitpoints=[plain_binding(fresh("a")), plain_binding(fresh("b"))],
        resume_condition=condition_value(BOTH),  # type: ignore[arg-type]
        resume_policy={"resume_delay_ms": 5},
        reason_code="waiting_for_signal",
        requested_by="operator",
        timeout_behavior="auto_resume",
        idempotency_key="",
    )
    assert plain == typed


@for_each(
    "name, value",
    [
        ("suspension_id", "1"),
        ("suspension_id", None),
        ("waitpoints", "a"),
        ("waitpoints", ["a"]),
        ("waitpoints", [{"Fresh": {"waitpoint_id": str(waitpoint(1))}}]),
        ("resume_condition", "Whenever"),
        ("resume_condition", None),
        ("resume_policy", None),
        ("resume_policy", {"resume_target": "terminal"}),
        ("reason_code", "bored"),
        ("requested_by", "nobody"),
        ("timeout_at", 1.5),
        ("timeout_at", True),
        ("timeout_at", 2**63),
        ("timeout_behavior", "panic"),
        ("continuation_metadata_pointer", 5),
        ("continuation_metadata_pointer", "\0"),
        ("idempotency_key", 5),
        ("idempotency_key", 0),
        ("idempotency_key", "\ud800"),
    ],
)
def test_an_argument_of_the_wrong_type_is_rejected(name: str, value: Any) -> None:
    given: Any = {
        "suspension_id": SUSPENSION,
        "waitpoints": (fresh("a"),),
        "resume_condition": single(),
        "reason_code": "waiting_for_signal",
    }
    with pytest.raises(InvalidInputError, match=r"^invalid_input: "):
        SuspendArgs(**{**given, name: value})


@for_each(
    "condition, key",
    [
        (single("k"), "k"),
        (AllOf((OperatorOnly(), AllOf((count(1, "second", "third"),)), single("fourth"))), "second"),
        (AllOf((count(1), single("b"))), "b"),
        (OperatorOnly(), f"wpk:{waitpoint(3)}"),
        (TimeoutOnly(), f"wpk:{waitpoint(3)}"),
        (AllOf((OperatorOnly(),)), f"wpk:{waitpoint(3)}"),
    ],
)
def test_a_wait_without_bindings_is_bound_to_the_first_key_of_its_condition(condition: Condition, key: str) -> None:
    assert default_binding(waitpoint(3), condition) == Fresh(waitpoint_id=waitpoint(3), waitpoint_key=key)


bindings = st.one_of(
    st.builds(Fresh, waitpoint_id=st.uuids().map(WaitpointId), waitpoint_key=st.sampled_from(("", "a", "é"))),
    st.builds(UsePending, waitpoint_id=st.uuids().map(WaitpointId)),
)


@given(bindings)
def test_a_binding_survives_its_json(binding: Binding) -> None:
    assert parse_binding(json.loads(json.dumps(plain_binding(binding)))) == binding
    assert parse_binding(binding) is binding


def test_bindings_have_this_json_form() -> None:
    form = {"Fresh": {"waitpoint_id": "00000000-0000-0000-0000-000000000004", "waitpoint_key": "a"}}
    assert parse_binding(form) == fresh("a", 4)
    assert parse_binding({"UsePending": {"waitpoint_id": "00000000-0000-0000-0000-000000000009"}}) == PENDING


@for_each(
    "plain",
    [
        None,
        "Fresh",
        {},
        {"Fresh": {}},
        {"Fresh": {"waitpoint_id": "x", "waitpoint_key": "a"}},
        {"Fresh": {"waitpoint_id": str(waitpoint(1)), "waitpoint_key": 5}},
        {"Fresh": {"waitpoint_id": str(waitpoint(1)), "waitpoint_key": "a", "ttl": 5}},
        {"UsePending": {"waitpoint_id": str(waitpoint(1)), "waitpoint_key": "a"}},
        {"UsePending": {"waitpoint_id": str(waitpoint(1))}, "Fresh": {}},
        {"Shared": {"waitpoint_id": str(waitpoint(1))}},
    ],
)
def test_a_malformed_binding_is_rejected(plain: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^invalid_input: "):
        parse_binding(plain)


def test_each_suspension_reason_has_its_blocking_reason() -> None:
    assert {reason.value: blocking_reason_of(reason).value for reason in SuspensionReason} == {
        "waiting_for_signal": "waiting_for_signal",
        "waiting_for_approval": "waiting_for_approval",
        "waiting_for_callback": "waiting_for_callback",
        "waiting_for_tool_result": "waiting_for_tool_result",
        "waiting_for_operator_review": "paused_by_operator",
        "paused_by_policy": "paused_by_policy",
        "paused_by_budget": "waiting_for_budget",
        "step_boundary": "waiting_for_signal",
        "manual_pause": "paused_by_operator",
    }
    for stored in ("manual_pause", "newer", "", None):
        expected = BlockingReason.PAUSED_BY_OPERATOR if stored == "manual_pause" else BlockingReason.WAITING_FOR_SIGNAL
        assert blocking_reason_of(stored) is expected


def test_the_literals_of_requesters() -> None:
    assert list(SuspensionRequester) == ["worker", "operator", "policy", "system_timeout_policy"]


def test_a_timeout_behavior_has_an_alias_and_a_stored_default() -> None:
    assert parse_timeout_behavior("auto_resume") is TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL
    assert read_stored_timeout_behavior("auto_resume") is TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL
    assert read_stored_timeout_behavior(None) is read_stored_timeout_behavior("") is TimeoutBehavior.FAIL
    for behavior in TimeoutBehavior:
        assert parse_timeout_behavior(behavior.value) is read_stored_timeout_behavior(behavior.value) is behavior
    with pytest.raises(InvalidInputError, match="invalid_input: timeout_behavior"):
        parse_timeout_behavior(None)
    with pytest.raises(InvalidInputError, match="corruption: timeout_behavior"):
        read_stored_timeout_behavior("newer")


def test_a_deadline_may_be_ten_minutes_in_the_past() -> None:
    check_timeout_at(None, NOW)
    check_timeout_at(NOW - 600_000, NOW)
    with pytest.raises(InvalidInputError, match=r"^invalid_input: timeout_at_in_past: got 1699999399999, the database"):
        check_timeout_at(NOW - 600_001, NOW)


@for_each(
    "given, policy, deadline",
    [
        ({}, None, (None, "fail")),
        ({"timeout_at": 5}, None, (5, "fail")),
        ({"timeout_at": 5, "timeout_behavior": "cancel"}, None, (5, "cancel")),
        ({}, SuspensionPolicy(timeout_behavior=TimeoutBehavior.EXPIRE), (None, "fail")),
        ({}, SuspensionPolicy(default_timeout_ms=7), (NOW + 7, "fail")),
        ({}, SuspensionPolicy(default_timeout_ms=0, timeout_behavior=TimeoutBehavior.EXPIRE), (NOW, "expire")),
        (
            {"timeout_at": 5},
            SuspensionPolicy(default_timeout_ms=7, timeout_behavior=TimeoutBehavior.EXPIRE),
            (5, "fail"),
        ),
        ({"timeout_behavior": "fail"}, SuspensionPolicy(default_timeout_ms=7), (NOW + 7, "fail")),
        (
            {"timeout_behavior": "fail"},
            SuspensionPolicy(default_timeout_ms=7, timeout_behavior=TimeoutBehavior.EXPIRE),
            (NOW + 7, "fail"),
        ),
    ],
)
def test_arguments_take_precedence_over_the_policy(
    given: dict[str, Any], policy: SuspensionPolicy | None, deadline: tuple[int | None, str]
) -> None:
    assert resolve_timeout(suspend(single(), fresh("a"), **given), policy, NOW) == deadline


def test_an_outcome_is_kept_until_a_minute_after_the_deadline_and_at_most_a_week() -> None:
    week = 7 * 86_400_000
    assert replay_window_ms(None, NOW) == week
    assert replay_window_ms(NOW + 5, NOW) == 60_005
    assert replay_window_ms(NOW - 5, NOW) == 60_000
    assert replay_window_ms(NOW + week, NOW) == week


def test_already_met_is_an_already_satisfied() -> None:
    assert issubclass(AlreadyMet, AlreadySatisfied)
