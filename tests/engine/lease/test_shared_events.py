"""An event of many executions is stored as one row and read as one event for each of them."""

from collections import Counter

from creates import new
from engine.cases import in_turn
from fixtures import Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.event import CompletionOutcome
from flowfabric.model.lease import ClaimedExecution

MANY = 20
SUCCESS = CompletionOutcome.SUCCESS.value


async def claim(engine: Engine, limit: int = 100) -> list[ClaimedExecution]:
    return await engine.claim_many(lanes=("default",), worker_id="worker", worker_instance_id="worker-1", limit=limit)


async def count_event_rows(rows: Rows, kind: str) -> int:
    return len(await rows.of("event", kind=kind))


async def test_executions_claimed_renewed_and_completed_together_share_one_row_per_event(
    engine: Engine, given: Given, rows: Rows
) -> None:
    ids = [await given.created() for _ in range(MANY)]
    runs = await claim(engine)
    await engine.renew_many([run.handle for run in runs])
    await engine.complete_many([(run.handle, b"done") for run in runs])

    assert [await count_event_rows(rows, kind) for kind in ("acquired", "renewed", "released")] == [1, 1, 1]
    for execution_id, run in zip(ids, runs, strict=True):
        events = await rows.events(execution_id)
        assert [event["kind"] for event in events] == ["acquired", "renewed", "released"]
        assert {(event["lease_id"], event["attempt_id"]) for event in events} == {(run.lease_id, run.attempt_id)}
        assert {(event["lease_epoch"], event["attempt_index"]) for event in events} == {(1, 0)}
        assert [event["outcome"] for event in events] == [None, None, SUCCESS]


@in_turn("difference", ["namespace", "instance_tag", "attempt"])
async def test_an_execution_that_differs_has_its_own_event_rows(
    engine: Engine, given: Given, rows: Rows, difference: str
) -> None:
    if difference == "attempt":
        # Its next claim is that of the second attempt.
        await engine.fail(await given.claimed(policy={"retry_policy": {"max_retries": 1}}), reason="once")
        await given.clock.advance(seconds=60)
        assert await parts_of(engine).delays.promote_due() == 1
    elif difference == "namespace":
        await given.created(namespace="other")
    else:
        await given.created(tags={"ff.instance_id": "blue"})
    for _ in range(MANY):
        await given.created()
    before = await count_event_rows(rows, "acquired")
    runs = await claim(engine)
    await engine.renew_many([run.handle for run in runs])
    await engine.complete_many([(run.handle, b"done") for run in runs])

    assert len(runs) == MANY + 1
    assert await count_event_rows(rows, "acquired") - before == 2
    assert await count_event_rows(rows, "renewed") == 2
    assert len(await rows.of("event", kind="released", outcome=SUCCESS)) == 2
    for run in runs:
        kinds = Counter(
            event["kind"] for event in await rows.events(run.execution_id) if event["lease_id"] == run.lease_id
        )
        assert kinds == {"acquired": 1, "renewed": 1, "released": 1}
        for event in await rows.events(run.execution_id):
            assert event["namespace_no"] == (await rows.execution(run.execution_id))["namespace_no"]
            assert event["instance_tag"] == (await rows.execution(run.execution_id))["instance_tag"]


async def test_an_event_row_of_150_executions_has_all_ids_in_order(engine: Engine, given: Given, rows: Rows) -> None:
    """Arrays of this length are compressed or moved out of the row by Postgres."""
    ids = [one.execution_id for one in await engine.create_many([new() for _ in range(150)])]  # type: ignore[union-attr]
    runs = await claim(engine, 150)
    (row,) = await rows.of("event", kind="acquired")
    assert row["execution_id"] is None
    assert [str(each) for each in row["execution_ids"]] == [uuid_of(execution_id) for execution_id in ids]
    assert row["lease_ids"] == [run.lease_id for run in runs]
