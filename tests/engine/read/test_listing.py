"""Lists of executions: every filter, both orders, and pages that neither repeat nor skip an execution."""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.flows import flow_of
from engine.state import claim, items, new, refused
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read import listing
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.execution import ExecutionPage, ExecutionSummary
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState


async def listed(engine: Engine, **filters: Any) -> list[str]:
    """The ids of a whole list, read page by page."""
    found: list[str] = []
    cursor = None
    limit = filters.get("limit", 50)
    while True:
        page = await engine.list_executions(**{**filters, "cursor": cursor})
        found += [one.execution_id for one in page.executions]
        assert len(found) == len(set(found))
        cursor = page.next_cursor
        if cursor is None:
            return found
        assert len(page.executions) == limit


async def test_a_list_entry_holds_the_summary_of_the_execution(engine: Engine, given: Given, clock: Clock) -> None:
    now = await clock.now()
    execution_id = await given.created(namespace="tenant", lane_id="mail", execution_kind="letter", priority=7)
    page = await engine.list_executions()
    line = ExecutionSummary(
        execution_id=execution_id,
        namespace="tenant",  # type: ignore[arg-type]
        lane_id="mail",  # type: ignore[arg-type]
        execution_kind="letter",
        public_state=PublicState.WAITING,
        priority=7,
        created_at=now,
    )
    assert page == ExecutionPage(executions=[line], next_cursor=None)


