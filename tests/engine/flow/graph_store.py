"""Two engines on one database for random flows: what is stored, and crashes between any two statements."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Any
from uuid import UUID

import asyncpg

from fixtures import Clock
from flowfabric.db.database import Database, Record, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import cascade
from flowfabric.engine.parts import Parts, parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.event import CompletionOutcome
from flowfabric.settings import Settings
from sessions import session

from .graph_model import GraphModel

CRASHES = ("before a statement", "cut before a statement", "answer lost")
"""How a process crashes: between two statements of a transaction, in both forms, or behind its commit."""

MAX_SWEEPS = 200
"""More sweeps than the largest flow needs with one edge each."""

State = dict[str, Any]

_MEMBERS = """
select e.execution_id, e.public_state, coalesce(e.input_payload, i.input_payload) as payload,
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
_RESULTS = ("succeeded", "failed", "skipped")


class Crashes:
    """Lets the process of an engine die at a statement or behind a commit: from then on, its calls fail."""

    def __init__(self, database: Database) -> None:
        self._fetch, self._transact = database.fetch, database.transact
        self._form = ""
        self._left = -1
        self.has_crashed = False
        self.cut: int | None = None
        """The server process of the connection that was cut."""
        database.fetch = self._guarded_fetch  # type: ignore[method-assign]
        database.transact = self._guarded_transact  # type: ignore[method-assign]

    @contextmanager
    def at(self, form: str, nth: int) -> Iterator[None]:
        """Crash at the nth statement of transactions, or behind the nth commit; the process lives again at the end."""
        self._form, self._left, self.has_crashed = form, nth, False
        try:
            yield
        finally:
            self._left, self.has_crashed = -1, False

    async def counted(self, transaction: Transaction) -> None:
        """Count a statement that is about to run, and crash if it is the one."""
        if self._form != "answer lost" and self._is_reached():
            if self._form == "cut before a statement":
                self.cut = transaction.connection.get_server_pid()
                transaction.connection.terminate()
            else:
                raise StoreFault("transport", "crashed before a statement")

    def _is_reached(self) -> bool:
        self._left -= 1
        self.has_crashed |= self._left == 0
        return self._left == 0

    def _check(self) -> None:
        if self.has_crashed:
            raise StoreFault("transport", "the process has crashed")

    async def _guarded_fetch(self, statement: Statement, values: Any, **options: Any) -> list[Record]:
        self._check()
        return await self._fetch(statement, values, **options)

    async def _guarded_transact(self, work: Callable[[Transaction], Awaitable[Any]]) -> Any:
        self._check()
        if self._left < 0:
            return await self._transact(work)
        answer = await self._transact(lambda transaction: work(_Counted(transaction, self)))
        if self._form == "answer lost" and self._is_reached():
            raise StoreFault("transport", "the answer is lost", outcome_unknown=True)
        return answer


class _Counted(Transaction):
    """A transaction whose statements are counted."""

    __slots__ = ("crashes",)

    def __init__(self, transaction: Transaction, crashes: Crashes) -> None:
        super().__init__(transaction.connection)
        self.crashes = crashes

    async def fetch(self, statement: Statement, **values: object) -> list[Record]:
        await self.crashes.counted(self)
        return await super().fetch(statement, **values)


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
        self.clock = Clock(self.connection)
        await self.clock.stop()
        settings = Settings(database_url=url, database_pool_size=3, listen=False)
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

    async def settle_left_over(self) -> None:
        """Settle every entry by the sweeps of the second engine."""
        for _ in range(MAX_SWEEPS):
            if not await self.connection.fetchval("select count(*) from cascade_entry"):
                return
            await self.clock.advance(ms=cascade.LEFT_OVER_MS + 1)
            await self.other.cascade.settle_left_over(since=0)
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
        "flow": (flow["live_count"], flow["unhappy_count"], flow["derived_state"], flow["public_flow_state"]),
        "queue": sorted((numbers[execution], outcome) for _, execution, outcome in await _queued(connection, flow_id)),
    }
    ended = ("completed", "failed", "cancelled", "expired", "skipped")
    live = {row["execution_id"] for row in members if row["public_state"] not in ended}
    for row in members:
        ends = [CompletionOutcome(outcome).literal for outcome in row["ends"]]
        state[f"member {numbers[row['execution_id']]}"] = (row["public_state"], row["payload"], ends)
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
        "flow": (model.live, model.unhappy, model.derived, "cancelled" if model.is_cancelled else "open"),
        "queue": sorted(model.queue),
    }
    for number, member in enumerate(model.members):
        state[f"member {number}"] = (member.public, member.payload, member.ends)
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


async def crashed(call: Awaitable[object], store: GraphStore, form: str, nth: int) -> Counter[str]:
    """Make a call in a process that may crash meanwhile; return whether it has, as a count."""
    with store.crashes.at(form, nth):
        try:
            await call
        except EngineError:
            if not store.crashes.has_crashed:
                raise
        has_crashed = store.crashes.has_crashed
    # The server keeps the locks of a connection until it has noticed that it was cut.
    while await store.connection.fetchval("select count(*) from pg_stat_activity where pid = $1", store.crashes.cut):
        pass
    return Counter({form: int(has_crashed)})
