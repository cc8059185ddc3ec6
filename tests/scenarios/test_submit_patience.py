"""A submission waits out a restart of the server, and is carried out once however often it is repeated."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from faults.proxy import Proxy
from fixtures import Rows
from flowfabric import Fabric
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import TransportError
from flowfabric.model.execution import Created, Duplicate, NewExecution
from flowfabric.model.ids import ExecutionId, Partitions, mint_solo
from flowfabric.model.states import PublicState
from flowfabric.settings import Settings

from .test_postgres_death import Server, kept

NEW: dict[str, Any] = {
    "namespace": "tests",
    "lane_id": "default",
    "execution_kind": "job",
    "input_payload": b"{}",
    "priority": 0,
    "creator_identity": "test",
}
FAR = 2**42
"""A time that does not come."""


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that every test leaves running."""
    server = Server(tmp_path_factory.mktemp("server") / "home")
    yield server
    server.discard()


@asynccontextmanager
async def lossy(url: str, **settings: Any) -> AsyncIterator[tuple[Engine, Proxy]]:
    """An engine, its statements prepared, whose only pooled connection goes through a proxy that can lose an answer."""
    async with (
        Proxy(url) as proxy,
        Engine.connect(
            settings=Settings(database_url=proxy.url, database_pool_size=1, listen=False, **settings)
        ) as engine,
    ):
        for more in ({}, {"idempotency_key": "first"}, {"execution_id": own_id()}, {"delay_until": FAR}):
            await engine.create_execution(**NEW, **more)
        await engine.create_many([NewExecution(**NEW), NewExecution(**NEW)])
        yield engine, proxy


def lose_answer(proxy: Proxy) -> None:
    """Drop the answer to the next command of a pooled connection once it is carried out, and cut the connection."""
    for link in proxy.links:
        # The connection that sends hints is none of the pool, and asks for this alone.
        if link.parameters is not None and "synchronous_commit" not in link.parameters:
            link.drop_answer()


def own_id() -> ExecutionId:
    """An id of the caller's own."""
    return mint_solo("default", Partitions(flow=256, budget=32, quota=32))


async def count(rows: Rows, execution_id: str) -> int:
    return len(await rows.of("execution", execution_id=execution_id[-36:]))


async def test_submissions_wait_out_a_restart_and_each_exists_once(mortal: Server) -> None:
    await mortal.make_database()
    settings = Settings(database_url=mortal.url, migrate_on_start=True, submit_patience_ms=60_000)
    async with Engine.connect(settings=settings) as engine:
        await engine.create_execution(**NEW)
        for round_ in range(2):

            async def one(at: int, round_: int = round_) -> list[Any]:
                key = f"{round_} {at}" if at % 3 == 1 else None
                if at % 3 == 2:
                    return [*await engine.create_many([NewExecution(**NEW), NewExecution(**NEW, delay_until=FAR)])]
                return [await engine.create_execution(**NEW, idempotency_key=key)]

            under_way = [asyncio.create_task(one(at)) for at in range(200)]
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            assert done
            mortal.kill()
            # Some begin while there is no server.
            under_way += [asyncio.create_task(one(at)) for at in range(200, 230)]
            await mortal.start_again()
            answers = [answer for task in under_way for answer in await task]
            assert {type(answer) for answer in answers} == {Created}
            assert len({answer.execution_id for answer in answers}) == len(answers)
            states, _, _ = await kept(mortal.url)
            assert {answer.execution_id for answer in answers} - states.keys() == set()
            assert {states[answer.execution_id] for answer in answers} == {"waiting", "delayed"}
            assert all(states[answer.execution_id] == answer.public_state for answer in answers)
        # Nothing was made twice: 200 + 30 calls a round, a third of them of two items.
        assert len(states) == 1 + 2 * (len(answers))


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({}, PublicState.WAITING),
        ({"idempotency_key": "k"}, PublicState.WAITING),
        ({"delay_until": FAR}, PublicState.DELAYED),
        ({"idempotency_key": "k", "delay_until": FAR}, PublicState.DELAYED),
        ({"policy": {"delay_until": FAR}}, PublicState.DELAYED),
        ({"delay_until": 1}, PublicState.WAITING),
        ({"delay_ms": 1}, PublicState.DELAYED),
        ({"delay_ms": 0}, PublicState.WAITING),
    ],
    ids=[
        "plain",
        "key",
        "delay",
        "key and delay",
        "delay of the policy",
        "delay that has passed",
        "delay from now",
        "no delay from now",
    ],
)
async def test_an_answer_lost_after_the_commit_is_created_once(
    url: str, rows: Rows, more: dict[str, Any], state: PublicState
) -> None:
    async with lossy(url) as (engine, proxy):
        if "policy" in more:
            # Its shape is known from now on, so that the answer to be lost is that of the insertion.
            await engine.create_execution(**NEW, **more)
        before = len(await rows.of("execution"))
        lose_answer(proxy)
        made = await engine.create_execution(**NEW, **more)
        assert isinstance(made, Created)
        assert (made.public_state, proxy.dropped) == (state, 1)
        assert len(await rows.of("execution")) == before + 1
        assert await count(rows, made.execution_id) == 1
        if key := more.get("idempotency_key"):
            again = await engine.create_execution(**NEW, **more)
            assert again == Duplicate(execution_id=made.execution_id)
            assert len(await rows.of("idempotency_key", key=key)) == 1


