"""Statements find rows by their keys, even in plans that were made on empty tables.

Sessions use generic plans, which are kept while the tables grow. On an empty table a worse index can look as cheap as
the right one, and so can a scan of a whole index that is then joined with the few given rows.
"""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from creates import new
from databases import Databases
from flowfabric.db.session import session_settings
from flowfabric.db.statements import Statement, Statements
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings

PACKAGE = Path(__file__).parents[2] / "src" / "flowfabric"
ALL = {
    statement.name: statement
    for folder in ("engine", "reconcile")
    for path in sorted((PACKAGE / folder).rglob("*.sql"))
    for statement in Statements(path)
    if "lock table" not in statement.sql
}

EXECUTION = ("partition_key", "execution_id")
KEYS: dict[str, tuple[tuple[str, ...], ...]] = {
    # By its flow: the members of one flow.
    "execution": (EXECUTION, ("flow_id",)),
    "execution_input": (EXECUTION,),
    "execution_result": (EXECUTION,),
    # A place is unique: places are drawn from one sequence.
    "ready": (("queue_no", "place"), ("route_no", "place")),
    "timer": (EXECUTION,),
    "claim": (("partition_key", "claim_no"),),
    "retained": (),
    "listed": (EXECUTION,),
    "attempt": (EXECUTION,),
    "claim_grant": (EXECUTION,),
    "execution_tag": (EXECUTION,),
    "idempotency_key": (("partition_key", "operation", "scope"),),
    "suspension": (EXECUTION,),
    "waitpoint": (("partition_key", "waitpoint_id"), ("execution_id",)),
    "signal": (EXECUTION, ("waitpoint_id",)),
    "stream": (EXECUTION,),
    "stream_frame": (EXECUTION,),
    "stream_summary": (EXECUTION,),
    "flow": (("partition_key", "flow_id"),),
    "flow_tag": (("partition_key", "flow_id"),),
    "flow_summary": (("partition_key", "flow_id"),),
    "edge": (("partition_key", "flow_id"), ("upstream_id",), ("downstream_id",)),
    "edge_group": (("partition_key", "flow_id"),),
    "pending_cancel_group": (("partition_key", "flow_id"),),
    "cancel_backlog": (("partition_key", "flow_id"),),
    "cancel_backlog_member": (("partition_key", "flow_id"),),
    # A queue: it is short, and a partition has few of its entries.
    "cascade_entry": (("partition_key",),),
    "quota_policy": (("partition_key", "quota_policy_id"), ("quota_policy_id",)),
    # The slots and the guards of one key.
    "quota_key": (("quota_key_no",), ("partition_key", "quota_policy_id", "key")),
    "slot_return": (("quota_key_no",),),
    "quota_admission": (("quota_key_no",), ("execution_id",)),
    "budget_limit": (("partition_key", "budget_id"), ("budget_id",)),
    "budget_usage": (("partition_key", "budget_id"),),
    "worker": (("partition_key", "namespace", "worker_instance_id"),),
    "worker_event": (("partition_key", "namespace", "worker_instance_id"),),
}
"""The tables that grow, and the columns that identify one row, or the rows of one execution, waitpoint or flow."""

ORDERED: dict[str, set[str]] = {
    "claim_by_route": {"ready_route"},
    "claim_by_queue": {"ready_queue"},
    "lock_best_of_routes": {"ready_route"},
    "lock_best_of_queues": {"ready_queue"},
    "pick_candidates": {"ready_route", "ready_queue"},
    "list_heads": {"ready_queue"},
    "read_has_entries": {"ready_route"},
    "return_expired_slots": {"claim_grant_slots_due"},
    "list_eligible": {"ready_route"},
    "read_reasons": {"ready_route", "ready_queue", "retained_due", "worker_due"},
    "list_unserved_members": {"worker_due"},
    "promote_delayed": {"timer_due"},
    "list_delayed": {"timer_due"},
    "lock_expired": {"timer_due"},
    "lock_timed_out": {"timer_due"},
    "take_spent_claims": {"claim_due"},
    "take_retained": {"retained_due"},
    "list_retained": {"retained_due"},
    "lock_ends": {"retained_due"},
    "lock_ends_anywhere": {"retained_due"},
    "take_ends": {"retained_due"},
    "read_retained_end": {"retained_due"},
    "list_trimmable": {"retained_due"},
    "take_flows": {"flow_retained"},
    "list_retained_flows": {"flow_retained"},
    "take_hidden_frames": {"stream_due"},
    "list_due_streams": {"stream_due"},
    "list_due_flows": {"flow_due"},
    "list_due_backlogs": {"cancel_backlog_due"},
    "list_old_entries": {"cascade_entry_age"},
    "list_stuck": {"listed_state"},
    "list_limited": {"listed_state"},
    "list_served": {"listed_state", "worker_due"},
    "take_expired_guards": {"quota_admission_due"},
    "take_expired_keys": {"idempotency_key_due"},
    "take_old_grants": {"claim_grant_due"},
    "take_expired_workers": {"worker_due"},
    "take_old_worker_events": {"worker_event_age"},
    "expire_pending_waitpoints": {"waitpoint_due"},
    "list_pending_waitpoints": {"waitpoint_due"},
    "read_due": {
        "claim_grant_slots_due",
        "timer_due",
        "claim_due",
        "retained_due",
        "idempotency_key_due",
        "waitpoint_due",
        "claim_grant_due",
        "stream_due",
        "flow_due",
        "cancel_backlog_due",
        "cascade_entry_age",
        "pending_cancel_group_age",
        "worker_due",
        "listed_state",
        "quota_admission_due",
    },
}
"""The indexes that a statement scans in order, with a start or an end and a limit."""

