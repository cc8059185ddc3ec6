"""Counting executions: every state, every grouping, every filter, and the same numbers as a walk along all rows."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import combinations
from typing import Any

import asyncpg
import pytest

from engine.counts import COLUMNS, miscounts, recount
from engine.reach import one_of
from engine.state import claim, items, new, refused, revoke
from engine.waits import args
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import ContentionError, NotFoundError, StateError
from flowfabric.model.execution import ExecutionCount
from flowfabric.model.states import PublicState

DAY = 86_400


async def counted(engine: Engine, **arguments: Any) -> dict[str, int]:
    """The counts by state."""
    found = await engine.count_executions(by="state", **arguments)
    return {one.public_state.value: one.count for one in found if one.public_state is not None}


async def test_a_count_names_what_was_counted_by_and_nothing_else(engine: Engine, given: Any) -> None:
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


async def test_nothing_is_counted_where_there_is_nothing(engine: Engine) -> None:
    assert await engine.count_executions() == []


@pytest.mark.parametrize("state", PublicState)
async def test_every_state_is_counted(
    engine: Engine, given: Any, clock: Any, connection: asyncpg.Connection, rows: Any, state: PublicState
) -> None:
    reached = await one_of(state, given, clock, connection)
    async with rows.unchanged():
        assert await counted(engine) == {state: len(reached)}
        assert await counted(engine, public_state=state) == {state: len(reached)}
        for other in PublicState:
            assert await counted(engine, public_state=other) == ({state: len(reached)} if other is state else {})
        assert await miscounts(engine, connection) == []


async def test_each_way_into_and_out_of_a_state_is_counted(
    engine: Engine, given: Any, clock: Any, connection: asyncpg.Connection
) -> None:
    async def are(**states: int) -> None:
        assert await counted(engine) == states
        assert await miscounts(engine, connection) == []

    handle = await given.claimed(lease_ttl_ms=DAY * 1000)
    await are(active=1)
    await engine.suspend(handle, args())
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
    await parts_of(engine).retention.trim()
    await are()


async def test_a_revoked_lease_is_counted_as_active(engine: Engine, given: Any, connection: asyncpg.Connection) -> None:
    # Nothing revokes a lease yet.
    handle = await given.claimed()
    await given.created()
    await revoke(connection, handle.execution_id)
    assert await counted(engine) == {"active": 1, "waiting": 1}
    assert await counted(engine, public_state="waiting") == {"waiting": 1}


async def test_what_ended_in_one_statement_is_counted_by_its_own_lane_kind_and_outcome(
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


async def test_what_ended_in_one_statement_in_several_ways_is_counted_by_its_outcome(
    engine: Engine, given: Any, clock: Any, connection: asyncpg.Connection
) -> None:
    for behavior in ("fail", "cancel", "expire", "expire"):
        await engine.suspend(
            await given.claimed(), args(timeout_at=await clock.now() + 1000, timeout_behavior=behavior)
        )
    await clock.advance(seconds=2)
    assert await parts_of(engine).suspension_timeouts.expire_due() == 4
    assert await counted(engine) == {"failed": 1, "cancelled": 1, "expired": 2}
    assert await miscounts(engine, connection) == []


async def test_every_combination_may_be_counted_by(
    engine: Engine, given: Any, connection: asyncpg.Connection, altered_rows: None
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


async def test_filters_mean_what_they_mean_in_lists(engine: Engine, given: Any, connection: asyncpg.Connection) -> None:
    for namespace in "ab":
        for lane_id in "xy":
            for kind in ("k1", "k2"):
                shape = {"namespace": namespace, "lane_id": lane_id, "execution_kind": kind}
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
    ({"by": ()}, "by: at least one of lane, state, namespace, kind, got ()"),
    ({"by": "tenant"}, "by: one or several of lane, state, namespace, kind, got 'tenant'"),
    ({"by": ["lane", "public_state"]}, "by: one or several of lane, state, namespace, kind, got 'public_state'"),
    ({"by": ["lane", None]}, "got None"),
    ({"by": 5}, "by: several values are wanted, got 5"),
    ({"by": None}, "by: several values are wanted, got None"),
    ({"public_state": "done"}, "public_state: one of waiting, delayed"),
    ({"lane_id": "l" * 65}, "lane_id"),
    ({"namespace": "a\0"}, "namespace: must not contain NUL"),
    ({"execution_kind": 5}, "execution_kind: several values are wanted, got 5"),
]


@pytest.mark.parametrize(("arguments", "detail"), WRONG)
async def test_a_count_that_makes_no_sense_is_refused(engine: Engine, arguments: dict[str, Any], detail: str) -> None:
    await refused(engine.count_executions(**arguments), "invalid_input", detail)


# What an older version leaves in `retained`, which no operation of this one does.
AS_OLDER_VERSION = """
with entry as (delete from retained returning *)
insert into retained (retain_until, ended_at, partition_key, execution_ids)
select retain_until, ended_at, partition_key, array_agg(execution_id)
  from entry cross join unnest(execution_ids) as execution_id
 group by retain_until, ended_at, partition_key
