"""What a fault sweep calls operations on (subjects), their rows in a comparable form, and probes of an engine."""

import asyncio
import contextlib
import json
import re
import time
from typing import Any
from uuid import uuid4

import asyncpg

from fixtures import Clock, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import ContentionError, EngineError
from flowfabric.model.execution import Created, NewExecution
from flowfabric.model.grant import Granted
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, FlowId, parse_execution_id, split_execution_id
from flowfabric.model.suspension import SuspendDetails
from flowfabric.model.waitpoint import PendingWaitpoint

LEASE_MS = 30_000
MINUTE = 60_000
POLICY: dict[str, Any] = {
    "retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": MINUTE}},
    "timeout_policy": {"attempt_timeout_ms": 60 * MINUTE},
}
SECRET = "cd" * 32
WORKER: dict[str, Any] = {"worker_id": "worker", "worker_instance_id": "worker-1"}

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_VARYING = frozenset(
    {"event_id", "xid", "place", "sequence", "namespace_no", "lane_no", "route_no", "queue_no", "worker_no", "claim_no"}
    | {"budget_partition", "execution_partition"}
    | {"edge_no", "after_edge_no", "grant_id", "partition_key", "subject_partition", "token", "token_kid", "secret"}
    | {"quota_key_no", "slot_keys"}
)
"""Columns whose values differ between subjects."""
_FIRST_TIMESTAMP = 10**12
"""Integers above this are timestamps in milliseconds."""

_EXECUTION_TABLES = (
    "execution_detail",
    "execution_input",
    "execution_result",
    "ready",
    "timer",
    "listed",
    "execution_tag",
    "attempt",
    "event",
    "claim_grant",
    "suspension",
    "waitpoint",
    "signal",
    "stream",
    "stream_frame",
    "stream_summary",
)
_FLOW_TABLES = (
    "flow",
    "flow_tag",
    "flow_summary",
    "edge",
    "edge_group",
    "pending_cancel_group",
    "cascade_entry",
    "cancel_backlog",
    "cancel_backlog_member",
)
_BUDGET_TABLES = (
    "budget",
    "budget_limit",
    "budget_account",
    "budget_usage",
    "budget_spend",
    "budget_reservation",
)
_ROWS = f"""
with own as materialized (
  select e.execution_id from execution e join lane l using (lane_no) where l.lane_id = $1 and e.created_at >= $2)
{
    " union all ".join(
        f"select '{table}', to_jsonb(t)::text from {table} t where t.execution_id in (select execution_id from own)"
        " and to_jsonb(t) -> 'details' ->> 'effect' is distinct from 'deduped'"
        for table in _EXECUTION_TABLES
    )
}
{
    "".join(
        f"union all select '{table}', to_jsonb(t)::text from {table} t"
        " where t.flow_id in (select e.flow_id from own join execution e using (execution_id)) "
        for table in _FLOW_TABLES
    )
}
{
    "".join(
        f"union all select '{table}', to_jsonb(t)::text from {table} t where t.budget_id = any($5::uuid[]) "
        for table in _BUDGET_TABLES
    )
}
union all select 'event', to_jsonb(t)::text from event t
 where t.execution_id in (select e.flow_id from own join execution e using (execution_id))
union all select 'retained', to_jsonb(t)::text
  from (select r.retain_until, r.ended_at, i.execution_id
          from retained r cross join unnest(r.execution_ids) as i(execution_id)) t
 where t.execution_id in (select execution_id from own)
union all select 'idempotency_key', to_jsonb(t)::text from idempotency_key t
 where t.subject_id in (select execution_id from own) or t.subject_id = any($5)
    or t.scope in (select w.waitpoint_id from waitpoint w join own using (execution_id))
union all select 'lane', state::text from lane where lane_id = $1 and state <> 'active'
union all select 'lane', to_jsonb(t)::text from lane t where t.lane_id = $3
union all select 'limit_attachment', to_jsonb(t)::text from limit_attachment t where t.scope_id = $3
union all select 'queue', jsonb_build_object('budgets', budget_ids, 'quotas', cardinality(quota_key_nos))::text
  from queue join lane l using (lane_no) where l.lane_id = $3
union all select 'quota_key', jsonb_build_object('tokens', k.window_tokens, 'used', k.taken - r.returned)::text
  from quota_key k
 cross join lateral (
       select coalesce(sum(r.returned), 0) as returned from slot_return r where r.quota_key_no = k.quota_key_no) r
 where k.key = $3
union all select 'quota_admission', to_jsonb(t)::text
  from quota_admission t where t.quota_key_no in (select quota_key_no from quota_key where key = $3)
union all select 'flow', to_jsonb(t)::text from flow t where t.flow_kind = $3
union all select 'worker', to_jsonb(t)::text from worker t where t.worker_instance_id = $3
union all select 'worker_event', to_jsonb(t)::text from worker_event t where t.worker_instance_id = $3
union all select 'quota_policy', to_jsonb(t)::text from quota_policy t where t.quota_policy_id = $6
union all select 'quota_key', to_jsonb(t)::text from quota_key t where t.quota_policy_id = $6
union all select 'quota_admission', to_jsonb(t)::text from quota_admission t join quota_key k using (quota_key_no)
 where k.quota_policy_id = $6
union all select 'signing_key', is_current || ' ' || (expires_at is null) from signing_key where kid = $4
"""
"""Every row that a call on a subject may write, except the events that report repeated signals."""

