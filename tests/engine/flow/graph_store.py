"""Two engines on one database for random flows, and what is stored."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg

from fixtures import Clock
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import cascade
from flowfabric.engine.parts import Parts, parts_of
from flowfabric.model.event import CompletionOutcome
from flowfabric.settings import Settings
from sessions import session

from .graph_faults import LOCKS, Crashes
from .graph_model import GraphModel

MAX_SWEEPS = 200
"""More sweeps than the largest flow needs with one edge each."""

State = dict[str, Any]

_MEMBERS = """
select e.execution_id, e.public_state, e.blocking_reason = 'paused_by_flow_cancel' as is_held,
       coalesce(e.input_payload, i.input_payload) as payload,
       array(select v.outcome from event_each v
              where v.execution_id = e.execution_id and v.kind in ('ended', 'released') and v.outcome <> $2
              order by v.event_id) as ends
  from execution e left join execution_input i using (partition_key, execution_id) where e.flow_id = $1
"""
_GROUPS = """
select g.*, p.flow_id is not null as is_queued
  from edge_group g left join pending_cancel_group p using (partition_key, flow_id, downstream_id) where g.flow_id = $1
"""
_QUEUE = """
select c.event_id, c.outcome, m.execution_id
  from cascade_entry c cross join lateral unnest(c.execution_ids) with ordinality as m(execution_id, nth)
 where c.flow_id = $1 order by c.event_id, m.nth
"""
_DELETE_ALL = """
truncate flow, edge, edge_group, cascade_entry, pending_cancel_group, cancel_backlog, cancel_backlog_member,
         execution, execution_input, execution_result, ready, timer, claim, retained, listed, attempt, event,
         suspension, waitpoint
"""
_RESULTS = ("succeeded", "failed", "skipped")


class GraphStore:
    """The database of the test, the engine that works and may crash, the one that takes over, and their event loop."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self.run(self._open(url))

    def run(self, work: Awaitable[Any]) -> Any:
        """Run a coroutine and return its result."""
        return self.loop.run_until_complete(work)

    async def _open(self, url: str) -> None:
        self.connection = await session(url, "test graphs")
        self._stack.push_async_callback(self.connection.close)
        self._locker = await session(url, "test locks")
        self._stack.push_async_callback(self._locker.close)
        self.clock = Clock(self.connection)
        await self.clock.stop()
        settings = Settings(database_url=url, database_pool_size=3, listen=False, submit_patience_ms=0)
        self.engine: Engine = await self._stack.enter_async_context(Engine.connect(settings=settings))
        self.second: Engine = await self._stack.enter_async_context(Engine.connect(settings=settings))
        for parts in (self.parts, self.other):
            # The test settles and sweeps itself.
            parts.wakeups.on_members_ended = None
            parts.wakeups.on_siblings = None
            parts.catch_up.is_left_to_sweeps = True
        self.crashes = Crashes(self.parts.store.database)

    @property
    def parts(self) -> Parts:
        """The parts of the engine that works."""
        return parts_of(self.engine)

    @property
    def other(self) -> Parts:
        """The parts of the engine that takes over."""
        return parts_of(self.second)

    def close(self) -> None:
        """Close both engines."""
        self.run(self._stack.aclose())
        self.loop.close()

    async def clear(self) -> None:
        """Delete what a failed script has left, so that the next one fails by itself."""
        await self.connection.execute(_DELETE_ALL)

    @asynccontextmanager
    async def locked(self, lock: tuple[str, UUID] | None) -> AsyncIterator[None]:
        """Let another session hold a lock on a row of LOCKS."""
        if lock is None:
            yield
            return
        async with self._locker.transaction():
            await self._locker.execute(LOCKS[lock[0]], lock[1])
            yield

    async def wait_for_cut(self) -> None:
        """Wait until the server has noticed that a connection was cut: it keeps its locks until then."""
        while await self.connection.fetchval("select count(*) from pg_stat_activity where pid = $1", self.crashes.cut):
            pass

    async def settle_left_over(self, after_each: Callable[[], Awaitable[object]] | None = None) -> None:
        """Settle every entry by the sweeps of the second engine."""
        for _ in range(MAX_SWEEPS):
            if not await self.connection.fetchval("select count(*) from cascade_entry"):
                return
            await self.clock.advance(ms=cascade.LEFT_OVER_MS + 1)
            await self.other.cascade.settle_left_over(since=0)
            if after_each is not None:
                await after_each()
        raise AssertionError(f"entries are left after {MAX_SWEEPS} sweeps")

    async def queued(self, flow_id: UUID) -> list[tuple[int, UUID, str]]:
        """The queued ends in their order: event, execution, outcome."""
        return await _queued(self.connection, flow_id)

    async def stored(self, flow_id: UUID, numbers: Mapping[UUID, int]) -> State:
        """The flow as it is stored."""
        return await stored_flow(self.connection, flow_id, numbers)


