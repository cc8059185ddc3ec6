"""A submitted flow is stored as a whole: its members, edges and groups, and what can start at once."""

import json
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from engine.state import DELAYED, WAITING, event_texts, vector
from fixtures import Clock, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.edge import AllOfEdges, AnyOfEdges, EdgePolicy, OnSatisfied, QuorumOfEdges
from flowfabric.model.flow import FlowEdge, FlowNode, FlowSubmitted
from flowfabric.model.ids import Partitions, flow_partition, parse_uuid

from .submitting import edges, flow, names_of, node, nodes, submitted

pytestmark = pytest.mark.usefixtures("consistent_rows")

BLOCKED = "runnable/unowned/blocked_by_dependencies/waiting_for_children/none/pending_first_attempt/waiting_children"
MINUTE = 60_000


async def inbound(rows: Rows, answer: FlowSubmitted) -> dict[str, int]:
    """The number of inbound edges of each node that has a group."""
    names = {uuid_of(execution_id): name for execution_id, name in names_of(answer).items()}
    found = await rows.of("edge_group", flow_id=answer.flow_id)
    for group in found:
        assert (group["staged_count"], group["group_state"]) == (group["applied_count"], "pending")
        assert group["last_flow_graph_revision"] == answer.graph_revision
    return {names[str(group["downstream_id"])]: group["applied_count"] for group in found}


async def claimed(engine: Engine, answer: FlowSubmitted, *lanes: str, capabilities: Any = ()) -> list[str]:
    """The names of the nodes that a worker can claim now, in the order of its claims."""
    runs = await engine.claim_many(
        lanes=lanes or ("default",), worker_id="w", worker_instance_id="w-1", limit=500, capabilities=capabilities
    )
    names = names_of(answer)
    return [names[run.execution_id] for run in runs]


@pytest.mark.parametrize(
    ("names", "pairs", "groups", "roots", "state"),
    [
        ("a", "", {}, "a", "open"),
        ("a b c", "", {}, "a b c", "open"),
        ("a b c", "a>b b>c", {"b": 1, "c": 1}, "a", "blocked"),
        ("a b c d", "a>b a>c b>d c>d", {"b": 1, "c": 1, "d": 2}, "a", "blocked"),
        ("a b c d e", "a>b a>c a>d b>e c>e d>e", {"b": 1, "c": 1, "d": 1, "e": 3}, "a", "blocked"),
        # Two edges between the same nodes count as two, and nodes need not be in the order of the edges.
        ("d c a b", "a>b a>b c>b b>d", {"b": 3, "d": 1}, "c a", "blocked"),
    ],
    ids=["a single node", "only roots", "a chain", "a diamond", "a fan-out and fan-in", "two edges between two nodes"],
)
async def test_a_flow_is_stored_and_its_roots_can_be_claimed_at_once(
    engine: Engine, rows: Rows, clock: Clock, names: str, pairs: str, groups: dict[str, int], roots: str, state: str
) -> None:
    answer = await submitted(engine, names, pairs)
    ids = answer.execution_ids
    assert list(ids) == names.split()
    assert answer.graph_revision == len(ids) + len(answer.edge_ids)

    now = await clock.now()
    (row,) = await rows.of("flow")
    partition_key = flow_partition(answer.flow_id, Partitions().flow)
    assert row == {
        "partition_key": partition_key,
        "flow_id": answer.flow_id,
        "namespace_no": row["namespace_no"],
        "flow_kind": "dag",
        "graph_revision": answer.graph_revision,
        "node_count": len(ids),
        "edge_count": len(answer.edge_ids),
        "public_flow_state": "open",
        "derived_state": state,
        "live_count": len(ids),
        "failed_count": 0,
        "project_at": now,
        "quiet_count": 0,
        "retain_until": now + 86_400_000,
        "created_at": now,
        "last_mutation_at": now,
        "ended_at": None,
        "cancelled_at": None,
        "cancel_reason": None,
        "cancellation_policy": None,
    }
    for name, execution_id in ids.items():
        member = await rows.execution(execution_id)
        assert execution_id.startswith(f"{{fp:{partition_key}}}:")
        assert (member["flow_id"], vector(member)) == (answer.flow_id, BLOCKED if name in groups else WAITING)
        assert member["blocking_detail"] == (f"{groups[name]} dep(s) unresolved" if name in groups else None)
        assert await engine.resolve_execution_flow_id(execution_id) == answer.flow_id
    assert await inbound(rows, answer) == groups

    stored = {edge["edge_id"]: edge for edge in await rows.of("edge", flow_id=answer.flow_id)}
    assert len(stored) == len(answer.edge_ids)
    numbers = [stored[edge_id].pop("edge_no") for edge_id in answer.edge_ids]
    assert numbers == sorted(set(numbers))
    for edge_id, given in zip(answer.edge_ids, edges(pairs), strict=True):
        assert stored[edge_id] == {
            "partition_key": partition_key,
            "flow_id": answer.flow_id,
            "edge_id": edge_id,
            "upstream_id": parse_uuid(uuid_of(ids[given.upstream]), ""),
            "downstream_id": parse_uuid(uuid_of(ids[given.downstream]), ""),
            "state": "unsatisfied",
            "staged_at": now,
            "applied_at": now,
            "last_resolved_at": None,
            "dependency_kind": "success_only",
            "data_passing_ref": None,
        }
    assert await claimed(engine, answer) == roots.split()


