"""A connection may break at any message: a call is done, not done, or says that it does not know."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from flowfabric.db import session
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.settings import Settings

from .conftest import IS_WHOLE, Sweep
from .operations import GROUPS, OPERATIONS, Operation
from .proxy import Action, Proxy, Side, Strike
from .scene import Scene, Subject, refusal_of

CUTS = (Action.CUT_BEFORE, Action.CUT_AFTER)
SAMPLE = 2
"""Messages at which the connection of an operation breaks in the sampled form."""
SILENT_SAMPLE = 4
"""Operations whose connection falls silent in the sampled form."""
LIMIT_MS = 800
"""How long a statement may take in these tests."""
HANGS_SECONDS = 15
"""A call that has not ended by now never does."""
TRIES = (False, False, True)
"""How often a call over a connection that works is tried, and whether it is the last time."""


class Breaking:
    """One operation on one engine behind a proxy, whose connection breaks at one message after the other."""

    def __init__(self, scene: Scene, proxy: Proxy, engine: Engine, operation: Operation) -> None:
        self._scene = scene
        self._proxy = proxy
        self._engine = engine
        self._operation = operation
        self._whole: list[str] = []
        self.messages: dict[Side, int] = {}

    async def learn(self) -> None:
        """The rows that the call leaves, how many messages it takes, and that a repeat of it adds nothing."""
        # The first time statements are prepared, the second they are known.
        for _ in range(2):
            subject = await self._untouched()
            self.messages = {side: self._proxy.counted(side) for side in Side}
            self._whole = await self._scene.digest(subject)
            if self._operation.repeats:
                await self._call(subject)
                repeated = await self._scene.digest(subject)
                if repeated != self._whole:
                    pytest.fail(f"a repeat adds to what is done: {sorted({*self._whole} ^ {*repeated})}")
            await self._scene.leave(subject)

    async def _untouched(self) -> Subject:
        """The subject of a call that was not broken."""
        for is_last in TRIES:
            subject = await self._scene.subject(lane_id="warm lane")
            await self._operation.prepare(subject)
            self._proxy.arm(None)
            refused = await self._call(subject)
            if refused is None:
                return subject
            if is_last or not _is_late(refused):
                raise refused
            await self._scene.leave(subject)
        raise AssertionError("unreachable")

    async def break_at(self, strike: Strike) -> tuple[bool, list[str]]:
        """Whether the call came to that message, and what is wrong."""
        subject = await self._scene.subject(lane_id="warm lane")
        await self._operation.prepare(subject)
        before = await self._scene.digest(subject)
        self._proxy.arm(strike)
        error = await self._call(subject)
        has_struck = bool(self._proxy.struck)
        self._proxy.arm(None)
        await self._proxy.settled()
        wrong = []
        if busy := await self._scene.quiet():
            wrong.append(f"a session is left busy: {busy}")
        wrong += self._judged(error, before, await self._scene.digest(subject))
        wrong += await self._repeated(subject)
        wrong += await self._others()
        await self._scene.leave(subject)
        where = f"{self._operation.title}, {strike.action} message {strike.nth} of the {strike.side}"
        return has_struck, [f"{where}: {each}" for each in wrong]

    async def _others(self) -> list[str]:
        """What is wrong with other operations on the same engine."""
        for is_last in TRIES:
            try:
                return await self._scene.testify(self._engine)
            except EngineError as refused:
                if is_last or not _is_late(refused):
                    return [f"an operation after it was refused: {refused!r}"]
        raise AssertionError("unreachable")

    async def _call(self, subject: Subject) -> BaseException | None:
        task = asyncio.ensure_future(self._operation.call(self._engine, subject))
        done, _ = await asyncio.wait((task,), timeout=HANGS_SECONDS)
        if not done:
            task.cancel()
            await asyncio.wait((task,))
            return TimeoutError(f"no answer within {HANGS_SECONDS} s")
        return refusal_of(task)

    def _judged(self, error: BaseException | None, before: list[str], after: list[str]) -> list[str]:
        match error:
            case None:
                return (
                    []
                    if after == self._whole
                    else [f"was acknowledged and is not done: {_difference(self._whole, after)}"]
                )
            case TransportError() if error.outcome_unknown:
                return [] if after in (before, self._whole) else [f"is half done: {_difference(self._whole, after)}"]
            case EngineError():
                return (
                    [] if after == before else [f"was refused with {error!r} and is done: {_difference(before, after)}"]
                )
            case _:
                return [f"ended in {error!r}"]

    async def _repeated(self, subject: Subject) -> list[str]:
        """What is wrong with a repeat of the call over a connection that works."""
        for is_last in TRIES:
            error = await self._call(subject)
            if is_last or not _is_late(error):
                break
        if error is not None and (not isinstance(error, EngineError) or isinstance(error, TransportError)):
            return [f"a repeat ended in {error!r}"]
        after = await self._scene.digest(subject)
        if self._operation.repeats and after != self._whole:
            return [f"a repeat left it otherwise ({error!r}): {_difference(self._whole, after)}"]
        return []


def _is_late(error: BaseException | None) -> bool:
    """Whether a call met the short limit of these tests, as it may on a busy machine."""
    return isinstance(error, TransportError) and error.kind == "timeout"


def _difference(expected: list[str], found: list[str]) -> str:
    return (
        f"missing {[row for row in expected if row not in found]},"
        f" unexpected {[row for row in found if row not in expected]}"
    )


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the test's database."""
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def engine(proxy: Proxy) -> AsyncIterator[Engine]:
    """An engine behind the proxy."""
    async with _engine(proxy) as engine:
        yield engine
        proxy.heal()


