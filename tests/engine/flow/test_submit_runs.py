"""A submitted flow runs to its end along its edges."""

import pytest

from engine.state import DELAYED, vector
from fixtures import Clock, Eventually, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.flow import FlowEdge, FlowSubmitted

from .submitting import edges, names_of, node, nodes, submitted

pytestmark = pytest.mark.usefixtures("consistent_rows")

MINUTE = 60_000


async def run(engine: Engine, answer: FlowSubmitted, count: int, *, failing: str = "") -> dict[str, bytes]:
    """Run so many members, each with its name as the result, except those that fail; return their inputs in order."""
    names = names_of(answer)
    inputs: dict[str, bytes] = {}
    while len(inputs) < count:
        found = await engine.claim_many(
            lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=500, max_wait_ms=10_000
        )
        inputs |= {names[each.execution_id]: each.input_payload for each in found}
        results = [(each.handle, names[each.execution_id].encode()) for each in found]
        failed = [handle for handle, name in results if name.decode() in failing.split()]
        for handle in failed:
            await engine.fail(handle, reason="no luck", classification="permanent")
        if completed := [(handle, result) for handle, result in results if handle not in failed]:
            await engine.complete_many(completed)
    return inputs


async def ended(rows: Rows, answer: FlowSubmitted, eventually: Eventually) -> str:
    """The derived state of the flow, once it has ended."""

    async def found() -> str | None:
        (row,) = await rows.of("flow", flow_id=answer.flow_id)
        return str(row["derived_state"]) if row["live_count"] == 0 else None

    return str(await eventually(found))


async def states(rows: Rows, answer: FlowSubmitted) -> dict[str, str]:
    """The public state of each member."""
    return {
        name: (await rows.execution(execution_id))["public_state"]
        for name, execution_id in answer.execution_ids.items()
    }


async def test_every_member_runs_after_its_dependencies_with_their_data(
    engine: Engine, rows: Rows, eventually: Eventually
) -> None:
    links = [*edges("a>b a>c b>d"), FlowEdge(upstream="c", downstream="d", data_passing_ref="x")]
    answer = await submitted(engine, nodes("d c b a"), links)
    inputs = await run(engine, answer, 4)
    assert list(inputs) in (["a", "b", "c", "d"], ["a", "c", "b", "d"])
    assert inputs["d"] == b"c"
    assert inputs["b"] == b'{"a": 1}'
    assert await ended(rows, answer, eventually) == "completed"


async def test_the_policies_of_the_groups_decide_what_runs(engine: Engine, rows: Rows, eventually: Eventually) -> None:
    answer = await submitted(
        engine,
        "a b c all any two three",
        "a>all b>all c>all a>any b>any c>any a>two b>two c>two a>three b>three c>three",
        groups={
            "any": {"kind": "any_of", "on_satisfied": "let_run"},
            "two": {"kind": "quorum", "k": 2, "on_satisfied": "let_run"},
            "three": {"kind": "quorum", "k": 3, "on_satisfied": "let_run"},
        },
    )
    await run(engine, answer, 5, failing="b")
    assert await ended(rows, answer, eventually) == "failed"
    found = await states(rows, answer)
    assert found == {
        **dict.fromkeys(("a", "c", "any", "two"), "completed"),
        "b": "failed",
        **dict.fromkeys(("all", "three"), "skipped"),
    }


async def test_a_delay_applies_after_the_dependencies_are_satisfied(
    engine: Engine, rows: Rows, clock: Clock, eventually: Eventually
) -> None:
    answer = await submitted(engine, [node("a"), node("b", delay_ms=MINUTE)], "a>b")
    child = answer.execution_ids["b"]
    await run(engine, answer, 1)

    async def is_delayed() -> bool:
        return vector(await rows.execution(child)) == DELAYED

    await eventually(is_delayed)
    await clock.advance(ms=MINUTE)
    assert await parts_of(engine).delays.promote_due() == 1
    await run(engine, answer, 1)
    assert await ended(rows, answer, eventually) == "completed"


async def test_a_wide_flow_of_many_statements_runs_to_its_end(
    engine: Engine, rows: Rows, eventually: Eventually
) -> None:
    count = 1_200
    middle = " ".join(f"n{at}" for at in range(count))
    pairs = " ".join(f"first>n{at} n{at}>last" for at in range(count))
    answer = await submitted(engine, f"first {middle} last", pairs)
    inputs = list(await run(engine, answer, count + 2))
    assert (inputs[0], inputs[-1]) == ("first", "last")
    assert await ended(rows, answer, eventually) == "completed"
