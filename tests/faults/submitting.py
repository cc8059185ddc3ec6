"""Submitters: one execution at a time with and without a key or an id, and many at once."""

import asyncio
import json
from typing import Any
from uuid import uuid4

from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Created, Duplicate, NewExecution

from .actor import MANUAL, NAMESPACE, WORK, Actor

KINDS = {"quick": 8, "slow": 2, "threaded": 3, "flaky": 3, "waiter": 3, "manual": 10}
"""The kinds of executions, with their weights."""
RETRY = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 100}}}
TASKS = 3
REMEMBERED = 50


class Submitter:
    """Submits executions, and repeats a submission with a key or an id if its outcome is unknown."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine
        self._repeatable: list[dict[str, Any]] = []
        """Recent submissions with a key, to be repeated."""

    def _new(self, **named: Any) -> dict[str, Any]:
        rng = self._actor.rng
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        order = {"nonce": uuid4().hex, "key": named.get("idempotency_key"), "size": rng.random()}
        # Some inputs are too large for the row of their execution.
        order["padding"] = "x" * rng.choice((0, 0, 0, 1500))
        return {
            "namespace": NAMESPACE,
            "lane_id": MANUAL if kind == "manual" else WORK,
            "execution_kind": kind,
            "input_payload": json.dumps({"order": order}).encode(),
            "priority": rng.choice((0, 0, 0, 100)),
            "creator_identity": "faults",
            "policy": RETRY,
            **named,
        }

    async def step(self) -> None:
        """Make one random submission."""
        rng = self._actor.rng
        match rng.choices(("plain", "key", "id", "again", "many"), (4, 3, 2, 2, 1))[0]:
            case "plain":
                await self._submit(self._new(), tries=1)
            case "key":
                given = self._new(idempotency_key=uuid4().hex)
                self._repeatable = [*self._repeatable[-REMEMBERED:], given]
                await self._submit(given, tries=4)
            case "id":
                named = {"execution_id": f"{{fp:{rng.randrange(256)}}}:{uuid4()}"}
                named |= {"idempotency_key": uuid4().hex} if rng.random() < 0.5 else {}
                # A submission whose only try is refused must not be in the store.
                await self._submit(self._new(**named), tries=rng.choice((1, 4)))
            case "again" if self._repeatable:
                await self._submit(rng.choice(self._repeatable), tries=2)
            case "many":
                await self._submit_many([self._new() for _ in range(rng.randrange(2, 20))])

    async def _submit(self, given: dict[str, Any], tries: int) -> None:
        known = {"execution_id": given.get("execution_id"), "key": given.get("idempotency_key")}
        for _ in range(tries):
            answer = await self._actor.call(
                "submit", self._engine.create_execution(**given), cancel_share=0.15, **known
            )
            if answer is not None:
                await self._record(answer, given)
                return
            await self._actor.pause(0.1)

    async def _submit_many(self, given: list[dict[str, Any]]) -> None:
        call = self._engine.create_many([NewExecution(**one) for one in given])
        answers = await self._actor.call("submit many", call, cancel_share=0.15)
        for one, answer in zip(given, answers or (), strict=False):
            if isinstance(answer, Created | Duplicate):
                await self._record(answer, one)

    async def _record(self, answer: Created | Duplicate, given: dict[str, Any]) -> None:
        history, execution_id = self._actor.history, answer.execution_id
        event = "created" if isinstance(answer, Created) else "duplicate"
        nonce = json.loads(given["input_payload"])["order"]["nonce"]
        history.record(event, execution_id=execution_id, key=given.get("idempotency_key"), nonce=nonce)
        if self._actor.rng.random() < 0.3:
            await self._read(execution_id)

    async def _read(self, execution_id: str) -> None:
        answer = await self._actor.call("read", _state_in_list(self._engine, execution_id))
        if answer is not None:
            self._actor.history.record("read", execution_id=execution_id, state=answer[0])


async def _state_in_list(engine: Engine, execution_id: str) -> list[object]:
    """The state of an execution in a list, because None is a valid answer."""
    return [await engine.read_execution_state(execution_id)]


async def submit(actor: Actor) -> None:
    """Submit with several tasks on one engine, which waits during an outage or fails at once."""
    async with actor.engine(submit_patience_ms=actor.rng.choice((0, 2_000))) as engine:
        submitter = Submitter(actor, engine)
        await asyncio.gather(*(actor.repeat(submitter.step, 0.03) for _ in range(TASKS)))
