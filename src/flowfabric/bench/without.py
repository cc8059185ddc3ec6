"""Switch off one optimisation at a time, to measure whether it is worth its code.

The package has no switches. Instead, functions and constants are replaced in the process that runs the benchmark.
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
class Optimisation:
    """One optimisation: what it does, how it is switched off, and the subject and figures that show its effect."""

    does: str
    replacements: dict[str, Substitute]
    """What is replaced (`package.module:Class.attribute` or `package.module:name`), and by what."""
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

OPTIMISATIONS = {
    "watermark": Optimisation(
        does="a claim starts after the entries that this process has claimed, not at the head of the queue",
        replacements={f"{ENGINE}.core.watermark:ScanWatermarks.raise_to": returning(None)},
        subject="dead_rows",
        figures=("pinned_backlog_last",),
    ),
    "timer_watermark": Optimisation(
        does="a check for due timers starts at the first possible live timer, not at the head of the index",
        replacements={f"{ENGINE}.core.watermark:TimerWatermark.move_to": returning(None)},
        subject="dead_rows",
        figures=("pinned_timer_look",),
    ),
    "completion": Optimisation(
        does="completions whose fences match have their own statement",
        replacements={f"{ENGINE}.core.consequence:LeaseEnds._complete": returning_async(())},
        subject="work",
        figures=("engine_claim_finish", "worker_end_to_end"),
    ),
    "insert_alike": Optimisation(
        does="submissions that differ only in id, priority, payload and tags have their own statement",
        replacements={
            f"{ENGINE}.execution.checking:Submissions.uniform_batch": returning(None),
            f"{ENGINE}.execution.checking:Submission.is_plain": returning(False),
        },
        subject="submit",
        figures=("submit_batch", "submit_100_callers"),
    ),
    "group_commit": Optimisation(
        does="concurrent calls of one process share a statement and a commit",
        replacements={"flowfabric.db.batch:Batch.put": _put_alone},
        subject="submit",
        figures=("submit_100_callers",),
    ),
    "claim_ahead": Optimisation(
        does="a worker claims more than its free slots while fast handlers process a backlog",
        replacements={"flowfabric.worker.ahead:Ahead.claimed": returning(None)},
        subject="work",
        figures=("worker_default_slots",),
    ),
    "known_queues": Optimisation(
        does="a claim does not return the lane and kind of queues that the process has claimed from before",
        replacements={f"{ENGINE}.lease.claim:Queues.MAX_KNOWN": value(0)},
        subject="work",
        figures=("engine_claim_finish",),
    ),
    "queue_walk": Optimisation(
        does="a claim of few queues of a lane scans those queues, not the whole route",
        replacements={f"{ENGINE}.lease.claim:Scans.MAX_QUEUES": value(-1)},
        subject="backlog",
        figures=("claim_behind_300k_of_other_kinds",),
    ),
    "two_claims": Optimisation(
        does="a process makes two claims concurrently",
        replacements={f"{ENGINE}.lease.claim:MAX_AT_ONCE": value(1)},
        subject="work",
        figures=("engine_claim_finish",),
    ),
    "frame_batch": Optimisation(
        does="concurrent appends to one stream share a transaction",
        replacements={f"{ENGINE}.stream.frame_batch:FrameBatch.MAX_FRAMES": value(1)},
        subject="streams",
        figures=("frames_grouped", "frames_one_stream"),
    ),
}


def switch_off(name: str, set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Switch off an optimisation in this process, for good unless `set_attribute` undoes it."""
    for target, substitute in OPTIMISATIONS[name].replacements.items():
        owner, attribute = resolve(target)
        set_attribute(owner, attribute, substitute(vars(owner)[attribute]))


def resolve(target: str) -> tuple[ModuleType | type, str]:
    """The module or class that defines a target, and its name there; LookupError if it does not exist."""
    module_name, _, path = target.partition(":")
    *outer, attribute = path.split(".")
    try:
        owner: Any = import_module(module_name)
    except ImportError as missing:
        raise LookupError(f"{target} does not exist: {missing}; correct OPTIMISATIONS in {__file__}") from missing
    for name in outer:
        owner = vars(owner).get(name)
        if not isinstance(owner, type):
            raise LookupError(f"{target} does not exist: no class {name}; correct OPTIMISATIONS in {__file__}")
    if attribute not in vars(owner):
        raise LookupError(f"{target} does not exist: no {attribute}; correct OPTIMISATIONS in {__file__}")
    return owner, attribute
