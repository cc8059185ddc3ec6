"""Every transaction that writes an event has its transaction id before it draws the event's id.

Feeds rely on it: the events of a transaction that began after a snapshot have greater ids than those in the snapshot.
"""

import re
from uuid import uuid4

import asyncpg
import pytest

from engine.flow.graphs import BuiltFlow
from engine.sending import waiting
from engine.state import claim
from engine.waits import suspend_run
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import submit
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import mint_for_flow

from .test_statements import ALL

_ALTERATION = """
create sequence test_event_id;
create table test_writer (query text);
create function next_test_event_id() returns bigint language plpgsql as $$
begin
  if pg_current_xact_id_if_assigned() is null then
    raise exception 'an event id was drawn before the transaction had its id';
  end if;
  insert into test_writer values (current_query());
  return nextval('test_event_id');
end $$;
alter table event alter column event_id drop identity;
alter table event alter column event_id set default next_test_event_id();
"""
_INSERT = "insert into event (at, partition_key, kind, namespace_no, execution_id) "
WRITERS = {name for name, statement in ALL.items() if re.search(r"\binsert into event\b", statement.sql)}


@pytest.fixture
async def checked(connection: asyncpg.Connection) -> asyncpg.Connection:
    """A database whose event ids come from a function that records the query and fails if its transaction has no id."""
    await connection.execute(_ALTERATION)
    return connection


async def test_a_statement_that_draws_an_event_id_too_early_is_detected(checked: asyncpg.Connection) -> None:
    values = "values (1, 0, 'expired', 1, gen_random_uuid())"
    with pytest.raises(asyncpg.RaiseError, match="before the transaction had its id"):
        await checked.execute(_INSERT + values)
    # A CTE that the insert does not read runs after it.
    with pytest.raises(asyncpg.RaiseError, match="before the transaction had its id"):
        await checked.execute(
            f"with late as (insert into lane (lane_id, registered_at, registered_by) values ('x', 1, 'x')) {_INSERT}"
            + values
        )
    await checked.execute(
        f"""with early as (insert into lane (lane_id, registered_at, registered_by) values ('x', 1, 'x') returning 1)
            {_INSERT} select 1, 0, 'expired', 1, gen_random_uuid() from early"""
    )


async def test_every_statement_that_writes_events_has_a_transaction_id_before(
    checked: asyncpg.Connection,
    engine: Engine,
    given: Given,
    clock: Clock,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = {"ff.instance_id": "one"}
    for _ in range(2):
        await given.created(tags=instance)
    await given.created(tags=instance, idempotency_key="k")
    runs = await claim(engine)
    await engine.renew_many([run.handle for run in runs])
    await engine.complete_many([(run.handle, b"done") for run in runs[:2]])
    await engine.fail(runs[2].handle, reason="no luck")
    await engine.set_execution_tag(runs[0].execution_id, "ff.instance_id", "two")

    # A claim that wants few of many kinds reads queues.
    for at in range(12):
        await given.created(execution_kind=f"kind {at}", lane_id="kinds")
    (run,) = await claim(engine, "kinds", kinds=("kind 3",))
    await engine.delay(run.handle, 0)

    limited = uuid4()
    await engine.create_quota_policy(limited, window_seconds=60, max_requests_per_window=0, max_concurrent=1)
    await given.created(lane_id="limited", policy={"quota_policy_id": str(limited)})
    assert len(await claim(engine, "limited")) == 1

    named = await given.created(lane_id="named")
    await engine.issue_grant_and_claim(execution_id=named, lane_id="named", lease_duration_ms=1000)
    await clock.advance(seconds=2)
    assert await parts_of(engine).lease_expiry.mark_expired([named]) == 1

    wait = await waiting(engine, given, lane_id="waits")
    await wait.send("ready")
    (resumed,) = await claim(engine, "waits")
    await suspend_run(engine, resumed.handle)
    await engine.resume_execution(execution_id=wait.execution_id)
    await engine.change_priority(wait.execution_id, 5)

    # The second member revives a flow that has ended.
    flow = await BuiltFlow.create(given, rows)
    for _ in range(2):
        await engine.cancel_execution(execution_id=await flow.member(), reason="not wanted")
        assert await engine.wait_for_flow(flow.flow_id, 30_000) is not None

    flow_id = uuid4()
    await engine.create_flow(flow_id, flow_kind="dag", namespace="tests")
    ended = await given.completed(execution_id=mint_for_flow(flow_id, parts_of(engine).store.rules.partitions))
    await engine.add_execution_to_flow(flow_id, ended)
    await engine.cancel_flow(flow_id, reason="not wanted", cancellation_policy="cancel_all")
    member = {
        "lane_id": "flows",
        "execution_kind": "job",
        "input_payload": b"1",
        "creator_identity": "test",
        "tags": instance,
    }
    monkeypatch.setattr(submit, "ROWS_PER_STATEMENT", 1)
    await engine.submit_flow(flow_kind="dag", namespace="tests", nodes=[{"name": name, **member} for name in "ab"])

    await engine.replay_execution(execution_id=runs[0].execution_id)

    quota_policy_id = uuid4()
    await engine.create_quota_policy(quota_policy_id, 60, 0, 1)
    await given.created(lane_id="limited", policy={"quota_policy_id": str(quota_policy_id)})
    assert len(await claim(engine, "limited")) == 1

    queries = await checked.fetch("select distinct query from test_writer")
    assert {match[1] for row in queries if (match := re.match(r"/\* (\w+) \*/", row["query"]))} == WRITERS


async def test_event_ids_are_drawn_one_by_one(connection: asyncpg.Connection) -> None:
    """A session that caches numbers of the sequence would use low ones late."""
    query = "select seqcache from pg_sequence where seqrelid = pg_get_serial_sequence('event', 'event_id')::regclass"
    assert await connection.fetchval(query) == 1
