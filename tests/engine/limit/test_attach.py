"""Limits are attached to lanes, namespaces, execution kinds and flows, and to what is queued there."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from engine.limit.attaching import Ends, define_quota, limits
from engine.state import claim, new, refused
from fixtures import Engines, Rows
from flowfabric.engine.core.admission import LIMITED
from flowfabric.engine.engine import Engine
from flowfabric.model.ids import Partitions, mint_for_flow
from flowfabric.model.limit import AlreadyAttached, Attached, Attachments, Detached, NotAttached

SCOPES = {"lane": "default", "namespace": "tests", "kind": "job"}
PLAIN = Ends(set(), [], is_governed=False)

pytestmark = pytest.mark.usefixtures("clock")

Submitted = Callable[..., Awaitable[Any]]


@pytest.mark.usefixtures("without_admission")
@pytest.mark.parametrize("scope", SCOPES)
async def test_a_limit_applies_to_queued_and_to_new_executions(
    engine: Engine, connection: asyncpg.Connection, scope: str
) -> None:
    queued = await engine.create_execution(**new())
    other = await engine.create_execution(**new(lane_id="o", namespace="o", execution_kind="o"))
    budget, quota = uuid4(), uuid4()
    assert await engine.attach_budget(scope, SCOPES[scope], budget) == Attached()
    assert await engine.attach_budget(scope, SCOPES[scope], str(budget)) == AlreadyAttached()
    assert await engine.attach_quota(scope, SCOPES[scope], quota) == Attached()
    assert await engine.attach_quota(scope, SCOPES[scope], quota) == AlreadyAttached()
    assert await engine.list_attachments(scope, SCOPES[scope]) == Attachments(
        budget_ids=(budget,), quota_policy_id=quota
    )
    limited = Ends({(quota, "default")}, [budget], is_governed=True)
    assert await limits(connection, queued) == limited
    assert await limits(connection, other) == PLAIN
    for fields in ({}, {"lane_id": "o"}, {"namespace": "o"}, {"execution_kind": "o"}):
        given = new(**fields)
        is_limited = given[{"lane": "lane_id", "namespace": "namespace", "kind": "execution_kind"}[scope]] != "o"
        assert (await limits(connection, await engine.create_execution(**given))).budgets == [budget] * is_limited
    assert [each.execution_id for each in await claim(engine, "o")] != []
    assert await claim(engine, "default") == [] or scope != "lane"


@pytest.mark.usefixtures("without_admission")
@pytest.mark.parametrize("scope", SCOPES)
async def test_a_detached_limit_no_longer_applies(engine: Engine, connection: asyncpg.Connection, scope: str) -> None:
    queued = await engine.create_execution(**new())
    budget, quota = uuid4(), uuid4()
    await engine.attach_budget(scope, SCOPES[scope], budget)
    await engine.attach_quota(scope, SCOPES[scope], quota)
    assert await claim(engine) == []
    assert await engine.detach_budget(scope, SCOPES[scope], budget) == Detached()
    assert await engine.detach_budget(scope, SCOPES[scope], budget) == NotAttached()
    assert await limits(connection, queued) == Ends({(quota, "default")}, [], is_governed=True)
    assert await engine.detach_quota(scope, SCOPES[scope], uuid4()) == NotAttached()
    assert await engine.detach_quota(scope, SCOPES[scope], quota) == Detached()
    assert await limits(connection, queued) == PLAIN
    assert [each.execution_id for each in await claim(engine)] == [queued.execution_id]


async def test_a_limit_can_be_attached_before_its_lane_exists(engine: Engine, connection: asyncpg.Connection) -> None:
    budget = uuid4()
    await engine.attach_budget("lane", "later", budget)
    made = await engine.create_execution(**new(lane_id="later"))
    assert await limits(connection, made) == Ends(set(), [budget], is_governed=True)


async def test_own_and_attached_limits_add_up(engine: Engine, connection: asyncpg.Connection) -> None:
    own, shared, *budgets = (uuid4() for _ in range(5))
    quota, other = uuid4(), uuid4()
    for (scope, scope_id), budget in zip(SCOPES.items(), budgets, strict=True):
        await engine.attach_budget(scope, scope_id, budget)
    await engine.attach_budget("lane", "default", shared)
    await engine.attach_quota("lane", "default", quota)
    await engine.attach_quota("kind", "job", other)
    policy = {"budget_ids": [str(own), str(shared)], "quota_policy_id": str(quota)}
    found = await limits(connection, await engine.create_execution(**new(policy=policy)))
    assert found.quotas == {(quota, "default"), (other, "default")}
    assert found.budgets[:2] == [own, shared]
    assert {*found.budgets[2:]} == {*budgets}
    await engine.detach_budget("lane", "default", shared)
    await engine.detach_quota("lane", "default", quota)
    made = await engine.create_execution(**new(policy=policy))
    assert (await limits(connection, made)).quotas == {(quota, "default"), (other, "default")}
    assert shared in (await limits(connection, made)).budgets


async def test_a_scope_has_one_quota_and_sixteen_budgets(engine: Engine, rows: Rows) -> None:
    quota = uuid4()
    await engine.attach_quota("lane", "default", quota)
    for _ in range(16):
        await engine.attach_budget("lane", "default", uuid4())
    async with rows.unchanged():
        await refused(engine.attach_quota("lane", "default", uuid4()), "quota_attach_conflict", str(quota))
        await refused(engine.attach_budget("lane", "default", uuid4()), "budget_attach_conflict", "16")


async def test_invalid_scopes_are_refused(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        for scope, scope_id in (("worker", "x"), ("lane", ""), ("flow", "x"), ("namespace", 1), ("kind", "k" * 5000)):
            await refused(engine.attach_budget(scope, scope_id, uuid4()), "invalid_input")  # type: ignore[arg-type]
        await refused(engine.attach_budget("lane", "default", "budget"), "invalid_input")
        await refused(engine.attach_budget("flow", uuid4(), uuid4()), "flow_not_found")


# Keyed quotas.


async def test_a_keyed_quota_of_a_lane_takes_the_keys_of_new_executions(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    quota = await define_quota(connection, "tag:app.customer", "tag:app.tokens")
    given = new(tags={"app.customer": "42", "app.tokens": "9"})
    queued = await engine.create_execution(**given)
    await engine.attach_quota("lane", "default", quota)
    assert await limits(connection, queued) == Ends({(quota, "default")}, [], is_governed=True)
    made = await engine.create_execution(**given)
    assert await limits(connection, made) == Ends({(quota, "42")}, [], is_governed=True, weight=9)
    await engine.detach_quota("lane", "default", quota)
    assert await limits(connection, made) == Ends(set(), [], is_governed=False, weight=9)
    await engine.attach_quota("lane", "default", quota)
    assert await limits(connection, made) == Ends({(quota, "42")}, [], is_governed=True, weight=9)


async def test_another_process_learns_of_a_keyed_quota(
    engines: Engines, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = await define_quota(connection, "tag:app.customer")
    first, second = await engines(), await engines()
    given = new(tags={"app.customer": "42"})
    await second.create_execution(**given)
    await first.attach_quota("lane", "default", quota)
    monkeypatch.setattr("flowfabric.engine.execution.limits.REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("flowfabric.engine.execution.limits.MAX_AGE_SECONDS", 0.0)
    made = await second.create_execution(**given)
    assert (await limits(connection, made)).quotas == {(quota, "42")}


# Routes.


async def required(connection: asyncpg.Connection) -> set[tuple[str, ...]]:
    """What the routes require."""
    found = await connection.fetch("select c.required from route join capability_set c using (capability_set_no)")
    return {tuple(row["required"]) for row in found}


async def test_each_route_of_a_lane_keeps_capabilities_of_its_own(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    budget = uuid4()
    plain = await engine.create_execution(**new())
    own = await engine.create_execution(**new(policy={"budget_ids": [str(budget)]}))
    assert await required(connection) == {(), (LIMITED,)}
    await engine.attach_budget("lane", "default", budget)
    route_no = await connection.fetchval("select min(route_no) from route")
    assert await required(connection) == {(f"{LIMITED} {route_no}",), (LIMITED,)}
    later = await engine.create_execution(**new(execution_kind="later"))
    assert await limits(connection, later) == Ends(set(), [budget], is_governed=True)
    await engine.detach_budget("lane", "default", budget)
    assert await required(connection) == {(), (LIMITED,)}
    assert await limits(connection, plain) == PLAIN
    assert await limits(connection, own) == Ends(set(), [budget], is_governed=True)
    assert plain.execution_id in [each.execution_id for each in await claim(engine)]


async def test_capabilities_that_users_require_stay(engine: Engine, connection: asyncpg.Connection) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu", "zone"]}}
    made = await engine.create_execution(**new(policy=policy))
    await engine.attach_budget("lane", "default", uuid4())
    assert await required(connection) == {("gpu", LIMITED, "zone")}
    fields = await engine.read_exec_core_fields(made.execution_id, ["required_capabilities"])
    assert fields == {"required_capabilities": "gpu,zone"}
    worker: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
    grant: dict[str, Any] = {"execution_id": made.execution_id, "lane_id": "default", **worker}
    await refused(engine.issue_claim_grant(**grant, worker_capabilities=["gpu"]), "capability_mismatch", "zone")
    granted = await engine.issue_claim_grant(**grant, worker_capabilities=["gpu", "zone"])
    assert granted.execution_id == made.execution_id
    assert await engine.detach_budget("lane", "default", uuid4()) == NotAttached()


async def test_a_plain_route_made_meanwhile_stays_the_plain_one(engine: Engine, connection: asyncpg.Connection) -> None:
    budget = uuid4()
    limited = await engine.create_execution(**new())
    await engine.attach_budget("namespace", "tests", budget)
    other = await engine.create_execution(**new(namespace="other"))
    assert await limits(connection, other) == PLAIN
    await engine.detach_budget("namespace", "tests", budget)
    assert await limits(connection, limited) == Ends(set(), [], is_governed=True)
    assert await required(connection) == {(), (LIMITED,)}


async def test_a_queue_of_a_process_without_limits_is_governed_by_its_next_user(
    engines: Engines, connection: asyncpg.Connection
) -> None:
    first = await engines()
    queued = await first.create_execution(**new())
    await first.attach_budget("lane", "default", budget := uuid4())
    # As a process of the previous version leaves it, which knows no limits.
    await connection.execute("update queue set budget_ids = '{}'")
    await connection.execute(
        "update route set capability_set_no = (select capability_set_no from capability_set where required = '{}')"
    )
    await (await engines()).create_execution(**new())
    assert await limits(connection, queued) == Ends(set(), [budget], is_governed=True)


async def test_a_new_queue_misses_no_limit_that_is_being_attached(
    engines: Engines, connection: asyncpg.Connection
) -> None:
    first, second = await engines(), await engines()
    for nth in range(50):
        lane, budget = f"lane {nth}", uuid4()
        calls: list[Awaitable[Any]] = [
            first.create_execution(**new(lane_id=lane)),
            second.attach_budget("lane", lane, budget),
        ]
        made = await asyncio.gather(*(calls if nth % 2 else reversed(calls)))
        created = next(each for each in made if each != Attached())
        assert await limits(connection, created) == Ends(set(), [budget], is_governed=True), nth


# Flows.


def node(name: str, **overrides: Any) -> dict[str, Any]:
    """A node of a flow."""
    given = new(**overrides)
    del given["namespace"]
    return {"name": name, **given}


async def test_the_limits_of_a_flow_are_those_of_its_members(engine: Engine, connection: asyncpg.Connection) -> None:
    quota = await define_quota(connection, "tag:app.customer")
    budget, own = uuid4(), uuid4()
    made = await engine.submit_flow(
        flow_kind="dag",
        namespace="tests",
        nodes=[
            node("a", tags={"app.customer": "42"}, policy={"budget_ids": [str(own)]}),
            node("b", lane_id="other", policy={"quota_policy_id": str(quota)}),
        ],
        edges=[{"upstream": "a", "downstream": "b"}],
        budget_ids=[budget],
        quota_policy_id=quota,
    )
    first, second = made.execution_ids["a"], made.execution_ids["b"]  # type: ignore[union-attr]
    assert await limits(connection, first) == Ends({(quota, "42")}, [own, budget], is_governed=True)
    assert await limits(connection, second) == Ends({(quota, "default")}, [budget], is_governed=True)
    assert await engine.list_attachments("flow", made.flow_id) == Attachments(
        budget_ids=(budget,), quota_policy_id=quota
    )
    child = await engine.create_execution(**new(parent_execution_id=first))
    assert await limits(connection, child) == Ends({(quota, "42")}, [own, budget], is_governed=True)


async def test_conflicting_limits_of_a_node_are_refused(engine: Engine, rows: Rows) -> None:
    flow: dict[str, Any] = {
        "flow_kind": "dag",
        "namespace": "tests",
        "quota_policy_id": uuid4(),
        "budget_ids": [uuid4()],
    }
    bad = node("b", policy={"quota_policy_id": str(uuid4())})
    many = node("b", policy={"budget_ids": [str(uuid4()) for _ in range(16)]})
    async with rows.unchanged():
        await refused(engine.submit_flow(nodes=[node("a"), bad], **flow), "quota_attach_conflict", "nodes[1]")
        await refused(engine.submit_flow(nodes=[node("a"), many], **flow), "budget_attach_conflict", "nodes[1]")
        too_many = {**flow, "budget_ids": [uuid4() for _ in range(17)]}
        await refused(engine.submit_flow(nodes=[node("a")], **too_many), "budget_attach_conflict")


async def flow_with(engine: Engine, **limited: Any) -> UUID:
    """An empty flow with limits."""
    flow_id = uuid4()
    await engine.create_flow(flow_id, flow_kind="dag", namespace="tests", **limited)
    return flow_id


async def test_a_new_member_moves_to_the_queue_with_the_limits_of_the_flow(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    quota = await define_quota(connection, "payload:/id", "payload:/tokens")
    flow_id = await flow_with(engine, budget_ids=[budget := uuid4()])
    await engine.attach_quota("flow", flow_id, quota)
    own = uuid4()
    member = await engine.create_execution(
        **new(
            execution_id=mint_for_flow(flow_id, Partitions()),
            input_payload=b'{"id": 7, "tokens": 4}',
            policy={"budget_ids": [str(own)], "routing_requirements": {"required_capabilities": ["gpu"]}},
        )
    )
    delayed = await engine.create_execution(**new(execution_id=mint_for_flow(flow_id, Partitions()), delay_ms=60_000))
    await engine.add_execution_to_flow(flow_id, member.execution_id)
    await engine.add_execution_to_flow(flow_id, delayed.execution_id)
    expected = Ends({(quota, "7")}, [own, budget], is_governed=True, weight=4)
    assert await limits(connection, member) == expected
    assert (await limits(connection, delayed)).quotas == {(quota, "default")}
    assert await connection.fetchval("select count(*) from ready") == 1


@pytest.mark.usefixtures("without_admission")
async def test_a_claimable_member_is_claimed_from_its_new_queue(engine: Engine, connection: asyncpg.Connection) -> None:
    flow_id = await flow_with(engine, budget_ids=[uuid4()])
    member = await engine.create_execution(**new(execution_id=mint_for_flow(flow_id, Partitions())))
    await engine.add_execution_to_flow(flow_id, member.execution_id)
    assert await claim(engine) == []
    found = await engine.scan_eligible_executions(lane_id="default")
    assert found == [member.execution_id]


async def test_an_active_execution_cannot_get_the_limits_of_a_flow(engine: Engine, rows: Rows) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"budget_ids": [uuid4()]}, "budget_attach_conflict"),
        ({"quota_policy_id": uuid4()}, "quota_attach_conflict"),
    ]
    for limited, code in cases:
        flow_id = await flow_with(engine, **limited)
        member = await engine.create_execution(**new(execution_id=mint_for_flow(flow_id, Partitions())))
        await claim(engine)
        async with rows.unchanged(without=("queue", "route", "admission_key", "quota_key", "capability_set")):
            await refused(engine.add_execution_to_flow(flow_id, member.execution_id), code, "active")


async def test_an_active_execution_with_the_same_limits_becomes_a_member(engine: Engine) -> None:
    budget = uuid4()
    flow_id = await flow_with(engine, budget_ids=[budget])
    member = await engine.create_execution(
        **new(execution_id=mint_for_flow(flow_id, Partitions()), policy={"budget_ids": [str(budget)]})
    )
    await engine.issue_grant_and_claim(execution_id=member.execution_id, lane_id="default", lease_duration_ms=30_000)
    assert (await engine.add_execution_to_flow(flow_id, member.execution_id)).execution_id == member.execution_id


async def test_a_member_with_another_quota_is_refused(engine: Engine, rows: Rows) -> None:
    flow_id = await flow_with(engine, quota_policy_id=uuid4())
    member = await engine.create_execution(
        **new(execution_id=mint_for_flow(flow_id, Partitions()), policy={"quota_policy_id": str(uuid4())})
    )
    async with rows.unchanged():
        await refused(engine.add_execution_to_flow(flow_id, member.execution_id), "quota_attach_conflict")


async def test_limits_of_a_flow_are_attached_before_its_members(engine: Engine, rows: Rows) -> None:
    flow_id = await flow_with(engine, budget_ids=[budget := uuid4()])
    member = await engine.create_execution(**new(execution_id=mint_for_flow(flow_id, Partitions())))
    await engine.add_execution_to_flow(flow_id, member.execution_id)
    async with rows.unchanged():
        assert await engine.attach_budget("flow", flow_id, budget) == AlreadyAttached()
        await refused(engine.attach_budget("flow", flow_id, uuid4()), "budget_attach_conflict", "before its first")
        await refused(engine.attach_quota("flow", flow_id, uuid4()), "quota_attach_conflict", "before its first")
        await refused(engine.detach_budget("flow", flow_id, budget), "budget_attach_conflict", "before its first")
    empty = await flow_with(engine, budget_ids=[budget])
    assert await engine.detach_budget("flow", empty, budget) == Detached()


# Fairness.


@pytest.mark.usefixtures("without_admission")
async def test_a_fair_lane_is_claimed_with_admission_only(engine: Engine, connection: asyncpg.Connection) -> None:
    made = await engine.create_execution(**new(tags={"app.customer": "42"}))
    await engine.set_lane_fairness(lane_id="default", fair_by="tag:app.customer", weights={"42": 2, "default": 0.5})
    assert await limits(connection, made) == Ends(set(), [], is_governed=True)
    keyed = await engine.create_execution(**new(tags={"app.customer": "42"}))
    assert await limits(connection, keyed) == Ends(set(), [], is_governed=True, fair_key="42")
    keyless = await engine.create_execution(**new())
    assert (await limits(connection, keyless)).fair_key == "default"
    child = await engine.create_execution(**new(parent_execution_id=keyed.execution_id))
    assert (await limits(connection, child)).fair_key == "42"
    assert await claim(engine) == []
    (lane,) = (await engine.list_lanes()).lanes
    assert (lane.fair_by, lane.weights, lane.ageing_ms) == ("tag:app.customer", {"42": 2.0, "default": 0.5}, None)
    await engine.set_lane_fairness(lane_id="default", ageing_ms=1000)
    assert await claim(engine) == []
    await engine.set_lane_fairness(lane_id="default", fair_by="namespace")
    later = await engine.create_execution(**new())
    assert await limits(connection, later) == Ends(set(), [], is_governed=True)
    await engine.set_lane_fairness(lane_id="default")
    assert len(await claim(engine)) == 5


async def test_invalid_fairness_is_refused(engine: Engine, rows: Rows) -> None:
    await engine.create_execution(**new())
    cases: list[dict[str, Any]] = [
        {"fair_by": "customer"},
        {"fair_by": "tag:"},
        {"fair_by": "tag:customer"},
        {"fair_by": "payload:customer"},
        {"weights": {"a": 1}},
        {"fair_by": "namespace", "weights": {"a": 0}},
        {"fair_by": "namespace", "weights": {"a": "1"}},
        {"fair_by": "namespace", "weights": {"": 1}},
        {"fair_by": "namespace", "weights": {"a": float("nan")}},
        {"fair_by": "namespace", "weights": [1]},
        {"ageing_ms": 0},
        {"lane_id": "other", "fair_by": "namespace"},
    ]
    async with rows.unchanged():
        for case in cases:
            code = "invalid_tag_key" if case.get("fair_by") == "tag:customer" else "invalid_input"
            await refused(engine.set_lane_fairness(**{"lane_id": "default", **case}), code)


async def test_executions_stay_consistent(engine: Engine) -> None:
    flow_id = await flow_with(engine, budget_ids=[uuid4()])
    member = await engine.create_execution(**new(execution_id=mint_for_flow(flow_id, Partitions())))
    await engine.add_execution_to_flow(flow_id, member.execution_id)
    await engine.attach_budget("lane", "default", uuid4())
    assert await engine.find_inconsistencies() == []