async def test_a_flow_without_nodes_is_stored_and_never_projected(engine: Engine, rows: Rows) -> None:
    answer = await submitted(engine)
    assert (answer.execution_ids, list(answer.edge_ids), answer.graph_revision) == ({}, [], 0)
    (row,) = await rows.of("flow")
    assert (row["derived_state"], row["node_count"], row["live_count"], row["project_at"]) == ("open", 0, 0, None)


async def test_nodes_and_edges_may_be_given_as_mappings(engine: Engine, rows: Rows) -> None:
    plain = {"lane_id": "default", "execution_kind": "job", "input_payload": b"1", "creator_identity": "test"}
    answer = await submitted(
        engine,
        [{"name": "a", **plain}, {"name": "b", **plain, "priority": 7}],
        [{"upstream": "a", "downstream": "b", "dependency_kind": "any", "data_passing_ref": "result"}],
        groups={"b": {"kind": "any_of", "on_satisfied": "let_run"}},
    )
    (edge,) = await rows.of("edge")
    assert (edge["dependency_kind"], edge["data_passing_ref"]) == ("any", "result")
    assert (await rows.execution(answer.execution_ids["b"]))["priority"] == 7


async def test_the_policy_of_each_group_is_stored(engine: Engine, rows: Rows) -> None:
    policies: dict[str, EdgePolicy] = {
        "b": AllOfEdges(),
        "c": AnyOfEdges(OnSatisfied.LET_RUN),
        "d": AnyOfEdges(OnSatisfied.CANCEL_REMAINING),
        "e": QuorumOfEdges(2, OnSatisfied.LET_RUN),
    }
    answer = await submitted(engine, "x y b c d e f", "x>b x>c y>c x>d y>d x>e y>e x>f", groups=policies)
    names = {uuid_of(execution_id): name for execution_id, name in names_of(answer).items()}
    assert {
        names[str(row["downstream_id"])]: (row["policy"], row["k"], row["on_satisfied"])
        for row in await rows.of("edge_group")
    } == {
        "b": ("all_of", None, None),
        "c": ("any_of", None, "let_run"),
        "d": ("any_of", None, "cancel_remaining"),
        "e": ("quorum", 2, "let_run"),
        "f": ("all_of", None, None),
    }


async def test_the_tags_of_a_flow_are_stored(engine: Engine, rows: Rows) -> None:
    await submitted(engine, "a", tags={"app.customer": "acme", "app.month": "may"})
    assert {row["key"]: row["value"] for row in await rows.of("flow_tag")} == {
        "app.customer": "acme",
        "app.month": "may",
    }


