"""Counts of executions: every state, grouping and filter, compared with a count of all rows."""

import asyncio
from itertools import combinations
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.counts import COLUMNS, miscounts, recount
from engine.flows import flow_of
from engine.reach import one_of
from engine.state import claim, items, new, refused, revoke
from engine.waits import suspend_args
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import ExecutionCount
from flowfabric.model.states import PublicState

DAY = 86_400


async def counted(engine: Engine, **arguments: Any) -> dict[str, int]:
    """The counts by state."""
    found = await engine.count_executions(by="state", **arguments)
    return {one.public_state.value: one.count for one in found if one.public_state is not None}


async def test_a_count_has_only_the_fields_it_is_grouped_by(engine: Engine, given: Given) -> None:
    assert await engine.count_executions() == []
    for lane_id, execution_kind in (("mail", "letter"), ("mail", "parcel"), ("bank", "letter")):
        await given.created(namespace="tenant", lane_id=lane_id, execution_kind=execution_kind)
    await given.completed(lane_id="cash")

    def count(number: int, **fields: Any) -> ExecutionCount:
        return ExecutionCount(
            **{**dict.fromkeys(("lane_id", "public_state", "namespace", "execution_kind")), **fields}, count=number
        )

    assert await engine.count_executions() == [
        count(1, lane_id="bank", public_state=PublicState.WAITING),
        count(1, lane_id="cash", public_state=PublicState.COMPLETED),
        count(2, lane_id="mail", public_state=PublicState.WAITING),
    ]
    assert await engine.count_executions(by=["kind", "namespace"]) == [
        count(2, namespace="tenant", execution_kind="letter"),
        count(1, namespace="tenant", execution_kind="parcel"),
        count(1, namespace="tests", execution_kind="job"),
    ]
    assert await engine.count_executions(by="state") == [
        count(1, public_state=PublicState.COMPLETED),
        count(3, public_state=PublicState.WAITING),
    ]


STATES = (
    # Reached by a change of every row, so first; what leaves claimable work behind comes last.
    PublicState.SKIPPED,
    PublicState.EXPIRED,
    PublicState.ACTIVE,
    PublicState.CANCELLED,
    PublicState.FAILED,
    PublicState.COMPLETED,
    PublicState.SUSPENDED,
    PublicState.RATE_LIMITED,
    PublicState.WAITING_CHILDREN,
    PublicState.DELAYED,
    PublicState.RESUMABLE,
    PublicState.WAITING,
)


async def test_every_state_is_counted(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, rows: Rows
) -> None:
    assert set(STATES) == set(PublicState)
    expected: dict[str, int] = {}
    for state in STATES:
        expected[state] = len(await one_of(state, given, clock, connection))
        assert await counted(engine) == expected
    async with rows.unchanged():
        for state in PublicState:
            assert await counted(engine, public_state=state) == {state: expected[state]}
        assert await miscounts(engine, connection) == []


