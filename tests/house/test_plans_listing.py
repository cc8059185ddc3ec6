"""A page of executions touches few rows, however many executions of other states and namespaces there are."""

from typing import Any

import asyncpg
import pytest

from creates import new
from engine.reach import DAY, one_of
from engine.state import all_cases
from fixtures import Clock, Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.read.listing import FIRST_SCAN
from flowfabric.model.states import PublicState
from house.touched import Touched, touched

__all__ = ["touched"]

BACKLOG = 8_000

RARE = (
    # Before the others: to reach it, the states of all executions in the store are rewritten.
    PublicState.SKIPPED,
    PublicState.COMPLETED,
    PublicState.FAILED,
    PublicState.CANCELLED,
    PublicState.EXPIRED,
    PublicState.ACTIVE,
    PublicState.SUSPENDED,
    PublicState.RATE_LIMITED,
    PublicState.WAITING_CHILDREN,
    PublicState.DELAYED,
    # After the others: it can be claimed.
    PublicState.RESUMABLE,
)
"""The states to search for behind many waiting executions, in the order in which the executions are created."""


async def backlog(engine: Engine, **overrides: Any) -> None:
    """Create many executions, newer than all others, and few of them in the same millisecond."""
    for _ in range(BACKLOG // 200):
        await engine.create_many([new(**overrides) for _ in range(200)])


def test_every_state_is_looked_for() -> None:
    assert {*RARE, PublicState.WAITING} == set(PublicState)


@pytest.mark.parametrize("states", [RARE, (PublicState.WAITING,)], ids=["behind waiting", "behind delayed"])
async def test_a_page_of_a_state_is_found_behind_many_executions_of_another(
    engine: Engine,
    given: Given,
    clock: Clock,
    connection: asyncpg.Connection,
    touched: Touched,
    states: tuple[PublicState, ...],
) -> None:
    wanted = {state: await one_of(state, given, clock, connection) for state in states}
    # The backlog has timers too, so that the timers of delays are not the only ones.
    timer = "delay_until" if PublicState.WAITING in states else "execution_deadline_at"
    await backlog(engine, **{timer: await clock.now() + DAY})
    with all_cases() as case:
        for upkeep in ("vacuum", "vacuum analyze"):
            await connection.execute(upkeep)
            for state, namespace in ((state, namespace) for state in states for namespace in (None, "tests")):
                with case(f"{state} of {namespace} after {upkeep}"):
                    touched.clear()
                    page = await engine.list_executions(public_state=state, namespace=namespace)
                    assert {line.execution_id for line in page.executions} == wanted[state]
                    assert page.next_cursor is None
                    # A scan in creation order gives up, and a small table contains every match.
                    assert touched.sum("list_newest") <= 8 * FIRST_SCAN
                    assert 0 < touched.sum("list_candidates") <= 40


async def test_ordinary_executions_have_no_row_in_listed_and_no_timer(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    await engine.create_many([new() for _ in range(500)])
    claimed = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=400)
    await engine.renew_many([run.handle for run in claimed[:100]])
    await engine.complete_many([(run.handle, b"1") for run in claimed[:300]])
    for table in ("listed", "timer"):
        assert await connection.fetchval("select pg_relation_size($1::text::regclass)", table) == 0


async def test_a_page_of_many_namespaces_reads_few_executions(engine: Engine, touched: Touched) -> None:
    spaces = 600
    for nth in range(8):
        for first in range(0, spaces, 100):
            await engine.create_many([new(namespace=f"n{(first + at + nth) % spaces}") for at in range(100)])
    for order in ("newest", "oldest"):
        found: list[str] = []
        cursor = None
        for _ in range(3):
            touched.clear()
            page = await engine.list_executions(order=order, cursor=cursor, limit=20)
            assert len(page.executions) == 20
            assert 0 < touched.sum("list_pairs") <= 3 * spaces
            assert 0 < touched.sum(f"list_{order}") <= 4 * FIRST_SCAN
            found += [line.execution_id for line in page.executions]
            cursor = page.next_cursor
        whole = await engine.list_executions(order=order, limit=60)
        assert found == [line.execution_id for line in whole.executions]


async def test_an_empty_range_of_completion_times_runs_no_statement(engine: Engine, touched: Touched) -> None:
    for before in (5, 4, -5):
        page = await engine.list_executions(completed_after=5, completed_before=before)
        assert (page.executions, page.next_cursor, touched.calls) == ([], None, {})
