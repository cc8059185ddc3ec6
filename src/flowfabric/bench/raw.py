"""The raw limit: the throughput of asyncpg on a minimal queue table, without an engine."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import asyncpg

from flowfabric.bench.api import Statement, mint_uuid_texts, statements_beside
from flowfabric.bench.subject import (
    BATCH,
    CONNECTIONS,
    LARGE_PAYLOADS,
    PAYLOAD,
    PAYLOADS,
    Figure,
    Figures,
    Task,
    rate,
    spread,
)

SQL = statements_beside(__file__)

FILL = 5_000


async def measure(task: Task) -> Figures:
    """Claim and complete, and insert, one row and a hundred rows per statement on several connections."""
    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(CONNECTIONS):
            connection = await asyncpg.connect(task.url)
            stack.push_async_callback(connection.close)
            connections.append(connection)
        await connections[0].execute(SQL.create_queue.sql)
        raw = Raw(connections)
        few, many, large = task.count(5_000), task.count(120_000), task.count(80_000)
        return {
            "raw_claim1_complete1": await raw.claim_and_complete(SQL.claim_1, SQL.complete_one, few),
            "raw_claim100_complete100": await raw.claim_and_complete(SQL.claim_100, SQL.complete_many, many),
            "raw_insert1": await raw.insert(SQL.insert_one, PAYLOADS, count=few, batch=1),
            "raw_insert100": await raw.insert(SQL.insert_many, PAYLOADS, count=many, batch=BATCH),
            "raw_insert100_1500b": await raw.insert(SQL.insert_many, LARGE_PAYLOADS, count=large, batch=BATCH),
        }


class Raw:
    """One table and the connections that share it."""

    def __init__(self, connections: list[Any]) -> None:
        self._connections = connections

    async def claim_and_complete(self, claim: Statement, complete: Statement, count: int) -> Figure:
        """The rate at which a backlog is claimed and completed; each statement is a transaction."""
        first = self._connections[0]
        await first.execute(SQL.empty_queue.sql)
        for at in range(0, count, FILL):
            size = min(FILL, count - at)
            await first.execute(SQL.insert_many.sql, mint_uuid_texts(size), [PAYLOAD] * size)
        await first.execute(SQL.analyze_queue.sql)
        batch = BATCH if complete is SQL.complete_many else 1
        pairs = [(await each.prepare(claim.sql), await each.prepare(complete.sql)) for each in self._connections]

        async def work(take: Any, end: Any) -> None:
            if ids := [row[0] for row in await take.fetch()]:
                await end.fetch(ids[0] if batch == 1 else ids)

        calls = [lambda pair=pair: work(*pair) for pair in pairs]
        return await rate(count, spread(count // batch, *calls))

    async def insert(self, statement: Statement, payloads: Sequence[bytes], *, count: int, batch: int) -> Figure:
        """The rate at which rows are inserted with ids of the caller, `batch` per statement and transaction."""
        await self._connections[0].execute(SQL.empty_queue.sql)
        prepared = [await each.prepare(statement.sql) for each in self._connections]

        async def one(insert: Any) -> None:
            if batch == 1:
                await insert.fetch(mint_uuid_texts(1)[0], payloads[0])
            else:
                await insert.fetch(mint_uuid_texts(batch), payloads[:batch])

        calls = [lambda insert=insert: one(insert) for insert in prepared]
        return await rate(count, spread(count // batch, *calls))