async def test_every_transition_is_counted(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    async def are(**states: int) -> None:
        assert await counted(engine) == states
        assert await miscounts(engine, connection) == []

    handle = await given.claimed(lease_ttl_ms=DAY * 1000)
    await are(active=1)
    await engine.suspend(handle, suspend_args())
    await are(suspended=1)
    await engine.resume_execution(execution_id=handle.execution_id, resume_delay_ms=1000)
    await are(delayed=1)
    await clock.advance(seconds=1)
    await parts_of(engine).delays.promote_due()
    await are(resumable=1)
    handle = (await given.claim(lease_ttl_ms=DAY * 1000)).handle
    await are(active=1)
    await engine.hand_back(handle)
    await are(resumable=1)
    handle = (await given.claim()).handle
    await clock.advance(seconds=31)
    await are(active=1)
    await parts_of(engine).lease_expiry.sweep()
    await are(active=1)
    await given.claim()
    await are(active=1)
    await engine.cancel_execution(execution_id=handle.execution_id, reason="enough")
    await are(cancelled=1)
    await clock.advance(seconds=DAY + 1)
    await parts_of(engine).retention.trim_batch()
    await are()


async def test_a_revoked_lease_is_counted_as_active(engine: Engine, given: Given) -> None:
    # No operation revokes a lease yet.
    handle = await given.claimed()
    await given.created()
    await revoke(engine, handle.execution_id)
    assert await counted(engine) == {"active": 1, "waiting": 1}
    assert await counted(engine, public_state="waiting") == {"waiting": 1}


async def test_executions_ended_by_one_statement_are_counted_by_their_lane_kind_and_outcome(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    made = [
        new(namespace=f"n{at % 2}", lane_id=f"l{at % 3}", execution_kind=f"k{at % 5}", execution_deadline_at=1)
        if at % 7 == 0
        else new(namespace=f"n{at % 2}", lane_id=f"l{at % 3}", execution_kind=f"k{at % 5}")
        for at in range(40)
    ]
    await engine.create_many(items(*made))
    await parts_of(engine).timeouts.expire_due()
    runs = await claim(engine, "l0", "l1", "l2", limit=30)
    await engine.complete_many([(run.handle, b"x") for run in runs[:20]])
    await asyncio.gather(
        *(engine.fail(run.handle, reason="no", classification="permanent") for run in runs[20:25]),
        *(engine.cancel(run.handle, "no") for run in runs[25:]),
    )
    found = await counted(engine)
    assert found == {"completed": 20, "failed": 5, "cancelled": 5, "expired": 6, "waiting": 4}
    assert await miscounts(engine, connection) == []


async def test_timeouts_applied_by_one_statement_are_counted_by_their_outcome(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    for behavior in ("fail", "cancel", "expire", "expire"):
        await engine.suspend(
            await given.claimed(), suspend_args(timeout_at=await clock.now() + 1000, timeout_behavior=behavior)
        )
    await clock.advance(seconds=2)
    assert await parts_of(engine).suspension_timeouts.expire_due() == 4
    assert await counted(engine) == {"failed": 1, "cancelled": 1, "expired": 2}
    assert await miscounts(engine, connection) == []


async def test_every_combination_of_groups_is_counted(
    engine: Engine, given: Given, connection: asyncpg.Connection, altered_rows: None
) -> None:
    for at in range(24):
        shape = {"namespace": f"n{at % 2}", "lane_id": f"l{at % 3}", "execution_kind": f"k{at % 4}"}
        execution_id = await given.created(**shape)
        if at % 5 == 0:
            await engine.cancel_execution(execution_id=execution_id, reason="no")
    for size in range(1, 5):
        for by in combinations(COLUMNS, size):
            assert await engine.count_executions(by=by)
            assert await miscounts(engine, connection, *by) == []
    assert await engine.count_executions(by=["lane", "lane"]) == await engine.count_executions(by=iter(["lane"]))


FILTERS: list[dict[str, Any]] = [
    {"namespace": "a"},
    {"namespace": ["a", "b"]},
    {"namespace": ("b", "unknown")},
    {"namespace": "unknown"},
    {"namespace": []},
    {"lane_id": "x"},
    {"lane_id": ["x", "y"], "namespace": "a"},
    {"lane_id": "unknown"},
    {"lane_id": []},
    {"execution_kind": "k1"},
    {"execution_kind": {"k1", "k2"}, "lane_id": "y"},
    {"execution_kind": "k"},
    {"public_state": "waiting"},
    {"public_state": [PublicState.ACTIVE, "failed"]},
    {"public_state": "completed", "lane_id": "x", "namespace": "b", "execution_kind": "k1"},
    {"public_state": []},
]


async def test_filters_select_the_same_executions_as_in_lists(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    for namespace in "ab":
        for lane_id in "xy":
            for kind in ("k1", "k2"):
                shape: dict[str, Any] = {"namespace": namespace, "lane_id": lane_id, "execution_kind": kind}
                await given.completed(**shape)
                await given.failed(**shape)
                await given.claimed(**shape)
    for namespace in "ab":
        for lane_id in "xy":
            await given.created(namespace=namespace, lane_id=lane_id, execution_kind="k1")
    for filters in FILTERS:
        listed = await engine.list_executions(**filters, limit=1000)
        assert sum((await counted(engine, **filters)).values()) == len(listed.executions), filters
        for by in (("state",), ("lane", "state"), ("kind",), tuple(COLUMNS)):
            assert await miscounts(engine, connection, *by, **filters) == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"by": ()}, "by: expected at least one of lane, state, namespace, kind, got ()"),
    ({"by": "tenant"}, "by: expected one or more of lane, state, namespace, kind, got 'tenant'"),
    ({"by": ["lane", "public_state"]}, "by: expected one or more of lane, state, namespace, kind, got 'public_state'"),
    ({"by": ["lane", None]}, "got None"),
    ({"by": 5}, "by: expected a list or another collection, got 5"),
    ({"by": None}, "by: expected a list or another collection, got None"),
    ({"public_state": "done"}, "public_state: expected one of waiting, delayed"),
    ({"lane_id": "l" * 65}, "lane_id"),
    ({"namespace": "a\0"}, "namespace: must not contain NUL"),
    ({"execution_kind": 5}, "execution_kind: expected a list or another collection, got 5"),
]


async def test_wrong_arguments_are_refused(engine: Engine, subtests: pytest.Subtests) -> None:
    for arguments, detail in WRONG:
        with subtests.test(f"{arguments}"):
            await refused(engine.count_executions(**arguments), "invalid_input", detail)


# Rewrites the entries of `retained` as an older version stores them.
AS_OLDER_VERSION = """
with entry as (delete from retained returning *)
insert into retained (retain_until, ended_at, partition_key, execution_ids)
select retain_until, ended_at, partition_key, array_agg(execution_id)
  from entry cross join unnest(execution_ids) as execution_id
 group by retain_until, ended_at, partition_key
"""


async def test_executions_ended_by_an_older_version_are_counted(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    await given.completed(lane_id="mail", execution_kind="letter")
    await given.completed(lane_id="mail", execution_kind="parcel")
    await given.failed(lane_id="bank", namespace="other")
    await given.cancelled(lane_id="mail")
    assert await connection.execute(AS_OLDER_VERSION) == "INSERT 0 2"
    await given.completed(lane_id="mail")
    assert await counted(engine) == {"completed": 3, "failed": 1, "cancelled": 1}
    assert await counted(engine, public_state="failed") == {"failed": 1}
    assert await miscounts(engine, connection) == []
    assert await engine.find_inconsistencies() == []
    await clock.advance(seconds=DAY + 1)
    await given.completed()
    assert (await parts_of(engine).retention.trim_batch()).done == 5
    assert await counted(engine) == {"completed": 1}


async def test_a_replayed_execution_is_counted_in_its_current_state(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    # No operation replays yet; it will leave its old entry without a queue.
    await given.completed()
    execution_id = await given.cancelled()
    await connection.execute(
        "update retained set queue_no = null, queue_nos = null where $1 = any(execution_ids)", uuid_of(execution_id)
    )
    await connection.execute(
        """with replayed as (
             update execution
                set lifecycle_phase = 'runnable', eligibility_state = 'eligible_now', terminal_outcome = 'none',
                    blocking_reason = 'waiting_for_worker', cancellation_reason = null, cancelled_by = null,
                    last_transition_at = ff_now() + 1
              where execution_id = $1 returning *),
           unlisted as (delete from listed)
           insert into ready (place, route_no, queue_no, partition_key, execution_id)
           select place, route_no, queue_no, partition_key, execution_id from replayed join queue using (queue_no)""",
        uuid_of(execution_id),
    )
    assert await counted(engine) == {"completed": 1, "waiting": 1}
    await clock.advance(seconds=1)
    await engine.cancel_execution(execution_id=execution_id, reason="again")
    assert await counted(engine) == {"completed": 1, "cancelled": 1}
    assert await engine.find_inconsistencies() == []


async def of_kinds(engine: Engine, kinds: int) -> list[Any]:
    """Six runs of as many kinds that were completed in one statement."""
    await engine.create_many(items(*[new(execution_kind=f"k{at % kinds}") for at in range(6)]))
    runs = await claim(engine)
    await engine.complete_many([(run.handle, b"x") for run in runs])
    return runs


@pytest.mark.parametrize("kinds", [1, 2, 6])
async def test_what_a_trim_leaves_of_an_entry_is_counted(
    engine: Engine, clock: Clock, connection: asyncpg.Connection, rows: Rows, consistent_rows: None, kinds: int
) -> None:
    runs = await of_kinds(engine, kinds)
    assert len(await rows.of("retained")) == 1
    await clock.advance(seconds=DAY + 1)
    for held in (4, 2, 1, 0):
        ids = [uuid_of(run.execution_id) for run in runs[:held]]
        async with connection.transaction():
            await connection.execute("select from execution where execution_id = any($1::uuid[]) for update", ids)
            await parts_of(engine).retention.trim_batch()
            assert await miscounts(engine, connection) == []
            assert await counted(engine) == ({"completed": held} if held else {})
        # The ids that are left may be in another order than the queues were.
        assert [row["queue_nos"] for row in await rows.of("retained")] == [None] * bool(held)


@pytest.mark.parametrize("kinds", [1, 2, 6])
@pytest.mark.parametrize("left", [1, 2, 5])
async def test_what_a_trim_of_an_older_version_leaves_of_an_entry_is_counted(
    engine: Engine, connection: asyncpg.Connection, kinds: int, left: int
) -> None:
    await of_kinds(engine, kinds)
    # It knows of no queues.
    await connection.execute(
        """with gone as (
             delete from execution where execution_id in (select unnest(execution_ids[1 : $1]) from retained))
           update retained set execution_ids = execution_ids[$1 + 1 :]""",
        6 - left,
    )
    assert await counted(engine) == {"completed": left}
    assert await miscounts(engine, connection) == []
    assert await engine.find_inconsistencies() == []


async def test_the_recount_of_the_tests_agrees_with_group_by(engine: Engine, connection: asyncpg.Connection) -> None:
    await engine.create_many(items(*[new(lane_id=f"l{at % 2}") for at in range(5)]))
    plain = await connection.fetch("select lane_no, public_state, count(*) from execution group by 1, 2 order by 3")
    assert [one.count for one in await recount(connection, ("lane", "state"), {})] == [3, 2]
    assert [row["count"] for row in plain] == [2, 3]


async def test_the_members_of_a_flow_are_counted_by_its_id(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    members = [await given.completed(), await given.failed(), await given.cancelled(execution_kind="other")]
    members += [await given.created() for _ in range(3)]
    flow_id = await flow_of(engine, members, [(members[3], members[4])])
    await given.completed(lane_id="other")
    await given.created()
    states = {"waiting": 2, "waiting_children": 1, "completed": 1, "failed": 1, "cancelled": 1}
    assert await counted(engine, flow_id=flow_id) == states
    assert await counted(engine, flow_id=str(flow_id), public_state=["failed", "completed"]) == {
        "completed": 1,
        "failed": 1,
    }
    assert await counted(engine, flow_id=flow_id, execution_kind="other") == {"cancelled": 1}
    assert await counted(engine, flow_id=flow_id, namespace="another") == {}
    (lane,) = await engine.count_executions(by="lane", flow_id=flow_id)
    assert (lane.lane_id, lane.count) == ("default", 6)
    assert await engine.count_executions(flow_id=uuid4()) == []
    await refused(engine.count_executions(flow_id="x"), "invalid_input", "flow_id")