async def test_a_task_with_a_delay_is_submitted_once_though_an_answer_is_lost(url: str, rows: Rows) -> None:
    async with Proxy(url) as proxy:
        fabric = Fabric(settings=Settings(database_url=proxy.url, database_pool_size=1, listen=False))

        @fabric.task
        async def job() -> None: ...

        async with fabric:
            await job.options(delay=60).submit()
            lose_answer(proxy)
            run = await job.options(delay=60).submit()
            assert (proxy.dropped, run.is_duplicate, (await run.status()).state) == (1, False, "delayed")
        assert len(await rows.of("execution")) == 2


async def test_a_batch_whose_answer_was_lost_is_created_once(url: str, rows: Rows) -> None:
    async with lossy(url) as (engine, proxy):
        before = len(await rows.of("execution"))
        lose_answer(proxy)
        alike = await engine.create_many([NewExecution(**NEW)] * 3)
        lose_answer(proxy)
        mixed = await engine.create_many(
            [
                NewExecution(**NEW, idempotency_key="a"),
                NewExecution(**NEW, idempotency_key="a"),
                NewExecution(**{**NEW, "priority": "high"}),
                NewExecution(**NEW, idempotency_key="first"),
                NewExecution(**NEW, delay_until=FAR),
            ]
        )
        assert proxy.dropped == 2
        assert [type(answer) for answer in alike] == [Created] * 3
        made, repeated, refused, known, delayed = cast("list[Any]", mixed)
        assert (type(made), type(known), type(delayed)) == (Created, Duplicate, Created)
        assert repeated == Duplicate(execution_id=made.execution_id)
        assert (refused.code, delayed.public_state) == ("invalid_input", "delayed")
        assert len(await rows.of("execution")) == before + 5


async def test_an_id_of_the_callers_own_whose_answer_was_lost_is_a_duplicate(url: str, rows: Rows) -> None:
    async with lossy(url) as (engine, proxy):
        lose_answer(proxy)
        execution_id = own_id()
        # Whether it was there before the call is not known.
        assert await engine.create_execution(**NEW, execution_id=execution_id) == Duplicate(execution_id=execution_id)
        assert (proxy.dropped, await count(rows, execution_id)) == (1, 1)


@pytest.mark.parametrize("is_batch", [False, True], ids=["one", "batch"])
@pytest.mark.parametrize("is_sent", [False, True], ids=["never sent", "answer lost"])
async def test_patience_that_is_over_raises_the_fault_and_what_is_unknown_stays_unknown(
    url: str,
    rows: Rows,
    is_batch: bool,  # noqa: FBT001
    is_sent: bool,  # noqa: FBT001
) -> None:
    async with lossy(url, submit_patience_ms=300) as (engine, proxy):
        before = len(await rows.of("execution"))
        proxy.refuses = True
        if is_sent:
            lose_answer(proxy)
        else:
            await cut(engine, proxy)
        connections, began = proxy.connections, time.monotonic()
        items = [NewExecution(**NEW)] * 2
        with pytest.raises(TransportError) as caught:
            await (engine.create_many(items) if is_batch else engine.create_execution(**NEW))
        assert (caught.value.code, caught.value.outcome_unknown) == ("transport", is_sent)
        assert time.monotonic() - began >= 0.3
        assert proxy.connections - connections >= 3
        assert len(await rows.of("execution")) == before + is_sent * (1 + is_batch)
        proxy.refuses = False


async def cut(engine: Engine, proxy: Proxy) -> None:
    """Have the pooled connection end without a statement of the test on it."""
    lose_answer(proxy)
    with pytest.raises(TransportError):
        await engine.ping()


async def test_without_patience_a_fault_is_raised_at_once(url: str) -> None:
    async with lossy(url, submit_patience_ms=0) as (engine, proxy):
        lose_answer(proxy)
        with pytest.raises(TransportError) as caught:
            await engine.create_execution(**NEW)
        assert caught.value.outcome_unknown
        # The new connection learns the statement, so that it is its execution whose answer is lost.
        await engine.create_execution(**NEW)
        lose_answer(proxy)
        with pytest.raises(TransportError):
            await engine.create_many([NewExecution(**NEW)])
        assert proxy.dropped == 2