_BUSY_SESSIONS = """
select coalesce(string_agg(state || ': ' || left(query, 80), ' | '), '') from pg_stat_activity
 where datname = current_database() and application_name = 'flowfabric' and state <> 'idle'
"""


class Subject:
    """What one call works on: its lane, its ids, and the execution that the preparation has created."""

    def __init__(
        self, engine: Engine, clock: Clock, connection: asyncpg.Connection, *, lane_id: str, began: int
    ) -> None:
        self.engine = engine
        """The engine of the preparation; the call itself is made on another engine."""
        self.clock = clock
        self.connection = connection
        self.lane_id = lane_id
        self.began = began
        """When the preparation began, in milliseconds."""
        self.name = uuid4().hex
        """A unique name."""
        self.execution_id = ExecutionId(f"{{fp:1}}:{uuid4()}")
        self.flow_id: FlowId
        self.upstream_id: ExecutionId
        self.handle: Handle
        self.grant: Granted
        self.wait: SuspendDetails
        self.pending: PendingWaitpoint
        self.cursor: bytes
        self.event_id: int
        self.is_settled = True
        """Whether its rows are compared after the cascade; not if the call does what the cascade would do."""
        self.quota_policy_id = uuid4()
        self.ids = [uuid4() for _ in range(4)]
        """Ids for the arguments of a call, the same for repeated calls."""

    @property
    def named(self) -> dict[str, Any]:
        """The arguments that name the execution and its lane."""
        return {"execution_id": self.execution_id, "lane_id": self.lane_id}

    @property
    def edge(self) -> dict[str, Any]:
        """The arguments that name an edge from the upstream execution to the subject's."""
        return {
            "edge_id": self.ids[0],
            "upstream_execution_id": self.upstream_id,
            "downstream_execution_id": self.execution_id,
        }

    @property
    def triple(self) -> dict[str, Any]:
        """The arguments that name the execution and the fence of its lease."""
        return {
            "execution_id": self.execution_id,
            "lease_id": self.handle.lease_id,
            "lease_epoch": self.handle.lease_epoch,
            "attempt_id": self.handle.attempt_id,
        }

    @property
    def fence(self) -> dict[str, Any]:
        """The arguments of `triple` and the attempt index."""
        return {**self.triple, "attempt_index": self.handle.attempt_index}

    def new(self, **overrides: Any) -> dict[str, Any]:
        """The arguments of `create_execution`."""
        return {
            "namespace": "tests",
            "lane_id": self.lane_id,
            "execution_kind": "job",
            "input_payload": b"{}",
            "priority": 0,
            "creator_identity": "test",
            "policy": POLICY,
            **overrides,
        }


