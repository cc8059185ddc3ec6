import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.resume import (
    ResumePolicy,
    ResumeTarget,
    parse_resume_policy,
    read_stored_resume_policy,
    resume_policy_json,
)
from model.cases import for_each

policies = st.builds(
    ResumePolicy,
    consume_matched_signals=st.booleans(),
    retain_signal_buffer_until_closed=st.booleans(),
    resume_delay_ms=st.none() | st.integers(0, 2**53 - 1),
    close_waitpoint_on_resume=st.booleans(),
)


@given(policies)
def test_a_resume_policy_survives_its_json(policy: ResumePolicy) -> None:
    assert parse_resume_policy(json.loads(resume_policy_json(policy))) == policy
    assert read_stored_resume_policy(resume_policy_json(policy)) == policy


def test_a_resume_policy_has_these_defaults() -> None:
    assert ResumePolicy() == ResumePolicy(
        resume_target=ResumeTarget.RUNNABLE,
        consume_matched_signals=True,
        retain_signal_buffer_until_closed=False,
        resume_delay_ms=None,
        close_waitpoint_on_resume=True,
    )
    assert parse_resume_policy({}) == read_stored_resume_policy(None) == ResumePolicy()
    assert read_stored_resume_policy('{"resume_delay_ms":5,"newer":1}') == ResumePolicy(resume_delay_ms=5)


@for_each(
    "plain",
    [
        {"newer": 1},
        {"resume_delay_ms": -1},
        {"resume_delay_ms": True},
        {"consume_matched_signals": 1},
        {"close_waitpoint_on_resume": "yes"},
        [],
    ],
)
def test_an_invalid_resume_policy_is_rejected(plain: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^invalid_input: resume_policy"):
        parse_resume_policy(plain)


def test_the_delay_of_the_signal_takes_precedence_over_the_policy() -> None:
    policy = ResumePolicy(resume_delay_ms=7)
    assert [policy.delay_ms(given) for given in (None, 0, 3)] == [7, 0, 3]
    assert ResumePolicy().delay_ms(None) == 0
