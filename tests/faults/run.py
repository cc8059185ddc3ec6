"""A run: processes, faults, healing, and the comparison of what was told with what is stored."""

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
from .checker import Kept, Store, Verdict, check
from .cluster import Cluster
from .history import History, Line, read
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
"""How long everything may take to end after the last fault."""
ACKNOWLEDGED = ("created", "duplicate", "claimed", "completed", "failed", "cancelled", "accepted", "tagged", "rotated")

_ID = "'{fp:' || e.partition_key || '}:' || e.execution_id"
_EXECUTIONS = f"""
select {_ID} as id, e.public_state::text as state, e.input_payload, e.result_payload as result from execution_detail e
"""
_ENDINGS = f"select {_ID} as id, count(*) as count from event_each e where outcome between 1 and 5 group by 1"
_LEASES = f"select {_ID} as id, lease_epoch, lease_id::text from event_each e where kind in ('acquired', 'reclaimed')"
_SIGNALS = "select signal_id::text, waitpoint_id::text, coalesce(idempotency_key, '') from signal"
_TAGS = f"select {_ID} as id, key, value from execution_tag e"
_OPEN = "select count(*) from execution where lifecycle_phase <> 'terminal'"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run consists of."""

    seed: int
    seconds: float
    standby: bool = True
    small_disk: bool = True
    roles: Mapping[str, int] = field(default_factory=lambda: dict(ROLES))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a run."""

    plan: Plan
    faults: Mapping[str, int]
    left_out: Mapping[str, str]
    acknowledged: Mapping[str, int]
    unanswered: Mapping[str, int]
    verdicts: Sequence[Verdict]
    healed_seconds: float

    @property
    def has_violations(self) -> bool:
        """Whether an invariant does not hold."""
        return any(verdict.violations for verdict in self.verdicts)


async def run(plan: Plan, *, keep: Path | None = None) -> Report:
    """Strike, heal and compare; the histories and logs are kept in a folder where one is named."""
    # Processes inherit it; a store that is not embedded starts with the first key only where it is told one.
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
    processes = Processes(proxy.url, folder, plan.roles, str(plan.seed), history)
    try:
        processes.start_all()
        injector = Injector(cluster, proxy, processes, history, random.Random(f"{plan.seed} faults"))
        await processes.ready()
        await injector.strike(plan.seconds)
        await injector.heal()
        healed_at = time.monotonic()
        await processes.end("submitter", "operator")
        if not await _everything_ended(cluster, until=healed_at + HEAL_SECONDS):
            for line in await _held_up(cluster):
                history.tell("held up", by=line)
                print(line, flush=True)
        healed_seconds = time.monotonic() - healed_at
        await processes.end()
        store = await _read(cluster)
        lines = read(await asyncio.to_thread(lambda: sorted(folder.glob("*.history"))))
        return Report(
            plan=plan,
            faults=injector.struck,
            left_out=injector.left_out,
            acknowledged=Counter(line.what for line in lines if line.what in ACKNOWLEDGED),
            unanswered=Counter(f"{line.what}: {line['of']}" for line in lines if line.what in ("unknown", "refused")),
            verdicts=check(lines, store),
            healed_seconds=healed_seconds,
        )
    finally:
        processes.kill_all()
        await proxy.stop()


async def _everything_ended(cluster: Cluster, until: float) -> bool:
    while time.monotonic() < until:
        connection = await _session(cluster)
        try:
            if not await connection.fetchval(_OPEN):
                return True
        finally:
            connection.terminate()
        await asyncio.sleep(0.2)
    return False


async def _held_up(cluster: Cluster) -> list[str]:
    """What has not ended, and every session that might be in its way."""
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
        executions = {row["id"]: _kept(row) for row in await connection.fetch(_EXECUTIONS)}
        endings = {row["id"]: row["count"] for row in await connection.fetch(_ENDINGS)}
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
        endings=endings,
        leases=leases,
        signals=signals,
        tags=tags,
        kids=kids,
        inconsistencies=found,
    )


def _kept(row: asyncpg.Record) -> Kept:
    result = row["result"]
    return Kept(
        state=row["state"],
        payload=json.loads(row["input_payload"])["order"],
        result=None if result is None else json.loads(result),
    )


MOST_SHOWN = 20
MOST_LINES = 15


def table(report: Report) -> str:
    """The report as Markdown: faults, operations, invariants, and what breaks them."""
    plan = report.plan
    rows = [
        f"seed {plan.seed}, {plan.seconds:g} s of faults, all ended {report.healed_seconds:.1f} s after the healing"
    ]
    rows += ["", "| fault | struck |", "|---|---|"]
    rows += [f"| {name} | {count} |" for name, count in sorted(report.faults.items())]
    rows += [f"| {name} | left out: {why} |" for name, why in report.left_out.items()]
    rows += ["", "| operation | acknowledged |", "|---|---|"]
    rows += [f"| {name} | {count} |" for name, count in report.acknowledged.items()]
    rows += [f"| answered with an error, {name} | {count} |" for name, count in sorted(report.unanswered.items())]
    rows += ["", "| invariant | checked | violations |", "|---|---|---|"]
    rows += [f"| {one.invariant} | {one.checked} | {len(one.violations)} |" for one in report.verdicts]
    for verdict in report.verdicts:
        for violation in verdict.violations[:MOST_SHOWN]:
            rows += [
                "",
                f"VIOLATION: {verdict.invariant}: {violation.text}",
                *map(_shown, violation.lines[-MOST_LINES:]),
            ]
    return "\n".join(rows)


def _shown(line: Line) -> str:
    return f"    {line}"