@pytest.fixture
async def hasty_engine(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """An engine behind the proxy that takes a silent connection for dead before long."""
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


WRITES = [group for group, operations in GROUPS.items() if not operations[0].is_read]


async def _broken(breaking: Breaking, sweep: Sweep, title: str, actions: tuple[Action, ...], sample: int) -> list[str]:
    """What is wrong at some messages of a call, or at every one of them."""
    await breaking.learn()
    cases = [
        Strike(action=action, side=side, nth=nth, seconds=LIMIT_MS / 1000 / 4)
        for action in actions
        for side in Side
        for nth in range(1, breaking.messages[side] + 1)
    ]
    wrong: list[str] = []
    strikes = 0
    sampled = [cases[at] for at in sweep.sample(f"{title} {actions}", len(cases), sample)]
    for case in sampled:
        has_struck, found = await breaking.break_at(case)
        strikes += has_struck
        wrong += found
        if len(wrong) >= 5:
            break
    if cases and not strikes:
        # Where its statements are prepared already, the call has fewer messages than were counted, but a first one.
        has_struck, found = await breaking.break_at(cases[0])
        wrong += found if has_struck else [f"{title}: no strike came to pass", *found]
    return wrong


async def _further(breaking: Breaking) -> list[str]:
    """What is wrong behind the last message expected: over a new connection statements are prepared anew."""
    wrong: list[str] = []
    for side in Side:
        nth, has_struck = breaking.messages[side] + 1, True
        while has_struck and len(wrong) < 5:
            has_struck, found = await breaking.break_at(Strike(action=Action.CUT_BEFORE, side=side, nth=nth))
            wrong += found
            nth += 1
    return wrong


@pytest.mark.parametrize("group", GROUPS)
async def test_a_call_whose_connection_is_cut_is_done_or_not_or_says_so(
    scene: Scene, proxy: Proxy, engine: Engine, sweep: Sweep, group: str
) -> None:
    wrong = []
    for operation in GROUPS[group]:
        breaking = Breaking(scene, proxy, engine, operation)
        wrong += await _broken(breaking, sweep, operation.title, CUTS, 1 if operation.is_read else SAMPLE)
        wrong += await _further(breaking) if sweep.is_whole else []
    wrong += await scene.inconsistencies()
    assert not wrong, f"seed {sweep.seed}\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", ["claim", "complete", "cancel_execution", "suspend", "deliver_signal", "progress"])
async def test_a_call_that_reaches_no_server_is_known_not_to_be_done(
    scene: Scene, proxy: Proxy, engine: Engine, name: str
) -> None:
    operation = OPERATIONS[name]
    subject = await scene.subject(lane_id="warm lane")
    await operation.prepare(subject)
    before = await scene.digest(subject)
    proxy.refuses = True
    proxy.cut()
    await proxy.settled()
    # The first call may find a connection that it could not know to be broken.
    for _ in range(3):
        with pytest.raises(TransportError) as caught:
            await operation.call(engine, subject)
    assert not caught.value.outcome_unknown
    assert await scene.digest(subject) == before


@pytest.mark.parametrize("group", WRITES if IS_WHOLE else ["some"])
@pytest.mark.parametrize("action", [Action.SILENCE, Action.DELAY])
async def test_a_call_whose_messages_come_late_or_never_is_done_or_not_or_says_so(
    scene: Scene, proxy: Proxy, hasty_engine: Engine, sweep: Sweep, group: str, action: Action
) -> None:
    groups = [WRITES[at] for at in sweep.sample(action, len(WRITES), SILENT_SAMPLE)] if group == "some" else [group]
    wrong = []
    for title in groups:
        breaking = Breaking(scene, proxy, hasty_engine, OPERATIONS[title])
        wrong += await _broken(breaking, sweep, title, (action,), 1)
    wrong += await scene.inconsistencies()
    assert not wrong, f"seed {sweep.seed}\n" + "\n".join(wrong)
