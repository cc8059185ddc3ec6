"""Switch off one optimisation at a time, to measure whether it is worth its code.

The package has no switches: an entry of the table names what is replaced, in the process of the subject before it runs.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

Substitute = Callable[[Any], Any]
"""Returns the replacement of the given value."""


@dataclass(frozen=True, kw_only=True)
class Without:
    """One optimisation: what it does, how it is switched off, and the subject and figures that show its effect."""

    does: str
    replaces: dict[str, Substitute]
    """By target, `package.module:Class.attribute` or `package.module:name`."""
    subject: str
    figures: tuple[str, ...]


def value(instead: object) -> Substitute:
    """Replace by this value."""
    return lambda _: instead


def returning(answer: object) -> Substitute:
    """Replace by a function that only returns this answer."""
    return lambda _: lambda *_args, **_options: answer


def returning_async(answer: object) -> Substitute:
    """Replace by an async function that only returns this answer."""

    async def nothing(*_args: object, **_options: object) -> object:
        return answer

    return value(nothing)


def _put_alone(_: object) -> Callable[[Any, Any], "asyncio.Future[Any]"]:
    """`Batch.put` that runs a statement for each item, concurrently."""

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
        does="a claim starts after the entries that this process has claimed, not at the head of the queue",
        replaces={f"{ENGINE}.core.watermark:ScanWatermarks.raise_to": returning(None)},
        subject="dead_rows",
        figures=("pinned_backlog_last",),
    ),
    "timer_watermark": Without(
        does="a check for due timers starts at the first possible live timer, not at the head of the index",
        replaces={f"{ENGINE}.core.watermark:TimerWatermark.move_to": returning(None)},
        subject="dead_rows",
        figures=("pinned_timer_look",),
    ),
    "completion": Without(
        does="completions whose fences match have their own statement",
        replaces={f"{ENGINE}.core.consequence:LeaseEnds._complete": returning_async(())},
        subject="work",
        figures=("engine_claim_finish", "worker_end_to_end"),
    ),
    "insert_alike": Without(
        does="submissions that differ only in id, priority, payload and tags have their own statement",
        replaces={
            f"{ENGINE}.execution.checking:Submissions.uniform_batch": returning(None),
            f"{ENGINE}.execution.checking:Submission.is_plain": returning(False),
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
        does="a worker claims more than its free slots while fast handlers process a backlog",
        replaces={"flowfabric.worker.ahead:Ahead.claimed": returning(None)},
        subject="work",
        figures=("worker_default_slots",),
    ),
    "known_queues": Without(
        does="a claim does not return the lane and kind of queues that the process has claimed from before",
        replaces={f"{ENGINE}.lease.claim:Queues.MAX_KNOWN": value(0)},
        subject="work",
        figures=("engine_claim_finish",),
    ),
    "queue_walk": Without(
        does="a claim of few queues of a lane scans those queues, not the whole route",
        replaces={f"{ENGINE}.lease.claim:Scans.MAX_QUEUES": value(-1)},
        subject="backlog",
        figures=("claim_behind_300k_of_other_kinds",),
    ),
    "two_claims": Without(
        does="a process makes two claims concurrently",
        replaces={f"{ENGINE}.lease.claim:MAX_AT_ONCE": value(1)},
        subject="work",
        figures=("engine_claim_finish",),
    ),
}


def switch_off(name: str, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Switch off an optimisation in this process, permanently."""
    for target, substitute in TABLE[name].replaces.items():
        owner, attribute = resolve(target)
        put(owner, attribute, substitute(vars(owner)[attribute]))


def resolve(target: str) -> tuple[ModuleType | type, str]:
    """The module or class that defines a target, and its name there; LookupError if it does not exist."""
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
