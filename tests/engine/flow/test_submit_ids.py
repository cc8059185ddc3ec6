"""The ids of the executions of a flow, given by the caller."""

from typing import Any
from uuid import uuid4

import pytest

from fixtures import Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import ConflictError, InvalidInputError
from flowfabric.model.flow import FlowAlreadySatisfied, FlowSubmitted
from flowfabric.model.ids import Partitions, mint_for_flow, plain_id

from .submitting import edges, flow, node

PARTITIONS = Partitions(flow=256, budget=32, quota=32)


async def test_a_node_may_have_the_id_that_the_caller_gives(engine: Engine, rows: Rows) -> None:
    flow_id = uuid4()
    given = [mint_for_flow(flow_id, PARTITIONS) for _ in range(2)]
    many = [node("a", execution_id=given[0]), node("b"), node("c", execution_id=plain_id(given[1]))]
    answer = await engine.submit_flow(**flow(many, edges("a>b c>b"), flow_id=flow_id))
    assert isinstance(answer, FlowSubmitted)
    assert [answer.execution_ids[name] for name in "ac"] == given
    assert {row["downstream_id"] for row in await rows.of("edge")} == {
        row["execution_id"]
        for row in await rows.of("execution")
        if str(row["execution_id"]) in answer.execution_ids["b"]
    }
    assert {str(row["upstream_id"]) for row in await rows.of("edge")} == {each[-36:] for each in given}


async def test_an_id_that_cannot_be_given_refuses_the_whole_flow(engine: Engine, rows: Rows) -> None:
    flow_id, other_id = uuid4(), uuid4()
    given = mint_for_flow(flow_id, PARTITIONS)
    elsewhere = next(
        found
        for _ in iter(int, 1)
        if not (found := mint_for_flow(uuid4(), PARTITIONS)).startswith(given.partition("}")[0])
    )
    refused: list[tuple[Any, str]] = [
        (5, r"nodes\[1\]\.execution_id: "),
        ("x", r"nodes\[1\]\.execution_id: "),
        (elsewhere, r"nodes\[1\]\.execution_id: .* is of partition \d+, but flow .* is of partition \d+"),
        (given, r"nodes\[1\]\.execution_id: nodes\[0\] has the id .* too"),
    ]
    async with rows.unchanged():
        for wrong, text in refused:
            nodes = [node("a", execution_id=given), node("b", execution_id=wrong)]
            with pytest.raises(InvalidInputError, match=text):
                await engine.submit_flow(**flow(nodes, flow_id=flow_id))
    existing = await engine.submit_flow(**flow([node("a", execution_id=given)], flow_id=flow_id))
    assert isinstance(existing, FlowSubmitted)
    while mint_for_flow(other_id, PARTITIONS).partition("}")[0] != given.partition("}")[0]:
        other_id = uuid4()
    async with rows.unchanged():
        with pytest.raises(ConflictError, match=r"nodes\[1\]\.execution_id: execution .* exists already; leave"):
            await engine.submit_flow(**flow([node("a"), node("b", execution_id=given)], flow_id=other_id))


async def test_a_second_submission_with_the_same_ids_is_not_taken_for_the_first(engine: Engine) -> None:
    flow_id = uuid4()
    given = mint_for_flow(flow_id, PARTITIONS)
    first = flow([node("a", execution_id=given)], flow_id=flow_id)
    assert isinstance(await engine.submit_flow(**first), FlowSubmitted)
    assert isinstance(await engine.submit_flow(**first), FlowAlreadySatisfied)
