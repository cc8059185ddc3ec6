"""The runs of flows: waiting, counting, cancelling, and finding them again in other processes."""

import asyncio
import re
from typing import Any
from uuid import UUID, uuid4

import pytest

from fixtures import Eventually, Rows
from flowfabric import Fabric, FlowRunCancelled, FlowRunFailed, FlowStatus, Run, RunCancelled, RunExpired, any_of
from flowfabric.errors import EngineError, InvalidInputError, NotFoundError, StateError
from flowfabric.fabric import flow_run
from flowfabric.outcomes import LaneState, PublicState

TIMEOUT = 60


@pytest.fixture
def fabric(url: str) -> Fabric:
    return Fabric(url)


def tasks_of(fabric: Fabric) -> Any:
    """Tasks that wait for the gate, or return at once, or fail."""

    class Tasks:
        gate = asyncio.Event()

        @staticmethod
        @fabric.task
        async def wait(number: int = 0) -> int:
            await Tasks.gate.wait()
            return number

        @staticmethod
        @fabric.task
        async def copy(number: int) -> int:
            return number

        @staticmethod
        @fabric.task
        async def fail(number: int = 0) -> int:
            raise ValueError(f"no luck {number}")

    return Tasks


async def is_active(run: Run[Any]) -> bool:
    """Whether a worker runs the run."""
    return (await run.status()).state is PublicState.ACTIVE


async def test_a_flow_is_counted_and_awaited_until_it_ends(fabric: Fabric) -> None:
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly", tags={"app.team": "data"})
    a = flow.add(tasks.wait, 5)
    b = flow.add(tasks.copy, a)
    async with fabric:
        submitted = await flow.submit()
        assert (submitted.id, submitted.is_duplicate, repr(submitted)) == (flow.id, False, f"FlowRun({flow.id})")
        status = await submitted.status()
        assert (status.kind, status.state, status.id) == ("nightly", FlowStatus.ACTIVE, flow.id)
        assert (status.runs, status.total, status.ended) == ({"waiting": 1, "waiting_children": 1}, 2, 0)
        with pytest.raises(TimeoutError) as late:
            await submitted.wait(timeout=0.05)
        assert str(late.value) == (
            f"flow {flow.id} has not ended within 0.05 s: its runs are 1 waiting, 1 waiting children"
        )
        with pytest.raises(TimeoutError):
            await submitted.result(timeout=0)
        async with fabric.worker():
            tasks.gate.set()
            assert await submitted.wait() is FlowStatus.COMPLETED
            await submitted.result()
        assert await submitted.run(b).result() == 5
        ended = await submitted.status()
        assert (ended.state, ended.total, ended.ended, ended.cancel_reason) == (FlowStatus.COMPLETED, 2, 2, None)
        snapshot = await fabric.engine.describe_flow(flow.id)
        assert snapshot is not None
        assert (snapshot.tags, snapshot.flow_kind, snapshot.namespace) == ({"app.team": "data"}, "nightly", "default")


async def test_a_flow_is_found_by_its_id_in_any_process(fabric: Fabric, url: str) -> None:
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    a = flow.add(tasks.copy, 5)
    b = flow.add(tasks.copy, a)
    other = Fabric(url)
    async with fabric, other, fabric.worker():
        submitted = await flow.submit()
        found = other.flow_run(submitted.id)
        assert found == submitted
        assert len({found, submitted}) == 1
        await found.result(timeout=TIMEOUT)
        assert [await each.result() for each in await found.runs()] == [5, 5]
        assert await found.runs() == await submitted.runs() == [submitted.run(a), submitted.run(b)]
        assert (await found.status()).runs == {"completed": 2}
        with pytest.raises(InvalidInputError, match="was found by its id and does not know the nodes"):
            found.run(a)
        with pytest.raises(TypeError, match=r"run: expected a node made by flow.add"):
            submitted.run(5)
        with pytest.raises(InvalidInputError, match="is not a node of this flow"):
            submitted.run(fabric.flow("other").add(tasks.copy, 5))


async def test_a_flow_that_does_not_exist_is_not_found(fabric: Fabric) -> None:
    async with fabric:
        missing = fabric.flow_run(uuid4())
        for call in (missing.wait, missing.result, missing.status, missing.runs, missing.cancel):
            with pytest.raises(NotFoundError, match=r"not found: flow .*was not submitted to this store"):
                await call()


