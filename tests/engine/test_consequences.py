"""Consequences: every end of a lease or an execution runs the consequence of its attachments exactly once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from creates import new
from engine.ends import BIT, TTL_MS, WAYS, Scene
from engine.state import all_cases, claim, refused
from engine.waits import suspend_args, triple
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.db.database import Transaction
from flowfabric.engine import parts as parts_module
from flowfabric.engine.core.consequence import EndedLease
from flowfabric.engine.core.transition import Move
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import Completed


@pytest.fixture
async def scene(
    monkeypatch: pytest.MonkeyPatch, engines: Engines, clock: Clock, connection: asyncpg.Connection
) -> Scene:
    """An engine with its own consequences and one of this test."""
    await connection.execute(
        """create table test_ended (nth int generated always as identity, execution_id text, move text,
                                    is_terminal boolean, xid xid8 default pg_current_xact_id())"""
    )

    async def see(transaction: Transaction, ended: Sequence[EndedLease]) -> None:
        await found.see(transaction, ended)

    monkeypatch.setattr(parts_module, "CONSEQUENCES", {**parts_module.CONSEQUENCES, BIT: see})
    found = Scene(Given(await engines(), clock), clock, connection)
    return found


def test_every_move_has_a_way() -> None:
    assert {move for move, _ in WAYS.values()} == set(Move)


@asynccontextmanager
async def prepared(scene: Scene, name: str) -> AsyncIterator[tuple[ExecutionId, AsyncIterator[ExecutionId]]]:
    """An execution that is ready to end in a way, on a lane of its own, and what ends it; cleared in the end."""
    scene.lane = name
    steps = WAYS[name][1](scene)
    execution_id = await anext(steps)
    try:
        yield execution_id, steps
    finally:
        await scene.clear(execution_id)


async def test_the_consequence_sees_every_end_once_in_its_transaction(scene: Scene) -> None:
    with all_cases() as case:
        for name, (move, _) in WAYS.items():
            with case(name):
                async with prepared(scene, name) as (execution_id, steps):
                    await scene.attach(execution_id)
                    assert await anext(steps, None) is None
                    await check_seen(scene, execution_id, move)


async def check_seen(scene: Scene, execution_id: ExecutionId, move: Move) -> None:
    """Check that the consequence has seen one move of an execution, in the transaction of its event."""
    info = await scene.engine.read_execution_info(execution_id)
    is_terminal = info is not None and info.state_vector.terminal_outcome != "none"
    assert await scene.seen() == [(execution_id, move, is_terminal)]
    assert scene.calls == [1]
    # An attachment is removed with the execution, and stays when only the lease ends.
    assert (await scene.attached(execution_id)) & BIT == (0 if is_terminal else BIT)
    assert await scene.connection.fetchval(
        """select count(*) from event_each e join test_ended s on s.xid = e.xid
            where e.execution_id = $1 and e.kind in ('released', 'ended', 'expired', 'revoked')""",
        uuid_of(execution_id),
    ), "no event of the end is of the transaction that the consequence saw"


async def test_the_consequence_does_not_see_executions_without_the_attachment(scene: Scene) -> None:
    with all_cases() as case:
        for name in WAYS:
            with case(name):
                async with prepared(scene, name) as (execution_id, steps):
                    assert await anext(steps, None) is None
                    assert (await scene.seen(), scene.calls) == ([], [])
                    assert not (await scene.attached(execution_id)) & BIT


async def test_an_end_whose_consequence_fails_is_rolled_back(scene: Scene, rows: Rows) -> None:
    with all_cases() as case:
        for name in ("complete", "fail", "hand_back", "suspend", "cancel", "time_out"):
            with case(name):
                async with prepared(scene, name) as (execution_id, steps):
                    await scene.attach(execution_id)
                    scene.fault = ValueError("not now")
                    async with rows.unchanged():
                        with pytest.raises(ValueError, match="not now"):
                            await anext(steps, None)
                    assert scene.calls
                    assert await scene.seen() == []


async def test_the_consequence_sees_every_lease_of_an_execution(scene: Scene) -> None:
    first = await scene.given.claimed()
    await scene.attach(first.execution_id)
    await scene.engine.hand_back(first)
    (second,) = await claim(scene.engine)
    await scene.engine.suspend(second.handle, suspend_args())
    await scene.engine.resume_execution(execution_id=first.execution_id)
    (third,) = await claim(scene.engine)
    await scene.engine.complete(third.handle, b"done")
    await scene.engine.complete(third.handle, b"done")
    assert [(move, is_terminal) for _, move, is_terminal in await scene.seen()] == [
        (Move.HANDED_BACK, False),
        (Move.SUSPENDED, False),
        (Move.COMPLETED, True),
    ]


async def test_a_batch_with_one_attachment_completes_as_a_whole(scene: Scene, rows: Rows) -> None:
    await scene.engine.create_many([new() for _ in range(100)])
    runs = await claim(scene.engine, limit=100)
    await scene.attach(runs[41].execution_id)
    answers = await scene.engine.complete_many([(run.handle, b"%d" % at) for at, run in enumerate(runs)])
    assert [answer.execution_id for answer in answers if isinstance(answer, Completed)] == [
        run.execution_id for run in runs
    ]
    assert await scene.seen() == [(runs[41].execution_id, Move.COMPLETED, True)]
    found = {row["execution_id"]: row["result_payload"] for row in await rows.of("execution")}
    assert sorted(found.values()) == sorted(b"%d" % at for at in range(100))


async def test_the_consequence_runs_once_for_all_attachments_of_a_batch(scene: Scene) -> None:
    await scene.engine.create_many([new() for _ in range(100)])
    runs = await claim(scene.engine, limit=100)
    marked = [run.execution_id for run in runs[::10]]
    await scene.attach(*marked)
    await scene.engine.complete_many([(run.handle, None) for run in runs])
    assert scene.calls == [10]
    assert sorted(await scene.seen()) == sorted((each, Move.COMPLETED, True) for each in marked)


async def test_concurrent_ends_of_different_kinds_are_seen_with_their_own_move(scene: Scene) -> None:
    await scene.engine.create_many([new() for _ in range(100)])
    runs = await claim(scene.engine, limit=100)
    await scene.attach(*(run.execution_id for run in runs[:50]))
    until = await scene.clock.now() + 60_000
    kinds: list[tuple[Move, Callable[[Handle], Any]]] = [
        (Move.COMPLETED, lambda handle: scene.engine.complete(handle, b"done")),
        (Move.FAILED, lambda handle: scene.engine.fail(handle, reason="no luck")),
        (Move.CANCELLED, lambda handle: scene.engine.cancel(handle, "not wanted")),
        (Move.HANDED_BACK, lambda handle: scene.engine.hand_back(handle)),
        (Move.DELAYED, lambda handle: scene.engine.delay(handle, until)),
    ]
    await asyncio.gather(*(kinds[at % 5][1](run.handle) for at, run in enumerate(runs)))
    assert sorted((each, move) for each, move, _ in await scene.seen()) == sorted(
        (run.execution_id, kinds[at % 5][0]) for at, run in enumerate(runs[:50])
    )


async def test_the_consequence_does_not_see_a_refused_end(scene: Scene) -> None:
    stale = await scene.given.claimed(lease_ttl_ms=TTL_MS)
    await scene.clock.advance(ms=TTL_MS + 1)
    (current,) = await claim(scene.engine)
    assert current.execution_id == stale.execution_id
    await scene.attach(stale.execution_id)
    await refused(scene.engine.complete(stale, b"late"), "lease_conflict")
    await refused(scene.engine.fail(stale, reason="late"), "lease_conflict")
    await refused(scene.engine.hand_back(stale), "lease_conflict")
    await refused(scene.engine.complete_execution(**triple(stale)), "stale_lease")
    (answer,) = await scene.engine.complete_many([(stale, b"late")])
    assert not isinstance(answer, Completed)
    assert (await scene.seen(), scene.calls) == ([], [])
    await scene.engine.complete(current.handle, b"done")
    assert await scene.seen() == [(stale.execution_id, Move.COMPLETED, True)]