async def _queued(connection: asyncpg.Connection, flow_id: UUID) -> list[tuple[int, UUID, str]]:
    """The queued ends in their order: event, execution, outcome."""
    return [
        (row["event_id"], row["execution_id"], CompletionOutcome(row["outcome"]).literal)
        for row in await connection.fetch(_QUEUE, flow_id)
    ]


async def stored_flow(connection: asyncpg.Connection, flow_id: UUID, numbers: Mapping[UUID, int]) -> State:
    """The flow as it is stored, in the form of `modelled`; `numbers` are those of its members."""
    (flow,) = await connection.fetch("select * from flow where flow_id = $1", flow_id)
    members = await connection.fetch(_MEMBERS, flow_id, CompletionOutcome.RESUMABLE)
    state: State = {
        "flow": (flow["live_count"], flow["failed_count"], flow["derived_state"], flow["public_flow_state"]),
        "queue": sorted((numbers[execution], outcome) for _, execution, outcome in await _queued(connection, flow_id)),
    }
    ended = ("completed", "failed", "cancelled", "expired", "skipped")
    live = {row["execution_id"] for row in members if row["public_state"] not in ended}
    for row in members:
        ends = [CompletionOutcome(outcome).literal for outcome in row["ends"]]
        state[f"member {numbers[row['execution_id']]}"] = (row["public_state"], row["is_held"], row["payload"], ends)
    for row in await connection.fetch("select edge_id, state from edge where flow_id = $1", flow_id):
        state[f"edge {row['edge_id']}"] = row["state"]
    for row in await connection.fetch(_GROUPS, flow_id):
        pending = row["cancel_siblings_pending_members"] or ()
        state[f"group {numbers[row['downstream_id']]}"] = (
            row["staged_count"],
            row["applied_count"],
            *(row[f"{result}_count"] for result in _RESULTS),
            row["group_state"],
            row["satisfied_at"] is not None,
            row["cancel_siblings_pending_flag"],
            row["is_queued"],
            sorted({numbers[each] for each in pending if each in live}),
            row["cancel_siblings_reason"],
        )
    return state


def modelled(model: GraphModel) -> State:
    """The flow as it should be stored."""
    state: State = {
        "flow": (model.live, model.failed, model.derived, "cancelled" if model.is_cancelled else "open"),
        "queue": sorted(model.queue),
    }
    for number, member in enumerate(model.members):
        state[f"member {number}"] = (member.public, member.is_held, member.payload, member.ends)
    for edge in model.edges:
        state[f"edge {edge.key}"] = edge.state
    for number, group in model.groups.items():
        state[f"group {number}"] = (
            group.staged,
            group.applied,
            *(getattr(group, result) for result in _RESULTS),
            group.state,
            group.state == "satisfied",
            group.is_flagged,
            group.is_flagged,
            sorted(each for each in group.siblings if model.members[each].is_live),
            group.reason,
        )
    return state


def differences(stored: State, expected: State) -> list[str]:
    """What is stored otherwise than it should be."""
    return [
        f"{key}: {stored.get(key)}, the model has {expected.get(key)}"
        for key in sorted({*stored, *expected})
        if stored.get(key) != expected.get(key)
    ]
