"""Flows whose members end at the same time in several processes: every group is decided once, whoever settles it."""

import asyncio
import random
from collections import Counter
from collections.abc import Collection
from typing import Any
from uuid import UUID

import pytest

from engine.flow.graph_model import Edge, GraphModel, Group, Member
from engine.flow.graph_scripts import policy_of
from engine.flow.graph_store import differences, modelled, stored_flow
from engine.flow.graphs import BuiltFlow
from engine.flow.submitting import edges, node, submitted
from engine.state import rounds
from fixtures import Clock, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Replayed
from flowfabric.model.flow import FlowEdge, FlowSubmitted
from flowfabric.model.states import PublicState

from .races import Rivals, completion_counts, outcome, race, rivals

__all__ = ["rivals"]


async def rest(engines: list[Engine]) -> None:
    """Wait until no engine settles or cancels anything."""
    for _ in range(3):
        for engine in engines:
            await parts_of(engine).cascade.drain()
            await parts_of(engine).siblings.drain()


async def work(engine: Engine, name: str, fails: Collection[str]) -> int:
    """Claim and end members until a claim finds nothing; members in `fails` fail."""
    done = 0
    while True:
        parts_of(engine).wakeups.watermarks.clear()
        claimed = await engine.claim_many(
            lanes=("default",), worker_id=name, worker_instance_id=name, limit=2, lease_ttl_ms=3_600_000
        )
        if not claimed:
            return done
        await asyncio.gather(
            *(
                engine.fail(one.handle, reason="no luck", classification="permanent")
                if one.execution_id in fails
                else engine.complete(one.handle, b"done")
                for one in claimed
            )
        )
        done += len(claimed)


def random_graph(rng: random.Random) -> tuple[list[tuple[int, int]], dict[int, Group], set[int]]:
    """Edges, the policies of groups, none of which cancels siblings, and the members that fail if they run."""
    count = rng.randint(4, 12)
    pairs = [(up, down) for up, down in (sorted(rng.sample(range(count), 2)) for _ in range(2 * count))]
    inbound = Counter(down for _, down in pairs)
    groups = {
        number: rng.choice((Group(), Group(policy="any_of"), Group(policy="quorum", k=rng.randint(1, inbound[number]))))
        for number in inbound
    }
    return pairs, groups, {number for number in range(count) if rng.random() < 0.3}


def ended(model: GraphModel, fails: set[int]) -> GraphModel:
    """The model after every member that can run has run."""
    while waiting := [number for number, member in enumerate(model.members) if member.phase == "waiting"]:
        for number in waiting:
            model.claim(number)
            model.end(number, "failed" if number in fails else "success", None if number in fails else b"done")
        while model.queue:
            model.settle(list(model.queue))
    return model


async def test_flows_that_several_processes_work_on_end_as_the_model_predicts(
    clock: Clock, rivals: Rivals, rows: Rows, connection: Any
) -> None:
    engines = await rivals(2)
    for seed in rounds(8, whole=80):
        rng = random.Random(seed)
        pairs, groups, fails = random_graph(rng)
        count = 1 + max(max(pair) for pair in pairs)
        answer = await submitted(
            engines[0],
            [node(str(number)) for number in range(count)],
            [FlowEdge(upstream=str(up), downstream=str(down)) for up, down in pairs],
            groups={str(number): policy_of(group) for number, group in groups.items()},
        )
        ids = [answer.execution_ids[str(number)] for number in range(count)]
        numbers = {UUID(uuid_of(each)): number for number, each in enumerate(ids)}
        failing = {ids[number] for number in fails if number < count}
        model = GraphModel(0, "open")
        for _ in ids:
            model.add(Member(b'{"a": 1}'))
        model.groups = groups
        for edge_id, (up, down) in zip(answer.edge_ids, pairs, strict=True):
            model.stage(Edge(str(edge_id), up, down, has_data=False))
        for edge in model.edges:
            model.apply(edge)
        ended(model, fails)

        for _ in range(2 * count):
            await asyncio.gather(*(work(engine, f"worker-{nth}", failing) for nth, engine in enumerate(engines * 2)))
            await rest(engines)
            if (await rows.of("flow", flow_id=answer.flow_id))[0]["live_count"] == 0:
                break
        found = differences(await stored_flow(connection, answer.flow_id, numbers), modelled(model))
        assert not found, "\n".join((f"seed {seed}", *found))
    assert await engines[0].find_inconsistencies() == []