async def test_every_field_of_a_node_is_stored_as_a_submission_stores_it(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    now = await clock.now()
    policy = {
        "routing_requirements": {"required_capabilities": ["gpu"]},
        "stream_policy": {"retention_ttl_ms": 5},
        "timeout_policy": {"execution_deadline_ms": 7 * MINUTE},
    }
    fields: dict[str, dict[str, Any]] = {
        "plain": {},
        "empty": {"input_payload": b""},
        "large": {"input_payload": b"x" * 5000, "payload_encoding": "text"},
        "prior": {"priority": 20_000},
        "late": {"delay_until": now + MINUTE},
        "later": {"delay_ms": 2 * MINUTE, "lane_id": "other"},
        "past": {"delay_until": now - MINUTE},
        "due": {"execution_deadline_at": now + 3 * MINUTE, "creator_identity": "someone"},
        "routed": {"policy": policy},
        "same": {"policy": policy, "execution_kind": "another"},
        "typed": {"policy": '{"max_replay_count": 3}', "priority": -5},
        "tagged": {"tags": {"app.key": "value", "ff.instance_id": "one"}, "delay_ms": 0},
    }
    created = {}
    for name, more in fields.items():
        arguments = {field: getattr(node(name, **more), field) for field in node(name).__struct_fields__}
        del arguments["name"]
        created[name] = await engine.create_execution(namespace="tests", **arguments)
    answer = await submitted(engine, [node(name, **more) for name, more in fields.items()])
    differs = {"partition_key", "execution_id", "place", "flow_id"}
    for name, execution_id in answer.execution_ids.items():
        own, other = await rows.execution(execution_id), await rows.execution(created[name].execution_id)
        assert {key: value for key, value in own.items() if other[key] != value}.keys() <= differs, name
        assert await rows.timers(execution_id) == await rows.timers(created[name].execution_id)
        for table in ("execution_input", "execution_tag", "listed"):
            assert [
                [value for key, value in row.items() if key not in differs]
                for row in await rows.of(table, execution_id=uuid_of(execution_id))
            ] == [
                [value for key, value in row.items() if key not in differs]
                for row in await rows.of(table, execution_id=uuid_of(created[name].execution_id))
            ]
        assert await event_texts(rows, execution_id) == await event_texts(rows, created[name].execution_id)
    (event,) = await rows.events(answer.execution_ids["tagged"])
    assert (event["kind"], event["flow_id"], event["instance_tag"]) == ("tag_attached", answer.flow_id, "one")
    assert vector(await rows.execution(answer.execution_ids["late"])) == DELAYED


class MadeWhenRead(Sequence[FlowNode]):
    """Nodes that nothing keeps after they are read; each has another replay limit."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, at: Any) -> Any:
        if at >= len(self):
            raise IndexError
        return node(f"n{at}", policy={"max_replay_count": 100 + at})


async def test_each_node_of_a_lazy_sequence_keeps_its_own_policy(engine: Engine, rows: Rows) -> None:
    answer = await engine.submit_flow(**flow(MadeWhenRead()))
    assert isinstance(answer, FlowSubmitted)
    for at, execution_id in enumerate(answer.execution_ids.values()):
        assert json.loads((await rows.execution(execution_id))["policy"]) == {"max_replay_count": 100 + at}


async def test_a_flow_whose_roots_are_delayed_is_blocked(engine: Engine, rows: Rows, clock: Clock) -> None:
    now = await clock.now()
    for more, state in (
        ({"delay_until": now + 1}, "blocked"),
        ({"delay_ms": 1}, "blocked"),
        ({"policy": {"delay_until": now + 1}}, "blocked"),
        ({"delay_until": now}, "open"),
        ({"delay_ms": 0}, "open"),
    ):
        answer = await submitted(engine, [node("a"), node("b", **more)])
        (row,) = await rows.of("flow", flow_id=answer.flow_id)
        assert row["derived_state"] == state, more


async def test_a_waiting_member_keeps_its_delay_without_a_timer_and_has_a_deadline(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    now = await clock.now()
    late = node("late", delay_until=now + MINUTE, execution_deadline_at=now + 2 * MINUTE, input_payload=b"x" * 5000)
    tagged = node("tagged", delay_ms=MINUTE, tags={"ff.instance_id": "one"})
    answer = await submitted(engine, [node("a"), late, tagged], "a>late a>tagged")
    for name in ("late", "tagged"):
        row = await rows.execution(answer.execution_ids[name])
        assert (vector(row), row["delay_until"]) == (BLOCKED, now + MINUTE)
        assert row["blocking_detail"] == "1 dep(s) unresolved"
    assert await rows.timers(answer.execution_ids["late"]) == {"deadline": now + 2 * MINUTE}
    assert await event_texts(rows, answer.execution_ids["tagged"]) == ["tag_attached"]
    await clock.advance(ms=3 * MINUTE)
    assert await claimed(engine, answer) == ["a"]


async def test_members_are_claimed_by_priority_and_then_in_the_order_of_their_nodes(engine: Engine) -> None:
    members = [node(f"n{at}", priority=at % 3, execution_kind=f"kind {at % 2}") for at in range(30)]
    answer = await submitted(engine, members)
    expected = sorted(range(30), key=lambda at: (-(at % 3), at))
    assert await claimed(engine, answer) == [f"n{at}" for at in expected]


async def test_only_a_capable_worker_claims_a_root_that_requires_capabilities(engine: Engine) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    answer = await submitted(engine, [node("any"), node("gpu", policy=policy)])
    assert await claimed(engine, answer) == ["any"]
    assert await claimed(engine, answer, capabilities=("gpu",)) == ["gpu"]


async def test_a_deadline_ends_a_waiting_member(engine: Engine, clock: Clock) -> None:
    late = node("b", execution_deadline_at=await clock.now() + MINUTE)
    answer = await submitted(engine, [node("a"), late], "a>b")
    await clock.advance(ms=MINUTE + 1)
    await engine.expire_execution(answer.execution_ids["b"], "execution_deadline")
    status = await engine.read_execution_status(answer.execution_ids["b"])
    assert status is not None
    assert status.public_state == "expired"


async def test_a_large_flow_is_submitted_in_one_call(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    count = 5_000
    # Every statement has nodes with and without edges, in several lanes and with several policies.
    members = [
        node(
            f"n{at}",
            lane_id=f"lane {at % 3}",
            execution_kind=f"kind {at % 7}",
            policy={"max_replay_count": at % 5},
            input_payload=b"x" * (300 if at % 11 == 0 else 3),
            tags={"app.at": str(at)} if at % 4 == 0 else None,
        )
        for at in range(count)
    ]
    pairs = [FlowEdge(upstream=f"n{at}", downstream=f"n{at * 2 % count}") for at in range(1, count) if at * 2 != count]
    pairs = [edge for edge in pairs if int(edge.upstream[1:]) < int(edge.downstream[1:])]
    answer = await submitted(engine, members, pairs)
    assert len(await rows.of("execution")) == count
    ends = {row["edge_id"]: (str(row["upstream_id"]), str(row["downstream_id"])) for row in await rows.of("edge")}
    ids = answer.execution_ids
    assert [ends[edge_id] for edge_id in answer.edge_ids] == [
        (uuid_of(ids[edge.upstream]), uuid_of(ids[edge.downstream])) for edge in pairs
    ]
    groups = await inbound(rows, answer)
    children = [edge.downstream for edge in pairs]
    assert groups == {name: children.count(name) for name in set(children)}
    ordered = await connection.fetch("select execution_id::text from execution order by place")
    assert [row[0] for row in ordered] == [uuid_of(execution_id) for execution_id in ids.values()]
    roots = {f"n{at}" for at in range(count)} - set(children)
    found: set[str] = set()
    while more := await claimed(engine, answer, "lane 0", "lane 1", "lane 2"):
        found.update(more)
    assert found == roots


async def test_inputs_of_many_megabytes_are_stored_in_several_statements(engine: Engine, rows: Rows) -> None:
    answer = await submitted(engine, [node(f"n{at}", input_payload=bytes([at]) * 3 * 2**20) for at in range(5)])
    for at, execution_id in enumerate(answer.execution_ids.values()):
        (row,) = await rows.of("execution_input", execution_id=uuid_of(execution_id))
        assert row["input_payload"] == bytes([at]) * 3 * 2**20


async def test_an_empty_data_passing_ref_is_stored_as_none(engine: Engine, rows: Rows) -> None:
    await engine.submit_flow(
        **{**flow(), "nodes": nodes("a b"), "edges": [FlowEdge(upstream="a", downstream="b", data_passing_ref="")]}
    )
    (edge,) = await rows.of("edge")
    assert edge["data_passing_ref"] is None
