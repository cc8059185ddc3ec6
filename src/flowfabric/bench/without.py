"""Optimisations switched off one at a time, to show that each is worth its lines.

The package has no switches: an entry of the table names what is replaced, and the replacement is set in the process of
the subject before the subject runs.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

Substitute = Callable[[Any], Any]
"""Given what is there, what is put in its place."""


@dataclass(frozen=True, kw_only=True)
class Without:
    """One optimisation: what it does, how it is switched off, and which figures of which subject show its worth."""

    does: str
    replaces: dict[str, Substitute]
    """By target, `package.module:Class.attribute` or `package.module:name`."""
    subject: str
    figures: tuple[str, ...]


def value(instead: object) -> Substitute:
    """Replace a value."""
    return lambda _: instead


def giving(answer: object) -> Substitute:
    """Replace a function by one that does nothing and gives this answer."""
    return lambda _: lambda *_args, **_options: answer


def giving_soon(answer: object) -> Substitute:
    """Replace an async function by one that does nothing and gives this answer."""

    async def nothing(*_args: object, **_options: object) -> object:
        return answer

    return value(nothing)


def _put_alone(_: object) -> Callable[[Any, Any], "asyncio.Future[Any]"]:
    """`Batch.put` with a statement for each item, all of them at once."""

    def put(batch: Any, item: Any) -> "asyncio.Future[Any]":
        async def alone() -> Any:
            (answer,) = await batch.run([item])
            if isinstance(answer, Exception):
                raise answer
            return answer

        task = asyncio.create_task(alone())
        batch._tasks.add(task)
        task.add_done_callback(batch._tasks.discard)
        return task

    return put


ENGINE = "flowfabric.engine"

TABLE = {
    "watermark": Without(
        does="a claim begins where this process has claimed up to, not at the head of the queue",
        replaces={f"{ENGINE}.core.watermark:ScanWatermarks.raise_to": giving(None)},
        subject="dead_rows",
        figures=("pinned_backlog_last",),
    ),
    "timer_watermark": Without(
        does="a look for due timers begins where live ones can be, not at the head of the index",
        replaces={f"{ENGINE}.core.watermark:TimerWatermark.move_to": giving(None)},
        subject="dead_rows",
        figures=("pinned_timer_look",),
    ),
    "completion": Without(
        does="a batch of completions whose fences hold has a statement of its own",
        replaces={f"{ENGINE}.core.consequence:LeaseEnds._complete": giving_soon(())},
        subject="work",
        figures=("engine_claim_finish", "worker_end_to_end"),
    ),
    "insert_alike": Without(
        does="submissions that differ in id, priority, payload and tags only have a statement of their own",
        replaces={
            f"{ENGINE}.execution.checking:Submissions.uniform_batch": giving(None),
            f"{ENGINE}.execution.checking:Submission.is_plain": giving(False),
        },
        subject="submit",
        figures=("submit_batch", "submit_100_callers"),
    ),
    "group_commit": Without(
        does="concurrent calls of one process share a statement and a commit",
        replaces={"flowfabric.db.batch:Batch.put": _put_alone},
        subject="submit",
        figures=("submit_100_callers",),
    ),
    "claim_ahead": Without(
        does="a worker claims ahead of its free slots while fast handlers work off a backlog",
        replaces={"flowfabric.worker.ahead:Ahead.claimed": giving(None)},
        subject="work",
        figures=("worker_default_slots",),
    ),
    "known_queues": Without(
        does="a claim does not answer the lane and the kind of queues that the process has claimed from before",
        replaces={f"{ENGINE}.lease.claim:Queues.MAX_KNOWN": value(0)},
        subject="work",
        figures=("engine_claim_finish",),
    ),
    "queue_walk": Without(
        does="a claim that wants few of a lane's queues walks those, and not the whole route",
        replaces={f"{ENGINE}.lease.claim:Scans.MAX_QUEUES": value(-1)},
        subject="backlog",
        figures=("claim_behind_300k_of_other_kinds",),
    ),
    "two_claims": Without(
        does="a process makes two claims at once",
        replaces={f"{ENGINE}.lease.claim:MAX_AT_ONCE": value(1)},
        subject="work",
        figures=("engine_claim_finish",),
    ),
}


def switch_off(name: str, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace what makes up this optimisation, in this process and for good."""
    for target, substitute in TABLE[name].replaces.items():
        owner, attribute = resolve(target)
        put(owner, attribute, substitute(vars(owner)[attribute]))


def resolve(target: str) -> tuple[ModuleType | type, str]:
    """The module or class that defines a target, and the name it has there; LookupError where it is gone."""
    module_name, _, path = target.partition(":")
    *outer, attribute = path.split(".")
    try:
        owner: Any = import_module(module_name)
    except ImportError as missing:
        raise LookupError(f"{target} does not exist: {missing}; correct the table in {__file__}") from missing
    for name in outer:
        owner = vars(owner).get(name)
        if not isinstance(owner, type):
            raise LookupError(f"{target} does not exist: no class {name}; correct the table in {__file__}")
    if attribute not in vars(owner):
        raise LookupError(f"{target} does not exist: no {attribute}; correct the table in {__file__}")
    return owner, attribute
