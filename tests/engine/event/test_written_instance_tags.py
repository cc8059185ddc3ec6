"""The events of the instance tag: attached when it gets a value, cleared with the old value before it changes."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from creates import new
from engine.state import refused, rounds
from fixtures import Engines, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Created, Duplicate

from .written import written

KEY = "ff.instance_id"


async def changes(rows: Rows, execution_id: str) -> list[str]:
    """The events of the instance tag in order, as `kind value`."""
    found = await written(rows, execution_id, "tag_attached", "tag_cleared")
    return [f"{event.kind} {event.instance_tag}" for event in found]


async def test_a_create_with_the_instance_tag_attaches_it(engine: Engine, given: Given, rows: Rows) -> None:
    tags = {KEY: "blue", "app.customer": "acme"}
    variants: list[dict[str, Any]] = [
        {},
        {"execution_id": f"{{fp:1}}:{uuid4()}"},
        {"idempotency_key": "k"},
        {"execution_id": f"{{fp:1}}:{uuid4()}", "idempotency_key": "both"},
        {"delay_ms": 60_000},
    ]
    for overrides in variants:
        execution_id = await given.created(tags=tags, namespace="tenant", **overrides)
        (event,) = await written(rows, execution_id)
        (namespace,) = await rows.of("namespace", namespace="tenant")
        assert (event.kind, event.instance_tag, event.tags) == ("tag_attached", "blue", tags)
        assert event.namespace_no == namespace["namespace_no"]


async def test_create_many_attaches_each_its_own_value(engine: Engine, rows: Rows) -> None:
    tags: list[dict[str, str] | None] = [{KEY: "blue"}, None, {"app.customer": "acme"}, {KEY: "", "app.customer": "x"}]
    for overrides in ({}, {"delay_ms": 60_000}):
        answers = await engine.create_many([new(tags=each, **overrides) for each in tags])
        for answer, each in zip(answers, tags, strict=True):
            assert isinstance(answer, Created)
            found = [(event.kind, event.instance_tag, event.tags) for event in await written(rows, answer.execution_id)]
            assert found == ([("tag_attached", each[KEY], each)] if each and KEY in each else [])


async def test_a_submission_that_creates_nothing_writes_no_event(engine: Engine, given: Given, rows: Rows) -> None:
    tags = {KEY: "blue"}
    execution_id = f"{{fp:1}}:{uuid4()}"
    await given.created(tags=tags, execution_id=execution_id)
    await given.created(tags=tags, idempotency_key="k")
    await given.created(lane_id="closed")
    await engine.set_lane_state("closed", "draining")
    async with rows.unchanged():
        duplicates = await engine.create_many(
            [new(tags=tags, execution_id=execution_id), new(tags=tags, idempotency_key="k", input_payload=b'{"a": 1}')]
        )
        assert all(isinstance(each, Duplicate) for each in duplicates)
    for overrides in ({}, {"idempotency_key": "other"}):
        await refused(given.created(tags=tags, lane_id="closed", **overrides), "invalid_input")
    assert len(await rows.of("event")) == 2


async def test_a_change_clears_the_old_value_before_it_attaches_the_new_one(
    engine: Engine, given: Given, rows: Rows
) -> None:
    execution_id = await given.created(tags={"app.customer": "acme"})
    await engine.set_execution_tag(execution_id, KEY, "blue")
    await engine.set_execution_tags(execution_id, {"app.customer": "other", KEY: "green"})
    await engine.set_execution_tag(execution_id, KEY, "")
    events = await written(rows, execution_id)
    assert [(event.kind, event.instance_tag, event.tags) for event in events] == [
        ("tag_attached", "blue", {"app.customer": "acme", KEY: "blue"}),
        ("tag_cleared", "blue", {"app.customer": "acme", KEY: "blue"}),
        ("tag_attached", "green", {"app.customer": "other", KEY: "green"}),
        ("tag_cleared", "green", {"app.customer": "other", KEY: "green"}),
        ("tag_attached", "", {"app.customer": "other", KEY: ""}),
    ]


async def test_other_tags_and_the_same_value_write_no_event(engine: Engine, given: Given, rows: Rows) -> None:
    execution_id = await given.created(tags={KEY: "blue"})
    async with rows.unchanged(without=["execution", "execution_tag"]):
        await engine.set_execution_tag(execution_id, KEY, "blue")
        await engine.set_execution_tags(execution_id, {KEY: "blue", "app.customer": "acme"})
        await engine.set_execution_tag(execution_id, "app.customer", "other")
    assert await engine.get_execution_tag(execution_id, "app.customer") == "other"
    async with rows.unchanged():
        await refused(engine.set_execution_tag(f"{{fp:1}}:{uuid4()}", KEY, "blue"), "execution_not_found")
        await refused(engine.set_execution_tags(execution_id, {KEY: "green", "bad": "x"}), "invalid_tag_key")
    assert await changes(rows, execution_id) == ["tag_attached blue"]


async def test_the_value_changes_also_after_the_end_of_the_execution(engine: Engine, given: Given, rows: Rows) -> None:
    execution_id = await given.completed(tags={KEY: "blue"})
    await engine.set_execution_tag(execution_id, KEY, "green")
    assert await changes(rows, execution_id) == ["tag_attached blue", "tag_cleared blue", "tag_attached green"]


@pytest.mark.usefixtures("altered_rows")
async def test_only_the_configured_tag_writes_events(engines: Engines, given: Given, rows: Rows) -> None:
    other = await engines(instance_tag="team.name")
    (created,) = await other.create_many([new(tags={"team.name": "red", KEY: "blue"})])
    assert isinstance(created, Created)
    await other.set_execution_tag(created.execution_id, KEY, "green")
    await other.set_execution_tag(created.execution_id, "team.name", "black")
    assert await changes(rows, created.execution_id) == ["tag_attached red", "tag_cleared red", "tag_attached black"]


async def test_concurrent_changes_are_reported_in_the_order_in_which_they_happened(
    engines: Engines, given: Given, rows: Rows
) -> None:
    several = [await engines() for _ in range(3)]
    for _ in rounds(3, whole=30):
        execution_id = await given.created()
        values = ["a", "b", "c", "b", "a"]
        await asyncio.gather(
            *(one.set_execution_tag(execution_id, KEY, value) for one in several for value in values),
            *(one.set_execution_tag(execution_id, "app.other", value) for one in several for value in values),
        )
        events = await written(rows, execution_id)
        current = None
        for event in events:
            if event.kind == "tag_cleared":
                assert event.instance_tag == current
                current = None
            else:
                assert current is None
                current = event.instance_tag
            assert event.tags is not None
            assert event.tags[KEY] == event.instance_tag
        assert current == await several[0].get_execution_tag(execution_id, KEY)
