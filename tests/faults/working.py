"""Workers of the library, and claimers, which call the engine directly."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict
from uuid import uuid4

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.lease import ClaimedExecution, TerminalFailed
from flowfabric.worker.context import Context
from flowfabric.worker.worker import Worker

from .actor import MANUAL, WORK, Actor
from .history import History

Result = dict[str, str]
DRAIN_SECONDS = 3
FAILURES = 2
"""How often a flaky execution fails before it succeeds."""


class Order(TypedDict):
    """The input of an execution."""

    nonce: str
    key: str | None
    size: float


class Handlers:
    """Short handlers that record when they start and how they end."""

    def __init__(self, history: History, lease_ms: int) -> None:
        self._history = history
        self._lease_ms = lease_ms

    @contextmanager
    def _run(self, ctx: Context) -> Iterator[Result]:
        """Yield the result of a run, and record its start and end."""
        fence = ctx.fence
        result = {"run": uuid4().hex, "lease": str(fence.lease_id)}
        fields = {"execution_id": ctx.execution_id, "lease_id": str(fence.lease_id), "run": result["run"]}
        self._history.record(
            "start", **fields, epoch=fence.lease_epoch, attempt=ctx.attempt_index, kind=ctx.execution_kind
        )
        how = "raised"
        try:
            yield result
            how = "returned"
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            self._history.record("end", **fields, how=how)

    async def quick(self, ctx: Context, order: Order) -> Result:
        """Take a few milliseconds."""
        with self._run(ctx) as result:
            await asyncio.sleep(order["size"] * 0.05)
            return result

    async def slow(self, ctx: Context, order: Order) -> Result:
        """Take so long that the lease is renewed, and report progress."""
        with self._run(ctx) as result:
            await asyncio.sleep(order["size"] * self._lease_ms / 1000)
            try:
                await ctx.progress(50, "half")
            except EngineError as error:
                self._history.record("refused", operation="progress", execution_id=ctx.execution_id, detail=str(error))
            await asyncio.sleep(order["size"])
            return result

    def threaded(self, ctx: Context, order: Order) -> Result:
        """Take a short time in a thread."""
        with self._run(ctx) as result:
            time.sleep(order["size"] * 0.2)
            return result

    async def flaky(self, ctx: Context, order: Order) -> Result:
        """Fail a few times, then succeed."""
        with self._run(ctx) as result:
            await asyncio.sleep(order["size"] * 0.02)
            if ctx.retry_count < FAILURES:
                raise RuntimeError(f"failure {ctx.retry_count}")
            return result

    async def waiter(self, ctx: Context, order: Order) -> Result:
        """Wait for a signal, once in every attempt."""
        with self._run(ctx) as result:
            await asyncio.sleep(order["size"] * 0.02)
            if not ctx.is_resumed:
                await ctx.suspend(keys=["go"], timeout=600)
            return result


async def work(actor: Actor) -> None:
    """Run a worker until stopped."""
    handlers = Handlers(actor.history, actor.lease_ms)
    by_kind = {kind: getattr(handlers, kind) for kind in ("quick", "slow", "threaded", "flaky", "waiter")}
    async with actor.engine() as engine:
        worker = Worker(
            engine,
            lanes=(WORK,),
            handlers=by_kind,
            concurrency=16,
            lease_ttl=actor.lease_ms / 1000,
            drain=DRAIN_SECONDS,
            poll_interval=0.5,
        )
        while True:
            try:
                await worker.__aenter__()
                break
            except EngineError as error:
                actor.history.record("refused", operation="start", detail=str(error))
                await actor.pause(0.2)
                if actor.stopping.is_set():
                    return
        try:
            await actor.stopping.wait()
        finally:
            await worker.__aexit__(None, None, None)


class Claimer:
    """Claims, completes and fails executions by direct calls, and records their outcomes."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine
        self._name = f"claimer-{uuid4().hex[:8]}"

    async def step(self) -> None:
        """Claim a few executions and complete or fail them."""
        call = self._engine.claim_many(
            lanes=(MANUAL,),
            worker_id="claimer",
            worker_instance_id=self._name,
            limit=5,
            lease_ttl_ms=self._actor.lease_ms,
        )
        claimed = await self._actor.call("claim", call, cancel_share=0.05) or []
        runs = [(one, uuid4().hex) for one in claimed]
        for one, run in runs:
            lease = {"lease_id": str(one.handle.lease_id), "epoch": one.lease_epoch, "run": run}
            self._actor.history.record("claimed", execution_id=one.execution_id, attempt=one.attempt_index, **lease)
        await asyncio.gather(*(self._end(one, run) for one, run in runs))

    async def _end(self, one: ClaimedExecution, run: str) -> None:
        rng = self._actor.rng
        if rng.random() < 0.5:
            report = self._engine.progress(one.handle, percent=rng.randrange(100))
            await self._actor.call("progress", report, cancel_share=0.5, execution_id=one.execution_id)
        await self._actor.pause(rng.random() * 0.05)
        match rng.choices(("complete", "fail", "fail permanently", "leave"), (10, 2, 1, 1))[0]:
            case "complete":
                await self._complete(one, run)
            case "fail":
                await self._actor.call(
                    "fail", self._engine.fail(one.handle, reason="failed on purpose"), execution_id=one.execution_id
                )
            case "fail permanently":
                call = self._engine.fail(one.handle, reason="failed on purpose", classification="permanent")
                answer = await self._actor.call("fail", call, execution_id=one.execution_id)
                if isinstance(answer, TerminalFailed):
                    self._actor.history.record("failed", execution_id=one.execution_id)

    async def _complete(self, one: ClaimedExecution, run: str) -> None:
        """Complete, and repeat the call if the outcome is unknown: a repeated completion succeeds."""
        payload = json.dumps({"run": run, "lease": str(one.handle.lease_id)}).encode()
        fields = {"execution_id": one.execution_id, "run": run}
        self._actor.history.record("end", **fields, how="returned")
        for _ in range(4):
            answer = await self._actor.call(
                "complete", _completed(self._engine, one, payload), cancel_share=0.1, **fields
            )
            if answer is not None:
                self._actor.history.record("completed", **fields)
                return
            await self._actor.pause(0.2)


async def _completed(engine: Engine, one: ClaimedExecution, payload: bytes) -> bool:
    await engine.complete(one.handle, payload)
    return True


async def claim_by_hand(actor: Actor) -> None:
    """Claim with several tasks on one engine until stopped."""
    async with actor.engine() as engine:
        claimer = Claimer(actor, engine)
        await asyncio.gather(*(actor.repeat(claimer.step, 0.1) for _ in range(2)))