@pytest.mark.parametrize("succeeding", [60, 40])
async def test_a_hundred_upstreams_that_end_together_decide_a_quorum_of_fifty_once(
    rivals: Rivals, rows: Rows, succeeding: int
) -> None:
    engines = await rivals(2)
    names = [str(number) for number in range(100)]
    answer: FlowSubmitted = await submitted(
        engines[0],
        [node(name) for name in (*names, "child")],
        [FlowEdge(upstream=name, downstream="child", data_passing_ref="input") for name in names],
        groups={"child": {"kind": "quorum", "k": 50, "on_satisfied": "let_run"}},
    )
    child = answer.execution_ids["child"]
    claimed = await engines[0].claim_many(
        lanes=("default",), worker_id="w", worker_instance_id="w", limit=100, lease_ttl_ms=3_600_000
    )
    assert len(claimed) == 100
    await asyncio.gather(
        *(
            engines[nth % 2].complete(one.handle, str(nth).encode())
            if nth < succeeding
            else engines[nth % 2].fail(one.handle, reason="no luck", classification="permanent")
            for nth, one in enumerate(claimed)
        )
    )
    await rest(engines)
    for _ in range(3):
        await parts_of(engines[0]).cascade.settle_flow((await rows.of("flow"))[0]["partition_key"], answer.flow_id)
    (group,) = await rows.of("edge_group")
    assert (group["succeeded_count"], group["failed_count"], group["skipped_count"]) == (
        succeeding,
        100 - succeeding,
        0,
    )
    state = await engines[0].read_execution_state(child)
    counts = await completion_counts(rows)
    if succeeding >= 50:
        assert (group["group_state"], state, counts[uuid_of(child)]) == ("satisfied", PublicState.WAITING, 0)
        (run,) = await engines[1].claim_many(lanes=("default",), worker_id="w", worker_instance_id="w", limit=2)
        assert run.execution_id == child
        assert int(run.input_payload) < succeeding
    else:
        assert (group["group_state"], state, counts[uuid_of(child)]) == ("impossible", PublicState.SKIPPED, 1)
    assert {*counts.values()} == {1}
    assert await engines[0].find_inconsistencies() == []


@pytest.mark.parametrize("policy", ["all_of", "any_of"])
async def test_two_upstreams_that_end_together_release_their_child_once(
    rivals: Rivals, rows: Rows, policy: str
) -> None:
    engines = await rivals(2)
    wanted = {"kind": policy, **({} if policy == "all_of" else {"on_satisfied": "let_run"})}
    for nth in rounds(10, whole=100):
        answer = await submitted(engines[0], "a b c", edges("a>c b>c"), groups={"c": wanted})
        claimed = await engines[0].claim_many(
            lanes=("default",), worker_id="w", worker_instance_id="w", limit=3, lease_ttl_ms=3_600_000
        )
        assert len(claimed) == 2
        await race(nth, *(engine.complete(one.handle) for engine, one in zip(engines, claimed, strict=True)))
        await rest(engines)
        (row,) = await rows.of("flow", flow_id=answer.flow_id)
        await parts_of(engines[0]).cascade.settle_flow(row["partition_key"], answer.flow_id)
        (group,) = await rows.of("edge_group", flow_id=answer.flow_id)
        assert (group["group_state"], group["succeeded_count"]) == ("satisfied", 2)
        assert len(await rows.of("ready")) == 1
        (run,) = await engines[1].claim_many(lanes=("default",), worker_id="w", worker_instance_id="w", limit=3)
        assert run.execution_id == answer.execution_ids["c"]
        await engines[1].complete(run.handle)
        await rest(engines)
    assert await engines[0].find_inconsistencies() == []


async def test_a_member_that_is_replayed_while_its_upstream_succeeds_runs(
    clock: Clock, rivals: Rivals, rows: Rows
) -> None:
    one, other = await rivals(2)
    given = Given(one, clock)
    for nth in rounds(20, whole=200):
        flow = await BuiltFlow.create(given, rows)
        upstream, child = await flow.members(2)
        await flow.connect(upstream, child)
        await one.cancel_execution(execution_id=upstream, reason="x")
        await settle(one, flow)
        assert await one.read_execution_state(child) is PublicState.SKIPPED
        await settle(one, flow)
        await one.replay_execution(execution_id=upstream)
        run = await one.issue_grant_and_claim(execution_id=upstream, lane_id="default", lease_duration_ms=3_600_000)
        assert run is not None
        completed = one.complete_execution(execution_id=upstream, source="operator_override", payload=b"done")
        answers = await race(nth, completed, other.replay_execution(execution_id=child), settle(other, flow))
        assert isinstance(answers[1], Replayed), answers
        await rest([one, other])
        await settle(one, flow)
        assert await one.read_execution_state(child) is PublicState.WAITING
        assert (await flow.row())["live_count"] == 1
        await one.cancel_execution(execution_id=child, reason="x")
        await settle(one, flow)
    assert await one.find_inconsistencies() == []


async def test_a_flow_that_is_cancelled_while_its_members_end_has_no_live_member(
    clock: Clock, rivals: Rivals, rows: Rows, eventually: Eventually
) -> None:
    one, other = await rivals(2)
    for nth in rounds(20, whole=200):
        answer = await submitted(one, "a b c d", edges("a>b a>c b>d c>d"))
        run = await one.claim_many(
            lanes=("default",), worker_id="w", worker_instance_id="w", limit=4, lease_ttl_ms=3_600_000
        )
        await race(
            nth,
            one.complete(run[0].handle, b"done"),
            other.cancel_flow(answer.flow_id, reason="not wanted", cancellation_policy="cancel_all"),
        )
        await parts_of(other).flow_cancel.drain()
        await rest([one, other])
        (row,) = await rows.of("flow", flow_id=answer.flow_id)
        await parts_of(one).cascade.settle_flow(row["partition_key"], answer.flow_id)
        (row,) = await rows.of("flow", flow_id=answer.flow_id)
        assert (row["live_count"], row["derived_state"]) == (0, "failed")
    assert {*(await completion_counts(rows)).values()} == {1}
    assert await one.find_inconsistencies() == []


async def settle(engine: Engine, flow: BuiltFlow) -> None:
    """Settle the ends of members."""
    await outcome(parts_of(engine).cascade.settle_flow((await flow.row())["partition_key"], flow.flow_id))
