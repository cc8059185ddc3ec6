"""An idempotency key that is used again with another kind, payload, encoding or policy is a conflict."""

import asyncio
import itertools
from typing import Any

import pytest

from engine.state import CREATES, all_cases, items, new, rounds
from fixtures import Clock, Engines, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import ConflictError, EngineError
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.policy import ExecutionPolicy, RetryPolicy
from flowfabric.model.text import shown

POLICY = {"retry_policy": {"max_retries": 2}}


async def conflict(asked: Any) -> dict[str, Any]:
    """The detail of the conflict error of a call."""
    with pytest.raises(ConflictError) as refusal:
        await asked
    assert (refusal.value.code, refusal.value.error_class) == ("idempotency_conflict", "Terminal")
    detail = refusal.value.detail
    assert isinstance(detail, dict)
    return detail


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"execution_kind": "other"}, "kind"),
    ({"input_payload": b"other"}, "payload"),
    ({"input_payload": b""}, "payload"),
    ({"payload_encoding": "msgpack"}, "encoding"),
    ({"payload_encoding": ""}, "encoding"),
    ({"policy": {"max_reclaim_count": 1}}, "policy"),
    ({"policy": None}, "policy"),
    ({"policy": {}}, "policy"),
    (
        {"execution_kind": "other", "input_payload": b"other", "payload_encoding": "msgpack", "policy": None},
        "kind and payload and encoding and policy",
    ),
]


async def test_a_repeat_with_other_content_is_a_conflict_that_names_both_and_writes_nothing(
    engine: Engine, rows: Rows
) -> None:
    for lane, create in CREATES.items():
        keyed = new(lane_id=lane, idempotency_key="k", policy=POLICY)
        first = await create(engine, **keyed)
        async with rows.unchanged():
            with all_cases() as case:
                for other, differs in DIFFERENT:
                    with case(f"{lane} {other}"):
                        found = await conflict(create(engine, **{**keyed, **other}))
                        assert found["execution_id"] == first.execution_id
                        kinds = found["stored_kind"], found["given_kind"]
                        assert kinds == ("job", other.get("execution_kind", "job"))
                        assert (found["differs"], found["idempotency_key"]) == (differs, "'k'")


async def test_equal_policies_in_other_forms_are_the_same(engine: Engine) -> None:
    empty: tuple[Any, ...] = (None, "", "{}", {}, ExecutionPolicy())
    same_as_none: tuple[Any, ...] = (*empty, b"", {"max_reclaim_count": None})
    same_as_policy: tuple[Any, ...] = (
        '{"retry_policy": {"max_retries": 2}}',
        {"max_reclaim_count": None, "retry_policy": {"max_retries": 2}},
        ExecutionPolicy(retry_policy=RetryPolicy(max_retries=2)),
    )
    forms: list[tuple[Any, tuple[Any, ...]]] = [(POLICY, same_as_policy), *((first, same_as_none) for first in empty)]
    with all_cases() as case:
        for (lane, create), (nth, (first, others)) in itertools.product(CREATES.items(), enumerate(forms)):
            with case(f"{lane} {first!r}"):
                keyed = new(lane_id=lane, idempotency_key=f"{nth}")
                made = await create(engine, **keyed, policy=first)
                for same in others:
                    again = await create(engine, **keyed, policy=same)
                    assert again == Duplicate(execution_id=made.execution_id), same
                found = await conflict(create(engine, **keyed, policy=None if first is POLICY else POLICY))
                assert found["differs"] == "policy"


async def test_a_conflict_names_both_encodings(engine: Engine, rows: Rows) -> None:
    pairs = [(None, "json"), ("json", None), ("json", "msgpack"), ("", None), ("x" * 300, "y" * 300)]
    with all_cases() as case:
        for (lane, create), (nth, (stored, given)) in itertools.product(CREATES.items(), enumerate(pairs)):
            with case(f"{lane} {stored} {given}"):
                keyed = new(lane_id=lane, idempotency_key=f"{nth}")
                made = await create(engine, **keyed, payload_encoding=stored)
                again = await create(engine, **keyed, payload_encoding=stored)
                assert again == Duplicate(execution_id=made.execution_id)
                async with rows.unchanged():
                    found = await conflict(create(engine, **keyed, payload_encoding=given))
                assert found["differs"] == "encoding"
                assert (found["stored_encoding"], found["given_encoding"]) == (shown(stored), shown(given))


