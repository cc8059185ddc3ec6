"""A run: start processes, inject faults, heal, and compare the histories with the store."""

import asyncio
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings

from .actor import settings
from .checker import Store, StoredExecution, Verdict, check
from .cluster import Cluster
from .history import History, read
from .injector import Injector
from .processes import Processes
from .proxy_process import ProxyProcess

ROLES = {"submitter": 2, "worker": 2, "claimer": 1, "signaller": 1, "operator": 1}
_NOT_ENDED = """
select row_to_json(e)::text from (
  select execution_id, lifecycle_phase, ownership_state, eligibility_state, blocking_reason, attempt_state, lease_epoch,
         lease_expires_at - ff_now() as lease_left_ms, granted_until - ff_now() as granted_ms,
         (select array_agg(t.kind::text || ' in ' || (t.due_at - ff_now())) from timer t
           where t.execution_id = e.execution_id) as timers,
         exists (select from ready r where r.execution_id = e.execution_id) as is_ready,
         (select c.expires_at - ff_now() from claim c
           where c.partition_key = e.partition_key and c.claim_no = e.claim_no) as claim_left_ms,
         xmin, xmax, worker_no
    from execution e where lifecycle_phase <> 'terminal' limit 20) e
"""
_SESSIONS = """
select row_to_json(a)::text from (
  select pid, application_name, state, wait_event_type, wait_event, now() - xact_start as in_transaction,
         pg_blocking_pids(pid) as waits_for, backend_xid, left(query, 80) as query
    from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()) a
"""
HEAL_SECONDS = 60
"""How long the open executions may take to end after the last fault."""
ACKNOWLEDGED = ("created", "duplicate", "claimed", "completed", "failed", "cancelled", "accepted", "tagged", "rotated")

_ID = "'{fp:' || e.partition_key || '}:' || e.execution_id"
_EXECUTIONS = f"""
select {_ID} as id, e.public_state::text as state, e.input_payload, e.result_payload as result from execution_detail e
"""
_END_EVENTS = f"select {_ID} as id, count(*) as count from event_each e where outcome between 1 and 5 group by 1"
_LEASES = f"select {_ID} as id, lease_epoch, lease_id::text from event_each e where kind in ('acquired', 'reclaimed')"
_SIGNALS = "select signal_id::text, waitpoint_id::text, coalesce(idempotency_key, '') from signal"
_TAGS = f"select {_ID} as id, key, value from execution_tag e"
_OPEN = "select count(*) from execution where lifecycle_phase <> 'terminal'"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of a run."""

    seed: int
    seconds: float
    """How long faults are injected; every kind is injected once even if that takes longer."""
    pace: float = 1
    """A factor for the duration of faults and the pauses between them."""
    lease_ms: int = 2_000
    standby: bool = True
    small_disk: bool = True
    roles: Mapping[str, int] = field(default_factory=lambda: dict(ROLES))


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a run."""

    plan: Plan
    faults: Mapping[str, int]
    skipped: Mapping[str, str]
    acknowledged: Mapping[str, int]
    errors: Mapping[str, int]
    verdicts: Sequence[Verdict]
    healed_seconds: float

    @property
    def has_violations(self) -> bool:
        """Whether an invariant is violated."""
        return any(verdict.violations for verdict in self.verdicts)


async def run(plan: Plan, *, keep: Path | None = None) -> Report:
    """Inject faults, heal and compare; the histories and logs are kept if a folder is given."""
    # The processes inherit the secret, which a store that is not embedded needs for its first key.
    os.environ.setdefault("FF_WAITPOINT_HMAC_SECRET", "ab" * 32)
    folder = keep or Path(tempfile.mkdtemp(prefix="ff-histories-"))
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(standby=plan.standby, small_disk=plan.small_disk)
    try:
        await cluster.start()
        await _migrate(cluster)
        return await _run_on(cluster, plan, folder)
    finally:
        cluster.discard()
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


async def _migrate(cluster: Cluster) -> None:
    given = settings(cluster.primary.url).model_copy(update={"migrate_on_start": True})
    async with Engine.connect(settings=given):
        pass


