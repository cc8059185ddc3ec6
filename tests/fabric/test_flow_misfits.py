"""Results that do not fit where they are put: what fails, what is blamed, and that a retry is not tried."""

import dataclasses
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from flowfabric import Fabric, RunFailed, all_of, quorum
from flowfabric.ids import plain_id
from flowfabric.worker.upstreams import ENCODING, Place, described

TIMEOUT = 60


@dataclasses.dataclass
class Part:
    number: int
    weight: Decimal


async def test_a_result_that_does_not_fit_fails_the_run_and_names_both_tasks(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def extract(value: Any) -> Any:
        return value

    @fabric.task
    async def load(rows: list[int], by_name: dict[str, Part] | None = None) -> int:
        return len(rows)

    flow = fabric.flow("nightly")
    good, bad, worse = flow.add(extract, 1), flow.add(extract, "text"), flow.add(extract, {"number": 1})
    nodes = [
        flow.add(load, all_of([good, bad])),
        flow.add(load, bad),
        flow.add(load, [good], by_name={"x": worse}),
        flow.add(load, quorum(2, of=[good, bad])),
    ]
    async with fabric, fabric.worker():
        run = await flow.submit()
        errors = list[str]()
        for node in nodes:
            with pytest.raises(RunFailed) as failed:
                await run.run(node).result(timeout=TIMEOUT)
            errors.append(str(failed.value.reason))
        of_bad, of_worse = plain_id(run.run(bad).id), plain_id(run.run(worse).id)
    head = "ResultMisfit: invalid_input: task 'load', parameter"
    assert errors[0] == (
        f"{head} 'rows': the result of task 'extract' ({of_bad}) does not fit list[int]: "
        "Expected `int`, got `str` - at `$[1]`"
    )
    assert errors[1] == (
        f"{head} 'rows': the result of task 'extract' ({of_bad}) does not fit list[int]: Expected `list`, got `str`"
    )
    assert f"{head} 'by_name': the result of task 'extract' ({of_worse}) does not fit dict[str, " in errors[2]
    assert f"the result of task 'extract' ({of_bad}) does not fit list[int]" in errors[3]


async def test_a_result_that_does_not_fit_is_not_retried(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def extract() -> Any:
        return "text"

    @fabric.task(retries=3, backoff=0)
    async def load(rows: list[int]) -> int:
        return len(rows)

    flow = fabric.flow("nightly")
    loaded = flow.add(load, flow.add(extract))
    async with fabric, fabric.worker():
        run = await flow.submit()
        await run.wait(timeout=TIMEOUT)
        assert (await run.run(loaded).status()).attempt == 1


async def test_a_run_whose_upstream_run_does_not_exist_any_more_fails_for_good(url: str) -> None:
    fabric, missing = Fabric(url), str(uuid4())

    @fabric.task(retries=3, backoff=0)
    async def load(rows: list[int]) -> int:
        return len(rows)

    async with fabric, fabric.worker():
        new = load.bind([])._new
        payload = described(b'{"rows":null}', [Place(path=["rows"], upstreams=[missing])])
        made = await fabric.engine.create_execution(
            **{**msgspec.structs.asdict(new), "input_payload": payload, "payload_encoding": ENCODING}
        )
        run = load.run(made.execution_id)
        with pytest.raises(
            RunFailed, match=f"the run with UUID {missing}, .* deleted by retention, or is not upstream"
        ):
            await run.result(timeout=TIMEOUT)
        assert (await run.status()).attempt == 1


async def test_a_run_that_is_started_before_its_results_exist_says_so(url: str, connection: asyncpg.Connection) -> None:
    fabric = Fabric(url)

    @fabric.task(lane="not served")
    async def extract(number: int) -> int:
        return number

    @fabric.task
    async def load(number: int) -> int:
        return number

    @fabric.task
    async def collect(numbers: list[int]) -> int:
        return sum(numbers)

    flow = fabric.flow("nightly")
    parts = [flow.add(extract, number) for number in range(3)]
    loaded, collected = flow.add(load, parts[0]), flow.add(collect, quorum(2, of=parts))
    async with fabric, fabric.worker(lanes=["default"]):
        run = await flow.submit()
        # No operation satisfies a group without its edges.
        await connection.execute("update edge_group set group_state = 'satisfied', satisfied_at = 1")
        for node in (loaded, collected):
            await fabric.engine.promote_blocked_to_eligible(run.run(node).id)
        early = "this run was started before its dependencies were satisfied"
        with pytest.raises(RunFailed, match=f"task 'extract' .* whose result is an argument, is waiting: {early}"):
            await run.run(loaded).result(timeout=TIMEOUT)
        counts = "0 of the 3 runs that parameter 'numbers' waits for have succeeded, and it takes 2"
        with pytest.raises(RunFailed, match=f"{counts}: {early}"):
            await run.run(collected).result(timeout=TIMEOUT)


async def test_a_value_beside_results_is_not_blamed_on_them(url: str) -> None:
    """The worker has another version of the task than the submitter."""
    first, second = Fabric(url), Fabric(url)

    async def extract() -> int:
        return 1

    @first.task
    async def load(rows: list[Any]) -> int:
        return len(rows)

    second.task(extract)

    @second.task(name="load")
    async def load_numbers(rows: list[int]) -> int:
        return len(rows)

    @second.task(name="load_pairs")
    async def load_numbers_by_name(rows: dict[str, int]) -> int:
        return len(rows)

    @first.task
    async def load_pairs(rows: list[int]) -> int:
        return len(rows)

    flow = first.flow("nightly")
    number = flow.add(first.task(extract))
    nodes = [flow.add(load, ["text", number]), flow.add(load_pairs, [number])]
    async with first, second, second.worker():
        run = await flow.submit()
        errors = list[str]()
        for node in nodes:
            with pytest.raises(RunFailed) as failed:
                await run.run(node).result(timeout=TIMEOUT)
            errors.append(str(failed.value.reason))
        source = f"the result of task 'extract' ({plain_id(run.run(number).id)})"
    head = "ResultMisfit: invalid_input: task"
    assert errors == [
        f"{head} 'load', parameter 'rows': a value with {source} in it does not fit list[int]: "
        "Expected `int`, got `str` - at `$[0]`",
        f"{head} 'load_pairs', parameter 'rows': a value with {source} in it does not fit dict[str, int]: "
        "Expected `dict`, got `list`",
    ]


async def test_a_result_that_its_parameter_would_change_is_refused(url: str) -> None:
    fabric, seen = Fabric(url), list[Any]()

    @fabric.task
    async def word(value: str) -> str:
        return value

    @fabric.task
    async def day() -> date:
        return date(2026, 1, 31)

    @fabric.task
    async def take(values: dict[int, list[date | str]]) -> None:
        seen.append(values)

    flow = fabric.flow("nightly")
    same, changed, dated = flow.add(word, "a"), flow.add(word, "2026-01-31"), flow.add(day)
    good = flow.add(take, {7: [same, dated]})
    bad = [flow.add(take, {7: [same], 8: [dated, changed]}), flow.add(take, {1: all_of([same, changed])})]
    async with fabric, fabric.worker():
        run = await flow.submit()
        await run.run(good).result(timeout=TIMEOUT)
        for node in bad:
            with pytest.raises(RunFailed) as failed:
                await run.run(node).result(timeout=TIMEOUT)
            assert (
                f"the result of task 'word' ({plain_id(run.run(changed).id)}) is '2026-01-31', which would arrive as "
                "datetime.date(2026, 1, 31); annotate the result and the parameter with the same type"
            ) in str(failed.value.reason)
    assert seen == [{7: ["a", date(2026, 1, 31)]}]
