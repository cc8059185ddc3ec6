"""Daily partitions of the event table: created ahead of time, dropped when they are too old."""

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import asyncpg

from flowfabric.db.database import Connection
from flowfabric.db.migrate import check_schema_name

logger = logging.getLogger(__name__)

DAY_MS = 86_400_000
LOCK_TIMEOUT = "100ms"
"""How long a change of the partitions may block writers; a change that cannot get its lock is tried again next time."""
LARGEST_DEFAULT = 1 << 30
"""The largest default partition, in bytes, that is scanned while writers wait."""

_IN_DEFAULT = "the default partition holds events of that day"
_NAME = re.compile(r"event_(\d{8})")

_LIST = """
select c.relname as name, h.inhrelid is not null as is_attached
  from pg_class c
  left join pg_inherits h on h.inhrelid = c.oid and h.inhparent = to_regclass($1 || '.event')
 where c.relnamespace = to_regnamespace($1) and c.relkind = 'r' and c.relname ~ '^event_[0-9]{8}$'
 order by 1
"""

_OWNER = """
select quote_ident(current_user), quote_ident(pg_get_userbyid(relowner))
  from pg_class where oid = to_regclass($1 || '.event')
"""

Record = Callable[[int, int], Awaitable[None]]
"""Records which events are dropped: those from a millisecond until before another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnsuredPartitions:
    """The partitions that were created, and those that were not, each with the reason."""

    created: tuple[str, ...]
    skipped: dict[str, str]


def name_of(at_ms: int) -> str:
    """The name of the partition of the day that contains an instant."""
    return f"event_{datetime.fromtimestamp(at_ms // 1000, UTC):%Y%m%d}"


def bounds_of(name: str) -> tuple[int, int]:
    """The first millisecond of a partition and the first millisecond after it."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not the name of a daily partition")
    first = int(datetime.strptime(found[1], "%Y%m%d").replace(tzinfo=UTC).timestamp()) * 1000
    return first, first + DAY_MS


async def ensure(connection: Connection, *, schema: str, now_ms: int, ahead_days: int = 2) -> EnsuredPartitions:
    """Create the missing partitions of today and of the days ahead; any number of processes may call it at once.

    A day that already has events in the default partition gets none. Raises NotOwner if the role may not create them.
    """
    check_schema_name(schema)
    wanted = [name_of(now_ms + day * DAY_MS) for day in range(ahead_days + 1)]
    existing = {row["name"] for row in await connection.fetch(_LIST, schema) if row["is_attached"]}
    created: list[str] = []
    skipped: dict[str, str] = {}
    for name in wanted:
        if name in existing:
            continue
        try:
            if await _create(connection, schema, name):
                created.append(name)
        except asyncpg.CheckViolationError:
            skipped[name] = _IN_DEFAULT
        except _Skipped as reason:
            skipped[name] = str(reason)
        except asyncpg.LockNotAvailableError:
            logger.debug("%s: the event table is locked, trying again later", name)
    return EnsuredPartitions(created=tuple(created), skipped=skipped)


async def drop_older(connection: Connection, *, schema: str, before_ms: int, record: Record) -> list[str]:
    """Drop the partitions that hold only older events; return their names.

    `record` is called for each of them, in the transaction that makes its events invisible.
    """
    check_schema_name(schema)
    dropped: list[str] = []
    for name, is_attached in await connection.fetch(_LIST, schema):
        if bounds_of(name)[1] > before_ms:
            continue
        try:
            # Detaching locks the whole table but is quick; dropping the detached table may take longer.
            if is_attached:
                await _detach(connection, schema, name, record)
            if await _drop(connection, schema, name):
                dropped.append(name)
        except asyncpg.LockNotAvailableError:
            logger.debug("%s: the event table is locked, trying again later", name)
    return dropped


class NotOwner(Exception):
    """The role may not change the partitions; the message names their owner."""


class _Skipped(Exception):
    """A day gets no partition of its own; the message says why."""


async def _create(connection: Connection, schema: str, name: str) -> bool:
    first, end = bounds_of(name)
    async with _locked_transaction(connection, schema):
        if await _exists(connection, schema, name):
            return False
        newest = await connection.fetchval(f'select at from "{schema}".event_default order by event_id desc limit 1')
        if newest is not None:
            if first <= newest < end:
                raise _Skipped(_IN_DEFAULT)
            size = await connection.fetchval("select pg_relation_size($1::regclass)", f'"{schema}".event_default')
            if size > LARGEST_DEFAULT:
                raise _Skipped(f"the default partition is larger than {LARGEST_DEFAULT >> 20} MB")
        # Attaching a table locks only the default partition; creating it as a partition would lock all of them.
        await connection.execute(
            f'create table "{schema}"."{name}" ('
            f'like "{schema}".event including constraints including defaults including storage);'
            f'alter table "{schema}".event attach partition "{schema}"."{name}" for values from ({first}) to ({end})'
        )
        return True


async def _detach(connection: Connection, schema: str, name: str, record: Record) -> None:
    async with _locked_transaction(connection, schema):
        if not await _exists(connection, schema, name, attached=True):
            return
        # Locks all that detaching locks before the rows that `record` writes: deleting single events does so too.
        tables = ", ".join(f'only "{schema}".{table}' for table in ("event", "event_default", f'"{name}"'))
        await connection.execute(f"lock table {tables} in access exclusive mode")
        await record(*bounds_of(name))
        await connection.execute(f'alter table "{schema}".event detach partition "{schema}"."{name}"')


async def _drop(connection: Connection, schema: str, name: str) -> bool:
    async with _locked_transaction(connection, schema):
        if not await _exists(connection, schema, name, attached=False):
            return False
        await connection.execute(f'drop table "{schema}"."{name}"')
        return True


async def _exists(connection: Connection, schema: str, name: str, *, attached: bool | None = None) -> bool:
    rows = await connection.fetch(_LIST, schema)
    return any(row["name"] == name and attached in (None, row["is_attached"]) for row in rows)


@asynccontextmanager
async def _locked_transaction(connection: Connection, schema: str) -> AsyncIterator[None]:
    """A transaction with the advisory lock under which all processes change the partitions."""
    try:
        async with connection.transaction():
            await connection.execute(f"set local lock_timeout = '{LOCK_TIMEOUT}'")
            await connection.execute(
                "select pg_advisory_xact_lock(hashtextextended('flowfabric partitions ' || $1, 0))", schema
            )
            yield
    except asyncpg.InsufficientPrivilegeError as refused:
        role, owner = await connection.fetchrow(_OWNER, schema)
        raise NotOwner(
            f"user {role} does not own table event of schema {schema}, {owner} does ({refused.args[0]}); events go to"
            f" event_default and are deleted row by row; to have partitions, run a worker as {owner}"
        ) from None