async def test_a_key_is_found_by_a_caller_with_an_id_in_another_partition(engine: Engine, rows: Rows) -> None:
    for nth, (lane, create) in enumerate(CREATES.items()):
        own, other = (f"{{fp:{partition}}}:{nth}{partition}111111-2222-3333-4444-555555555555" for partition in (3, 4))
        keyed = new(lane_id=lane, idempotency_key="k")
        first = await create(engine, **keyed, execution_id=own)
        assert first.execution_id == own
        async with rows.unchanged():
            for given in (None, other, own):
                again = await create(engine, **keyed, execution_id=given)
                assert again == Duplicate(execution_id=first.execution_id)
                found = await conflict(create(engine, **{**keyed, "input_payload": b"other"}, execution_id=given))
                assert found["execution_id"] == own


async def test_conflicts_within_one_call_are_found_in_the_order_of_the_items(engine: Engine) -> None:
    wrong = new(idempotency_key="k", policy="{")
    first, again, other, *rest = await engine.create_many(
        items(
            new(idempotency_key="k"),
            new(idempotency_key="k"),
            new(idempotency_key="k", input_payload=b"other"),
            new(idempotency_key="k"),
            new(),
            wrong,
        )
    )
    assert isinstance(first, Created)
    assert again == rest[0] == Duplicate(execution_id=first.execution_id)
    assert isinstance(other, ConflictError)
    assert isinstance(rest[1], Created)
    assert isinstance(rest[2], ConflictError)
    assert rest[2].code == "idempotency_conflict"


async def test_a_conflict_does_not_affect_the_99_others_of_its_call(engine: Engine, rows: Rows) -> None:
    await engine.create_execution(**new(idempotency_key="k"))
    for at in (0, 50, 99):
        many = [new(idempotency_key=f"{at} {nth}") if nth % 2 else new() for nth in range(99)]
        many.insert(at, new(idempotency_key="k", input_payload=b"other"))
        verdicts = await engine.create_many(items(*many))
        refusal = verdicts.pop(at)
        assert isinstance(refusal, EngineError)
        assert refusal.code == "idempotency_conflict"
        assert {type(verdict) for verdict in verdicts} == {Created}
    assert len(await rows.of("execution")) == 1 + 3 * 99


async def test_of_concurrent_submissions_one_wins_and_the_others_are_conflicts(engines: Engines) -> None:
    rivals = [await engines() for _ in range(3)]
    for at in rounds(8, whole=20):
        verdicts = await asyncio.gather(
            *(
                rival.create_execution(**new(idempotency_key=f"{at}", input_payload=b"%d" % nth))
                for nth, rival in enumerate(rivals)
            ),
            return_exceptions=True,
        )
        (made,) = [verdict for verdict in verdicts if isinstance(verdict, Created)]
        conflicts = [verdict for verdict in verdicts if isinstance(verdict, ConflictError)]
        assert len(conflicts) == 2
        assert {one.detail["execution_id"] for one in conflicts} == {made.execution_id}  # type: ignore[index]


async def test_an_expired_key_may_be_used_for_other_content(engine: Engine, clock: Clock) -> None:
    await engine.create_execution(**new(idempotency_key="k"))
    await clock.advance(ms=86_400_000)
    second = await engine.create_execution(**new(idempotency_key="k", execution_kind="other", input_payload=b"other"))
    assert isinstance(second, Created)
    found = await conflict(engine.create_execution(**new(idempotency_key="k")))
    assert (found["execution_id"], found["stored_kind"]) == (second.execution_id, "other")


async def test_the_text_of_a_conflict_says_what_to_do(engine: Engine) -> None:
    first = await engine.create_execution(**new(idempotency_key="order 1"))
    with pytest.raises(ConflictError) as refusal:
        await engine.create_execution(**new(idempotency_key="order 1", execution_kind="refund"))
    assert str(refusal.value) == (
        f"idempotency_conflict: idempotency_key='order 1', execution_id={first.execution_id}, stored_kind=job, "
        "given_kind=refund, differs=kind, remedy=submit what was submitted under this key, or use another key"
    )
