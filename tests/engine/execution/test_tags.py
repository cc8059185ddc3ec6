"""Tags: set and read in any state of an execution, with namespaced keys."""

import asyncio
import itertools
from typing import Any
from uuid import uuid4

import pytest

from engine.state import all_cases, claim, refused
from fixtures import Clock, Engines, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.tag import TagsSet

ABSENT = f"{{fp:1}}:{uuid4()}"
WRONG_KEYS: tuple[Any, ...] = (
    "",
    "Cairn.x",
    "1cairn.x",
    "cairn",
    "cairn.",
    "cairn..x",
    ".cairn",
    "ca-irn.x",
    "cairn.Foo",
    "a.b c",
    'a."',
    5,
)


async def test_a_tag_replaces_its_old_value_and_marks_the_mutation(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    execution_id = await given.created(tags={"shop.order": "1"})
    created = await rows.execution(execution_id)
    now = await clock.advance(seconds=1)
    await engine.set_execution_tag(execution_id, "shop.order", "2")
    await engine.set_execution_tag(execution_id, "shop.new", "")
    answer = await engine.set_execution_tags(execution_id, {"a.b": "1", "a.c": "ü\n'\""})
    assert answer == TagsSet(count=2)
    tags = {"shop.order": "2", "shop.new": "", "a.b": "1", "a.c": "ü\n'\""}
    for key, value in tags.items():
        assert await engine.get_execution_tag(execution_id, key) == value
    assert await rows.execution(execution_id) == {**created, "last_mutation_at": now}
    (claimed,) = await claim(engine)
    assert claimed.tags == tags
    assert (await engine.read_execution_context(execution_id)).tags == tags


async def test_the_instance_tag_is_stored_on_the_row_and_in_events(engine: Engine, given: Given, rows: Rows) -> None:
    execution_id = await given.created()
    await engine.set_execution_tags(execution_id, {"a.b": "1", "ff.instance_id": "blue"})
    assert (await rows.execution(execution_id))["instance_tag"] == "blue"
    await engine.set_execution_tag(execution_id, "a.b", "2")
    assert (await rows.execution(execution_id))["instance_tag"] == "blue"
    await engine.set_execution_tag(execution_id, "ff.instance_id", "green")
    assert (await rows.execution(execution_id))["instance_tag"] == "green"
    await given.claim()
    assert (await rows.events(execution_id))[-1]["instance_tag"] == "green"


@pytest.mark.usefixtures("altered_rows")
async def test_the_name_of_the_instance_tag_is_a_setting(engines: Engines, given: Given, rows: Rows) -> None:
    execution_id = await given.created()
    other = await engines(instance_tag="team.name")
    await other.set_execution_tags(execution_id, {"team.name": "red", "ff.instance_id": "blue"})
    assert (await rows.execution(execution_id))["instance_tag"] == "red"


async def test_running_and_ended_executions_can_be_tagged(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    for execution_id in (await given.completed(), await given.cancelled(), handle.execution_id):
        await engine.set_execution_tag(execution_id, "a.b", "late")
        assert await engine.get_execution_tag(execution_id, "a.b") == "late"
    await engine.complete(handle)


async def test_a_wrong_key_is_refused_before_anything_is_read(engine: Engine, given: Given, rows: Rows) -> None:
    execution_id = await given.created()
    async with rows.unchanged():
        with all_cases() as case:
            for key, name in itertools.product(WRONG_KEYS, (execution_id, ABSENT, "not an id")):
                with case(f"{key!r} of {name}"):
                    await refused(engine.set_execution_tag(name, key, "x"), "invalid_tag_key")
                    await refused(engine.set_execution_tags(name, {"a.b": "1", key: "x"}), "invalid_tag_key")
                    await refused(engine.get_execution_tag(name, key), "invalid_tag_key")


async def test_refused_tags_write_nothing(engine: Engine, given: Given, rows: Rows) -> None:
    execution_id = await given.created()
    async with rows.unchanged():
        await refused(engine.set_execution_tag(ABSENT, "a.b", "x"), "execution_not_found")
        await refused(engine.set_execution_tags(ABSENT, {"a.b": "x"}), "execution_not_found")
        assert await engine.get_execution_tag(ABSENT, "a.b") is None
        assert await engine.get_execution_tag(execution_id, "a.b") is None
        await refused(engine.set_execution_tags(execution_id, {}), "invalid_input", "tags")
        await refused(engine.set_execution_tags(execution_id, "a.b"), "invalid_input", "tags")  # type: ignore[arg-type]
        for value in ("\0", "\ud800", 5, None):
            await refused(engine.set_execution_tag(execution_id, "a.b", value), "invalid_input", "value")  # type: ignore[arg-type]
            await refused(engine.set_execution_tags(execution_id, {"a.b": value}), "invalid_input", "a.b")  # type: ignore[dict-item]
        await refused(engine.set_execution_tag("not an id", "a.b", "x"), "invalid_input", "MissingTag")
        await refused(engine.get_execution_tag(f"{{fp:65535}}:{uuid4()}", "a.b"), "invalid_input", "exceeds i16 range")


async def test_concurrently_set_tags_are_all_stored(engines: Engines, given: Given, rows: Rows) -> None:
    execution_id = await given.created()
    several = [await engines() for _ in range(3)]
    await asyncio.gather(
        *(
            engine.set_execution_tags(execution_id, {f"a.n{nth}_{at}": "x", "ff.instance_id": f"i{nth}", "a.same": "y"})
            for at in range(5)
            for nth, engine in enumerate(several)
        )
    )
    found = {row["key"]: row["value"] for row in await rows.of("execution_tag")}
    assert len(found) == 15 + 2
    assert (await rows.execution(execution_id))["instance_tag"] == found["ff.instance_id"]
    assert await several[0].find_inconsistencies() == []
