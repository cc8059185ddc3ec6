"""Approvals: the operator is the source of the signal, so that distinct operators can be counted."""

from typing import Any

import pytest

from engine.sending import Waiting, signals, waiting
from engine.state import refused
from fixtures import Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import ByName, Count, CountKind
from flowfabric.model.signal import SignalDuplicate

TWO_OPERATORS = Count(n=2, count_kind=CountKind.DISTINCT_SOURCES, matcher=ByName("approved"), waitpoints=("wait",))


async def approve(wait: Waiting, **overrides: Any) -> Any:
    return await wait.engine.deliver_approval_signal(
        **{
            "execution_id": wait.execution_id,
            "waitpoint_id": wait.points["wait"].waitpoint_id,
            "signal_name": "approved",
            "idempotency_suffix": "1",
            **overrides,
        }
    )


async def test_two_operators_count_as_two_sources(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await waiting(engine, given, resume_condition=TWO_OPERATORS)
    first = await approve(wait, source_identity="ann")
    assert first.disposition == "appended_to_waitpoint"
    again = await approve(wait, source_identity="ann", idempotency_suffix="2")
    assert again.disposition == "appended_to_waitpoint_duplicate"
    assert await approve(wait, source_identity="ann") == SignalDuplicate(existing_signal_id=first.signal_id)
    assert (await approve(wait, source_identity="bob", idempotency_suffix="3")).effect == "resume_condition_satisfied"
    stored = [(row["source_type"], row["source_identity"]) for row in await signals(rows, wait.execution_id)]
    assert stored == [("operator", "ann"), ("operator", "ann"), ("operator", "bob")]


async def test_approvals_of_two_operators_with_one_suffix_are_not_duplicates(engine: Engine, given: Given) -> None:
    wait = await waiting(engine, given, resume_condition=TWO_OPERATORS)
    await approve(wait, source_identity="ann")
    assert (await approve(wait, source_identity="bob")).effect == "resume_condition_satisfied"


async def test_without_an_identity_all_operators_count_as_one_source(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await waiting(engine, given, resume_condition=TWO_OPERATORS)
    await approve(wait)
    assert (await approve(wait, idempotency_suffix="2")).disposition == "appended_to_waitpoint_duplicate"
    stored = [(row["source_identity"], row["idempotency_key"]) for row in await signals(rows, wait.execution_id)]
    assert stored == [("", "approval:approved:1"), ("", "approval:approved:2")]


async def test_texts_of_an_approval_have_a_type_and_a_maximum_length(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    wait = await waiting(engine, given)
    for field in ("signal_name", "source_identity", "idempotency_suffix"):
        for letter in ("x", "\N{GRINNING FACE}"):
            with subtests.test(f"{field} of {letter}"):
                async with rows.unchanged():
                    detail = f"{field}: must be at most 1024 characters long, got 1025"
                    await refused(approve(wait, **{field: letter * 1025}), "invalid_input", detail)
                first = await approve(wait, **{field: letter * 1024})
                again = await approve(wait, **{field: letter * 1024})
                assert again == SignalDuplicate(existing_signal_id=first.signal_id)
                other = await approve(wait, **{field: letter * 1023 + "y"})
                assert other.signal_id != first.signal_id
    async with rows.unchanged():
        for identity in (None, 3, b"ann", "a\0b", "\ud800"):
            await refused(approve(wait, source_identity=identity), "invalid_input", "source_identity")


async def test_colons_in_texts_do_not_make_two_approvals_equal(engine: Engine, given: Given) -> None:
    wait = await waiting(engine, given)
    triples = [
        ("approved", "1:ann", ""),
        ("approved", "1", "ann"),
        ("approved:1", "ann", ""),
        ("approved:1", "", "ann"),
        ("approved", "1%3Aann", ""),
        ("approved%3A1", "ann", ""),
        ("approved", "1:ann", "bob"),
        ("approved", "1", "ann:bob"),
        ("approved", "1:" + "x" * 1000, "ann:" + "y" * 1000),
        ("approved:1", "x" * 1000 + ":ann", "y" * 1000),
    ]
    given_ids = {
        (await approve(wait, signal_name=name, idempotency_suffix=suffix, source_identity=source)).signal_id
        for name, suffix, source in triples
    }
    assert len(given_ids) == len(triples)