async def test_a_flow_with_an_id_is_submitted_once(url: str, rows: Rows) -> None:
    def built() -> tuple[Fabric, Any, Any]:
        fabric = Fabric(url)
        tasks = tasks_of(fabric)
        flow = fabric.flow("nightly", id="2026-01-31")
        return fabric, flow, flow.add(tasks.copy, flow.add(tasks.copy, 7))

    (first, flow, a), (second, same, b) = built(), built()
    async with first, second:
        run, again = await flow.submit(), await same.submit()
        assert (run.is_duplicate, again.is_duplicate, run == again) == (False, True, True)
        assert (await flow.submit()).is_duplicate
        assert run.run(a) == again.run(b)
        assert again.run(b).is_duplicate
        assert len(await rows.of("execution")) == 2
        async with second.worker():
            assert await again.run(b).result(timeout=TIMEOUT) == 7
        other = second.flow("nightly", id="2026-01-31")
        wrong = other.add(second.tasks["fail"])
        found = await other.submit()
        with pytest.raises(InvalidInputError, match="is a run of task 'copy', not of 'fail'"):
            await found.run(wrong).result()


async def test_concurrent_submissions_of_one_id_make_one_flow(url: str, rows: Rows) -> None:
    fabrics = [Fabric(url) for _ in range(4)]
    flows = []
    for fabric in fabrics:
        tasks = tasks_of(fabric)
        flow = fabric.flow("nightly", id="one")
        flow.add(tasks.copy, 1)
        flows.append(flow)
    async with fabrics[0], fabrics[1], fabrics[2], fabrics[3]:
        runs = await asyncio.gather(*(flow.submit() for flow in flows))
    assert [run.is_duplicate for run in runs].count(False) == 1
    assert len(await rows.of("execution")) == len(await rows.of("flow")) == 1


async def test_a_submitted_flow_takes_no_more_nodes(fabric: Fabric) -> None:
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    async with fabric:
        with pytest.raises(InvalidInputError, match=r"flow 'nightly' has no nodes; add some with flow.add"):
            await flow.submit()
        a = flow.add(tasks.copy, 1)
        await flow.submit()
        for change in (lambda: flow.add(tasks.copy, 2), lambda: flow.after(a, a)):
            with pytest.raises(InvalidInputError, match="flow 'nightly' is submitted, and its graph is fixed"):
                change()


async def test_a_refused_submission_names_the_node_and_can_be_repeated(fabric: Fabric, rows: Rows) -> None:
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    flow.add(tasks.copy, 1)
    flow.add(tasks.copy.options(lane="closed"), 2)
    async with fabric:
        # The names of the lanes are stored.
        await tasks.copy.submit(1)
        await tasks.copy.options(lane="closed").submit(1)
        await fabric.engine.set_lane_state("closed", LaneState.DRAINING)
        async with rows.unchanged():
            with pytest.raises(EngineError, match=r"<node 2 of flow 'nightly': task 'copy'>, lane_id: .*closed"):
                await flow.submit()
        await fabric.engine.set_lane_state("closed", LaneState.ACTIVE)
        flow.add(tasks.copy, 3)
        assert not (await flow.submit()).is_duplicate


async def test_a_cancelled_flow_cancels_its_runs(fabric: Fabric, eventually: Eventually) -> None:
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    a = flow.add(tasks.wait)
    b = flow.add(tasks.copy, a)
    async with fabric, fabric.worker():
        run = await flow.submit()
        await eventually(lambda: is_active(run.run(a)))
        await run.cancel("no longer wanted")
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.CANCELLED
        with pytest.raises(FlowRunCancelled, match=f"flow {run.id} was cancelled: no longer wanted"):
            await run.result()
        for node in (a, b):
            with pytest.raises(RunCancelled):
                await run.run(node).result()
        status = await run.status()
        assert (status.state, status.runs, status.cancel_reason) == (
            FlowStatus.CANCELLED,
            {"cancelled": 2},
            "no longer wanted",
        )
        await run.cancel("a repeat")
        assert (await run.status()).cancel_reason == "no longer wanted"