async def test_executions_are_listed_by_every_state(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    states = {
        "active": [(await given.reclaimable(lane_id="lost")).execution_id, (await given.claimed()).execution_id],
        "completed": [await given.completed()],
        "failed": [await given.failed()],
        "cancelled": [await given.cancelled()],
        "delayed": [(await given.backing_off()).execution_id, await given.delayed()],
        "waiting": [await given.created()],
    }
    blocked = await given.created()
    await engine.block_execution_for_admission(blocked, "waiting_for_quota")
    states["rate_limited"] = [blocked]
    held = await given.created()
    await engine.block_execution_for_admission(held, "paused_by_operator")
    states["waiting"].append(held)
    for state in PublicState:
        expected = sorted(states.get(state, []))
        assert sorted(await listed(engine, public_state=state)) == expected
        assert sorted(await listed(engine, public_state=state, order="oldest", limit=1)) == expected
    assert sorted(await listed(engine, public_state=["failed", PublicState.ACTIVE])) == sorted(
        states["failed"] + states["active"]
    )
    assert await listed(engine, public_state=[]) == []


async def test_an_execution_in_several_sources_is_listed_once(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = {"execution_deadline_at": await clock.now() + 10**9}
    expected = [
        (await given.reclaimable(lane_id="lost", **later)).execution_id,
        (await given.claimed(**later)).execution_id,
        await given.delayed(**later),
        await given.created(**later),
    ]
    blocked = await given.created(lane_id="blocked", **later)
    await engine.block_execution_for_admission(blocked, "waiting_for_budget")
    expected.append(blocked)
    # The scan ends after the first execution, so that the collections are used.
    monkeypatch.setattr(listing, "FIRST_SCAN", 1)
    monkeypatch.setattr(listing, "MIN_DEPTH", 1)
    states = ["active", "delayed", "waiting", "rate_limited"]
    page = await engine.list_executions(public_state=states)
    assert sorted(one.execution_id for one in page.executions) == sorted(expected)


async def test_filters_are_combined_and_the_values_of_one_are_alternatives(engine: Engine, given: Given) -> None:
    one = await given.created(namespace="a", lane_id="x", execution_kind="k1", tags={"t.k": "1"})
    two = await given.created(namespace="a", lane_id="y", execution_kind="k2", tags={"t.k": "2", "t.l": "1"})
    three = await given.created(namespace="b", lane_id="x", execution_kind="k1", tags={"t.k": "1"})
    wanted: list[tuple[dict[str, Any], set[str]]] = [
        ({"namespace": "a"}, {one, two}),
        ({"namespace": ["a", "b"]}, {one, two, three}),
        ({"namespace": ("b", "unknown")}, {three}),
        ({"namespace": "unknown"}, set()),
        ({"namespace": []}, set()),
        ({"lane_id": "x"}, {one, three}),
        ({"lane_id": ["x", "y"], "namespace": "a"}, {one, two}),
        ({"lane_id": "unknown"}, set()),
        ({"execution_kind": "k1"}, {one, three}),
        ({"execution_kind": ["k1", "k2"]}, {one, two, three}),
        ({"execution_kind": "k"}, set()),
        ({"tag": ("t.k", "1")}, {one, three}),
        ({"tag": ("t.k", "1"), "namespace": "a"}, {one}),
        ({"tag": ("t.k", "1"), "lane_id": "y"}, set()),
        ({"tag": ("t.l", "1")}, {two}),
        ({"tag": ("t.l", "2")}, set()),
        ({"tag": ("t.k", "1"), "public_state": "waiting", "execution_kind": "k1"}, {one, three}),
        ({"tag": ("t.k", "1"), "public_state": "failed"}, set()),
    ]
    for filters, expected in wanted:
        assert set(await listed(engine, **filters)) == expected, filters


async def test_long_tags_are_compared_whole(engine: Engine, given: Given) -> None:
    long = "x" * 200
    one = await given.created(tags={"a.b": long + "1"})
    await given.created(tags={"a.b": long + "2"})
    assert await listed(engine, tag=("a.b", long + "1")) == [one]


async def test_a_datetime_is_refused_with_the_milliseconds_to_write(engine: Engine) -> None:
    text = r"created_after: expected milliseconds since the epoch, got datetime.*; write int\(t.*, here 1767225600000$"
    with pytest.raises(InvalidInputError, match=text):
        await engine.list_executions(created_after=datetime(2026, 1, 1, tzinfo=UTC))  # type: ignore[arg-type]


async def test_time_ranges_include_the_start_and_exclude_the_end(engine: Engine, given: Given, clock: Clock) -> None:
    first = await clock.now()
    one = await given.completed()
    second = await clock.advance(seconds=1)
    two = await given.completed()
    ranges: list[tuple[dict[str, Any], list[str]]] = [
        ({"created_after": first}, [two, one]),
        ({"created_after": first + 1}, [two]),
        ({"created_after": second}, [two]),
        ({"created_after": second + 1}, []),
        ({"created_before": second}, [one]),
        ({"created_before": first}, []),
        ({"created_before": second + 1}, [two, one]),
        ({"created_after": second, "created_before": second}, []),
        ({"created_after": second, "created_before": first}, []),
        ({"completed_after": first}, [two, one]),
        ({"completed_after": second}, [two]),
        ({"completed_before": second}, [one]),
        ({"completed_after": first, "completed_before": second}, [one]),
        ({"completed_after": first, "public_state": ["completed", "waiting"]}, [two, one]),
        ({"completed_after": first, "public_state": "waiting"}, []),
        ({"completed_after": first, "public_state": "failed"}, []),
    ]
    for filters, expected in ranges:
        assert await listed(engine, **filters) == expected, filters


async def test_the_completion_filters_match_only_ended_executions(engine: Engine, given: Given) -> None:
    await given.created()
    await given.claimed(lane_id="other")
    failed = await given.failed(lane_id="failed")
    assert await listed(engine, completed_after=0) == [failed]
    assert await listed(engine, completed_before=2**62) == [failed]


async def test_a_flow_is_listed_by_its_id(engine: Engine, given: Given, connection: asyncpg.Connection) -> None:
    member = await given.created()
    await given.created()
    flow_id = await flow_of(engine, [member])
    assert await listed(engine, flow_id=flow_id) == [member]
    assert await listed(engine, flow_id=str(flow_id), public_state="failed") == []
    assert await listed(engine, flow_id=uuid4()) == []


async def test_a_list_of_a_flow_has_each_member_once_in_every_order_and_with_every_filter(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    await clock.stop()
    members: list[ExecutionId] = []
    for nth in range(12):
        # Three of each time, whose ids are in an order of their own.
        await clock.advance(ms=nth % 3 == 0)
        options = {"tags": {"a.b": str(nth % 2)}, "execution_kind": f"kind{nth % 2}", "namespace": f"n{nth % 4}"}
        members.append(await given.created(**options) if nth % 4 else await given.cancelled(**options))
        await given.created(tags={"a.b": "1"})
    flow_id = await flow_of(engine, members)
    lines = (await engine.list_executions(flow_id=flow_id)).executions
    ordered = [line.execution_id for line in lines]
    assert sorted(ordered) == sorted(members)
    assert [(one.created_at, one.execution_id) for one in lines] == sorted(
        ((one.created_at, one.execution_id) for one in lines), reverse=True
    )
    middle = lines[5].created_at
    filters: list[tuple[dict[str, Any], Callable[[ExecutionSummary], bool]]] = [
        ({}, bool),
        ({"public_state": "cancelled"}, lambda one: one.public_state == "cancelled"),
        ({"execution_kind": "kind1"}, lambda one: one.execution_kind == "kind1"),
        ({"namespace": ["n1", "n2"]}, lambda one: one.namespace in ("n1", "n2")),
        ({"lane_id": "default"}, bool),
        ({"tag": ("a.b", "1")}, lambda one: one.execution_kind == "kind1"),
        ({"completed_after": 0}, lambda one: one.public_state == "cancelled"),
        ({"created_after": middle}, lambda one: one.created_at >= middle),
        ({"created_before": middle}, lambda one: one.created_at < middle),
    ]
    for given_filters, matches in filters:
        expected = [one.execution_id for one in lines if matches(one)]
        for limit in (1, 2, 5, 50):
            assert await listed(engine, flow_id=flow_id, limit=limit, **given_filters) == expected
            assert await listed(engine, flow_id=flow_id, limit=limit, order="oldest", **given_filters) == expected[::-1]


async def test_the_order_is_by_creation_then_by_id(engine: Engine, clock: Clock) -> None:
    created: list[tuple[int, str]] = []
    for _ in range(3):
        now = await clock.advance(ms=1)
        made = await engine.create_many(
            items(
                *(
                    new(lane_id=f"lane{at % 3}", namespace=f"ns{at % 2}", execution_id=f"{{fp:{at}}}:{uuid4()}")
                    for at in range(12)
                )
            )
        )
        created += [(now, one.execution_id) for one in made]  # type: ignore[union-attr]
    expected = [execution_id for _, execution_id in sorted(created)]
    for limit in (1, 5, 7, 36, 1000):
        assert await listed(engine, order="oldest", limit=limit) == expected
        assert await listed(engine, order="newest", limit=limit) == expected[::-1]


async def test_a_page_may_be_empty_and_has_at_most_a_thousand_entries(engine: Engine) -> None:
    for _ in range(2):
        await engine.create_many(items(*(new() for _ in range(501))))
    assert await engine.list_executions(limit=0) == ExecutionPage(executions=[], next_cursor=None)
    page = await engine.list_executions(limit=5_000)
    assert (len(page.executions), page.next_cursor is not None) == (1000, True)
    page = await engine.list_executions(limit=5_000, cursor=page.next_cursor)
    assert (len(page.executions), page.next_cursor) == (2, None)


async def test_a_cursor_works_after_its_row_is_deleted(engine: Engine, given: Given, clock: Clock) -> None:
    policy = {"stream_policy": {"retention_ttl_ms": 1000}}
    ids = []
    for at in range(5):
        await clock.advance(ms=1)
        ids.append(await given.completed(policy=policy) if at == 2 else await given.created(lane_id="other"))
    page = await engine.list_executions(order="oldest", limit=3)
    assert page.executions[-1].execution_id == ids[2]
    await clock.advance(seconds=1)
    await parts_of(engine).retention.trim_batch()
    page = await engine.list_executions(order="oldest", limit=3, cursor=page.next_cursor)
    assert [one.execution_id for one in page.executions] == ids[3:]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    *(({"limit": wrong}, "invalid_input", "limit") for wrong in (-1, "5", None, 1.5)),
    *(({"public_state": wrong}, "invalid_input", "public_state") for wrong in ("running", ["waiting", "x"], 5, [None])),
    *(({"order": wrong}, "invalid_input", "order") for wrong in ("Newest", "", None)),
    *(({"namespace": wrong}, "invalid_input", "namespace") for wrong in ("\0", 5, [5])),
    *(({"lane_id": wrong}, "invalid_input", "lane_id") for wrong in ("", ["a", "ä"], 5)),
    *(({"execution_kind": wrong}, "invalid_input", "execution_kind") for wrong in ("\0", [None], 5)),
    *(({"tag": wrong}, "invalid_input", "tag") for wrong in ("a.b", ("a.b",), ("a.b", 5), 5)),
    *(({"tag": wrong}, "invalid_tag_key", "") for wrong in (("a", "x"), ("A.b", "x"), (5, "x"))),
    ({"flow_id": "x"}, "invalid_input", "flow_id"),
    *(
        ({name: "5"}, "invalid_input", name)
        for name in ("created_after", "created_before", "completed_after", "completed_before")
    ),
    *(
        ({"cursor": wrong}, "invalid_input", "cursor")
        for wrong in ("", "x", "!!", 5, b"x", "eyJ4IjoxfQ", "WyJuZXdlc3QiLDEsIngiXQ")
    ),
]


async def test_wrong_arguments_are_refused_with_their_code(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        for filters, code, detail in WRONG:
            await refused(engine.list_executions(**filters), code, detail)


async def test_a_cursor_belongs_to_one_order(engine: Engine, given: Given) -> None:
    for _ in range(2):
        await given.created()
    page = await engine.list_executions(limit=1)
    await refused(
        engine.list_executions(order="oldest", cursor=page.next_cursor),
        "invalid_input",
        "cursor: belongs to a list with order newest, got order oldest",
    )


async def test_a_corrupt_stored_id_is_reported(engine: Engine, given: Given, connection: asyncpg.Connection) -> None:
    await given.created()
    await connection.execute("update execution set partition_key = -1")
    await refused(engine.list_executions(), "corruption", "list_executions: execution_id: ")


async def test_a_missing_name_is_corruption(engine: Engine, given: Given, connection: asyncpg.Connection) -> None:
    await given.created()
    for column, field in (("queue_no", "execution_kind"), ("namespace_no", "namespace")):
        await connection.execute(f"update execution set {column} = 99")
        await refused(engine.list_executions(), "corruption", f"list_executions: {field}: is missing")


async def test_scans_and_collections_agree_with_a_sorted_model(
    engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small steps make every list use several statements; rows are added and changed between the pages of a list."""
    dice = random.Random(7)
    model: dict[str, dict[str, Any]] = {}

    async def add(count: int) -> None:
        now = await clock.advance(ms=dice.randrange(2))
        made = [
            new(
                namespace=f"ns{dice.randrange(3)}",
                lane_id=f"lane{dice.randrange(3)}",
                execution_kind=f"kind{dice.randrange(2)}",
                tags={"a.b": str(dice.randrange(2))} if dice.random() < 0.5 else None,
                delay_until=now + 10**9 if dice.random() < 0.2 else None,
            )
            for _ in range(count)
        ]
        for given, answer in zip(made, await engine.create_many(items(*made)), strict=True):
            state = "waiting" if given["delay_until"] is None else "delayed"
            model[answer.execution_id] = {**given, "created_at": now, "public_state": state}  # type: ignore[union-attr]

    async def move(count: int) -> None:
        for run in await claim(engine, "lane0", "lane1", "lane2", limit=count, lease_ttl_ms=10**9):
            match dice.randrange(4):
                case 0:
                    await engine.complete(run.handle)
                    model[run.execution_id]["public_state"] = "completed"
                case 1:
                    await engine.fail(run.handle, reason="x", classification="permanent")
                    model[run.execution_id]["public_state"] = "failed"
                case _:
                    model[run.execution_id]["public_state"] = "active"

    def matching(filters: dict[str, Any]) -> list[str]:
        def fits(row: dict[str, Any]) -> bool:
            tag = filters.get("tag")
            return (
                all(
                    row[name] in filters[name]
                    for name in ("namespace", "lane_id", "execution_kind", "public_state")
                    if name in filters
                )
                and (tag is None or (row["tags"] or {}).get(tag[0]) == tag[1])
                and filters.get("created_after", 0) <= row["created_at"] < filters.get("created_before", 2**62)
            )

        found = sorted((row["created_at"], execution_id) for execution_id, row in model.items() if fits(row))
        return [execution_id for _, execution_id in (found if filters["order"] == "oldest" else reversed(found))]

    def some(prefix: str, count: int) -> list[str]:
        return [f"{prefix}{dice.randrange(count)}" for _ in range(dice.randrange(1, 3))]

    for _ in range(6):
        await add(25)
    await move(40)
    for turn in range(60):
        monkeypatch.setattr(listing, "FIRST_SCAN", dice.choice((1, 30, 1000)))
        monkeypatch.setattr(listing, "FIRST_CAP", dice.choice((1, 20, 1000)))
        monkeypatch.setattr(listing, "FIRST_FAN_OUT", dice.choice((1, 2, 64)))
        monkeypatch.setattr(listing, "MIN_DEPTH", dice.choice((1, 8)))
        filters: dict[str, Any] = {"order": dice.choice(("newest", "oldest"))}
        if dice.random() < 0.4:
            filters["namespace"] = some("ns", 4)
        if dice.random() < 0.4:
            filters["lane_id"] = some("lane", 4)
        if dice.random() < 0.3:
            filters["execution_kind"] = some("kind", 3)
        if dice.random() < 0.6:
            filters["public_state"] = dice.sample(
                ("waiting", "active", "delayed", "completed", "failed", "suspended"), dice.randrange(1, 3)
            )
        if dice.random() < 0.3:
            filters["tag"] = ("a.b", str(dice.randrange(2)))
        if dice.random() < 0.3:
            filters["created_after"] = await clock.now() - dice.randrange(6)
        if dice.random() < 0.3:
            filters["created_before"] = await clock.now() - dice.randrange(6)
        before = matching(filters)
        found: list[str] = []
        cursor = None
        while True:
            page = await engine.list_executions(**filters, cursor=cursor, limit=dice.choice((1, 7, 40)))
            found += [one.execution_id for one in page.executions]
            cursor = page.next_cursor
            if cursor is None:
                break
            if turn % 3 == 0:
                await add(1)
            if turn % 3 == 1:
                await move(1)
        after = matching(filters)
        assert len(found) == len(set(found)), filters
        assert set(before) & set(after) <= set(found) <= set(before) | set(after), filters
        places = {execution_id: (model[execution_id]["created_at"], execution_id) for execution_id in found}
        assert found == sorted(found, key=places.__getitem__, reverse=filters["order"] == "newest")
        if turn % 3 == 2:
            assert found == before, filters
