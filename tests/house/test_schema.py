"""The schema in Postgres agrees with its dump and with the enumerations in Python."""

from enum import StrEnum

import asyncpg
import pytest

from flowfabric.db.dump import SCHEMA_FILE, dump_migrations
from flowfabric.model.edge import DependencyState, GroupState
from flowfabric.model.event import EventKind
from flowfabric.model.states import (
    AttemptLifecycle,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
    WaitpointState,
)
from flowfabric.model.stream import FrameMode

ENUMS: dict[str, type[StrEnum]] = {
    "lifecycle_phase": LifecyclePhase,
    "ownership_state": OwnershipState,
    "eligibility_state": EligibilityState,
    "blocking_reason": BlockingReason,
    "terminal_outcome": TerminalOutcome,
    "attempt_state": AttemptState,
    "public_state": PublicState,
    "attempt_lifecycle": AttemptLifecycle,
    "attempt_type": AttemptType,
    "lane_state": LaneState,
    "waitpoint_state": WaitpointState,
    "event_kind": EventKind,
    "frame_mode": FrameMode,
    "dependency_state": DependencyState,
    "group_state": GroupState,
}
ONLY_IN_SQL = {
    "timer_kind": ["delay", "attempt_timeout", "deadline", "suspension_timeout"],
    "keyed_operation": ["submit", "suspend", "signal", "spend", "settle"],
}
"""Enumerations that only statements use, with their labels."""


@pytest.fixture
async def labels(connection: asyncpg.Connection) -> dict[str, list[str]]:
    """The enumerations of the migrated schema, with their labels in order."""
    query = """select t.typname, array_agg(e.enumlabel::text order by e.enumsortorder)
                 from pg_enum e join pg_type t on t.oid = e.enumtypid
                where t.typnamespace = 'flowfabric'::regnamespace group by 1"""
    return dict(await connection.fetch(query))


async def test_every_enumeration_has_the_same_labels_in_python_and_in_postgres(labels: dict[str, list[str]]) -> None:
    assert labels == {name: [member.value for member in enum] for name, enum in ENUMS.items()} | ONLY_IN_SQL


async def test_the_schema_dump_is_up_to_date(empty_url: str) -> None:
    assert await dump_migrations(empty_url) == SCHEMA_FILE.read_text(encoding="utf-8"), (
        "run python -m flowfabric.db.dump"
    )


SMALL = {
    "configuration",
    "namespace",
    "lane",
    "capability_set",
    "kind",
    "worker_identity",
    "route",
    "queue",
    "signing_key",
    "schema_migration",
    "feed_trim",
    "feed_origin",
    "admission_key",
    "limit_attachment",
    "slot_return",
}
"""Global tables that every process caches or seldom reads; each node of a distributed Postgres would have a copy."""
OF_QUOTA_KEYS = {"slot_return", "quota_admission"}
"""Tables that a distributed Postgres would distribute by quota_key_no: claims and ends of leases know no more."""
WITHOUT_KEY = {
    "ready": ["ready_queue", "ready_route"],
    "retained": ["retained_due", "retained_mixed"],
    "event": ["event_feed", "event_order", "event_rare_order"],
}
"""Tables without a primary key, read only by ordered index scans, and their indexes."""

_CONSTRAINTS = """
select c.relname as on_table, n.conname as name, n.contype::text as type
  from pg_constraint n join pg_class c on c.oid = n.conrelid
 where c.relnamespace = 'flowfabric'::regnamespace and not c.relispartition and c.relname not like 'test_%'
"""
_INDEXES = """
select t.relname as on_table, i.relname as name, x.indisprimary as is_primary, x.indisunique as is_unique,
       array(select a.attname::text from unnest(x.indkey) with ordinality k(attnum, nth)
              left join pg_attribute a on a.attrelid = t.oid and a.attnum = k.attnum order by k.nth) as columns,
       pg_get_expr(x.indpred, x.indrelid) as predicate
  from pg_index x join pg_class i on i.oid = x.indexrelid join pg_class t on t.oid = x.indrelid
 where t.relnamespace = 'flowfabric'::regnamespace and not t.relispartition and t.relname not like 'test_%'
"""
_COLUMNS = """
select c.relname, array_agg(a.attname::text)
  from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
 where c.relnamespace = 'flowfabric'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
   and c.relname not like 'test_%'
 group by 1
"""


async def test_every_constraint_was_named_by_a_migration(connection: asyncpg.Connection) -> None:
    wrong = []
    for on_table, name, kind in await connection.fetch(_CONSTRAINTS):
        match kind:
            case "p":
                is_named = name == f"{on_table}_pkey"
            case "n":
                # Postgres 18 names not-null constraints itself.
                is_named = True
            case _:
                # A name made up by Postgres has one of these endings.
                is_named = name.startswith(on_table) and not name.endswith(("_check", "_key", "_fkey", "_excl"))
                is_named = is_named and not name[-1].isdigit()
        if not is_named:
            wrong.append(f"{on_table}: {name}")
    assert wrong == []


async def test_every_unique_key_starts_with_the_partition(connection: asyncpg.Connection) -> None:
    keys = [row for row in await connection.fetch(_INDEXES) if row["is_unique"] and row["on_table"] not in SMALL]
    wrong = [row["name"] for row in keys if row["columns"][0] != "partition_key" and row["on_table"] not in WITHOUT_KEY]
    assert [name for name in wrong if name.removesuffix("_pkey") not in OF_QUOTA_KEYS] == []
    of_quota_keys = [row for row in keys if row["on_table"] in OF_QUOTA_KEYS]
    assert {row["columns"][0] for row in of_quota_keys} == {"quota_key_no"}
    # This unique index does without the partition: `place` is drawn from one sequence for all partitions.
    assert [row["name"] for row in keys if row["on_table"] in WITHOUT_KEY] == ["ready_queue"]


async def test_every_table_except_the_small_ones_has_a_partition_column(connection: asyncpg.Connection) -> None:
    columns = dict(await connection.fetch(_COLUMNS))
    assert set(columns) >= SMALL | set(WITHOUT_KEY)
    others = [table for table in columns if table not in SMALL and table not in OF_QUOTA_KEYS]
    assert [table for table in others if "partition_key" not in columns[table]] == []
    assert [table for table in SMALL if "partition_key" in columns[table]] == []


async def test_only_the_listed_tables_have_no_primary_key(connection: asyncpg.Connection) -> None:
    indexes = await connection.fetch(_INDEXES)
    found = {table: sorted(row["name"] for row in indexes if row["on_table"] == table) for table in WITHOUT_KEY}
    assert found == WITHOUT_KEY
    with_key = {row["on_table"] for row in indexes if row["is_primary"]}
    assert set(dict(await connection.fetch(_COLUMNS))) - with_key == set(WITHOUT_KEY)


NEVER_CHANGED = {"partition_key", "execution_id", "namespace_no", "lane_no", "created_at", "flow_id"}
"""An execution joins a flow once, and no claim or end changes that."""


async def test_no_index_of_execution_contains_a_column_that_changes(connection: asyncpg.Connection) -> None:
    # Otherwise every claim and every ending would write to all indexes of the table.
    indexes = [row for row in await connection.fetch(_INDEXES) if row["on_table"] == "execution"]
    assert {column for row in indexes for column in row["columns"]} == NEVER_CHANGED
    assert [row["name"] for row in indexes if row["predicate"] is not None] == ["execution_flow"]
