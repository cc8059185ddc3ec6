"""A flow is submitted once, as a whole or not at all, whatever happens during the call."""

import asyncio
from collections import Counter
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.state import rounds
from faults.proxy import Action, Fault, Proxy, Side
from fixtures import Engines, Eventually, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution import submit as submission
from flowfabric.engine.flow import submit
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import ContentionError, TransportError
from flowfabric.model.flow import FlowAlreadySatisfied, FlowSubmitted
from flowfabric.model.ids import ExecutionId, FlowId, Partitions, mint_for_flow, split_execution_id
from flowfabric.settings import Settings

from .submitting import begin, flow, is_awaited, node, nodes, submitted

pytestmark = pytest.mark.usefixtures("consistent_rows")

TABLES = ("flow", "flow_tag", "execution", "ready", "edge", "edge_group", "listed")
DIAMOND = {
    **flow("a b c d", "a>b a>c b>d c>d", tags={"app.key": "value"}),
    "nodes": [node("a", tags={"ff.instance_id": "one"}), *nodes("b c d")],
}
STORED = {"flow": 1, "flow_tag": 1, "execution": 4, "ready": 1, "edge": 4, "edge_group": 3, "listed": 3}


@pytest.fixture(params=[1_000, 2], ids=["one part", "two parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit a diamond by one statement, or in a transaction by a statement for each part of it."""
    monkeypatch.setattr(submit, "ROWS_PER_STATEMENT", request.param)


async def stored(rows: Rows) -> dict[str, int]:
    """The number of rows in each table."""
    return {table: len(await rows.of(table)) for table in TABLES}


def times(count: int) -> dict[str, int]:
    """The number of rows that so many diamonds have."""
    return {table: number * count for table, number in STORED.items()}


async def test_the_id_of_a_flow_is_its_idempotency_key_and_nothing_is_compared(engine: Engine, rows: Rows) -> None:
    flow_id = uuid4()
    first = await engine.submit_flow(**DIAMOND, flow_id=flow_id)
    assert isinstance(first, FlowSubmitted)
    assert first.flow_id == flow_id
    async with rows.unchanged():
        for again in (
            {**DIAMOND, "flow_id": flow_id},
            {**DIAMOND, "flow_id": str(flow_id).upper(), "flow_kind": "other", "namespace": "other"},
            {**flow("other"), "flow_id": flow_id},
        ):
            assert await engine.submit_flow(**again) == FlowAlreadySatisfied(flow_id=first.flow_id)


async def test_flows_without_an_id_are_different_flows(engine: Engine, rows: Rows) -> None:
    first, second = await submitted(engine, **DIAMOND), await submitted(engine, **DIAMOND)
    assert first.flow_id != second.flow_id
    assert await stored(rows) == times(2)


async def test_one_of_several_concurrent_submissions_of_a_flow_creates_it(engines: Engines, rows: Rows) -> None:
    rivals = [await engines(), await engines()]
    count = 0
    for _ in rounds(8, whole=60):
        flow_id, count = uuid4(), count + 1
        answers = await asyncio.gather(*(rival.submit_flow(**DIAMOND, flow_id=flow_id) for rival in rivals * 3))
        assert Counter(map(type, answers)) == {FlowSubmitted: 1, FlowAlreadySatisfied: 5}
        assert {answer.flow_id for answer in answers} == {flow_id}
    assert await stored(rows) == times(count)


async def insert_member(connection: asyncpg.Connection, execution_id: ExecutionId) -> None:
    """Insert an execution within a transaction that has not ended, as another session that is creating it."""
    await connection.execute(
        """insert into execution (partition_key, execution_id, place, queue_no, namespace_no, lane_no, created_at,
                                  lifecycle_phase, eligibility_state, blocking_reason, attempt_state,
                                  last_transition_at, creator_identity)
           values ($1, $2, 1, 1, 1, 1, 1, 'runnable', 'eligible_now', 'waiting_for_worker', 'pending_first_attempt',
                   1, 'test')""",
        *split_execution_id(execution_id),
    )


async def test_a_submission_waits_for_another_of_the_same_flow(
    engine: Engine, connection: asyncpg.Connection, rows: Rows, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submitted(engine, **DIAMOND)
    for ends in ("commit", "rollback"):
        flow_id = uuid4()
        transaction = connection.transaction()
        await transaction.start()
        await begin(connection, flow_id)
        waiting = asyncio.create_task(engine.submit_flow(**DIAMOND, flow_id=flow_id))
        await eventually(lambda: is_awaited(rows, connection))
        await getattr(transaction, ends)()
        answer = await waiting
        assert type(answer) is (FlowAlreadySatisfied if ends == "commit" else FlowSubmitted)
    monkeypatch.setattr(submit, "LOCK_TIMEOUT", "15ms")
    async with connection.transaction():
        flow_id = uuid4()
        await begin(connection, flow_id)
        with pytest.raises(ContentionError, match=f"flow {flow_id} is locked by another session"):
            await engine.submit_flow(**DIAMOND, flow_id=flow_id)


@pytest.mark.usefixtures("patient_with_locks")
async def test_no_claim_and_no_reader_sees_a_part_of_a_flow(
    engines: Engines,
    connection: asyncpg.Connection,
    rows: Rows,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submit, "ROWS_PER_STATEMENT", 5)
    monkeypatch.setattr(submit, "LOCK_TIMEOUT", "100s")
    engine, worker = await engines(), await engines()
    flow_id, count = FlowId(uuid4()), 300
    names = [f"n{at}" for at in range(count)]
    last_id = mint_for_flow(flow_id, Partitions())

    async def seen() -> tuple[int, int, int]:
        flows, members, edges = [len(await rows.of(table)) for table in ("flow", "execution", "edge")]
        return flows, members, edges

    async def claimed() -> int:
        return len(await worker.claim_many(lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=500))

    transaction = connection.transaction()
    await transaction.start()
    await insert_member(connection, last_id)
    pairs = " ".join(f"{name}>end" for name in names)
    members = [*nodes(" ".join(names)), node("end", execution_id=last_id)]
    submitting = asyncio.create_task(submitted(engine, members, pairs, flow_id=flow_id))
    # The last part waits for the other session, and all others are inserted.
    await eventually(lambda: is_awaited(rows, connection))
    assert (await seen(), await claimed()) == ((0, 0, 0), 0)
    await transaction.rollback()
    assert len((await submitting).edge_ids) == count
    assert (await seen(), await claimed()) == ((1, count + 1, count), count)


@pytest.mark.usefixtures("hints_only")
@pytest.mark.parametrize("submitter", ["the same process", "another process"])
async def test_a_claim_that_waits_is_woken(engines: Engines, eventually: Eventually, submitter: str) -> None:
    worker = await engines()
    engine = worker if submitter == "the same process" else await engines()
    for _ in rounds(5, whole=20):
        waiting = asyncio.create_task(
            worker.claim(lane_id="default", worker_id="w", worker_instance_id="w-1", max_wait_ms=60_000)
        )
        await eventually(lambda: any(parts_of(worker).wakeups._waiting.values()))
        answer = await submitted(engine, "a b", "a>b")
        async with asyncio.timeout(30):
            run = await waiting
        assert run is not None
        assert run.execution_id == answer.execution_ids["a"]


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("ids", ["with an id", "without an id"])
async def test_a_submission_whose_connection_is_cut_is_repeated_and_carried_out_once(
    url: str, rows: Rows, monkeypatch: pytest.MonkeyPatch, ids: str
) -> None:
    monkeypatch.setattr(submission, "PAUSE_SECONDS", (0.005, 0.05))

    def arguments() -> dict[str, Any]:
        return {**DIAMOND, "flow_id": uuid4()} if ids == "with an id" else DIAMOND

    settings: dict[str, Any] = {"database_pool_size": 1, "listen": False}
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url, **settings)) as engine:
        for _ in range(2):
            proxy.arm(None)
            await engine.submit_flow(**arguments())
        messages = {side: proxy.counted(side) for side in Side}
        count = 2
        for side in Side:
            for nth in range(1, messages[side] + 1):
                for action in (Action.CUT_BEFORE, Action.CUT_AFTER):
                    proxy.arm(Fault(action=action, side=side, nth=nth))
                    answer = await engine.submit_flow(**arguments())
                    proxy.arm(None)
                    await proxy.settled()
                    count += 1
                    assert isinstance(answer, FlowSubmitted), (side, nth, action)
                    assert await stored(rows) == times(count), (side, nth, action)
                    members = await rows.of("execution", flow_id=answer.flow_id)
                    assert {str(row["execution_id"]) for row in members} == {
                        execution_id[-36:] for execution_id in answer.execution_ids.values()
                    }
                    edges = await rows.of("edge", flow_id=answer.flow_id)
                    assert {row["edge_id"] for row in edges} == set(answer.edge_ids)


async def hints_sent(engine: Engine, eventually: Eventually) -> None:
    """Wait until an engine has sent its hints, so that the next messages are those of the next call."""
    hints = parts_of(engine).wakeups.hints
    await eventually(lambda: hints._sender is None or hints._sender.done())


async def test_a_retry_takes_a_flow_for_another_if_the_caller_has_given_all_ids(
    url: str, rows: Rows, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments() -> dict[str, Any]:
        flow_id = FlowId(uuid4())
        return {**flow([node("a", execution_id=mint_for_flow(flow_id, Partitions()))]), "flow_id": flow_id}

    monkeypatch.setattr(submission, "PAUSE_SECONDS", (0.005, 0.05))
    settings: dict[str, Any] = {"database_pool_size": 1, "listen": False}
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url, **settings)) as engine:
        count, answer = 0, None
        while not isinstance(answer, FlowAlreadySatisfied):
            count += 1
            await hints_sent(engine, eventually)
            proxy.arm(Fault(action=Action.CUT_BEFORE, side=Side.SERVER, nth=count))
            answer = await engine.submit_flow(**arguments())
            proxy.arm(None)
            await proxy.settled()
        assert await stored(rows) == dict.fromkeys(TABLES, 0) | dict.fromkeys(("flow", "execution", "ready"), count)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("side", Side)