async def _run_on(cluster: Cluster, plan: Plan, folder: Path) -> Report:
    history = History(folder / "runner.history", "runner")
    proxy = await ProxyProcess.start(cluster.primary.url, f"{plan.seed} proxy")
    processes = Processes(proxy.url, folder, plan.roles, str(plan.seed), plan.lease_ms, history)
    try:
        processes.start_all()
        rng = random.Random(f"{plan.seed} faults")
        injector = Injector(cluster, proxy, processes, history, rng, lease_ms=plan.lease_ms, pace=plan.pace)
        await processes.ready()
        await injector.inject(plan.seconds)
        await injector.heal()
        healed_at = time.monotonic()
        await processes.end("submitter", "operator")
        if not await _all_ended(cluster, until=healed_at + HEAL_SECONDS):
            for line in await _stuck(cluster):
                history.record("stuck", detail=line)
                print(line, flush=True)
        healed_seconds = time.monotonic() - healed_at
        await processes.end()
        store = await _read(cluster)
        records = read(await asyncio.to_thread(lambda: sorted(folder.glob("*.history"))))
        return Report(
            plan=plan,
            faults=injector.injected,
            skipped=injector.skipped,
            acknowledged=Counter(record.event for record in records if record.event in ACKNOWLEDGED),
            errors=Counter(
                f"{record['operation']} {record.event}" for record in records if record.event in ("unknown", "refused")
            ),
            verdicts=check(records, store),
            healed_seconds=healed_seconds,
        )
    finally:
        processes.kill_all()
        await proxy.stop()


async def _all_ended(cluster: Cluster, until: float) -> bool:
    while time.monotonic() < until:
        connection = await _session(cluster)
        try:
            if not await connection.fetchval(_OPEN):
                return True
        finally:
            connection.terminate()
        await asyncio.sleep(0.2)
    return False


async def _stuck(cluster: Cluster) -> list[str]:
    """The open executions, and every session that may block them."""
    connection = await _session(cluster)
    try:
        return [row[0] for query in (_NOT_ENDED, _SESSIONS) for row in await connection.fetch(query)]
    finally:
        connection.terminate()


async def _session(cluster: Cluster) -> Any:
    connection = await cluster.connect()
    await connection.execute("set search_path to flowfabric")
    return connection


async def _read(cluster: Cluster) -> Store:
    connection = await _session(cluster)
    try:
        executions = {row["id"]: _stored(row) for row in await connection.fetch(_EXECUTIONS)}
        end_events = {row["id"]: row["count"] for row in await connection.fetch(_END_EVENTS)}
        leases = frozenset(tuple(row) for row in await connection.fetch(_LEASES))
        signals = [tuple(row) for row in await connection.fetch(_SIGNALS)]
        tags = {(row["id"], row["key"]): row["value"] for row in await connection.fetch(_TAGS)}
        kids = frozenset(row[0] for row in await connection.fetch("select kid from signing_key"))
    finally:
        connection.terminate()
    async with Engine.connect(settings=Settings(database_url=cluster.primary.url)) as engine:
        found = [f"{one.execution_id} {one.problem}" for one in await engine.find_inconsistencies()]
    return Store(
        executions=executions,
        end_events=end_events,
        leases=leases,
        signals=signals,
        tags=tags,
        kids=kids,
        inconsistencies=found,
    )


def _stored(row: asyncpg.Record) -> StoredExecution:
    result = row["result"]
    return StoredExecution(
        state=row["state"],
        payload=json.loads(row["input_payload"])["order"],
        result=None if result is None else json.loads(result),
    )


MOST_VIOLATIONS = 20
MOST_RECORDS = 15


def table(report: Report) -> str:
    """The report as Markdown: faults, operations, invariants and their violations."""
    plan = report.plan
    rows = [f"seed {plan.seed}, {plan.seconds:g} s of faults, all executions ended in {report.healed_seconds:.1f} s"]
    rows += ["", "| fault | injected |", "|---|---|"]
    rows += [f"| {name} | {count} |" for name, count in sorted(report.faults.items())]
    rows += [f"| {name} | skipped: {why} |" for name, why in report.skipped.items()]
    rows += ["", "| answer | count |", "|---|---|"]
    rows += [f"| {name} | {count} |" for name, count in (*report.acknowledged.items(), *sorted(report.errors.items()))]
    rows += ["", "| invariant | checked | violations |", "|---|---|---|"]
    rows += [f"| {one.invariant} | {one.checked} | {len(one.violations)} |" for one in report.verdicts]
    for verdict in report.verdicts:
        for violation in verdict.violations[:MOST_VIOLATIONS]:
            rows += ["", f"VIOLATION: {verdict.invariant}: {violation.text}"]
            rows += [f"    {record}" for record in violation.records[-MOST_RECORDS:]]
    return "\n".join(rows)
