"""The summary that handlers keep up to date."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fixtures import StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.summary import NULL
from flowfabric.worker.context import Context

from .streaming import LONGEST, refusal, texts


async def test_a_patch_is_merged_into_the_summary_and_returns_its_version(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    @dataclass
    class Step:
        name: str
        at: datetime

    async def job(ctx: Context) -> list[int]:
        return [
            await ctx.summary.patch({"done": 1, "of": 3, "by": {"worker": "a", "host": "b"}}),
            await ctx.summary.patch({"done": 2, "of": None, "by": {"host": NULL}}),
            await ctx.summary.patch({"step": Step("compile", datetime(2026, 1, 2, tzinfo=UTC)), "done": 3}),
        ]

    await start_worker({"job": job})
    run = await submit()
    assert (await engine.wait_for_ending(run, timeout=60)).result == b"[1,2,3]"
    summary = await engine.read_summary(run, 0)
    assert summary is not None
    assert summary.version == 3
    assert summary.document == {
        "done": 3,
        "by": {"worker": "a", "host": None},
        "step": {"name": "compile", "at": "2026-01-02T00:00:00Z"},
    }


async def test_a_patch_that_is_no_json_object_is_refused_and_changes_nothing(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    @dataclass
    class Names:
        by_number: dict[int, str]

    refused: list[tuple[str, str]] = []
    deep: dict[str, Any] = {}
    for _ in range(16):
        deep = {"b": 1, "a": deep}

    async def job(ctx: Context) -> None:
        wrong: list[Any] = [[1], "text", None, {"a": float("nan")}, {"a": [float("inf")]}, {"a": "\ud800"}, deep]
        wrong += [{1: "a", "1": "b"}, {"a": [{"b": {2.5: 1}}]}]
        wrong += [{"a": Names({1: "one"})}, {"a": object()}, {"a": "x" * LONGEST}]
        for patch in wrong:
            refused.append(await refusal(ctx.summary.patch(patch)))

    await start_worker({"job": job})
    run = await submit()
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    assert await engine.read_summary(run, 0) is None
    assert await texts(engine, run) == []
    assert [code for code, _ in refused] == ["invalid_input"] * 11 + ["retention_limit_exceeded"]
    assert refused[0][1] == "patch: expected a dict, such as {'done': 3}, got [1]"
    assert refused[3][1] == (
        "patch: {'a': nan} cannot be stored as JSON: JSON has neither NaN nor infinity; pass None or a string instead"
    )
    assert refused[6][1] == (
        "patch_depth_exceeded: a patch may be nested at most 16 levels deep, and " + "['a']" * 16 + " is deeper"
    )
    assert refused[7][1] == "patch: keys must be text, got 1; write '1'"
    assert refused[8][1] == "patch: keys must be text, got 2.5; write '2.5'"
    assert refused[9][1] == refused[7][1]