READERS = {
    "list_newest",
    "list_flows",
    "list_tagged_flows",
    "list_oldest",
    "list_pairs",
    "list_candidates",
    "count_executions",
    "list_suspended",
    "list_expired_leases",
    "list_live_workers",
    "read_range_end",
    "list_vectors",
    "list_with_vector",
    "list_broken_rules",
    "list_orphans",
    "list_broken_members",
    "read_flow_range_end",
    "list_broken_flows",
    "list_flow_orphans",
    "take_old_identities",
    "list_pending_groups",
    "read_entry",
    "list_miscounted_keys",
    "recount_keys",
    "list_broken_keys",
    "list_broken_budgets",
    "list_broken_reservations",
    "list_wrong_queues",
}
"""Statements that scan a table: lists, counts, consistency checks, and scans of the few claims."""

_SCAN = re.compile(r"(?:-> +)?(.*Scan.*) on (\w+)(?: \w+)?$")
_USING = re.compile(r"using (\w+)")


async def plan(connection: asyncpg.Connection, statement: Statement) -> list[str]:
    """The generic plan of a statement, line by line."""
    nothing = f"({', '.join(['null'] * len(statement.parameters))})" if statement.parameters else ""
    await connection.execute(f"prepare {statement.name} as {statement.sql}")
    found = await connection.fetch(f"explain (costs off) execute {statement.name}{nothing}")
    await connection.execute(f"deallocate {statement.name}")
    return [row[0].strip() for row in found]


def scans(lines: list[str]) -> list[tuple[str, str, str]]:
    """The scans of tables that grow: scan type, table and condition."""
    found = []
    for at, line in enumerate(lines):
        scan = _SCAN.match(line)
        if scan is None or scan[2] not in KEYS:
            continue
        # An `exists` without a condition reads at most one row.
        if lines[at - 1].startswith("InitPlan") and not "".join(lines[at + 1 : at + 2]).startswith(
            ("Index Cond", "Filter")
        ):
            continue
        condition = next((each for each in lines[at + 1 : at + 3] if " Cond: " in each), "")
        found.append((scan[1], scan[2], condition))
    return found


def is_by_key(table: str, condition: str) -> bool:
    """Whether a condition names all columns of a key."""
    if condition.startswith("TID Cond"):
        return True
    return any(all(re.search(rf"\b{column} = ", condition) for column in key) for key in KEYS[table])


@pytest.fixture(scope="module", params=["no statistics", "statistics of empty tables", "statistics of full tables"])
async def planner(request: pytest.FixtureRequest, databases: Databases) -> AsyncIterator[asyncpg.Connection]:
    """A session with the settings of the engine, with each state of the planner's statistics."""
    async with databases.new() as url:
        if request.param == "statistics of full tables":
            async with Engine.connect(settings=Settings(database_url=url)) as engine:
                await fill(engine, round(time.time() * 1000))
        connection = await asyncpg.connect(url, server_settings=session_settings("flowfabric"))
        if request.param != "no statistics":
            await connection.execute("vacuum analyze")
        yield connection
        await connection.close()


async def fill(engine: Engine, now: int) -> None:
    """Create executions with rows in every table that grows."""
    for _ in range(3):
        await engine.create_many([new(execution_deadline_at=now + 3_600_000, tags={"app.a": "b"}) for _ in range(1000)])
    await engine.create_many([new(input_payload=b"x" * 300) for _ in range(1000)])
    await engine.create_many([new(delay_until=now + 3_600_000, idempotency_key=str(n)) for n in range(1000)])
    runs = []
    for _ in range(20):
        runs += await engine.claim_many(lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=50)
    await engine.complete_many([(run.handle, b"1") for run in runs[:500]])
    for failed in range(500, 600, 10):
        await asyncio.gather(*(engine.fail(run.handle, reason="no luck") for run in runs[failed : failed + 10]))


