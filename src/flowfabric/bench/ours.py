"""Shared by the subjects that measure FlowFabric: engines and executions to submit."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import count, islice
from typing import Any

from pydantic import SecretStr

from flowfabric.bench.api import Engine, EngineError, ExecutionPolicy, NewExecution, Settings, statements_beside
from flowfabric.bench.subject import CONNECTIONS, PAYLOADS, spread

SQL = statements_beside(__file__)

LANE = "bench"
KIND = "noop"
LARGEST_BATCH = 1_000
SCHEMA = "flowfabric"

_numbers = count()


def settings_on(url: str, **overrides: Any) -> Settings:
    """The default settings with these overrides; the engine migrates the database when it connects."""
    return Settings(
        database_url=url,
        schema_name=SCHEMA,
        migrate_on_start=True,
        waitpoint_hmac_secret=SecretStr("ab" * 32),
        **overrides,
    )


@asynccontextmanager
async def engine_on(url: str, **overrides: Any) -> AsyncIterator[Engine]:
    """Connect an engine with the default settings and these overrides, and migrate its database."""
    async with Engine.connect(settings=settings_on(url, **overrides)) as engine:
        yield engine


def noop(
    *,
    lane: str = LANE,
    kind: str = KIND,
    payload: bytes | None = None,
    priority: int = 0,
    tags: dict[str, str] | None = None,
    policy: ExecutionPolicy | None = None,
) -> NewExecution:
    """A no-op execution; without a given payload, consecutive ones have different payloads."""
    return NewExecution(
        namespace="bench",
        lane_id=lane,
        execution_kind=kind,
        input_payload=PAYLOADS[next(_numbers) % len(PAYLOADS)] if payload is None else payload,
        priority=priority,
        creator_identity="bench",
        tags=tags,
        policy=policy,
    )


def noops(*, lane: str = LANE) -> Iterator[NewExecution]:
    """An endless supply of no-op executions."""
    while True:
        yield noop(lane=lane)


async def fill(engine: Engine, items: Iterable[NewExecution], count: int) -> None:
    """Create executions from the items, LARGEST_BATCH in each call, until there are at least `count`."""
    source = iter(items)

    async def create() -> None:
        check(await engine.create_many(list(islice(source, LARGEST_BATCH))))

    await spread(-(-count // LARGEST_BATCH), *[create] * CONNECTIONS)


def check(verdicts: Iterable[object]) -> None:
    """Raise the first error among the results of a batch."""
    for verdict in verdicts:
        if isinstance(verdict, EngineError):
            raise verdict
