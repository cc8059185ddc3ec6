"""The privileges that a process needs on a schema, and which of them a session lacks."""

from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from flowfabric.db.address import database_of, server_of

_SHOWN = 3
"""How many tables a message names; the rest are counted."""

_SESSION = """
select current_setting('transaction_read_only')::boolean as is_read_only, pg_is_in_recovery() as is_standby,
       quote_ident(current_user) as role
"""
# Partitions are accessed with the privileges of their parent, and the sequence of an identity column needs none. A
# process only reads schema_migration.
_MISSING = """
with relation as (
  select c.oid, c.relname::text as name, c.relkind = 'S' as is_sequence
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
   where n.nspname = $1 and c.relname = any($2::text[]) and c.relkind in ('r', 'p', 'S') and not c.relispartition
     and not exists (select from pg_depend d
                      where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'i'))
select 'sequences' as kind, 'USAGE' as privilege, name
  from relation where is_sequence and not has_sequence_privilege(oid, 'usage')
union all
select 'tables', p.privilege, r.name
  from relation r cross join unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) as p(privilege)
 where not r.is_sequence and (r.name <> 'schema_migration' or p.privilege = 'SELECT')
   and not has_table_privilege(r.oid, p.privilege)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rights:
    """Why a session cannot do the work of a process, and what to do; None means no problem."""

    read_only: str | None
    missing: str | None


async def read_only_reason(connection: asyncpg.Connection, *, url: str) -> str | None:
    """Return why a session cannot write and what to do, or None if it can."""
    return _read_only(await connection.fetchrow(_SESSION), _where(url))


def _read_only(found: asyncpg.Record, where: str) -> str | None:
    if found["is_standby"]:
        return (
            f"{where} is read-only: it is a standby; name the primary in the database URL (FF_DATABASE_URL),"
            " or promote the standby"
        )
    if found["is_read_only"]:
        return (
            f"{where} is read-only: default_transaction_read_only is on; turn it off where it is set, for example"
            f" `alter role {found['role']} set default_transaction_read_only = off`"
        )
    return None


def _where(url: str) -> str:
    return f"{server_of(url)} (database {database_of(url)})"


async def rights_of(connection: asyncpg.Connection, *, url: str, schema: str, names: Sequence[str]) -> Rights:
    """Compare the privileges of a session on these tables and sequences with what a process needs."""
    found = await connection.fetchrow(_SESSION)
    where = _where(url)
    rows = await connection.fetch(_MISSING, schema, names)
    missing = None
    if rows:
        lacks = " and ".join(
            _missing_privileges(kind, [row for row in rows if row["kind"] == kind])
            for kind in ("tables", "sequences")
            if any(row["kind"] == kind for row in rows)
        )
        missing = f"user {found['role']} of {where} lacks {lacks}: as the owner run `{grants(schema, found['role'])}`"
    return Rights(read_only=_read_only(found, where), missing=missing)


def grants(schema: str, role: str) -> str:
    """The statements that grant a role, given by its quoted name, what a process needs on a schema."""
    return (
        f"grant usage on schema {schema} to {role};"
        f" grant select, insert, update, delete on all tables in schema {schema} to {role};"
        f" grant usage on all sequences in schema {schema} to {role};"
    )


def _missing_privileges(kind: str, rows: list[asyncpg.Record]) -> str:
    privileges = ", ".join(dict.fromkeys(row["privilege"] for row in rows))
    names = sorted({row["name"] for row in rows})
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{privileges} on {kind} {', '.join(names[:_SHOWN])}{rest}"
