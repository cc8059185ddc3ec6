"""A submission is retried while the server restarts, and is carried out once however often it is retried."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from engine.state import all_cases, new, rounds
from faults.proxy import Proxy
from fixtures import Rows, uuid_of
from flowfabric import Fabric
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution import submit
from flowfabric.model.errors import TransportError
from flowfabric.model.execution import Created, Duplicate, NewExecution
from flowfabric.model.ids import ExecutionId, Partitions, mint_solo
from flowfabric.model.states import PublicState
from flowfabric.settings import Settings

from .killable import KillableServer, stored

NEW = new()
FAR = 2**42
"""A time in the far future, in milliseconds."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "PAUSE_SECONDS", (0.005, 0.05))


@asynccontextmanager
async def lossy_engine(url: str, **settings: Any) -> AsyncIterator[tuple[Engine, Proxy]]:
    """An engine whose only pooled connection goes through a proxy that can drop an answer."""
    async with (
        Proxy(url) as proxy,
        Engine.connect(
            settings=Settings(database_url=proxy.url, database_pool_size=1, listen=False, **settings)
        ) as engine,
    ):
        yield engine, proxy


async def prepare_statements(engine: Engine) -> None:
    """Submit in every way once: after that the next answer on this connection is the one to an execution."""
    for more in (
        {},
        {"idempotency_key": "first"},
        {"execution_id": own_id()},
        {"delay_until": FAR},
        {"policy": {"delay_until": FAR}},
    ):
        await engine.create_execution(**NEW, **more)
    await engine.create_many([NewExecution(**NEW), NewExecution(**NEW)])


def drop_answer(proxy: Proxy) -> None:
    """Drop the answer to the next command of the pooled connection after it is committed, and cut the connection."""
    for link in proxy.links:
        # The connection that sends hints is not pooled, and is the only one that sets this parameter.
        if link.parameters is not None and "synchronous_commit" not in link.parameters:
            link.drop_answer()


def own_id() -> ExecutionId:
    """An execution id chosen by the caller."""
    return mint_solo("default", Partitions(flow=256, budget=32, quota=32))


async def count(rows: Rows, execution_id: str) -> int:
    """How many rows an execution has."""
    return len(await rows.of("execution", execution_id=uuid_of(execution_id)))


async def test_submissions_succeed_once_each_although_the_server_restarts(killable: KillableServer) -> None:
    url = await killable.new_database()
    async with Engine.connect(settings=Settings(database_url=url, submit_patience_ms=60_000)) as engine:
        await engine.create_execution(**NEW)
        expected = 1
        for number in rounds(2, whole=4):

            async def submit_one(at: int, number: int = number) -> list[Any]:
                key = f"{number} {at}" if at % 3 == 1 else None
                if at % 3 == 2:
                    return [*await engine.create_many([NewExecution(**NEW), NewExecution(**NEW, delay_until=FAR)])]
                return [await engine.create_execution(**NEW, idempotency_key=key)]

            submitting = [asyncio.create_task(submit_one(at)) for at in range(200)]
            done, _ = await asyncio.wait(submitting, return_when=asyncio.FIRST_COMPLETED)
            assert done
            killable.kill()
            # These start while there is no server.
            submitting += [asyncio.create_task(submit_one(at)) for at in range(200, 230)]
            await killable.start_again()
            answers = [answer for task in submitting for answer in await task]
            assert {type(answer) for answer in answers} == {Created}
            assert len({answer.execution_id for answer in answers}) == len(answers)
            states, _, _ = await stored(url)
            assert {answer.execution_id for answer in answers} - states.keys() == set()
            assert {states[answer.execution_id] for answer in answers} == {"waiting", "delayed"}
            assert all(states[answer.execution_id] == answer.public_state for answer in answers)
            expected += len(answers)
            # Nothing was created twice.
            assert len(states) == expected


