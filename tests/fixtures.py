"""The types of the fixtures, for the signatures of tests: `given: Given, clock: Clock, rows: Rows`."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import asyncpg

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Created
from flowfabric.model.explanation import Explanation
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import ClaimedExecution
from flowfabric.worker.worker import Worker
from sessions import SCHEMA

Engines: TypeAlias = Callable[..., Awaitable[Engine]]
"""Open another engine with these settings."""
Eventually: TypeAlias = Callable[..., Awaitable[Any]]
"""Wait until a condition holds, and return its value."""
StartWorker: TypeAlias = Callable[..., Awaitable[Worker]]
"""Start a worker with these handlers."""
Submit: TypeAlias = Callable[..., Awaitable[ExecutionId]]
"""Create an execution of kind `job`; the keyword arguments are its payload."""
Attempts: TypeAlias = Callable[[ExecutionId], Awaitable[list[dict[str, Any]]]]
"""The attempts of an execution in order."""
IsSuspended: TypeAlias = Callable[[ExecutionId], Awaitable[None]]
"""Wait until an execution is suspended."""
Explain: TypeAlias = Callable[[str], Awaitable[Explanation]]
"""The explanation of an execution, checked against its rows."""


def uuid_of(execution_id: str) -> str:
    """The UUID at the end of an execution id, as the tables store it."""
    return execution_id[-36:]


class Clock:
    """The clock of the test's database; a test can advance, stop and set it."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def advance(self, *, seconds: float = 0, ms: int = 0) -> int:
        """Advance the clock and return the new time in milliseconds."""
        now: int = await self._connection.fetchval(
            """update test_clock set offset_ms = offset_ms + $1 returning offset_ms
                 + case when is_stopped then 0 else (extract(epoch from clock_timestamp()) * 1000)::bigint end""",
            round(seconds * 1000) + ms,
        )
        return now

    async def stop(self) -> None:
        """Stop the clock: from now on only the test moves it, so nothing expires because the machine is slow."""
        await self._connection.execute("update test_clock set offset_ms = ff_now(), is_stopped = true")

    async def set(self, now: int) -> None:
        """Stop the clock at a time."""
        await self._connection.execute("update test_clock set offset_ms = $1, is_stopped = true", now)

    async def now(self) -> int:
        """The current time in milliseconds."""
        now: int = await self._connection.fetchval("select ff_now()")
        return now


