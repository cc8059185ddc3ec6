"""Signallers, which signal suspended executions, and operators, which cancel, tag, read and rotate keys."""

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
    """Signals suspended executions, some twice, with one idempotency key per waitpoint."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine

    async def step(self) -> None:
        """Signal the executions that have waited longest."""
        page = await self._actor.call("list", self._engine.list_suspended(limit=20))
        if page is not None:
            await asyncio.gather(*(self._signal_all(one.execution_id) for one in page.entries))

    async def _signal_all(self, execution_id: str) -> None:
        page = await self._actor.call("list", self._engine.list_pending_waitpoints(execution_id=execution_id))
        for point in page.entries if page is not None else ():
            named: dict[str, Any] = {"execution_id": execution_id, "waitpoint_id": point.waitpoint_id}
            token = await self._actor.call("token", self._engine.read_waitpoint_token(**named))
            for _ in range(self._actor.rng.choice((1, 1, 2)) if token is not None else 0):
                await self._signal({**named, "waitpoint_token": token})

    async def _signal(self, named: dict[str, Any]) -> None:
        key = f"go {named['waitpoint_id']}"
        call = self._engine.deliver_signal(**named, signal_name="go", payload=b"{}", idempotency_key=key)
        fields = {"execution_id": named["execution_id"], "waitpoint_id": named["waitpoint_id"], "key": key}
        answer = await self._actor.call("signal", call, cancel_share=0.1, **fields)
        if isinstance(answer, Accepted):
            self._actor.history.record("accepted", signal_id=answer.signal_id, **fields)


async def signal_waiters(actor: Actor) -> None:
    """Signal suspended executions until stopped."""
    async with actor.engine() as engine:
        await actor.repeat(Signaller(actor, engine).step, 0.2)


class Operator:
    """Cancels, tags and reads recent executions, and rotates the signing keys."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine

    async def step(self) -> None:
        """Make one random call on a recent execution, or rotate the keys."""
        page = await self._actor.call("list", self._engine.list_executions(limit=30))
        if page is None or not page.executions:
            return
        execution_id = self._actor.rng.choice(page.executions).execution_id
        match self._actor.rng.choices(("cancel", "tag", "read", "rotate"), (2, 6, 6, 1))[0]:
            case "cancel":
                call = self._engine.cancel_execution(execution_id=execution_id, reason="faults")
                if await self._actor.call("cancel", call, cancel_share=0.1, execution_id=execution_id) is not None:
                    self._actor.history.record("cancelled", execution_id=execution_id)
            case "tag":
                await self._tag(execution_id)
            case "read":
                await self._actor.call("explain", self._engine.explain(execution_id))
                await self._actor.call("info", self._engine.read_execution_info(execution_id))
            case "rotate":
                await self._rotate()

    async def _tag(self, execution_id: str) -> None:
        tag, value = f"app.t{uuid4().hex}", uuid4().hex
        call = self._engine.set_execution_tags(execution_id, {tag: value})
        fields = {"execution_id": execution_id, "tag": tag, "value": value}
        if await self._actor.call("tag", call, cancel_share=0.1, **fields) is not None:
            self._actor.history.record("tagged", **fields)

    async def _rotate(self) -> None:
        kid = f"k{uuid4().hex[:12]}"
        call = self._engine.rotate_waitpoint_hmac_secret_all(
            new_kid=kid, new_secret_hex=secrets.token_hex(32), grace_ms=GRACE_MS
        )
        entries = await self._actor.call("rotate", call, kid=kid)
        if entries and not isinstance(entries[0].result, EngineError):
            self._actor.history.record("rotated", kid=kid)


async def operate(actor: Actor) -> None:
    """Operate on recent executions until stopped."""
    async with actor.engine() as engine:
        await actor.repeat(Operator(actor, engine).step, 0.1)
