"""Signallers, who answer whatever waits, and operators, who cancel, tag, look and change keys."""

import asyncio
import secrets
from typing import Any
from uuid import uuid4

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.signal import Accepted

from .actor import Actor

GRACE_MS = 600_000


class Signaller:
    """Signals what waits, under a key of the waitpoint's own, and more often than needed."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine

    async def step(self) -> None:
        """Answer those who wait longest."""
        page = await self._actor.ask("list", self._engine.list_suspended(limit=20))
        if page is not None:
            await asyncio.gather(*(self._answer(one.execution_id) for one in page.entries))

    async def _answer(self, execution_id: str) -> None:
        page = await self._actor.ask("list", self._engine.list_pending_waitpoints(execution_id=execution_id))
        for point in page.entries if page is not None else ():
            named: dict[str, Any] = {"execution_id": execution_id, "waitpoint_id": point.waitpoint_id}
            token = await self._actor.ask("token", self._engine.read_waitpoint_token(**named))
            for _ in range(self._actor.chance.choice((1, 1, 2)) if token is not None else 0):
                await self._signal({**named, "waitpoint_token": token})

    async def _signal(self, named: dict[str, Any]) -> None:
        key = f"go {named['waitpoint_id']}"
        call = self._engine.deliver_signal(**named, signal_name="go", payload=b"{}", idempotency_key=key)
        said = {"execution_id": named["execution_id"], "waitpoint_id": named["waitpoint_id"], "key": key}
        answer = await self._actor.ask("signal", call, impatient=0.1, **said)
        if isinstance(answer, Accepted):
            self._actor.history.tell("accepted", signal_id=answer.signal_id, **said)


async def signal_waiters(actor: Actor) -> None:
    """Signal on one engine."""
    async with actor.engine() as engine:
        await actor.repeat(Signaller(actor, engine).step, 0.2)


class Operator:
    """Cancels and tags what was submitted lately, reads it, and changes the keys that sign."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine

    async def step(self) -> None:
        """Do one thing to one execution, or to the keys."""
        page = await self._actor.ask("list", self._engine.list_executions(limit=30))
        if page is None or not page.executions:
            return
        execution_id = self._actor.chance.choice(page.executions).execution_id
        match self._actor.chance.choices(("cancel", "tag", "look", "rotate"), (2, 6, 6, 1))[0]:
            case "cancel":
                call = self._engine.cancel_execution(execution_id=execution_id, reason="faults")
                if await self._actor.ask("cancel", call, impatient=0.1, execution_id=execution_id) is not None:
                    self._actor.history.tell("cancelled", execution_id=execution_id)
            case "tag":
                await self._tag(execution_id)
            case "look":
                await self._actor.ask("explain", self._engine.explain(execution_id))
                await self._actor.ask("info", self._engine.read_execution_info(execution_id))
            case "rotate":
                await self._rotate()

    async def _tag(self, execution_id: str) -> None:
        tag, value = f"app.t{uuid4().hex}", uuid4().hex
        call = self._engine.set_execution_tags(execution_id, {tag: value})
        said = {"execution_id": execution_id, "tag": tag, "value": value}
        if await self._actor.ask("tag", call, impatient=0.1, **said) is not None:
            self._actor.history.tell("tagged", **said)

    async def _rotate(self) -> None:
        kid = f"k{uuid4().hex[:12]}"
        call = self._engine.rotate_waitpoint_hmac_secret_all(
            new_kid=kid, new_secret_hex=secrets.token_hex(32), grace_ms=GRACE_MS
        )
        entries = await self._actor.ask("rotate", call, kid=kid)
        if entries and not isinstance(entries[0].result, EngineError):
            self._actor.history.tell("rotated", kid=kid)


async def operate(actor: Actor) -> None:
    """Operate on one engine."""
    async with actor.engine() as engine:
        await actor.repeat(Operator(actor, engine).step, 0.1)
