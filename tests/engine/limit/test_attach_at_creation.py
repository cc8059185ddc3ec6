"""What executions are limited by when they are created."""

import json
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.limit.attaching import Ends, define_quota, limits
from engine.state import CREATES, Creating, claim, items, new, refused
from fixtures import Engines, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.submit import Submit
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.policy import ExecutionPolicy

UNKNOWN = "{fp:3}:00000000-0000-7000-8000-000000000000"

pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture(params=CREATES)
def create(request: pytest.FixtureRequest) -> Creating:
    """One of the two ways to create."""
    return CREATES[request.param]


async def test_an_execution_without_limits_waits_on_a_plain_route(
    engine: Engine, connection: asyncpg.Connection, create: Creating
) -> None:
    assert await limits(connection, await create(engine, **new())) == Ends(set(), [], is_governed=False)


async def test_budgets_and_the_quota_of_a_policy_limit_the_queue(
    engine: Engine, connection: asyncpg.Connection, create: Creating
) -> None:
    first, second, quota = uuid4(), uuid4(), uuid4()
    policy = {"budget_ids": [str(second), str(first), str(second)], "quota_policy_id": str(quota)}
    made = await create(engine, **new(policy=policy))
    assert await limits(connection, made) == Ends({(quota, "default")}, [second, first], is_governed=True)
    again = await create(engine, **new(policy=policy))
    assert await limits(connection, again) == await limits(connection, made)
    assert await connection.fetchval("select count(*) from queue") == 1


async def test_malformed_ids_limit_nothing(engine: Engine, connection: asyncpg.Connection, create: Creating) -> None:
    budget = uuid4()
    made = await create(engine, **new(policy={"budget_ids": ["nonsense", ""], "quota_policy_id": "gold"}))
    assert await limits(connection, made) == Ends(set(), [], is_governed=False)
    made = await create(engine, **new(policy={"budget_ids": ["nonsense", str(budget)]}))
    assert await limits(connection, made) == Ends(set(), [budget], is_governed=True)


@pytest.mark.usefixtures("without_admission")
async def test_claims_without_admission_do_not_see_limited_executions(engine: Engine) -> None:
    limited = await engine.create_execution(**new(policy={"budget_ids": [str(uuid4())]}))
    assert await claim(engine, limit=10) == []
    plain = await engine.create_execution(**new())
    claimed = await claim(engine, limit=10)
    assert [each.execution_id for each in claimed] == [plain.execution_id]
    fields = await engine.read_exec_core_fields(limited.execution_id, ["required_capabilities"])
    assert fields["required_capabilities"] in ("", None)


KEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "tag": ("tag:app.customer", {"tags": {"app.customer": "42"}}, "42"),
    "missing tag": ("tag:app.customer", {"tags": {"app.other": "42"}}, "default"),
    "no tags": ("tag:app.customer", {}, "default"),
    "empty tag": ("tag:app.customer", {"tags": {"app.customer": ""}}, "default"),
    "nested": ("payload:/customer/id", {"input_payload": b'{"customer": {"id": "c-1"}}'}, "c-1"),
    "escaped": ("payload:/a~1b/~0", {"input_payload": b'{"a/b": {"~": "x"}}'}, "x"),
    "item of a list": ("payload:/1/id", {"input_payload": b'[{}, {"id": "second"}]'}, "second"),
    "beyond a list": ("payload:/2/id", {"input_payload": b'[{}, {"id": "second"}]'}, "default"),
    "whole": ("payload:", {"input_payload": b'"all"'}, "all"),
    "number": ("payload:/id", {"input_payload": b'{"id": 7}'}, "7"),
    "boolean": ("payload:/id", {"input_payload": b'{"id": true}'}, "true"),
    "null": ("payload:/id", {"input_payload": b'{"id": null}'}, "default"),
    "object": ("payload:/id", {"input_payload": b'{"id": {}}'}, "default"),
    "missing": ("payload:/id", {"input_payload": b'{"other": 1}'}, "default"),
    "no JSON": ("payload:/id", {"input_payload": b"\x80"}, "default"),
    "longest": ("payload:/id", {"input_payload": json.dumps({"id": "k" * 256}).encode()}, "k" * 256),
    "unknown source": ("header:x", {}, "default"),
}


@pytest.mark.parametrize("case", KEYS)
async def test_the_key_of_a_quota_is_read_from_the_execution(
    engine: Engine, connection: asyncpg.Connection, case: str
) -> None:
    source, fields, key = KEYS[case]
    quota = await define_quota(connection, source)
    given = new(policy={"quota_policy_id": str(quota)}, **fields)
    made = await engine.create_execution(**given)
    assert await limits(connection, made) == Ends({(quota, key)}, [], is_governed=True)
    (again,) = await engine.create_many(items(given))
    assert await limits(connection, again) == Ends({(quota, key)}, [], is_governed=True)