"""


async def test_what_ended_under_an_older_version_is_counted(
    engine: Engine, given: Any, clock: Any, connection: asyncpg.Connection
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
    assert await parts_of(engine).retention.trim() == 5
    assert await counted(engine) == {"completed": 1}


async def test_what_was_replayed_is_counted_as_what_it_is_now(
    engine: Engine, given: Any, clock: Any, connection: asyncpg.Connection
) -> None:
    # No operation replays yet: it is to leave its old entry without queues.
    await given.completed()
    execution_id = await given.cancelled()
    await connection.execute(
        "update retained set queue_no = null, queue_nos = null where $1 = any(execution_ids)", execution_id[-36:]
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
        execution_id[-36:],
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
    engine: Engine, clock: Any, connection: asyncpg.Connection, rows: Any, consistent_rows: None, kinds: int
) -> None:
    runs = await of_kinds(engine, kinds)
    assert len(await rows.of("retained")) == 1
    await clock.advance(seconds=DAY + 1)
    for held in (4, 2, 1, 0):
        ids = [run.execution_id[-36:] for run in runs[:held]]
        async with connection.transaction():
            await connection.execute("select from execution where execution_id = any($1::uuid[]) for update", ids)
            await parts_of(engine).retention.trim()
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


class History:
    """Operations at random, of every way into a state and out of it."""

    def __init__(self, engine: Engine, clock: Any, chance: random.Random) -> None:
        self.engine = engine
        self.clock = clock
        self.chance = chance
        self.handles: list[Any] = []
        self.ids: list[str] = []
        self.steps: list[Callable[[], Awaitable[object]]] = [
            self.create,
            self.create,
            self.claim,
            self.claim,
            self.claim,
            self.complete,
            self.fail,
            self.suspend,
            self.suspend,
            self.resume,
            self.resume,
            self.park,
            self.cancel,
            self.wait,
            self.sweep,
            self.renew,
        ]

    async def step(self) -> None:
        """One operation, which may be refused: a lease may have expired, an execution may have ended."""
        with suppress(NotFoundError, ContentionError, StateError):
            await self.chance.choice(self.steps)()

    def handle(self) -> Any:
        return self.handles.pop(self.chance.randrange(len(self.handles))) if self.handles else None

    async def create(self) -> None:
        chance = self.chance
        made = [
            new(
                namespace=chance.choice("ab"),
                lane_id=chance.choice(("north", "south")),
                execution_kind=chance.choice("kl"),
                delay_ms=chance.choice((None, None, 40_000)),
                execution_deadline_at=chance.choice((None, await self.clock.now() + 50_000)),
                policy=chance.choice(
                    (None, {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}})
                ),
            )
            for _ in range(chance.randrange(1, 8))
        ]
        self.ids += [one.execution_id for one in await self.engine.create_many(items(*made))]  # type: ignore[union-attr]

    async def claim(self) -> None:
        runs = await claim(self.engine, "north", "south", limit=self.chance.randrange(1, 9))
        self.handles += [run.handle for run in runs]

    async def complete(self) -> None:
        ending = [self.handles.pop() for _ in range(min(len(self.handles), 4))]
        if ending:
            await self.engine.complete_many([(handle, b"x") for handle in ending])

    async def fail(self) -> None:
        if handle := self.handle():
            await self.engine.fail(handle, reason="no", classification=self.chance.choice(("permanent", "transient")))

    async def suspend(self) -> None:
        if handle := self.handle():
            timeout = self.chance.choice((None, await self.clock.now() + 30_000))
            await self.engine.suspend(handle, args(timeout_at=timeout))

    async def resume(self) -> None:
        found = await self.engine.list_executions(public_state="suspended", limit=1)
        for one in found.executions:
            delay_ms = self.chance.choice((0, 20_000))
            await self.engine.resume_execution(execution_id=one.execution_id, resume_delay_ms=delay_ms)

    async def park(self) -> None:
        if handle := self.handle():
            later = await self.clock.now() + 10_000
            await self.chance.choice(
                (self.engine.hand_back, self.engine.wait_children, lambda held: self.engine.delay(held, later))
            )(handle)

    async def cancel(self) -> None:
        if self.ids:
            await self.engine.cancel_execution(execution_id=self.chance.choice(self.ids), reason="no")

    async def renew(self) -> None:
        if self.handles:
            await self.engine.renew_many(self.handles[:5])

    async def wait(self) -> None:
        await self.clock.advance(seconds=self.chance.choice((1, 15, 31, DAY / 4)))

    async def sweep(self) -> None:
        engine = self.engine
        await parts_of(engine).lease_expiry.sweep()
        await parts_of(engine).delays.promote_due()
        await parts_of(engine).timeouts.expire_due()
        await parts_of(engine).suspension_timeouts.expire_due()
        await parts_of(engine).retention.trim()


@pytest.mark.parametrize("seed", range(4))
async def test_counts_are_those_of_the_rows_after_any_history(
    engine: Engine, clock: Any, connection: asyncpg.Connection, consistent_rows: None, seed: int
) -> None:
    chance = random.Random(seed)
    history = History(engine, clock, chance)
    seen: Counter[str] = Counter()
    for at in range(400):
        if at == 150:
            await connection.execute(AS_OLDER_VERSION)
        await history.step()
        assert await miscounts(engine, connection) == []
        seen.update(await counted(engine))
        by = tuple(chance.sample(list(COLUMNS), chance.randrange(1, 5)))
        states = chance.sample(list(PublicState), 3)
        filters = {"public_state": states, "lane_id": chance.choice((["north"], ["north", "south"])), "namespace": "a"}
        assert await miscounts(engine, connection, *by, **filters) == []
    assert set(PublicState) - set(seen) == {"rate_limited", "waiting_children", "skipped"}


async def test_counts_beside_other_work_are_of_one_moment(engine: Engine, engines: Any) -> None:
    size = 400
    await engine.create_many(items(*[new(lane_id=f"l{at % 2}", execution_kind=f"k{at % 3}") for at in range(size)]))
    others = [await engines(), await engines()]

    async def work(other: Engine, name: str) -> None:
        chance = random.Random(name)
        while runs := await claim(other, "l0", "l1", worker_id=name, worker_instance_id=name, limit=7):
            for run in runs:
                match chance.randrange(5):
                    case 0:
                        await other.hand_back(run.handle)
                    case 1:
                        await other.suspend(run.handle, args())
                        await other.resume_execution(execution_id=run.execution_id)
                    case 2:
                        await other.fail(run.handle, reason="no", classification="permanent")
                    case _:
                        await other.complete_many([(run.handle, b"x")])

    working = asyncio.gather(*(work(other, f"w{at}") for at, other in enumerate(others)))
    ended = looks = 0
    is_mixed = False
    while not working.done():
        found = await counted(engine)
        assert sum(found.values()) == size, found
        now_ended = found.get("completed", 0) + found.get("failed", 0)
        assert now_ended >= ended, found
        ended, looks, is_mixed = now_ended, looks + 1, is_mixed or len(found) > 3
    await working
    assert looks > 5
    assert is_mixed
    assert sum((await counted(engine, public_state=["completed", "failed"])).values()) == size


async def test_the_rows_are_counted_by_hand_as_by_the_database(engine: Engine, connection: asyncpg.Connection) -> None:
    await engine.create_many(items(*[new(lane_id=f"l{at % 2}") for at in range(5)]))
    plain = await connection.fetch("select lane_no, public_state, count(*) from execution group by 1, 2 order by 3")
    assert [one.count for one in await recount(connection, ("lane", "state"), {})] == [3, 2]
    assert [row["count"] for row in plain] == [2, 3]