class Rows:
    """The rows of the test's database."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def of(self, table: str, **where: object) -> list[dict[str, Any]]:
        """The rows of a table whose columns have these values, in no particular order."""
        condition = " and ".join(f"{column} is not distinct from ${nth}" for nth, column in enumerate(where, 1))
        query = f'select * from "{table}"' + (f" where {condition}" if where else "")
        return [dict(row) for row in await self._connection.fetch(query, *where.values())]

    async def execution(self, execution_id: str) -> dict[str, Any]:
        """The row of an execution, with its derived columns."""
        (row,) = await self.of("execution_detail", execution_id=uuid_of(execution_id))
        return row

    async def timers(self, execution_id: str) -> dict[str, int]:
        """The times at which the timers of an execution are due, by kind."""
        found = await self.of("timer", execution_id=uuid_of(execution_id))
        return {row["kind"]: row["due_at"] for row in found}

    async def events(self, execution_id: str) -> list[dict[str, Any]]:
        """The events of an execution in order."""
        found = await self.of("event_each", execution_id=uuid_of(execution_id))
        return sorted(found, key=lambda row: int(row["event_id"]))

    async def snapshot(self, *, without: Iterable[str] = ()) -> dict[str, list[str]]:
        """Every row of every table as text, sorted."""
        query = await self._connection.fetchval(
            """select string_agg(format('select %1$L, array(select t::text from %1$I t order by 1)', relname),
                                 ' union all ')
                 from pg_class where relnamespace = $1::text::regnamespace and relkind in ('r', 'p')
                  and not relispartition and relname <> all($2::text[])""",
            SCHEMA,
            ["test_clock", "test_change", *without],
        )
        return dict(await self._connection.fetch(query))

    @asynccontextmanager
    async def unchanged(self, *, without: Iterable[str] = ()) -> AsyncIterator[None]:
        """Fail if any row of any table has changed at the end of the block."""
        before = await self.snapshot(without=without)
        yield
        assert await self.snapshot(without=without) == before


class Given:
    """Creates the starting point of a test through real operations; arguments that are not given have defaults."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock

    async def created(self, **overrides: Any) -> ExecutionId:
        """A new execution on the lane `default`; the overrides are arguments of create_execution."""
        answer = await self.engine.create_execution(
            **{
                "namespace": "tests",
                "lane_id": "default",
                "execution_kind": "job",
                "input_payload": b'{"a": 1}',
                "priority": 0,
                "creator_identity": "test",
                **overrides,
            }
        )
        assert isinstance(answer, Created), answer
        return answer.execution_id

    async def run(
        self, *, worker: str = "worker", lease_ttl_ms: int = 30_000, capabilities: Iterable[str] = (), **overrides: Any
    ) -> ClaimedExecution:
        """A new execution that a worker has claimed."""
        execution_id = await self.created(**overrides)
        claimed = await self.claim(
            worker=worker,
            lease_ttl_ms=lease_ttl_ms,
            capabilities=capabilities,
            lane_id=overrides.get("lane_id", "default"),
        )
        assert claimed.execution_id == execution_id, "an older execution of the lane was claimed instead of the new one"
        return claimed

    async def claim(
        self,
        *,
        worker: str = "worker",
        lease_ttl_ms: int = 30_000,
        capabilities: Iterable[str] = (),
        lane_id: str = "default",
    ) -> ClaimedExecution:
        """The next execution of a lane, claimed by a worker."""
        (claimed,) = await self.engine.claim_many(
            lanes=(lane_id,),
            worker_id=worker,
            worker_instance_id=f"{worker}-1",
            capabilities=tuple(capabilities),
            lease_ttl_ms=lease_ttl_ms,
            limit=1,
        )
        return claimed

    async def claimed(self, **overrides: Any) -> Handle:
        """The handle of a new execution that a worker has claimed."""
        return (await self.run(**overrides)).handle

    async def completed(self, *, result: bytes | None = b"done", **overrides: Any) -> ExecutionId:
        """An execution that succeeded."""
        handle = await self.claimed(**overrides)
        await self.engine.complete(handle, result)
        return handle.execution_id

    async def failed(self, *, reason: str = "no luck", **overrides: Any) -> ExecutionId:
        """An execution whose only attempt failed."""
        handle = await self.claimed(**overrides)
        await self.engine.fail(handle, reason=reason, classification="permanent")
        return handle.execution_id

    async def cancelled(self, **overrides: Any) -> ExecutionId:
        """An execution that was cancelled before its first claim."""
        execution_id = await self.created(**overrides)
        await self.engine.cancel_execution(execution_id=execution_id, reason="not wanted")
        return execution_id

    async def delayed(self, *, seconds: float = 60, **overrides: Any) -> ExecutionId:
        """An execution that becomes claimable after this many seconds."""
        return await self.created(delay_until=await self.clock.now() + round(seconds * 1000), **overrides)

    async def backing_off(self, *, delay_ms: int = 60_000, max_retries: int = 3, **overrides: Any) -> Handle:
        """The handle of a failed attempt whose execution waits for its retry."""
        retry = {"max_retries": max_retries, "backoff": {"type": "fixed", "delay_ms": delay_ms}}
        policy = {**overrides.pop("policy", {}), "retry_policy": retry}
        handle = await self.claimed(policy=policy, **overrides)
        await self.engine.fail(handle, reason="no luck")
        return handle

    async def expired_lease(self, *, lease_ttl_ms: int = 30_000, **overrides: Any) -> Handle:
        """A handle whose lease has expired and is not marked as expired yet."""
        handle = await self.claimed(lease_ttl_ms=lease_ttl_ms, **overrides)
        await self.clock.advance(ms=lease_ttl_ms + 1)
        return handle

    async def reclaimable(self, **overrides: Any) -> Handle:
        """A handle whose lease is marked as expired: the next claim reclaims its execution."""
        handle = await self.expired_lease(**overrides)
        assert await parts_of(self.engine).lease_expiry.mark_expired([handle.execution_id]) == 1
        return handle

    async def registered(
        self, *, worker_instance_id: str = "worker-1", liveness_ttl_ms: int = 60_000, **overrides: Any
    ) -> str:
        """A live worker of the registry."""
        await self.engine.register_worker(
            **{
                "worker_id": "worker",
                "worker_instance_id": worker_instance_id,
                "lanes": ("default",),
                "liveness_ttl_ms": liveness_ttl_ms,
                "namespace": "tests",
                **overrides,
            }
        )
        return worker_instance_id
