"""Rare events are found by their kind, in the order of their ids, however many events there are."""

import json
from typing import Any

import asyncpg
import pytest

from fixtures import Clock, Given, uuid_of
from flowfabric.db.session import session_settings
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from sessions import session

_RARE = """
select execution_id from event where kind = 'expired' and event_id > $1 order by event_id limit 10
"""
_NOISE = """
insert into event (at, partition_key, kind, namespace_no, execution_id)
select ff_now(), 0, 'acquired', 1, gen_random_uuid() from generate_series(1, 2000)
"""


def indexes(plan: dict[str, Any]) -> set[str]:
    """The indexes that a plan scans; a sequential scan fails the test."""
    found = {plan["Index Name"]} if "Index Name" in plan else set()
    assert plan["Node Type"] != "Seq Scan"
    return found.union(*(indexes(child) for child in plan.get("Plans", ())))


async def test_rare_events_are_found_by_their_own_index(
    engine: Engine, given: Given, clock: Clock, url: str, connection: asyncpg.Connection
) -> None:
    await connection.execute(_NOISE)
    handle = await given.claimed(lease_ttl_ms=1000)
    await clock.advance(seconds=2)
    await parts_of(engine).lease_expiry.sweep()
    reader = await session(url, "test plans")
    for name, value in session_settings("flowfabric").items():
        await reader.execute("select set_config($1, $2, false)", name, value)
    assert [str(row["execution_id"]) for row in await reader.fetch(_RARE, 0)] == [uuid_of(handle.execution_id)]
    (plan,) = json.loads(await reader.fetchval(f"explain (format json) {_RARE}", 0))
    assert indexes(plan["Plan"])
    assert all("kind_event_id" in name or name == "event_rare_order" for name in indexes(plan["Plan"]))
    await reader.close()


async def test_a_rare_event_cannot_name_several_executions(connection: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="event_of_many_is_common"):
        await connection.execute(
            """insert into event (at, partition_key, kind, namespace_no, execution_ids)
               values (ff_now(), 0, 'expired', 1, array[gen_random_uuid()])"""
        )
