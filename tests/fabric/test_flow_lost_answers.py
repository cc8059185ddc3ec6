"""Submissions of flows that fail: whether the graph can still grow, and what a repeated submission stores."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from engine.flow.submitting import begin, is_awaited
from faults.proxy import Proxy
from fixtures import Eventually, Rows
from flowfabric import Fabric, Settings, Task
from flowfabric.engine.flow import submit
from flowfabric.errors import InvalidInputError, TransportError
from flowfabric.fabric.flow import Flow

Copy = Task[Any, Any, Any]


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the database of the test."""
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def copy(proxy: Proxy) -> AsyncIterator[Copy]:
    """A task of a fabric behind the proxy that does not repeat failed submissions by itself."""
    fabric = Fabric(settings=Settings(database_url=proxy.url, database_pool_size=1, listen=False, submit_patience_ms=0))

    @fabric.task
    async def copy(number: int) -> int:
        return number

    async with fabric:
        # The names of the flow and of its lane are stored.
        await new_flow(copy).submit()
        yield copy


def new_flow(copy: Copy) -> Flow:
    """A flow of two nodes."""
    assert isinstance(copy._fabric, Fabric)
    flow = copy._fabric.flow("nightly")
    flow.add(copy, flow.add(copy, 1))
    return flow


def drop_answer(proxy: Proxy) -> None:
    """Drop the answer to the next command of the pooled connection, and cut the connection."""
    for link in proxy.links:
        # The connection that sends hints is not pooled, and is the only one that sets this parameter.
        if link.parameters is not None and "synchronous_commit" not in link.parameters:
            link.drop_answer()


async def lose_first_answer(flow: Flow, proxy: Proxy) -> None:
    """Submit a flow and lose the answer to its first command, which only reads."""
    drop_answer(proxy)
    with pytest.raises(TransportError) as lost:
        await flow.submit()
    assert lost.value.outcome_unknown
    await proxy.settled()


async def submit_out_of_reach(flow: Flow, proxy: Proxy) -> None:
    """Submit a flow while no server can be reached."""
    proxy.refuses = True
    proxy.cut()
    await proxy.settled()
    # The first call finds a connection in the pool and cannot know that it is cut.
    with pytest.raises(TransportError):
        await flow._fabric.engine.ping()
    with pytest.raises(TransportError) as away:
        await flow.submit()
    assert not away.value.outcome_unknown
    proxy.refuses = False


async def nodes(rows: Rows, flow: Flow) -> int:
    """How many executions a flow has."""
    return len(await rows.of("execution", flow_id=UUID(flow.id)))


def check_fixed(flow: Flow, copy: Copy) -> None:
    """Check that nothing can be added to a flow of two nodes."""
    first, second = flow._nodes
    for change in (lambda: flow.add(copy, 2), lambda: flow.after(second, first)):
        with pytest.raises(InvalidInputError, match="flow 'nightly' is submitted, and its graph is fixed"):
            change()
    assert len(flow._nodes) == 2


async def test_the_graph_is_fixed_if_its_submission_may_be_stored(copy: Copy, proxy: Proxy, rows: Rows) -> None:
    flow = new_flow(copy)
    await lose_first_answer(flow, proxy)
    check_fixed(flow, copy)
    assert not (await flow.submit()).is_duplicate
    assert await nodes(rows, flow) == 2


async def test_a_flow_that_was_stored_without_an_answer_is_found_by_the_next_submission(
    copy: Copy,
    proxy: Proxy,
    rows: Rows,
    connection: asyncpg.Connection,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submit, "LOCK_TIMEOUT", "100s")
    flow = new_flow(copy)
    transaction = connection.transaction()
    await transaction.start()
    await begin(connection, UUID(flow.id))
    submitting = asyncio.create_task(flow.submit())
    # The command that inserts the flow waits for this session, so its answer is the next one.
    await eventually(lambda: is_awaited(rows, connection))
    drop_answer(proxy)
    await transaction.rollback()
    with pytest.raises(TransportError) as lost:
        await submitting
    assert lost.value.outcome_unknown
    assert await nodes(rows, flow) == 2
    check_fixed(flow, copy)
    assert (await flow.submit()).is_duplicate
    assert await nodes(rows, flow) == 2


async def test_the_graph_of_a_submission_that_reached_no_server_can_still_grow(
    copy: Copy, proxy: Proxy, rows: Rows
) -> None:
    flow = new_flow(copy)
    await submit_out_of_reach(flow, proxy)
    flow.add(copy, 3)
    assert not (await flow.submit()).is_duplicate
    assert await nodes(rows, flow) == 3


async def test_a_later_failure_does_not_open_a_graph_that_may_be_stored(copy: Copy, proxy: Proxy, rows: Rows) -> None:
    flow = new_flow(copy)
    await lose_first_answer(flow, proxy)
    await submit_out_of_reach(flow, proxy)
    check_fixed(flow, copy)
    await flow.submit()
    check_fixed(flow, copy)
    assert await nodes(rows, flow) == 2