async def test_without_patience_a_lost_answer_is_reported_and_a_repeat_finds_the_flow(
    url: str, rows: Rows, eventually: Eventually, side: Side
) -> None:
    settings: dict[str, Any] = {"database_pool_size": 1, "listen": False, "submit_patience_ms": 0}
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url, **settings)) as engine:
        for _ in range(2):
            proxy.arm(None)
            await engine.submit_flow(**DIAMOND, flow_id=uuid4())
        repeated: Counter[type] = Counter()
        faults = [
            Fault(action=action, side=side, nth=nth)
            for nth in range(1, proxy.counted(side) + 1)
            for action in (Action.CUT_BEFORE, Action.CUT_AFTER)
        ]
        for count, fault in enumerate(faults, 3):
            flow_id = uuid4()
            await hints_sent(engine, eventually)
            proxy.arm(fault)
            lost: TransportError | None = None
            try:
                await engine.submit_flow(**DIAMOND, flow_id=flow_id)
            except TransportError as error:
                lost = error
            proxy.arm(None)
            await proxy.settled()
            again = await engine.submit_flow(**DIAMOND, flow_id=flow_id)
            if lost is None:
                assert isinstance(again, FlowAlreadySatisfied), fault
            elif not lost.outcome_unknown:
                assert isinstance(again, FlowSubmitted), fault
            repeated[type(again)] += lost is not None
            assert await stored(rows) == times(count), fault
        if side is Side.SERVER:
            # The server answers once it has committed.
            assert repeated[FlowAlreadySatisfied] > 0
            assert repeated[FlowSubmitted] > 0


async def test_a_retry_waits_until_the_session_of_its_first_try_has_ended(
    url: str, connection: asyncpg.Connection, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "PAUSE_SECONDS", (0.005, 0.05))
    monkeypatch.setattr(submit, "LOCK_TIMEOUT", "5ms")
    settings: dict[str, Any] = {"database_pool_size": 1, "listen": False, "submit_patience_ms": 20_000}
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url, **settings)) as engine:
        flow_id = uuid4()
        transaction = connection.transaction()
        await transaction.start()
        await begin(connection, flow_id)
        proxy.arm(Fault(action=Action.CUT_BEFORE, side=Side.CLIENT, nth=1))
        waiting = asyncio.create_task(engine.submit_flow(**DIAMOND, flow_id=flow_id))
        # More messages than those of two retries.
        await eventually(lambda: proxy.counted(Side.CLIENT) > 100 or waiting.done())
        await transaction.rollback()
        assert isinstance(await waiting, FlowSubmitted)