async def test_a_flow_that_has_ended_otherwise_is_not_cancelled(fabric: Fabric, rows: Rows) -> None:
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    flow.add(tasks.copy, 1)
    async with fabric:
        async with fabric.worker():
            run = await flow.submit()
            await run.result(timeout=TIMEOUT)
        async with rows.unchanged():
            with pytest.raises(StateError, match=r"flow_already_terminal: flow .* has already ended"):
                await run.cancel()


async def test_another_cancel_covers_what_the_first_one_spared(fabric: Fabric, eventually: Eventually) -> None:
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    started = flow.add(tasks.wait)
    pending = flow.add(tasks.copy, started)
    async with fabric, fabric.worker():
        run = await flow.submit()
        await eventually(lambda: is_active(run.run(started)))
        await run.cancel("closed", policy="flow_only")
        assert (await run.status()).runs == {"active": 1, "waiting_children": 1}
        await run.cancel("what waits", policy="cancel_pending")
        with pytest.raises(RunCancelled, match="what waits"):
            await run.run(pending).result(timeout=TIMEOUT)
        assert (await run.status()).runs == {"active": 1, "cancelled": 1}
        await run.cancel("all", policy="flow_only")
        assert (await run.status()).runs == {"active": 1, "cancelled": 1}
        await run.cancel("all")
        with pytest.raises(RunCancelled, match="all"):
            await run.run(started).result(timeout=TIMEOUT)
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.CANCELLED
        assert (await run.status()).cancel_reason == "closed"


async def test_a_replayed_run_of_a_cancelled_flow_can_be_cancelled_again(fabric: Fabric) -> None:
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    first = flow.add(tasks.copy, 1)
    second = flow.add(tasks.copy, first)
    async with fabric:
        run = await flow.submit()
        await run.cancel()
        await run.wait(timeout=TIMEOUT)
        for refused in (run.run(first).replay(), run.replay()):
            with pytest.raises(StateError, match="to replay it nevertheless, set allow_cancelled_flow"):
                await refused
        await run.run(first).replay(allow_cancelled_flow=True)
        assert (await run.status()).runs == {"cancelled": 1, "waiting": 1}
        await run.cancel()
        assert (await run.status()).runs == {"cancelled": 2}
        assert len(await run.replay(allow_cancelled_flow=True)) == 2
        async with fabric.worker():
            assert await run.run(second).result(timeout=TIMEOUT) == 1


async def test_a_cancel_of_what_is_pending_lets_running_runs_end(fabric: Fabric, eventually: Eventually) -> None:
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    a = flow.add(tasks.wait, 3)
    b = flow.add(tasks.copy, a)
    async with fabric, fabric.worker():
        run = await flow.submit()
        await eventually(lambda: is_active(run.run(a)))
        with pytest.raises(InvalidInputError, match="invalid_input: policy: expected one of"):
            await run.cancel(policy="some")  # type: ignore[arg-type]
        await run.cancel(policy="cancel_pending")
        with pytest.raises(RunCancelled):
            await run.run(b).result(timeout=TIMEOUT)
        tasks.gate.set()
        assert await run.run(a).result(timeout=TIMEOUT) == 3
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.CANCELLED


async def test_the_error_of_a_flow_names_causes_first_and_at_most_ten(fabric: Fabric) -> None:
    tasks = tasks_of(fabric)

    @fabric.task(timeout=0.05)
    async def slow() -> int:
        await asyncio.Event().wait()
        return 1

    flow = fabric.flow("nightly")
    for number in range(10):
        flow.add(tasks.copy, flow.add(tasks.fail, number))
    many = fabric.flow("few")
    nodes = [many.add(tasks.fail), many.add(slow), many.add(tasks.wait)]
    many.add(tasks.copy, any_of([nodes[1]]))
    async with fabric, fabric.worker():
        failed, few = await flow.submit(), await many.submit()
        with pytest.raises(FlowRunFailed, match=r"20 of 20 runs did not succeed: fail .*no luck") as error:
            await failed.result(timeout=TIMEOUT)
        assert len(error.value.causes) == 10
        for cause in error.value.causes:
            assert cause.error_type == "ValueError"
            assert cause.traceback is not None
            assert "raise ValueError" in cause.traceback
        await few.run(nodes[2]).cancel("by hand")
        with pytest.raises(FlowRunFailed) as error:
            await few.result(timeout=TIMEOUT)
        assert [type(cause).__name__ for cause in error.value.causes] == ["RunFailed", "RunExpired", "RunCancelled"]
        with pytest.raises(RunExpired):
            await few.run(nodes[1]).result()
    parts = str(error.value).partition(": ")[2].split("; ")
    assert [re.sub(r"\{fp:.*?\}:[0-9a-f-]+", "ID", part) for part in parts] == [
        "4 of 4 runs did not succeed: fail ID failed: ValueError: no luck 0",
        "slow ID expired: its last attempt took longer than its timeout",
        "wait ID was cancelled: by hand",
    ]