async def test_rows_are_found_by_their_keys_whatever_the_planner_knows(planner: asyncpg.Connection) -> None:
    wrong: list[str] = []
    ordered: defaultdict[str, set[str]] = defaultdict(set)
    count = 0
    for name in sorted(set(ALL) - READERS - {"lock_keys", "lock_events"}):
        for how, table, condition in scans(await plan(planner, ALL[name])):
            count += 1
            if is_by_key(table, condition):
                continue
            using = _USING.search(how)
            # An ordered scan has a start or an end.
            if using is None or using[1] not in ORDERED.get(name, ()) or not re.search(r" (<|<=|>|>=) | = ", condition):
                wrong.append(f"{name}: {how} on {table} {condition}")
            else:
                ordered[name].add(using[1])
    assert wrong == [], "\n".join(wrong)
    assert ordered == ORDERED
    assert count > 150


@pytest.mark.parametrize("name", ["insert_alike", "insert_executions"])
async def test_a_create_of_small_inputs_skips_the_table_of_large_ones(planner: asyncpg.Connection, name: str) -> None:
    lines = await plan(planner, ALL[name])
    at = lines.index("->  Insert on execution_input")
    switch = f"${ALL[name].parameters.index('has_large_inputs') + 1}"
    filters = [line for line in lines[at : at + 6] if line.startswith("One-Time Filter: ")]
    assert len(filters) == 1
    assert re.fullmatch(rf"One-Time Filter: \(?{re.escape(switch)}( AND .+)?", filters[0])


@pytest.mark.parametrize("name", ["complete_leases", "end_leases"])
async def test_an_ending_with_a_small_result_skips_the_table_of_large_ones(
    planner: asyncpg.Connection, name: str
) -> None:
    lines = await plan(planner, ALL[name])
    at = lines.index("->  Insert on execution_result")
    switch = f"${ALL[name].parameters.index('has_large_results') + 1}"
    assert f"One-Time Filter: {switch}" in lines[at : at + 6]


@pytest.mark.parametrize(
    ("table", "condition"),
    [
        ("execution_input", "has_large_input"),
        ("execution_result", "may_have_large_result"),
        ("execution_tag", "has_tags"),
        ("listed", "is_listed"),
    ],
)
async def test_retention_skips_a_table_in_which_the_execution_has_no_rows(
    planner: asyncpg.Connection, table: str, condition: str
) -> None:
    lines = await plan(planner, ALL["take_retained"])
    at = next(at for at, line in enumerate(lines) if f"Delete on {table} " in line)
    assert lines[at + 2].startswith("->  CTE Scan on deleted d")
    assert lines[at + 3] == f"Filter: {condition}"


async def test_retention_counts_no_frames_if_there_are_no_streams(planner: asyncpg.Connection) -> None:
    lines = await plan(planner, ALL["take_retained"])
    counted = lines[lines.index("CTE counted") :]
    frames = next(at for at, line in enumerate(counted) if " on stream_frame f" in line)
    assert any(line.startswith("One-Time Filter: ") for line in counted[:frames])


@pytest.mark.parametrize("name", ["claim_by_route", "claim_by_queue"])
async def test_a_claim_merges_ordered_index_scans(planner: asyncpg.Connection, name: str) -> None:
    lines = await plan(planner, ALL[name])
    first = next(at for at, line in enumerate(lines) if line.endswith("Merge Append"))
    index = "ready_route" if name == "claim_by_route" else "ready_queue"
    merged = [line for line in lines[first:] if f"Index Scan using {index} on ready" in line]
    assert len(merged) == 8
    # Only the spans beyond those eight are sorted, and only the first entry of each is read.
    sorts = [at for at, line in enumerate(lines) if re.search(r"\bSort$", line)]
    assert [lines[at + 1] for at in sorts if not re.match(r"Sort Key: r_\d\.place$", lines[at + 1])] == []
    assert all(at < first for at in sorts)
    # The claimed execution, its entry and its stream are updated by ctid, without a second index lookup.
    by_ctid = {found[1] for line in lines if (found := re.search(r"Tid Scan on (\w+)", line))}
    assert by_ctid == {"execution", "ready", "stream"}


def test_a_scan_without_a_key_is_detected() -> None:
    lines = [
        "Delete on timer",
        "->  Nested Loop",
        "->  Index Scan using timer_due on timer",
        "->  CTE Scan on moved",
    ]
    assert scans(lines) == [("Index Scan using timer_due", "timer", "")]
    assert not is_by_key("timer", "")
    assert not is_by_key("timer", "Index Cond: (partition_key = m.partition_key)")
    assert is_by_key("timer", "Index Cond: ((partition_key = ANY (ARRAY[m.p])) AND (execution_id = m.execution_id))")


def test_every_exception_names_a_statement() -> None:
    assert set(ORDERED) | READERS <= set(ALL)