@pytest.mark.parametrize("key", ["k" * 257, "nul\0"])
async def test_a_key_that_cannot_be_stored_is_replaced_by_its_digest(
    engine: Engine, connection: asyncpg.Connection, key: str
) -> None:
    quota = await define_quota(connection, "payload:/id")
    other = json.dumps({"id": key + "x"}).encode()
    payload = json.dumps({"id": key}).encode()
    policy = {"quota_policy_id": str(quota)}
    made = [
        await engine.create_execution(**new(input_payload=each, policy=policy)) for each in (payload, payload, other)
    ]
    first, second, third = [(await limits(connection, each)).quotas for each in made]
    assert first == second != third
    ((_, stored),) = first
    assert stored.startswith("sha256:")


WEIGHTS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "number": ("payload:/tokens", {"input_payload": b'{"tokens": 500}'}, 500),
    "digits of a tag": ("tag:app.tokens", {"tags": {"app.tokens": "12"}}, 12),
    "one": ("payload:/tokens", {"input_payload": b'{"tokens": 1}'}, None),
    "zero": ("payload:/tokens", {"input_payload": b'{"tokens": 0}'}, None),
    "negative": ("payload:/tokens", {"input_payload": b'{"tokens": -5}'}, None),
    "fraction": ("payload:/tokens", {"input_payload": b'{"tokens": 2.5}'}, None),
    "boolean": ("payload:/tokens", {"input_payload": b'{"tokens": true}'}, None),
    "too large": ("payload:/tokens", {"input_payload": b'{"tokens": 9007199254740992}'}, 2**53 - 1),
    "far too large": ("payload:/tokens", {"input_payload": b'{"tokens": 1%s}' % (b"0" * 30)}, 2**53 - 1),
    "too many digits of a tag": ("tag:app.tokens", {"tags": {"app.tokens": "9" * 200}}, 2**53 - 1),
    "text": ("tag:app.tokens", {"tags": {"app.tokens": "many"}}, None),
    "missing": ("payload:/tokens", {}, None),
}


@pytest.mark.parametrize("case", WEIGHTS)
async def test_the_weight_is_read_from_the_execution(engine: Engine, connection: asyncpg.Connection, case: str) -> None:
    source, fields, weight = WEIGHTS[case]
    quota = await define_quota(connection, weight_from=source)
    given = new(policy={"quota_policy_id": str(quota)}, **fields)
    for made in (await engine.create_execution(**given), *await engine.create_many(items(given, given))):
        assert await limits(connection, made) == Ends({(quota, "default")}, [], is_governed=True, weight=weight)


