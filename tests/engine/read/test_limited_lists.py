"""Lists and counts: what waits in a queue without room is rate limited, whether a claim has marked it or not."""

from typing import Any

import pytest

from engine.limit.budgets import budget, report
from engine.limit.limits import limited, quota
from engine.state import claim
from engine.waits import suspend_run
from fixtures import Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read import listing
from flowfabric.model.flow import FlowNode
from flowfabric.model.ids import FlowId
from flowfabric.model.states import PublicState

pytestmark = pytest.mark.usefixtures("clock", "scans_are_free", "consistent_rows")

RATE_LIMITED, WAITING = PublicState.RATE_LIMITED, PublicState.WAITING


async def listed(engine: Engine, state: PublicState | None = None, **filters: Any) -> dict[str, str]:
    """The public state of each execution of a list, read with many pages."""
    found: dict[str, str] = {}
    cursor = None
    while True:
        page = await engine.list_executions(public_state=state, limit=2, cursor=cursor, **filters)
        found.update({each.execution_id: each.public_state.value for each in page.executions})
        if (cursor := page.next_cursor) is None:
            return found


async def counted(engine: Engine, **filters: Any) -> dict[str, int]:
    """The number of executions of each state."""
    counts = await engine.count_executions(by="state", **filters)
    return {str(each.public_state): each.count for each in counts}


async def agreed(engine: Engine, **filters: Any) -> dict[str, set[str]]:
    """The executions of each state; every list and every count must agree, whatever states they are for."""
    whole: dict[str, set[str]] = {}
    for execution_id, state in (await listed(engine, **filters)).items():
        whole.setdefault(state, set()).add(execution_id)
    assert await listed(engine, order="oldest", **filters) == await listed(engine, **filters)
    assert await counted(engine, **filters) == {state: len(ids) for state, ids in whole.items()}
    for state in PublicState:
        ids = whole.get(state, set())
        assert await listed(engine, state, **filters) == dict.fromkeys(ids, state.value)
        assert await counted(engine, public_state=state, **filters) == ({state.value: len(ids)} if ids else {})
    return whole


@pytest.fixture(params=["scans", "collections"])
def _each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find pages by scans only, or by collections where there is one."""
    if request.param == "scans":
        monkeypatch.setattr(listing._Query, "collections", lambda _: [])
        monkeypatch.setattr(listing._Query, "is_rare", False)
    else:
        monkeypatch.setattr(listing._Query, "is_rare", True)


@pytest.mark.usefixtures("_each_way")
async def test_executions_of_a_queue_without_room_are_rate_limited(engine: Engine, given: Given) -> None:
    policy = limited(await quota(engine, running=2, key_from="tag:app.tenant"))
    acme = [await given.created(policy=policy, tags={"app.tenant": "acme"}) for _ in range(6)]
    other = await given.created(policy=policy, tags={"app.tenant": "other"})
    plain = await given.created()
    assert await agreed(engine) == {"waiting": {*acme, other, plain}}
    runs = await claim(engine, limit=2)
    running = {run.execution_id for run in runs}
    assert running == {*acme[:2]}
    assert await agreed(engine) == {"active": running, "rate_limited": {*acme[2:]}, "waiting": {other, plain}}
    assert {run.execution_id for run in await claim(engine)} == {other, plain}
    # The first one is marked now.
    active = {*running, other, plain}
    assert await agreed(engine) == {"active": active, "rate_limited": {*acme[2:]}}
    found = await listed(engine, tag=("app.tenant", "acme"))
    assert found == dict.fromkeys(acme[:2], "active") | dict.fromkeys(acme[2:], "rate_limited")
    assert await agreed(engine, lane_id="default", namespace="tests", execution_kind="job") == await agreed(engine)
    assert await agreed(engine, lane_id="unknown") == {}
    await engine.complete(runs[0].handle, b"")
    # The marked one keeps its state until it is claimed or released.
    found_states = await agreed(engine)
    assert (found_states["rate_limited"], found_states["waiting"]) == ({acme[2]}, {*acme[3:]})


@pytest.mark.usefixtures("_each_way")
async def test_executions_of_an_exhausted_budget_are_rate_limited(engine: Engine, given: Given) -> None:
    budget_id = await budget(engine, hard={"calls": 1})
    ids = [await given.created(policy={"budget_ids": [str(budget_id)]}) for _ in range(3)]
    delayed = await given.delayed(policy={"budget_ids": [str(budget_id)]})
    held = await given.created(policy={"budget_ids": [str(budget_id)]})
    await engine.block_execution_for_admission(held, "paused_by_operator")
    assert await agreed(engine) == {"waiting": {*ids, held}, "delayed": {delayed}}
    await report(engine, budget_id, calls=1)
    # What is held back for another reason keeps its state.
    assert await agreed(engine) == {"rate_limited": {*ids}, "waiting": {held}, "delayed": {delayed}}


@pytest.mark.usefixtures("_each_way")
async def test_granted_resumable_and_lost_executions_of_a_queue_without_room_keep_their_state(
    engine: Engine, given: Given
) -> None:
    policy = limited(await quota(engine, running=1))
    resumed = await given.claimed(policy=policy)
    await suspend_run(engine, resumed)
    await engine.resume_execution(execution_id=resumed.execution_id)
    lost = await given.created(policy=policy, priority=9)
    (run,) = await claim(engine)
    assert run.execution_id == lost
    await engine.revoke_lease(lost, reason="test")
    holder = await given.created(policy=policy, priority=99)
    (run,) = await claim(engine)
    assert run.execution_id == holder
    granted, waiting = await given.created(policy=policy), await given.created(policy=policy)
    await engine.issue_claim_grant(
        execution_id=granted, worker_id="w", worker_instance_id="w-1", grant_ttl_ms=60_000, lane_id="default"
    )
    found = await agreed(engine)
    assert found["rate_limited"] == {waiting}
    assert found["waiting"] == {granted}
    assert found["resumable"] == {resumed.execution_id}
    assert found["active"] == {holder, lost}


@pytest.mark.usefixtures("_each_way")
async def test_members_of_a_flow_in_a_queue_without_room_are_rate_limited(engine: Engine, given: Given) -> None:
    policy = limited(await quota(engine, running=1))
    common: dict[str, Any] = {
        "lane_id": "default",
        "execution_kind": "job",
        "input_payload": b"",
        "creator_identity": "test",
    }
    nodes = [FlowNode(name=str(nth), policy=policy, **common) for nth in range(3)]
    submitted = await engine.submit_flow(
        flow_kind="dag", namespace="tests", nodes=[*nodes, FlowNode(name="plain", **common)], edges=[]
    )
    flow_id = FlowId(submitted.flow_id)
    assert set(await agreed(engine, flow_id=flow_id)) == {"waiting"}
    assert len(await claim(engine, limit=1)) == 1
    found = await agreed(engine, flow_id=flow_id)
    assert {state: len(ids) for state, ids in found.items()} == {"active": 1, "rate_limited": 2, "waiting": 1}
    progress = await parts_of(engine).members.read_progress(flow_id)
    assert progress is not None
    assert progress.members == {"active": 1, "rate_limited": 2, "waiting": 1}


async def test_a_read_of_one_execution_answers_what_is_stored(engine: Engine, given: Given) -> None:
    policy = limited(await quota(engine, running=1))
    await given.created(policy=policy)
    waiting = await given.created(policy=policy)
    assert len(await claim(engine, limit=1)) == 1
    assert await listed(engine, RATE_LIMITED) == {waiting: "rate_limited"}
    described = await engine.describe_execution(waiting)
    assert described is not None
    assert described.public_state is WAITING
