"""If a connection breaks at any message, the call is done, not done, or reports that its outcome is unknown."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from flowfabric.db import session
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.settings import Settings

from .conftest import IS_WHOLE, Sweep
from .operation import Operation
from .operations import OPERATIONS, groups
from .proxy import Action, Fault, Proxy, Side
from .scene import Scene, Subject, error_of

CUTS = (Action.CUT_BEFORE, Action.CUT_AFTER)
SAMPLE = 2
"""At how many messages the connection of a write is cut in a sampled sweep; that of a read is cut at one."""
SILENT_SAMPLE = 2
"""How many writes lose or delay messages in a sampled sweep."""
LIMIT_MS = 500
"""The statement timeout of the engine whose messages are lost or delayed."""
HANGS_SECONDS = 15
"""A call that has not ended by now counts as hanging."""
TRIES = (False, False, True)
"""The tries of a call over a working connection, and whether each is the last."""
MOST_FAILURES = 5
"""A sweep of an operation stops after this many failures."""
GROUPS = groups(is_whole=IS_WHOLE)
WRITES = [title for title, operation in OPERATIONS.items() if not operation.is_read]


class Breaking:
    """Breaks the connection of one operation at chosen messages, and checks the outcome and the rows."""

    def __init__(self, scene: Scene, proxy: Proxy, engine: Engine, operation: Operation) -> None:
        self._scene = scene
        self._proxy = proxy
        self._engine = engine
        self._operation = operation
        self._done: list[str] = []
        self.messages: dict[Side, int] = {}
        """How many messages each side sends in one call."""

    async def learn(self) -> None:
        """Make the call over a working connection, count its messages, and check that a second call adds nothing."""
        # The first call may prepare statements, and a hint may be sent during either.
        subject = await self._called()
        first = {side: self._proxy.counted(side) for side in Side}
        await self._scene.clean_up(subject)
        subject = await self._called()
        self.messages = {side: min(first[side], self._proxy.counted(side)) for side in Side}
        self._done = await self._scene.snapshot(subject)
        if self._operation.is_idempotent:
            await self.call(subject)
            repeated = await self._scene.snapshot(subject)
            if repeated != self._done:
                pytest.fail(f"a second call changed rows: {sorted({*self._done} ^ {*repeated})}")
        await self._scene.clean_up(subject)

    async def _called(self) -> Subject:
        """The subject of a successful call."""
        for is_last in TRIES:
            subject = await self._scene.subject(lane_id="warm lane")
            await self._operation.prepare(subject)
            self._proxy.arm(None)
            error = await self.call(subject)
            if error is None:
                return subject
            if is_last or not _is_timeout(error):
                raise error
            await self._scene.clean_up(subject)
        raise AssertionError("unreachable")

    async def break_at(self, fault: Fault) -> tuple[bool, list[str]]:
        """Break the connection of a call; return whether the call reached that message, and what is wrong."""
        subject = await self._scene.subject(lane_id="warm lane")
        await self._operation.prepare(subject)
        before = await self._scene.snapshot(subject)
        self._proxy.arm(fault)
        error = await self.call(subject)
        was_reached = bool(self._proxy.triggered)
        self._proxy.arm(None)
        await self._proxy.settled()
        wrong = []
        if busy := await self._scene.wait_until_idle():
            wrong.append(f"a session is still busy: {busy}")
        wrong += self._judge(error, before, await self._scene.snapshot(subject))
        wrong += await self._repeat(subject)
        await self._scene.clean_up(subject)
        return was_reached, [f"{self._at(fault)}: {each}" for each in wrong]

    async def probe(self, fault: Fault) -> list[str]:
        """What is wrong with other operations of the engine after a fault."""
        for is_last in TRIES:
            try:
                return [f"after {self._at(fault)}: {each}" for each in await self._scene.probe(self._engine)]
            except EngineError as error:
                if is_last or not _is_timeout(error):
                    return [f"after {self._at(fault)}: a later operation failed: {error!r}"]
        raise AssertionError("unreachable")

    def _at(self, fault: Fault) -> str:
        return f"{self._operation.title}, {fault.action} message {fault.nth} of the {fault.side}"

    async def call(self, subject: Subject) -> BaseException | None:
        """Make the call; return its error."""
        task = asyncio.ensure_future(self._operation.call(self._engine, subject))
        done, _ = await asyncio.wait((task,), timeout=HANGS_SECONDS)
        if not done:
            task.cancel()
            await asyncio.wait((task,))
            return TimeoutError(f"no answer within {HANGS_SECONDS} s")
        return error_of(task)

    def _judge(self, error: BaseException | None, before: list[str], after: list[str]) -> list[str]:
        match error:
            case None if after != self._done:
                return [f"was acknowledged but is not done: {_difference(self._done, after)}"]
            case TransportError() if error.outcome_unknown:
                return [] if after in (before, self._done) else [f"is half done: {_difference(self._done, after)}"]
            case EngineError() if after != before:
                return [f"failed with {error!r} but changed rows: {_difference(before, after)}"]
            case None | EngineError():
                return []
            case _:
                return [f"ended with {error!r}"]

    async def _repeat(self, subject: Subject) -> list[str]:
        """Repeat the call over a working connection; return what is wrong."""
        for is_last in TRIES:
            error = await self.call(subject)
            if is_last or not _is_timeout(error):
                break
        if error is not None and (not isinstance(error, EngineError) or isinstance(error, TransportError)):
            return [f"a second call ended with {error!r}"]
        after = await self._scene.snapshot(subject)
        if self._operation.is_idempotent and after != self._done:
            return [f"a second call ({error!r}) left other rows: {_difference(self._done, after)}"]
        return []


def _is_timeout(error: BaseException | None) -> bool:
    """Whether a call met the short timeout of these tests, as it may on a busy machine."""
    return isinstance(error, TransportError) and error.kind == "timeout"


def _difference(expected: list[str], found: list[str]) -> str:
    return (
        f"missing {[row for row in expected if row not in found]},"
        f" unexpected {[row for row in found if row not in expected]}"
    )


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the database of the test."""
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def engine(proxy: Proxy) -> AsyncIterator[Engine]:
    """An engine behind the proxy."""
    async with _engine(proxy) as engine:
        yield engine
        proxy.heal()