async def test_a_quota_policy_created_later_gives_later_executions_their_key(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    quota = await define_quota(connection, "tag:app.customer")
    (row,) = await connection.fetch("delete from quota_policy returning *")
    given = new(policy=ExecutionPolicy(quota_policy_id=str(quota)), tags={"app.customer": "42"})
    assert (await limits(connection, await engine.create_execution(**given))).quotas == {(quota, "default")}
    await connection.execute("insert into quota_policy values ($1, $2, $3, $4, $5, $6, $7, $8, $9)", *row.values())
    assert (await limits(connection, await engine.create_execution(**given))).quotas == {(quota, "42")}


async def test_a_thousand_keys_are_created_in_one_call(
    engine: Engine, connection: asyncpg.Connection, rows: Rows
) -> None:
    quota = await define_quota(connection, "payload:/id")
    policy = {"quota_policy_id": str(quota)}
    for _ in range(2):
        given = [
            new(
                policy=policy,
                input_payload=json.dumps({"id": nth}).encode(),
                idempotency_key=f"key {nth}" if nth % 2 else None,
            )
            for nth in range(1000)
        ]
        made = await engine.create_many(items(*given))
        assert {type(each) for each in made} <= {Created, Duplicate}
    keys = {row["key"] for row in await rows.of("quota_key", quota_policy_id=quota)}
    assert keys == {str(nth) for nth in range(1000)}
    assert len(await rows.of("queue")) == len(await rows.of("admission_key")) == 1000
    found = await connection.fetch(
        """select convert_from(e.input_payload, 'UTF8')::jsonb->>'id' as id, k.key
             from execution e join queue q using (queue_no) join quota_key k on k.quota_key_no = q.quota_key_nos[1]"""
    )
    assert len(found) == 1500
    assert [row for row in found if row["id"] != row["key"]] == []


async def test_executions_of_one_key_share_a_statement(engine: Engine, connection: asyncpg.Connection) -> None:
    quota = await define_quota(connection, "payload:/id", "payload:/tokens")
    given = new(policy=(policy := {"quota_policy_id": str(quota)}), input_payload=b'{"id": 1, "tokens": 3}')
    await engine.create_many(items(given))
    submissions = parts_of(engine).services[Submit]._create._submissions
    shared = items(*[given] * 3)
    for each in shared:
        each.policy = policy
    batch = submissions.uniform_batch(shared, ["a", "b", "c"])
    assert batch is not None
    assert batch.shape.columns["quota_weight"] == 3
    other = items(given, given, {**given, "input_payload": b'{"id": 2}'})
    for each in other:
        each.policy = policy
    assert submissions.uniform_batch(other, ["a", "b", "c"]) is None


async def test_other_processes_use_the_same_queues(engines: Engines, connection: asyncpg.Connection) -> None:
    quota = await define_quota(connection, "tag:app.customer")
    given = new(policy={"quota_policy_id": str(quota), "budget_ids": [str(uuid4())]}, tags={"app.customer": "42"})
    for _ in range(3):
        await (await engines()).create_execution(**given)
    assert await connection.fetchval("select count(distinct queue_no) from execution") == 1


# Parents.


async def test_a_child_has_the_limits_of_its_parent(
    engine: Engine, connection: asyncpg.Connection, create: Creating
) -> None:
    quota = await define_quota(connection, "tag:app.customer")
    budget, own = uuid4(), uuid4()
    policy = {"budget_ids": [str(budget)], "quota_policy_id": str(quota)}
    parent = await create(engine, **new(policy=policy, tags={"app.customer": "42"}))
    child = await create(
        engine,
        **new(lane_id="other", parent_execution_id=parent.execution_id, policy={"budget_ids": [str(own), str(budget)]}),
    )
    assert await limits(connection, child) == Ends({(quota, "42")}, [own, budget], is_governed=True)
    grandchild = await create(engine, **new(parent_execution_id=child.execution_id, policy=policy))
    assert await limits(connection, grandchild) == Ends({(quota, "42")}, [budget, own], is_governed=True)


async def test_a_child_of_a_parent_without_limits_has_none(
    engine: Engine, connection: asyncpg.Connection, create: Creating
) -> None:
    parent = await create(engine, **new())
    child = await create(engine, **new(parent_execution_id=parent.execution_id))
    assert await limits(connection, child) == Ends(set(), [], is_governed=False)


async def test_an_unknown_parent_is_refused(engine: Engine, rows: Rows, create: Creating) -> None:
    await create(engine, **new())
    async with rows.unchanged():
        await refused(create(engine, **new(parent_execution_id=UNKNOWN)), "execution_not_found")
        await refused(create(engine, **new(parent_execution_id="parent")), "invalid_input")


async def test_a_bad_parent_does_not_fail_the_others(engine: Engine) -> None:
    made = await engine.create_many(
        items(new(), new(parent_execution_id=UNKNOWN), new(parent_execution_id="parent"), new())
    )
    codes = [each.code if isinstance(each, EngineError) else "created" for each in made]
    assert codes == ["created", "execution_not_found", "invalid_input", "created"]


async def test_a_child_cannot_name_another_quota(engine: Engine, rows: Rows, create: Creating) -> None:
    parent = await create(engine, **new(policy={"quota_policy_id": str(uuid4())}))
    child = new(parent_execution_id=parent.execution_id, policy={"quota_policy_id": str(uuid4())})
    async with rows.unchanged():
        await refused(create(engine, **child), "quota_attach_conflict")


async def test_a_child_can_have_sixteen_budgets_in_all(
    engine: Engine, connection: asyncpg.Connection, rows: Rows, create: Creating
) -> None:
    budgets = [str(uuid4()) for _ in range(17)]
    parent = await create(engine, **new(policy={"budget_ids": budgets[:10]}))
    child = new(parent_execution_id=parent.execution_id)
    made = await create(engine, **child, policy={"budget_ids": budgets[8:16]})
    assert len((await limits(connection, made)).budgets) == 16
    async with rows.unchanged():
        await refused(create(engine, **child, policy={"budget_ids": budgets[8:17]}), "budget_attach_conflict")
        await refused(create(engine, **new(policy={"budget_ids": budgets})), "budget_attach_conflict")


async def test_a_duplicate_is_answered_before_its_limits_are_checked(engine: Engine, create: Creating) -> None:
    first = await create(engine, **new(idempotency_key="once"))
    again = await create(engine, **new(idempotency_key="once", parent_execution_id=UNKNOWN))
    assert again == Duplicate(execution_id=first.execution_id)
