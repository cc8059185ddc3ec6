"""A key that comes again with another kind, payload, encoding or policy: a conflict that names both, and no write."""

import asyncio
from typing import Any

import pytest

from engine.state import Creating, both_creates, items, new
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import ConflictError, EngineError
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.policy import ExecutionPolicy, RetryPolicy
from flowfabric.model.text import shown

POLICY = {"retry_policy": {"max_retries": 2}}


async def conflict(asked: Any) -> dict[str, Any]:
    """The detail of the conflict that a call is refused with."""
    with pytest.raises(ConflictError) as refusal:
        await asked
    assert (refusal.value.code, refusal.value.error_class) == ("idempotency_conflict", "Terminal")
    detail = refusal.value.detail
    assert isinstance(detail, dict)
    return detail


@both_creates
@pytest.mark.parametrize(
    ("other", "differs"),
    [
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
    ],
)
async def test_a_repeat_that_differs_names_both_and_writes_nothing(
    engine: Engine, create: Creating, rows: Any, other: dict[str, Any], differs: str
) -> None:
    first = await create(engine, **new(idempotency_key="k", policy=POLICY))
    async with rows.unchanged():
        found = await conflict(create(engine, **new(idempotency_key="k", **{"policy": POLICY, **other})))
    assert found["execution_id"] == first.execution_id
    assert (found["stored_kind"], found["given_kind"]) == ("job", other.get("execution_kind", "job"))
    assert found["differs"] == differs
    assert found["idempotency_key"] == "'k'"


@both_creates
async def test_one_policy_written_in_several_ways_is_the_same(engine: Engine, create: Creating) -> None:
    first = await create(engine, **new(idempotency_key="k", policy=POLICY))
    for same in (
        '{"retry_policy": {"max_retries": 2}}',
        {"max_reclaim_count": None, "retry_policy": {"max_retries": 2}},
        ExecutionPolicy(retry_policy=RetryPolicy(max_retries=2)),
    ):
        again = await create(engine, **new(idempotency_key="k", policy=same))
        assert again == Duplicate(execution_id=first.execution_id)


@both_creates
@pytest.mark.parametrize("first", [None, "", "{}", {}, ExecutionPolicy()], ids=repr)
async def test_the_default_policy_is_the_same_as_none(engine: Engine, create: Creating, first: Any) -> None:
    made = await create(engine, **new(idempotency_key="k", policy=first))
    for same in (None, "", b"", "{}", {}, {"max_reclaim_count": None}, ExecutionPolicy()):
        again = await create(engine, **new(idempotency_key="k", policy=same))
        assert again == Duplicate(execution_id=made.execution_id), same
    assert (await conflict(create(engine, **new(idempotency_key="k", policy=POLICY))))["differs"] == "policy"


@both_creates
@pytest.mark.parametrize(
    ("stored", "given"), [(None, "json"), ("json", None), ("json", "msgpack"), ("", None), ("x" * 300, "y" * 300)]
)
async def test_a_conflict_names_both_encodings(
    engine: Engine, create: Creating, rows: Any, stored: str | None, given: str | None
) -> None:
    made = await create(engine, **new(idempotency_key="k", payload_encoding=stored))
    again = await create(engine, **new(idempotency_key="k", payload_encoding=stored))
    assert again == Duplicate(execution_id=made.execution_id)
    async with rows.unchanged():
        found = await conflict(create(engine, **new(idempotency_key="k", payload_encoding=given)))
    assert found["differs"] == "encoding"
    assert (found["stored_encoding"], found["given_encoding"]) == (shown(stored), shown(given))


@both_creates
async def test_an_own_id_in_another_partition_meets_the_key(engine: Engine, create: Creating, rows: Any) -> None:
    own = "{fp:3}:11111111-2222-3333-4444-555555555555"
    first = await create(engine, **new(idempotency_key="k", execution_id=own))
    assert first.execution_id == own
    other = "{fp:4}:21111111-2222-3333-4444-555555555555"
    async with rows.unchanged():
        for given in (None, other, own):
            again = await create(engine, **new(idempotency_key="k", execution_id=given))
            assert again == Duplicate(execution_id=first.execution_id)
            found = await conflict(
                create(engine, **new(idempotency_key="k", execution_id=given, input_payload=b"other"))
            )
            assert found["execution_id"] == own


async def test_items_of_one_call_are_judged_in_their_order(engine: Engine) -> None:
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


async def test_99_others_are_created_beside_a_conflict(engine: Engine, rows: Any) -> None:
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


async def test_of_concurrent_submissions_one_wins_and_the_others_are_conflicts(engines: Any) -> None:
    rivals = [await engines() for _ in range(3)]
    for at in range(20):
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


async def test_an_expired_key_is_free_for_something_else(engine: Engine, clock: Any) -> None:
    await engine.create_execution(**new(idempotency_key="k"))
    await clock.advance(ms=86_400_000)
    second = await engine.create_execution(**new(idempotency_key="k", execution_kind="other", input_payload=b"other"))
    assert isinstance(second, Created)
    found = await conflict(engine.create_execution(**new(idempotency_key="k")))
    assert (found["execution_id"], found["stored_kind"]) == (second.execution_id, "other")


async def test_a_conflict_says_what_to_do(engine: Engine) -> None:
    first = await engine.create_execution(**new(idempotency_key="order 1"))
    with pytest.raises(ConflictError) as refusal:
        await engine.create_execution(**new(idempotency_key="order 1", execution_kind="refund"))
    assert str(refusal.value) == (
        f"idempotency_conflict: idempotency_key='order 1', execution_id={first.execution_id}, stored_kind=job, "
        "given_kind=refund, differs=kind, remedy=submit what was submitted under this key, or use another key"
    )
