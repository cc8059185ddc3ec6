"""A cancelled call leaves all of its effect or none, and nothing that is acknowledged after it is lost."""

import asyncio
from typing import Any

import pytest

from fixtures import Engines
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError

from .conftest import Sweep
from .operations import GROUPS, OPERATIONS, Operation, offered
from .scene import Scene, Subject, refusal_of

SAMPLE = 2
"""Turns at which an operation is cancelled in the sampled form."""


def test_every_operation_is_swept() -> None:
    # Of what is not offered, a worker brings forward what it has put off, and the reconciler trims.
    assert {operation.name for operation in OPERATIONS.values()} == offered() | {"bring_forward", "trim"}


class Turns:
    """Counts the turns of the running loop while a task is under way, and cancels the task at one of them.

    Every turn is two cases: what the turn waits for may have arrived when the cancellation comes, or not yet.
    """

    def __init__(self, task: "asyncio.Task[object]", cancel_at: int | None = None) -> None:
        self._task = task
        self._cancel_at = cancel_at
        # The selector is no part of what a loop offers, but is asked exactly once in every turn.
        loop: Any = asyncio.get_running_loop()
        self._loop = loop
        self._selector = loop._selector
        self.count = 0
        self.has_cancelled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def select(self, timeout: float | None = None) -> Any:
        """Wait for what comes next, as the loop asks for once in every turn."""
        if self._is_time():
            timeout = 0
        events = self._selector.select(timeout)
        self._is_time()
        return events

    def _is_time(self) -> bool:
        is_time = self.count == self._cancel_at and not self._task.done()
        if is_time:
            self.has_cancelled = True
            self._task.cancel()
        self.count += 1
        return is_time

    async def run(self) -> BaseException | None:
        """Wait for the task, and give the error it ended in."""
        self._loop._selector = self
        try:
            await asyncio.wait((self._task,))
        finally:
            self._loop._selector = self._selector
        return asyncio.CancelledError() if self._task.cancelled() else refusal_of(self._task)


class Cancelling:
    """One operation on one engine, cancelled at one turn after the other."""

    def __init__(self, scene: Scene, engine: Engine, operation: Operation) -> None:
        self._scene = scene
        self._engine = engine
        self._operation = operation
        self._whole: list[str] = []
        self._none: list[str] = []

    async def learn(self, *, is_whole: bool) -> int:
        """The rows a call leaves that ends by itself, and those that no call leaves; the turns that the call takes.

        In a whole sweep two calls are compared, and the longer one is counted: that which prepares its statements.
        """
        turns = 0
        for lane in ("warm lane", "another lane") if is_whole else ("warm lane",):
            subject = await self._scene.subject(lane_id=lane)
            await self._operation.prepare(subject)
            watched = Turns(asyncio.ensure_future(self._operation.call(self._engine, subject)))
            if refused := await watched.run():
                raise refused
            turns = max(turns, watched.count)
            whole = await self._after(subject)
            if self._whole and self._whole != whole:
                pytest.fail(f"two equal calls left different rows: {sorted({*self._whole} ^ {*whole})}")
            self._whole = whole
        subject = await self._scene.subject(lane_id="warm lane")
        await self._operation.prepare(subject)
        self._none = await self._after(subject)
        return turns

    async def _after(self, subject: Subject) -> list[str]:
        """The rows of a subject after other calls were made, which may do what is due in the whole store."""
        assert await self._scene.testify(self._engine) == []
        rows = await self._scene.digest(subject)
        await self._scene.leave(subject)
        return rows

    async def cancel_at(self, turn: int, *, lane: str) -> tuple[bool, list[str]]:
        """Whether the call ended by itself before that turn, and what is wrong."""
        subject = await self._scene.subject(lane_id=lane)
        await self._operation.prepare(subject)
        before = await self._scene.digest(subject)
        watched = Turns(asyncio.ensure_future(self._operation.call(self._engine, subject)), turn)
        outcome = await watched.run()
        has_ended = not watched.has_cancelled
        wrong = []
        if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
            wrong.append(f"ended in {outcome!r}")
        try:
            wrong += await self._scene.testify(self._engine)
        except (EngineError, TimeoutError) as refused:
            wrong.append(f"an operation after it was refused: {refused!r}")
        if busy := await self._scene.quiet():
            wrong.append(f"a session is left busy: {busy}")
        after = await self._scene.digest(subject)
        if after != self._whole and (has_ended or after not in (self._none, before)):
            wrong.append(_half(self._none, self._whole, after))
        await self._scene.leave(subject)
        return has_ended, [f"{self._operation.title}, cancelled at turn {turn}: {each}" for each in wrong]


def _half(none: list[str], whole: list[str], after: list[str]) -> str:
    return (
        f"neither done nor undone; missing {[row for row in whole if row not in after]},"
        f" unexpected {[row for row in after if row not in whole and row not in none]}"
    )


async def _swept(cancelling: Cancelling, sweep: Sweep, operation: Operation) -> list[str]:
    """What is wrong at some turns, or at every turn until the call ends by itself, with its names known and not."""
    turns = await cancelling.learn(is_whole=sweep.is_whole)
    wrong: list[str] = []
    if not sweep.is_whole:
        for nth, turn in enumerate(sweep.sample(operation.title, turns, 2 if operation.is_read else SAMPLE)):
            wrong += (await cancelling.cancel_at(turn, lane=f"cold lane {turn}" if nth == 1 else "warm lane"))[1]
        return wrong
    for lane in ("warm lane", "cold lane {}"):
        turn, has_ended = 0, False
        while not has_ended and len(wrong) < 5:
            has_ended, found = await cancelling.cancel_at(turn, lane=lane.format(turn))
            wrong += found
            turn += 1
    return wrong


@pytest.mark.parametrize("group", GROUPS)
async def test_a_cancelled_call_is_done_or_not_and_takes_nothing_else_with_it(
    engines: Engines, scene: Scene, sweep: Sweep, group: str
) -> None:
    engine = await engines(database_pool_size=2)
    wrong: list[str] = []
    for operation in GROUPS[group]:
        wrong += await _swept(Cancelling(scene, engine, operation), sweep, operation)
    wrong += await scene.inconsistencies()
    assert not wrong, f"seed {sweep.seed}\n" + "\n".join(wrong)


async def test_a_cancelled_report_of_progress_takes_nothing_with_it_whenever_it_is_cancelled(
    engines: Engines, scene: Scene
) -> None:
    """The smallest transaction there is, at every turn."""
    cancelling = Cancelling(scene, await engines(database_pool_size=2), OPERATIONS["progress"])
    await cancelling.learn(is_whole=True)
    turn, has_ended, wrong = 0, False, list[str]()
    while not has_ended and len(wrong) < 5:
        has_ended, found = await cancelling.cancel_at(turn, lane="warm lane")
        wrong += found
        turn += 1
    assert not wrong, "\n".join(wrong)
