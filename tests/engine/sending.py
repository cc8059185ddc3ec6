"""For tests of signals: waiting executions, signals to them, and their stored rows."""

from typing import Any, NamedTuple
from uuid import UUID

from fixtures import Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.wait.deliver import Signals
from flowfabric.model.handle import Handle
from flowfabric.model.signal import Accepted
from flowfabric.model.suspension import SuspendArgs, SuspendDetails
from flowfabric.model.token import WaitpointToken
from flowfabric.model.waitpoint import PendingWaitpoint

from .waits import suspend_run


class Point(NamedTuple):
    """A waitpoint and the token to signal it."""

    waitpoint_id: UUID
    token: WaitpointToken


class Waiting:
    """An execution with waitpoints, and the tokens to signal them."""

    def __init__(self, engine: Engine, handle: Handle) -> None:
        self.engine = engine
        self.handle = handle
        self.execution_id = handle.execution_id
        self.points: dict[str, Point] = {}
        """The waitpoints by their keys."""

    def on(self, details: SuspendDetails) -> "Waiting":
        """Add the waitpoints of a suspension; return self."""
        self.points[details.waitpoint_key] = Point(details.waitpoint_id, details.waitpoint_token)
        for each in details.additional_waitpoints:
            self.points[each.waitpoint_key] = Point(each.waitpoint_id, each.waitpoint_token)
        return self

    def with_pending(self, key: str, pending: PendingWaitpoint) -> "Waiting":
        """Add a waitpoint that was created in advance; return self."""
        self.points[key] = Point(pending.waitpoint_id, pending.hmac_token)
        return self

    def signal(self, name: str = "ready", key: str = "wait", **overrides: Any) -> dict[str, Any]:
        """The arguments of a delivery."""
        waitpoint_id, token = self.points[key]
        return {
            "execution_id": self.execution_id,
            "waitpoint_id": waitpoint_id,
            "waitpoint_token": token,
            "signal_name": name,
            **overrides,
        }

    async def send(self, name: str = "ready", key: str = "wait", **overrides: Any) -> Any:
        """Deliver a signal and return the answer."""
        return await self.engine.deliver_signal(**self.signal(name, key, **overrides))

    async def effect_of(self, name: str = "ready", key: str = "wait", **overrides: Any) -> str:
        """Deliver a signal, which must be accepted; return its effect, and its disposition if that differs."""
        answer = await self.send(name, key, **overrides)
        assert isinstance(answer, Accepted), answer
        return " ".join(dict.fromkeys((answer.effect, answer.disposition)))


async def waiting(engine: Engine, given: Given, suspend: SuspendArgs | None = None, **overrides: Any) -> Waiting:
    """A suspended execution; overrides that `create_execution` does not accept are arguments of the suspend."""
    run = {name: overrides.pop(name) for name in ("policy", "lane_id", "execution_deadline_at") if name in overrides}
    outcome = await suspend_run(engine, await given.claimed(**run), suspend, **overrides)
    return Waiting(engine, outcome.handle).on(outcome.details)


async def running(engine: Engine, given: Given, *, expires_in_ms: int = 60_000, **overrides: Any) -> Waiting:
    """A running execution that has created the waitpoint `wait` in advance."""
    handle = await given.claimed(**overrides)
    pending = await engine.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=expires_in_ms)
    return Waiting(engine, handle).with_pending("wait", pending)


async def signals(rows: Rows, execution_id: str) -> list[dict[str, Any]]:
    """The stored signals of an execution in order of acceptance."""
    found = await rows.of("signal", execution_id=uuid_of(execution_id))
    return sorted(found, key=lambda row: int(row["sequence"]))


async def signal_keys(rows: Rows, **where: Any) -> list[dict[str, Any]]:
    """The idempotency keys of signals."""
    return [dict(row) for row in await rows.of("idempotency_key", operation="signal", **where)]


async def stamps_written(engine: Engine) -> None:
    """Write the pending records of refused tokens, as closing the engine does."""
    await engine._services[Signals].drain()