class Scene:
    """Prepares and reads the store of a sweep, with an engine and a connection that are not under test."""

    def __init__(self, engine: Engine, clock: Clock, connection: asyncpg.Connection) -> None:
        self.engine = engine
        self._clock = clock
        self._connection = connection

    async def subject(self, *, lane_id: str) -> Subject:
        """A subject whose rows are identified by its lane and their time of creation."""
        began = await self._clock.advance(ms=1000)
        return Subject(self.engine, self._clock, self._connection, lane_id=lane_id, began=began)

    async def snapshot(self, subject: Subject) -> list[str]:
        """The rows of a subject, without ids and with times relative to its beginning."""
        if subject.is_settled:
            await self._settle(subject)
        rows = await self._connection.fetch(
            _ROWS,
            subject.lane_id,
            subject.began,
            subject.name,
            subject.name,
            subject.ids,
            subject.quota_policy_id,
        )
        return sorted(f"{table}: {_comparable(text, subject)}" for table, text in rows)

    async def _settle(self, subject: Subject) -> None:
        """Settle the ends of the members of the subject's flow, which its engine may be settling in the background."""
        if hasattr(subject, "flow_id"):
            partition, _ = split_execution_id(parse_execution_id(subject.execution_id))
            await parts_of(self.engine).cascade.settle_flow(partition, subject.flow_id)

    async def wait_until_idle(self) -> str:
        """Wait up to two seconds until every session of the engines is idle; return what is still running."""
        deadline = time.monotonic() + 2
        while True:
            busy: str = await self._connection.fetchval(_BUSY_SESSIONS)
            if not busy or time.monotonic() > deadline:
                return busy
            await asyncio.sleep(0.002)

    async def inconsistencies(self) -> list[str]:
        """The inconsistencies that the engine finds in the rows."""
        return [f"{one.execution_id} {one.problem}" for one in await self.engine.find_inconsistencies()]

    async def clean_up(self, subject: Subject) -> None:
        """Cancel the open executions of the subject's lane, activate the lane, and restore a missing signing key."""
        await self._settle(subject)
        query = """select '{fp:' || e.partition_key || '}:' || e.execution_id from execution e join lane using (lane_no)
                    where lane_id = $1 and lifecycle_phase <> 'terminal'"""
        for (execution_id,) in await self._connection.fetch(query, subject.lane_id):
            # The cancellation of another member of its flow may have ended it.
            with contextlib.suppress(ContentionError):
                await self.engine.cancel_execution(execution_id=execution_id, reason="clean up")
        if await self._connection.fetchval(
            "select true from lane where lane_id = $1 and state <> 'active'", subject.lane_id
        ):
            await self.engine.set_lane_state(subject.lane_id, "active")
        if not await self._connection.fetchval("select exists (select from signing_key)"):
            await self.engine.seed_waitpoint_hmac_secret(kid=uuid4().hex, secret_hex=SECRET)

    async def probe(self, engine: Engine) -> list[str]:
        """Make ten calls on an engine; return a text for each effect that another connection does not find.

        Independent calls run concurrently, so that every connection of the engine is used.
        """
        name = uuid4().hex
        new: dict[str, Any] = {
            "namespace": "tests",
            "lane_id": "probe",
            "execution_kind": "job",
            "input_payload": name.encode() * 10,
            "priority": 0,
            "creator_identity": "test",
        }
        first, second = await asyncio.gather(
            engine.create_execution(**new), engine.create_execution(**new, idempotency_key=name)
        )
        many = await engine.create_many([NewExecution(**{**new, "priority": priority}) for priority in (1, 2)])
        made = [one.execution_id for one in (first, second, *many) if isinstance(one, Created)]
        claimed = await engine.claim_many(
            lanes=("probe",), worker_id="probe", worker_instance_id="probe-1", limit=50, lease_ttl_ms=LEASE_MS
        )
        handles = {one.execution_id: one.handle for one in claimed}
        missing = [f"{one} was created but cannot be claimed" for one in made if one not in handles]
        missing += [
            f"{one.execution_id} was claimed with the input of another execution"
            for one in claimed
            if one.execution_id in made and one.input_payload != new["input_payload"]
        ]
        if missing or len(made) != 4:
            return missing or [f"not created: {[first, second, *many]}"]
        done, tagged, renewed, failed = made
        await asyncio.gather(
            engine.progress(handles[done], percent=42),
            engine.set_execution_tag(tagged, "app.probe", name),
            engine.renew(handles[renewed]),
        )
        await asyncio.gather(
            engine.complete(handles[done], name.encode()),
            engine.fail(handles[failed], reason=name, classification="permanent"),
            engine.cancel_execution(execution_id=tagged, reason=name),
        )
        wrong = await self._missing_effects(name, made, handles)
        left = [handle for execution_id, handle in handles.items() if execution_id not in (done, tagged, failed)]
        for verdict in await engine.complete_many([(handle, b"") for handle in left]):
            if isinstance(verdict, EngineError):
                wrong.append(f"a probe was not completed: {verdict}")
        return wrong

    async def _missing_effects(
        self, name: str, made: list[ExecutionId], handles: dict[ExecutionId, Handle]
    ) -> list[str]:
        done, tagged, renewed, failed = made
        query = """
            select e.execution_id, e.public_state::text as state, e.progress_pct, e.lease_id, e.failure_reason,
                   e.cancellation_reason, e.result_payload, t.value as tag, k.key
              from execution e
              left join execution_tag t using (partition_key, execution_id)
              left join idempotency_key k on k.subject_id = e.execution_id and k.operation = 'submit'
             where e.execution_id = any($1::uuid[])"""
        rows = {
            str(row["execution_id"]): row for row in await self._connection.fetch(query, [uuid_of(one) for one in made])
        }
        expected: dict[ExecutionId, dict[str, Any]] = {
            done: {"state": "completed", "result_payload": name.encode(), "progress_pct": 42},
            tagged: {"state": "cancelled", "cancellation_reason": name, "tag": name, "key": name},
            renewed: {"state": "active", "lease_id": handles[renewed].lease_id},
            failed: {"state": "failed", "failure_reason": name},
        }
        wrong = []
        for execution_id, values in expected.items():
            row = rows.get(uuid_of(execution_id))
            if row is None:
                wrong.append(f"{execution_id} was acknowledged but is not in the store")
                continue
            found = {column: row[column] for column in values}
            if found != values:
                wrong.append(f"{execution_id}: acknowledged {values}, stored {found}")
        return wrong


def error_of(task: "asyncio.Task[object]") -> BaseException | None:
    """The error of a call: the one it raised, or the first in the list that it returned."""
    if (raised := task.exception()) is not None:
        return raised
    answer = task.result()
    verdicts = list(answer) if isinstance(answer, list) else []
    return next((one for one in verdicts if isinstance(one, EngineError)), None)


def _comparable(text: str, subject: Subject) -> str:
    if not text.startswith("{"):
        return text
    row: dict[str, Any] = json.loads(text)
    kept = {column: value for column, value in row.items() if column not in _VARYING}
    return _without_ids(json.dumps({name: _relative(value, subject.began) for name, value in kept.items()}), subject)


def _relative(value: Any, began: int) -> Any:
    return value - began if isinstance(value, int) and value > _FIRST_TIMESTAMP else value


def _without_ids(text: str, subject: Subject) -> str:
    text = _UUID.sub("id", text.replace(subject.name, "name").replace(subject.lane_id, "lane"))
    # Tokens and handles are hexadecimal.
    text = re.sub(r"[0-9a-f]{40,}", "hex", text)
    # JSON values within a row may contain times.
    return re.sub(r"\b1[0-9]{12}\b", lambda found: f"t+{int(found[0]) - subject.began}", text)