@pytest.fixture
async def impatient_engine(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """An engine behind the proxy that considers a silent connection dead after a short time."""
    monkeypatch.setattr(session, "ANSWER_SECONDS", 0.2)
    async with _engine(proxy, statement_timeout_ms=LIMIT_MS) as engine:
        yield engine
        proxy.heal()


@asynccontextmanager
async def _engine(proxy: Proxy, statement_timeout_ms: int = 8_000) -> AsyncIterator[Engine]:
    settings = Settings(
        database_url=proxy.url,
        database_pool_size=2,
        listen=False,
        submit_patience_ms=0,
        statement_timeout_ms=statement_timeout_ms,
    )
    async with Engine.connect(settings=settings) as engine:
        yield engine


async def _broken(breaking: Breaking, sweep: Sweep, title: str, actions: tuple[Action, ...], sample: int) -> list[str]:
    """Break the connection of a call at a sample of messages or at all; return what is wrong.

    Other operations are probed after every fault of a whole sweep, and after the last one of a sample.
    """
    await breaking.learn()
    cases = [
        Fault(action=action, side=side, nth=nth, seconds=LIMIT_MS / 1000 / 4)
        for action in actions
        for side in Side
        for nth in range(1, breaking.messages[side] + 1)
    ]
    sampled = [cases[at] for at in sweep.sample(f"{title} {actions}", len(cases), sample)]
    wrong: list[str] = []
    reached = 0
    for nth, case in enumerate(sampled, 1):
        was_reached, found = await breaking.break_at(case)
        reached += was_reached
        wrong += found
        if sweep.is_whole or nth == len(sampled):
            wrong += await breaking.probe(case)
        if len(wrong) >= MOST_FAILURES:
            break
    if cases and not reached:
        # A call with prepared statements has fewer messages than one that prepares them, but always a first one.
        was_reached, found = await breaking.break_at(cases[0])
        wrong += found if was_reached else [f"{title}: no fault happened", *found]
        wrong += await breaking.probe(cases[0])
    return wrong


async def _broken_beyond(breaking: Breaking) -> list[str]:
    """Cut the connection after the last counted message: a new connection prepares its statements again."""
    wrong: list[str] = []
    for side in Side:
        nth, was_reached = breaking.messages[side] + 1, True
        while was_reached and len(wrong) < MOST_FAILURES:
            fault = Fault(action=Action.CUT_BEFORE, side=side, nth=nth)
            was_reached, found = await breaking.break_at(fault)
            wrong += [*found, *await breaking.probe(fault)]
            nth += 1
    return wrong


@pytest.mark.parametrize("group", GROUPS)
async def test_a_call_whose_connection_is_cut_is_done_or_not_or_reports_an_unknown_outcome(
    scene: Scene, proxy: Proxy, engine: Engine, sweep: Sweep, group: str
) -> None:
    wrong = []
    for operation in GROUPS[group]:
        breaking = Breaking(scene, proxy, engine, operation)
        wrong += await _broken(breaking, sweep, operation.title, CUTS, 1 if operation.is_read else SAMPLE)
        wrong += await _broken_beyond(breaking) if sweep.is_whole else []
    wrong += await scene.inconsistencies()
    assert not wrong, f"seed {sweep.seed}\n" + "\n".join(wrong)


async def test_a_call_that_reaches_no_server_is_known_not_to_be_done(
    scene: Scene, proxy: Proxy, engine: Engine
) -> None:
    wrong = []
    for title in ("claim", "complete", "cancel_execution", "suspend", "deliver_signal", "progress"):
        breaking = Breaking(scene, proxy, engine, OPERATIONS[title])
        subject = await scene.subject(lane_id=title)
        await OPERATIONS[title].prepare(subject)
        await engine.ping()
        before = await scene.snapshot(subject)
        proxy.refuses = True
        proxy.cut()
        await proxy.settled()
        # The first call finds a connection in the pool and cannot know that it is cut.
        errors = [await breaking.call(subject) for _ in range(3)]
        if not all(isinstance(error, TransportError) for error in errors):
            wrong.append(f"{title}: ended with {errors}")
        elif isinstance(errors[-1], TransportError) and errors[-1].outcome_unknown:
            wrong.append(f"{title}: the outcome is unknown: {errors[-1]!r}")
        if await scene.snapshot(subject) != before:
            wrong.append(f"{title}: rows have changed")
        proxy.refuses = False
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("group", WRITES if IS_WHOLE else ["sample"])
@pytest.mark.parametrize("action", [Action.SILENCE, Action.DELAY])
async def test_a_call_with_lost_or_late_messages_is_done_or_not_or_reports_an_unknown_outcome(
    scene: Scene, proxy: Proxy, impatient_engine: Engine, sweep: Sweep, group: str, action: Action
) -> None:
    titles = [WRITES[at] for at in sweep.sample(action, len(WRITES), SILENT_SAMPLE)] if not IS_WHOLE else [group]
    wrong = []
    for title in titles:
        breaking = Breaking(scene, proxy, impatient_engine, OPERATIONS[title])
        wrong += await _broken(breaking, sweep, title, (action,), 1)
    wrong += await scene.inconsistencies()
    assert not wrong, f"seed {sweep.seed}\n" + "\n".join(wrong)
