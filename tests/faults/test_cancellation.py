"""A cancelled call is done in full or not at all, and nothing acknowledged after it is lost."""

import asyncio
from typing import Any

import pytest

from fixtures import Engines
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError

from .conftest import IS_WHOLE, Sweep
from .operation import Operation
from .operations import OPERATIONS, groups, public_operations
from .scene import Scene, Subject, error_of

SAMPLE = 2
"""At how many turns a write is cancelled in a sampled sweep; a read is cancelled at one."""
MOST_FAILURES = 5
"""A sweep of an operation stops after this many failures."""
GROUPS = groups(is_whole=IS_WHOLE)


def test_every_operation_is_swept() -> None:
    internal = {
        "bring_forward",
        "cancel_many",
        "expire_streams",
        "project_due",
        "purge_guards",
        "trim",
        "unblock_batch",
    }
    assert {operation.name for operation in OPERATIONS.values()} == public_operations() | internal


class Turns:
    """Counts the turns of the event loop while a task runs, and cancels the task at one of them.

    Every turn counts twice: a cancellation comes either before or after the events of the turn have arrived.
    """

    def __init__(self, task: "asyncio.Task[object]", cancel_at: int | None = None) -> None:
        self._task = task
        self._cancel_at = cancel_at
        # The selector is private to the loop, but the loop calls it exactly once a turn.
        loop: Any = asyncio.get_running_loop()
        self._loop = loop
        self._selector = loop._selector
        self.count = 0
        self.has_cancelled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def select(self, timeout: float | None = None) -> Any:
        """Wait for events in place of the selector of the loop."""
        if self._cancel_if_due():
            timeout = 0
        events = self._selector.select(timeout)
        self._cancel_if_due()
        return events

    def _cancel_if_due(self) -> bool:
        is_due = self.count == self._cancel_at and not self._task.done()
        if is_due:
            self.has_cancelled = True
            self._task.cancel()
        self.count += 1
        return is_due

    async def run(self) -> BaseException | None:
        """Wait for the task; return its error."""
        self._loop._selector = self
        try:
            await asyncio.wait((self._task,))
        finally:
            self._loop._selector = self._selector
        return asyncio.CancelledError() if self._task.cancelled() else error_of(self._task)


class Cancellation:
    """Cancels calls of one operation on one engine, and compares the rows they leave with those of whole calls."""

    def __init__(self, scene: Scene, engine: Engine, operation: Operation) -> None:
        self._scene = scene
        self._engine = engine
        self._operation = operation
        self._done: list[str] = []
        self._probed: list[list[str]] = []

    async def learn(self, *, is_whole: bool) -> int:
        """Make the call without cancelling it; return how many turns it takes.

        In a whole sweep two calls are compared, and the longer one counts: the one that prepares its statements.
        """
        turns = 0
        for lane in ("warm lane", "another lane") if is_whole else ("warm lane",):
            subject = await self._prepared(lane)
            watched = Turns(asyncio.ensure_future(self._operation.call(self._engine, subject)))
            if error := await watched.run():
                raise error
            turns = max(turns, watched.count)
            done = await self._scene.snapshot(subject)
            await self._scene.clean_up(subject)
            if self._done and self._done != done:
                pytest.fail(f"two equal calls left different rows: {sorted({*self._done} ^ {*done})}")
            self._done = done
        return turns

    async def cancel_at(self, turn: int, *, lane: str) -> tuple[bool, list[str]]:
        """Cancel a call at a turn; return whether it ended before that turn, and what is wrong."""
        subject = await self._prepared(lane)
        before = await self._scene.snapshot(subject)
        watched = Turns(asyncio.ensure_future(self._operation.call(self._engine, subject)), turn)
        error = await watched.run()
        has_ended = not watched.has_cancelled
        wrong = []
        if error is not None and not isinstance(error, asyncio.CancelledError):
            wrong.append(f"ended with {error!r}")
        try:
            wrong += await self._scene.probe(self._engine)
        except (EngineError, TimeoutError) as failure:
            wrong.append(f"a later operation failed: {failure!r}")
        if busy := await self._scene.wait_until_idle():
            wrong.append(f"a session is still busy: {busy}")
        after = await self._scene.snapshot(subject)
        await self._scene.clean_up(subject)
        if after != self._done and (has_ended or after != before):
            wrong += await self._judge_after_probe(after, has_ended=has_ended)
        return has_ended, [f"{self._operation.title}, cancelled at turn {turn}: {each}" for each in wrong]

    async def sweep(self, *, lane: str) -> list[str]:
        """Cancel the call at every turn until it ends before; return what is wrong."""
        turn, has_ended, wrong = 0, False, list[str]()
        while not has_ended and len(wrong) < MOST_FAILURES:
            has_ended, found = await self.cancel_at(turn, lane=lane.format(turn))
            wrong += found
            turn += 1
        return wrong

    async def _judge_after_probe(self, after: list[str], *, has_ended: bool) -> list[str]:
        """Compare with the rows that a whole call and no call leave after a probe, which may process due items."""
        if not self._probed:
            self._probed = [await self._rows_after_probe(is_called=is_called) for is_called in (True, False)]
        done, not_done = self._probed
        if after == done or (after == not_done and not has_ended):
            return []
        missing = [row for row in done if row not in after]
        unexpected = [row for row in after if row not in done and row not in not_done]
        return [f"neither done nor undone; missing {missing}, unexpected {unexpected}"]

    async def _rows_after_probe(self, *, is_called: bool) -> list[str]:
        subject = await self._prepared("warm lane")
        if is_called:
            await self._operation.call(self._engine, subject)
        assert await self._scene.probe(self._engine) == []
        rows = await self._scene.snapshot(subject)
        await self._scene.clean_up(subject)
        return rows

    async def _prepared(self, lane: str) -> Subject:
        subject = await self._scene.subject(lane_id=lane)
        await self._operation.prepare(subject)
        return subject


async def _swept(cancellation: Cancellation, sweep: Sweep, operation: Operation) -> list[str]:
    """Cancel a call at a sample of turns or at all, with its lane known to the engine and not; return what is wrong."""
    turns = await cancellation.learn(is_whole=sweep.is_whole)
    wrong: list[str] = []
    if sweep.is_whole:
        for lane in ("warm lane", "cold lane {}"):
            wrong += await cancellation.sweep(lane=lane)
        return wrong
    for nth, turn in enumerate(sweep.sample(operation.title, turns, 1 if operation.is_read else SAMPLE)):
        wrong += (await cancellation.cancel_at(turn, lane=f"cold lane {turn}" if nth == 1 else "warm lane"))[1]
    return wrong


@pytest.mark.parametrize("group", GROUPS)
async def test_a_cancelled_call_is_done_or_not_and_loses_nothing_else(
    engines: Engines, scene: Scene, sweep: Sweep, group: str
) -> None:
    engine = await engines(database_pool_size=2)
    wrong: list[str] = []
    for operation in GROUPS[group]:
        wrong += await _swept(Cancellation(scene, engine, operation), sweep, operation)
    wrong += await scene.inconsistencies()
    assert not wrong, f"seed {sweep.seed}\n" + "\n".join(wrong)


async def test_a_progress_report_cancelled_at_any_turn_loses_nothing_else(engines: Engines, scene: Scene) -> None:
    """The smallest transaction, at every turn."""
    cancellation = Cancellation(scene, await engines(database_pool_size=2), OPERATIONS["progress"])
    await cancellation.learn(is_whole=True)
    wrong = await cancellation.sweep(lane="warm lane")
    assert not wrong, "\n".join(wrong)
