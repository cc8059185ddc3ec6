"""Workers: processes of the library's own, and others that claim and complete by hand."""

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

from .actor import LEASE_MS, MANUAL, WORK, Actor
from .history import History

Result = dict[str, str]
DRAIN_SECONDS = 3
FAILURES = 2
"""How often a flaky run fails before it succeeds."""


class Order(TypedDict):
    """What a submitter wants done."""

    nonce: str
    key: str | None
    size: float


class Handlers:
    """Short handlers that write down when they start and how they end."""

    def __init__(self, history: History) -> None:
        self._history = history

    @contextmanager
    def _run(self, ctx: Context) -> Iterator[Result]:
        """The result of a run, whose start and end are written down."""
        fence = ctx.fence
        result = {"run": uuid4().hex, "lease": str(fence.lease_id)}
        said = {"execution_id": ctx.execution_id, "lease_id": str(fence.lease_id), "run": result["run"]}
        self._history.tell("start", **said, epoch=fence.lease_epoch, attempt=ctx.attempt_index, kind=ctx.execution_kind)
        how = "raised"
        try:
            yield result
            how = "returned"
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            self._history.tell("end", **said, how=how)

    async def quick(self, ctx: Context, order: Order) -> Result:
        """Take a few milliseconds."""
        with self._run(ctx) as result:
            await asyncio.sleep(order["size"] * 0.05)
            return result

    async def slow(self, ctx: Context, order: Order) -> Result:
        """Take so long that the lease is renewed, and tell of it."""
        with self._run(ctx) as result:
            await asyncio.sleep(order["size"] * LEASE_MS / 1000)
            try:
                await ctx.progress(50, "half")
            except EngineError as error:
                self._history.tell("refused", of="progress", execution_id=ctx.execution_id, detail=str(error))
            await asyncio.sleep(order["size"])
            return result

    def threaded(self, ctx: Context, order: Order) -> Result:
        """Take a little time in a thread."""
        with self._run(ctx) as result:
            time.sleep(order["size"] * 0.2)
            return result

    async def flaky(self, ctx: Context, order: Order) -> Result:
        """Fail a few times."""
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
    """Be a worker process, until SIGTERM."""
    handlers = Handlers(actor.history)
    by_kind = {kind: getattr(handlers, kind) for kind in ("quick", "slow", "threaded", "flaky", "waiter")}
    async with actor.engine() as engine:
        worker = Worker(
            engine,
            lanes=(WORK,),
            handlers=by_kind,
            concurrency=16,
            lease_ttl=LEASE_MS / 1000,
            drain=DRAIN_SECONDS,
            poll_interval=0.5,
        )
        while True:
            try:
                await worker.__aenter__()
                break
            except EngineError as error:
                actor.history.tell("refused", of="start", detail=str(error))
                await actor.pause(0.2)
                if actor.stopping.is_set():
                    return
        try:
            await actor.stopping.wait()
        finally:
            await worker.__aexit__(None, None, None)


class Claimer:
    """Claims, completes and fails by hand, and so learns what became of it."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine
        self._name = f"claimer-{uuid4().hex[:8]}"

    async def step(self) -> None:
        """Claim a few executions and end them."""
        call = self._engine.claim_many(
            lanes=(MANUAL,), worker_id="claimer", worker_instance_id=self._name, limit=5, lease_ttl_ms=LEASE_MS
        )
        claimed = await self._actor.ask("claim", call, impatient=0.05) or []
        runs = [(one, uuid4().hex) for one in claimed]
        for one, run in runs:
            lease = {"lease_id": str(one.handle.lease_id), "epoch": one.lease_epoch, "run": run}
            self._actor.history.tell("claimed", execution_id=one.execution_id, attempt=one.attempt_index, **lease)
        await asyncio.gather(*(self._end(one, run) for one, run in runs))

    async def _end(self, one: ClaimedExecution, run: str) -> None:
        chance = self._actor.chance
        if chance.random() < 0.5:
            report = self._engine.progress(one.handle, percent=chance.randrange(100))
            await self._actor.ask("progress", report, impatient=0.5, execution_id=one.execution_id)
        await self._actor.pause(chance.random() * 0.05)
        match chance.choices(("complete", "fail", "fail for good", "leave"), (10, 2, 1, 1))[0]:
            case "complete":
                await self._complete(one, run)
            case "fail":
                await self._actor.ask(
                    "fail", self._engine.fail(one.handle, reason="no luck"), execution_id=one.execution_id
                )
            case "fail for good":
                call = self._engine.fail(one.handle, reason="no luck", classification="permanent")
                answer = await self._actor.ask("fail", call, execution_id=one.execution_id)
                if isinstance(answer, TerminalFailed):
                    self._actor.history.tell("failed", execution_id=one.execution_id)

    async def _complete(self, one: ClaimedExecution, run: str) -> None:
        """Complete, again where the answer was lost: a repeat is success too."""
        payload = json.dumps({"run": run, "lease": str(one.handle.lease_id)}).encode()
        said = {"execution_id": one.execution_id, "run": run}
        self._actor.history.tell("end", **said, how="returned")
        for _ in range(4):
            answer = await self._actor.ask("complete", _done(self._engine, one, payload), impatient=0.1, **said)
            if answer is not None:
                self._actor.history.tell("completed", **said)
                return
            await self._actor.pause(0.2)


async def _done(engine: Engine, one: ClaimedExecution, payload: bytes) -> bool:
    await engine.complete(one.handle, payload)
    return True


async def claim_by_hand(actor: Actor) -> None:
    """Claim with a few tasks on one engine."""
    async with actor.engine() as engine:
        claimer = Claimer(actor, engine)
        await asyncio.gather(*(actor.repeat(claimer.step, 0.1) for _ in range(2)))