async def test_the_error_of_a_flow_cuts_long_causes(fabric: Fabric) -> None:
    @fabric.task
    async def fail() -> None:
        raise ValueError("x" * 5_000)

    flow = fabric.flow("nightly")
    flow.add(fail)
    async with fabric, fabric.worker():
        run = await flow.submit()
        with pytest.raises(FlowRunFailed) as error:
            await run.result(timeout=TIMEOUT)
    assert len(str(error.value)) < 350
    assert str(error.value).endswith("xxx...")
    assert len(str(error.value.causes[0])) > 1_000


async def test_a_node_of_another_graph_says_so(fabric: Fabric) -> None:
    tasks = tasks_of(fabric)
    first = fabric.flow("nightly", id="2026-01-31")
    first.add(tasks.copy, 1)
    other = fabric.flow("nightly", id="2026-01-31")
    other.add(tasks.copy, 1)
    missing = other.add(tasks.copy, 2)
    async with fabric:
        await first.submit()
        run = await other.submit()
        with pytest.raises(NotFoundError, match="or the flow that is stored under this id has another graph"):
            await run.run(missing).status()


async def test_ids_of_the_wrong_kind_say_what_to_use(fabric: Fabric) -> None:
    flow = fabric.flow("nightly", id="2026-01-31")
    with pytest.raises(InvalidInputError, match=r"must be a UUID, got '2026-01-31'; .* fabric.flow\(kind, id="):
        fabric.flow_run("2026-01-31")
    with pytest.raises(
        InvalidInputError, match=r"flow_id: must be a UUID, got 'fp.*; for the id of a run use fabric.run"
    ):
        fabric.flow_run("fp5-00000000-0000-7000-8000-000000000000")
    with pytest.raises(InvalidInputError, match=r"got Flow\('nightly', 0 nodes\); write fabric.flow_run\(flow.id\)"):
        fabric.flow_run(flow)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"flow_id: must be a UUID, got 5$"):
        fabric.flow_run(5)  # type: ignore[arg-type]
    for given in (flow.id, UUID(flow.id)):
        with pytest.raises(InvalidInputError, match=r"MissingTag: .* for the id of a flow use fabric.flow_run\(id\)"):
            fabric.run(given)  # type: ignore[arg-type]


async def test_a_wait_for_a_flow_names_every_task_that_no_worker_serves(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    monkeypatch.setattr(flow_run, "UNSERVED_SECONDS", 0.05)
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    behind = flow.add(tasks.copy.options(lane="later"), flow.add(tasks.copy, 1))
    second = flow.add(tasks.copy.options(lane="second"), 2)
    flow.add(tasks.wait)
    async with fabric, fabric.worker(lanes=["default"]):
        submitted = await flow.submit()
        waiting = asyncio.create_task(fabric.flow_run(flow.id).wait())

        async def is_logged() -> bool:
            return all(f"{submitted.run(node).id} has not started: " in caplog.text for node in (behind, second))

        await eventually(is_logged)
        tasks.gate.set()
        async with fabric.worker(lanes=["later", "second"]):
            assert await waiting is FlowStatus.COMPLETED
    assert {each.levelname for each in caplog.records if "has not started" in each.message} == {"WARNING"}
    assert "no live worker serves lane 'later'" in caplog.text


async def test_a_wait_for_a_flow_that_no_worker_runs_is_logged(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flow_run, "UNSERVED_SECONDS", 0.05)
    tasks = tasks_of(fabric)
    flow = fabric.flow("nightly")
    flow.add(tasks.copy, 5)
    async with fabric:
        submitted = await flow.submit()
        with pytest.raises(TimeoutError):
            await submitted.wait(timeout=0.2)
    assert "has not started: " in caplog.text