async def test_a_submission_whose_answer_is_lost_after_the_commit_is_created_once(url: str, rows: Rows) -> None:
    submissions: dict[str, tuple[dict[str, Any], PublicState]] = {
        "plain": ({}, PublicState.WAITING),
        "key": ({"idempotency_key": "k"}, PublicState.WAITING),
        "delay": ({"delay_until": FAR}, PublicState.DELAYED),
        "key and delay": ({"idempotency_key": "delayed", "delay_until": FAR}, PublicState.DELAYED),
        "delay in the policy": ({"policy": {"delay_until": FAR}}, PublicState.DELAYED),
        "delay that has passed": ({"delay_until": 1}, PublicState.WAITING),
        "delay from now": ({"delay_ms": 1}, PublicState.DELAYED),
        "no delay from now": ({"delay_ms": 0}, PublicState.WAITING),
    }
    async with lossy_engine(url) as (engine, proxy):
        with all_cases() as case:
            for name, (more, state) in submissions.items():
                with case(name):
                    await prepare_statements(engine)
                    before, dropped = len(await rows.of("execution")), proxy.dropped
                    drop_answer(proxy)
                    made = await engine.create_execution(**NEW, **more)
                    assert isinstance(made, Created)
                    assert (made.public_state, proxy.dropped) == (state, dropped + 1)
                    assert len(await rows.of("execution")) == before + 1
                    assert await count(rows, made.execution_id) == 1
                    if key := more.get("idempotency_key"):
                        again = await engine.create_execution(**NEW, **more)
                        assert again == Duplicate(execution_id=made.execution_id)
                        assert len(await rows.of("idempotency_key", key=key)) == 1


async def test_a_delayed_task_whose_answer_is_lost_is_submitted_once(url: str, rows: Rows) -> None:
    async with Proxy(url) as proxy:
        fabric = Fabric(settings=Settings(database_url=proxy.url, database_pool_size=1, listen=False))

        @fabric.task
        async def job() -> None: ...

        async with fabric:
            await job.options(delay=60).submit()
            drop_answer(proxy)
            run = await job.options(delay=60).submit()
            assert (proxy.dropped, run.is_duplicate, (await run.status()).state) == (1, False, "delayed")
        assert len(await rows.of("execution")) == 2


async def test_a_batch_whose_answer_is_lost_is_created_once(url: str, rows: Rows) -> None:
    async with lossy_engine(url) as (engine, proxy):
        await prepare_statements(engine)
        before = len(await rows.of("execution"))
        drop_answer(proxy)
        alike = await engine.create_many([NewExecution(**NEW)] * 3)
        drop_answer(proxy)
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


async def test_a_submission_with_its_own_id_whose_answer_is_lost_is_a_duplicate(url: str, rows: Rows) -> None:
    async with lossy_engine(url) as (engine, proxy):
        await prepare_statements(engine)
        drop_answer(proxy)
        execution_id = own_id()
        # The engine cannot know whether the id existed before the call.
        assert await engine.create_execution(**NEW, execution_id=execution_id) == Duplicate(execution_id=execution_id)
        assert (proxy.dropped, await count(rows, execution_id)) == (1, 1)


async def test_a_submission_fails_after_its_patience_and_says_if_its_outcome_is_unknown(url: str, rows: Rows) -> None:
    patience_ms = 150
    async with lossy_engine(url, submit_patience_ms=patience_ms) as (engine, proxy):
        with all_cases() as case:
            for is_sent, is_batch in itertools.product((False, True), repeat=2):
                with case(f"{is_sent=} {is_batch=}"):
                    await prepare_statements(engine)
                    before = len(await rows.of("execution"))
                    proxy.refuses = True
                    if is_sent:
                        drop_answer(proxy)
                    else:
                        await cut_connection(engine, proxy)
                    connections, began = proxy.connections, time.monotonic()
                    items = [NewExecution(**NEW)] * 2
                    with pytest.raises(TransportError) as caught:
                        await (engine.create_many(items) if is_batch else engine.create_execution(**NEW))
                    assert (caught.value.code, caught.value.outcome_unknown) == ("transport", is_sent)
                    assert time.monotonic() - began >= patience_ms / 1000
                    assert proxy.connections - connections >= 3
                    assert len(await rows.of("execution")) == before + is_sent * (1 + is_batch)
                proxy.refuses = False


async def cut_connection(engine: Engine, proxy: Proxy) -> None:
    """Cut the pooled connection while no submission uses it."""
    drop_answer(proxy)
    with pytest.raises(TransportError):
        await engine.ping()


async def test_a_submission_without_patience_fails_at_once(url: str) -> None:
    async with lossy_engine(url, submit_patience_ms=0) as (engine, proxy):
        await prepare_statements(engine)
        drop_answer(proxy)
        with pytest.raises(TransportError) as caught:
            await engine.create_execution(**NEW)
        assert caught.value.outcome_unknown
        await prepare_statements(engine)
        drop_answer(proxy)
        with pytest.raises(TransportError):
            await engine.create_many([NewExecution(**NEW)])
        assert proxy.dropped == 2
