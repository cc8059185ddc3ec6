"""Listing lanes by name, page by page."""

from typing import Any

import asyncpg

from engine.state import refused
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.lane import Lane, LanePage
from flowfabric.model.states import LaneState


async def test_a_lane_is_listed_with_its_state_and_who_registered_it(
    engine: Engine, given: Given, clock: Clock
) -> None:
    now = await clock.advance(seconds=1)
    await given.created(lane_id="mail", creator_identity="web")
    await engine.set_lane_state("mail", "paused")
    page = await engine.list_lanes()
    assert [lane.lane_id for lane in page.lanes] == ["default", "mail"]
    assert page.lanes[1] == Lane(lane_id="mail", state=LaneState.PAUSED, registered_at=now, registered_by="web")  # type: ignore[arg-type]
    assert (page.lanes[0].registered_by, page.next_cursor) == ("configuration", None)


async def test_lanes_are_listed_in_byte_order_page_by_page(engine: Engine, given: Given) -> None:
    names = ["B", "a", "Z z", "~", "_", "a-b", "a.b", "ab", "0", "default", "!"]
    for name in names:
        await given.created(lane_id=name)
    for limit in (1, 2, 3, len(names) - 1):
        seen: list[str] = []
        cursor = None
        while True:
            page = await engine.list_lanes(cursor=cursor, limit=limit)
            assert len(page.lanes) <= limit
            seen += [lane.lane_id for lane in page.lanes]
            cursor = page.next_cursor
            if cursor is None:
                break
            assert len(page.lanes) == limit
        assert seen == sorted(names)
    assert (await engine.list_lanes(limit=len(names))).next_cursor is None
    assert (await engine.list_lanes(cursor="a+")).lanes[0].lane_id == "a-b"


async def test_a_wrong_limit_or_cursor_is_refused(engine: Engine, rows: Rows) -> None:
    wrong: list[dict[str, Any]] = [
        *({"limit": limit} for limit in (-1, "5", None)),
        *({"cursor": cursor} for cursor in ("", 5, "x" * 65)),
    ]
    async with rows.unchanged():
        for arguments in wrong:
            await refused(engine.list_lanes(**arguments), "invalid_input", *arguments)
        assert await engine.list_lanes(limit=0) == LanePage(lanes=[], next_cursor=None)


async def test_an_invalid_stored_lane_id_is_corruption(engine: Engine, connection: asyncpg.Connection) -> None:
    await connection.execute("insert into lane (lane_id, registered_at, registered_by) values ($1, 0, 'x')", "täg")
    await refused(engine.list_lanes(), "corruption", "list_lanes: lane_id: ")
