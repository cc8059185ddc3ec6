"""What tests of signals say: an execution that waits, signals to it, and what the tables hold of them."""

from typing import Any
from uuid import UUID

from flowfabric.engine.engine import Engine
from flowfabric.engine.wait.deliver import Signals
from flowfabric.model.handle import Handle
from flowfabric.model.signal import Accepted
from flowfabric.model.suspension import SuspendArgs, SuspendDetails
from flowfabric.model.token import WaitpointToken
from flowfabric.model.waitpoint import PendingWaitpoint

from .waits import suspended


class Waiting:
    """An execution with waitpoints, and what it takes to signal them."""

    def __init__(self, engine: Engine, handle: Handle) -> None:
        self.engine = engine
        self.handle = handle
        self.execution_id = handle.execution_id
        self.points: dict[str, tuple[UUID, WaitpointToken]] = {}

    def on(self, details: SuspendDetails) -> "Waiting":
        """The same, with the waitpoints of a suspension."""
        self.points[details.waitpoint_key] = details.waitpoint_id, details.waitpoint_token
        for each in details.additional_waitpoints:
            self.points[each.waitpoint_key] = each.waitpoint_id, each.waitpoint_token
        return self

    def ahead(self, key: str, pending: PendingWaitpoint) -> "Waiting":
        """The same, with a waitpoint made ahead."""
        self.points[key] = pending.waitpoint_id, pending.hmac_token
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
        """What a signal comes to."""
        return await self.engine.deliver_signal(**self.signal(name, key, **overrides))

    async def said(self, name: str = "ready", key: str = "wait", **overrides: Any) -> str:
        """The effect of a signal, and why where that is another word."""
        answer = await self.send(name, key, **overrides)
        assert isinstance(answer, Accepted), answer
        return " ".join(dict.fromkeys((answer.effect, answer.disposition)))


async def waiting(engine: Engine, given: Any, asked: SuspendArgs | None = None, **overrides: Any) -> Waiting:
    """An execution that is suspended; what is not of the suspend is of the create."""
    run = {name: overrides.pop(name) for name in ("policy", "lane_id", "execution_deadline_at") if name in overrides}
    outcome = await suspended(engine, await given.claimed(**run), asked, **overrides)
    return Waiting(engine, outcome.handle).on(outcome.details)


async def running(engine: Engine, given: Any, *, expires_in_ms: int = 60_000, **overrides: Any) -> Waiting:
    """An execution that runs and has made the waitpoint `wait` ahead."""
    handle = await given.claimed(**overrides)
    pending = await engine.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=expires_in_ms)
    return Waiting(engine, handle).ahead("wait", pending)


async def signals(rows: Any, execution_id: str) -> list[dict[str, Any]]:
    """The stored signals of an execution in the order of their acceptance."""
    found = await rows.of("signal", execution_id=execution_id[-36:])
    return sorted(found, key=lambda row: int(row["sequence"]))


async def signal_keys(rows: Any, **where: Any) -> list[dict[str, Any]]:
    """The idempotency keys of signals."""
    return [dict(row) for row in await rows.of("idempotency_key", operation="signal", **where)]


async def stamps_written(engine: Engine) -> None:
    """Let the engine note what tokens it has refused, as it does before it closes."""
    await engine._rooms[Signals].drain()
