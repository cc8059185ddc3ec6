"""`trim_retention` deletes executions that ended long enough ago, and nothing else."""

from typing import Any

import asyncpg
import pytest

from engine.flows import flow_of, settle
from engine.sending import Waiting
from engine.state import refused
from engine.waits import suspend_args, suspend_run
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution import retention
from flowfabric.engine.parts import parts_of
from flowfabric.feeds import ScannerFilter
from flowfabric.model.errors import TransportError
from flowfabric.model.ids import ExecutionId
from flowfabric.model.stream import DurableSummary, Frame

HOUR = 3_600_000
DAY = 24 * HOUR
BELONGINGS = (
    "execution",
    "execution_input",
    "execution_result",
    "execution_tag",
    "attempt",
    "listed",
    "retained",
)

pytestmark = pytest.mark.usefixtures("consistent_rows")


def kept_for(retention_ms: int) -> dict[str, Any]:
    """The arguments of an execution with a retention of its own."""
    return {"policy": {"stream_policy": {"retention_ttl_ms": retention_ms}}}


async def stored(rows: Rows) -> set[str]:
    """The UUIDs of the stored executions."""
    return {str(row["execution_id"]) for row in await rows.of("execution")}


async def test_an_execution_is_deleted_with_all_its_rows_a_day_after_its_end(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    ended = [
        await given.completed(tags={"a.b": "1"}, input_payload=b"x" * 300, result=b"x" * 300),
        await given.failed(),
        await given.cancelled(),
    ]
    await given.created(lane_id="waiting")
    retried = await given.backing_off(delay_ms=0, lane_id="retried")
    await engine.complete((await given.claim(lane_id="retried")).handle)
    await clock.advance(ms=DAY - 1)
    async with rows.unchanged():
        assert await engine.trim_retention() == 0
    await clock.advance(ms=2)
    others = await rows.snapshot(without=BELONGINGS)
    assert await engine.trim_retention() == 4
    assert await rows.snapshot(without=BELONGINGS) == others
    assert {table: len(await rows.of(table)) for table in BELONGINGS if await rows.of(table)} == {"execution": 1}
    for execution_id in (*ended, retried.execution_id):
        assert await engine.read_execution_info(execution_id) is None
        assert await engine.get_execution_result(execution_id) is None


async def test_the_retention_of_an_execution_wins_over_the_argument(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    short, long = await given.completed(**kept_for(HOUR)), await given.completed(**kept_for(7 * DAY))
    plain = await given.completed()
    assert await engine.trim_retention(retention_ms=0) == 1
    assert await stored(rows) == {uuid_of(short), uuid_of(long)}
    assert await engine.read_execution_info(plain) is None
    await clock.advance(ms=HOUR)
    assert await engine.trim_retention(retention_ms=2**53) == 1
    assert await stored(rows) == {uuid_of(long)}
    await clock.advance(ms=6 * DAY)
    assert await engine.trim_retention(retention_ms=0) == 0
    await clock.advance(ms=DAY)
    assert await engine.trim_retention() == 1


async def test_the_argument_may_be_shorter_or_longer_than_the_setting(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    early = await given.completed()
    await clock.advance(ms=2 * HOUR)
    late = await given.completed()
    assert await engine.trim_retention(retention_ms=HOUR) == 1
    assert await stored(rows) == {uuid_of(late)}
    assert await engine.read_execution_info(early) is None
    await clock.advance(ms=2 * DAY)
    # What is past its retention by the setting is left to the sweep.
    assert await engine.trim_retention(retention_ms=3 * DAY) == 0
    assert await engine.trim_retention(retention_ms=2 * DAY) == 1


async def test_the_oldest_executions_are_deleted_first_and_no_more_than_a_batch(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "WINDOW", 2)
    ended = []
    for nth in range(9):
        ended.append(await given.completed(lane_id=f"lane{nth % 2}"))
        await clock.advance(ms=nth % 3)
    await clock.advance(ms=DAY)
    assert await engine.trim_retention(batch_size=4) == 4
    assert await stored(rows) == {uuid_of(each) for each in ended[4:]}
    assert await engine.trim_retention(batch_size=4) == 4
    assert await engine.trim_retention(batch_size=4) == 1
    assert await engine.trim_retention(batch_size=4) == 0
    assert await rows.of("retained") == []


async def test_a_batch_ends_within_an_entry_of_executions_that_ended_together(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    await completed_together(engine, given, 7)
    await clock.advance(ms=DAY)
    assert [await engine.trim_retention(batch_size=3) for _ in range(4)] == [3, 3, 1, 0]
    assert await rows.of("execution") == []


async def test_a_filter_selects_executions_by_namespace_and_tag(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    for namespace in ("a", "b"):
        for tag in ("1", "2"):
            await given.completed(namespace=namespace, tags={"app.t": tag, "app.u": tag})
        await given.completed(namespace=namespace)
    await clock.advance(ms=DAY)

    async def trim(**fields: Any) -> int:
        return await engine.trim_retention(filter=ScannerFilter(**fields))

    for nothing in ({"namespace": "c"}, {"instance_tag": ("app.t", "3")}, {"instance_tag": ("app.v", "1")}):
        async with rows.unchanged():
            assert await trim(**nothing) == 0
    assert await trim(namespace="a", instance_tag=("app.t", "1")) == 1
    assert await trim(instance_tag=("app.t", "1")) == 1
    assert await trim(namespace="a") == 2
    assert await trim() == 2


async def test_locked_executions_are_left_and_others_behind_them_deleted(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    locked = [await given.completed() for _ in range(3)]
    await given.completed()
    await clock.advance(ms=DAY)
    async with connection.transaction():
        await connection.execute(
            "select from execution where execution_id = any($1::uuid[]) for update", [uuid_of(each) for each in locked]
        )
        assert [await engine.trim_retention(batch_size=1) for _ in range(2)] == [1, 0]
    assert await engine.trim_retention() == 3
    assert await rows.of("execution") == []


async def completed_together(engine: Engine, given: Given, count: int) -> list[ExecutionId]:
    """Executions that ended in one statement."""
    for _ in range(count):
        await given.created()
    runs = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=count)
    await engine.complete_many([(run.handle, b"1") for run in runs])
    return [run.execution_id for run in runs]


KEEPS = {
    "a trigger": (
        "create function refuse() returns trigger language plpgsql as $$begin raise 'not this one'; end$$; "
        "create trigger keeps before delete on execution for each row "
        "when (old.execution_id = '{uuid}') execute function refuse()",
        "drop trigger keeps on execution",
    ),
    "a foreign key": (
        "create table keeps (partition_key smallint, execution_id uuid, "
        "foreign key (partition_key, execution_id) references execution); "
        "insert into keeps select partition_key, execution_id from execution where execution_id = '{uuid}'",
        "drop table keeps",
    ),
}


@pytest.mark.parametrize("what", KEEPS)
async def test_an_execution_that_cannot_be_deleted_does_not_stop_the_others(
    engine: Engine,
    given: Given,
    clock: Clock,
    rows: Rows,
    connection: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    seconds = 0.0
    parts_of(engine).retention.quarantine = Quarantine(60, clock=lambda: seconds)
    bad = (await completed_together(engine, given, 100))[40]
    await clock.advance(ms=DAY)
    keep, let_go = KEEPS[what]
    await connection.execute(keep.format(uuid=uuid_of(bad)))
    assert [await engine.trim_retention(batch_size=60) for _ in range(3)] == [60, 39, 0]
    assert await stored(rows) == {uuid_of(bad)}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{bad} failed 1 times, skipping it for 60 s: ")
    await connection.execute(let_go)
    assert await engine.trim_retention() == 0
    seconds = 61
    assert await engine.trim_retention() == 1
    assert await rows.of("retained") == []


async def test_a_fault_of_the_store_stops_a_trim(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    await completed_together(engine, given, 3)
    await clock.advance(ms=DAY)
    await connection.execute(
        "create function refuse() returns trigger language plpgsql as "
        "$$begin raise query_canceled using message = 'too slow'; end$$; "
        "create trigger slow before delete on execution for each row execute function refuse()"
    )
    async with rows.unchanged():
        with pytest.raises(TransportError, match="too slow"):
            await engine.trim_retention()
    await connection.execute("drop trigger slow on execution")
    assert await engine.trim_retention() == 3


async def test_nothing_of_a_deleted_execution_is_left_but_what_has_its_own_age(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    retries = {"max_retries": 2, "backoff": {"type": "fixed", "delay_ms": 0}}
    first = await given.claimed(
        policy={"retry_policy": retries}, tags={"a.b": "1"}, input_payload=b"x" * 300, idempotency_key="once"
    )
    await engine.append_frame(first, Frame(bytes=b"x"))
    await engine.append_frame(first, Frame(bytes=b'{"a": 1}', mode=DurableSummary()))
    outcome = await suspend_run(engine, first, suspend_args(idempotency_key="once"))
    await Waiting(engine, outcome.handle).on(outcome.details).send()
    await engine.fail((await given.claim()).handle, reason="again", classification="transient")
    await clock.advance(ms=1)
    await engine.complete((await given.claim()).handle, b"x" * 300)
    uuid = uuid_of(first.execution_id)

    async def with_rows() -> set[str]:
        """The tables that have rows of the execution."""
        return {table for table, texts in (await rows.snapshot()).items() if any(uuid in text for text in texts)}

    # Deleted by their own age.
    kept = {"claim", "event", "idempotency_key"}
    assert await with_rows() == kept | {
        "attempt", "execution", "execution_input", "execution_result", "execution_tag", "retained", "signal", "stream",
        "stream_frame", "stream_summary", "suspension", "waitpoint",
    }  # fmt: skip
    await clock.advance(ms=DAY - 1)
    assert await engine.trim_retention() == 0
    await clock.advance(ms=2)
    assert await engine.trim_retention() == 1
    assert await with_rows() <= kept


async def test_a_member_is_deleted_only_when_its_flow_is_settled_and_does_not_stop_others(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    held = [await given.completed() for _ in range(5)]
    waiting = await given.created()
    flow_id = await flow_of(engine, [*held, waiting], [(waiting, held[0])])
    alone = await given.completed(lane_id="alone")
    await clock.advance(ms=HOUR)
    assert await engine.trim_retention(retention_ms=0, batch_size=2) == 1
    assert await engine.read_execution_info(alone) is None
    # The sweep still deletes them by the setting.
    assert {row["retain_until"] for row in await rows.of("retained")} == {await clock.now() - HOUR + DAY}
    await engine.cancel_execution(execution_id=waiting, reason="x")
    await settle(engine, flow_id)
    assert await engine.trim_retention(retention_ms=0) == 6
    assert await stored(rows) == set()


async def test_a_replayed_execution_is_kept(engine: Engine, given: Given, clock: Clock, rows: Rows) -> None:
    execution_id = await given.cancelled()
    await clock.advance(ms=DAY)
    await engine.replay_execution(execution_id=execution_id)
    assert await engine.trim_retention(retention_ms=0) == 0
    await engine.cancel_execution(execution_id=execution_id, reason="again")
    assert await engine.trim_retention() == 0
    await clock.advance(ms=DAY)
    assert await engine.trim_retention() == 1
    assert (await parts_of(engine).retention.trim_batch()).done == 0
    assert await rows.of("retained") == []


async def test_wrong_arguments_of_a_trim_are_refused(engine: Engine, given: Given, clock: Clock, rows: Rows) -> None:
    await given.completed()
    await clock.advance(ms=DAY)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"retention_ms": -1}, "retention_ms"),
        ({"retention_ms": 1.5}, "retention_ms"),
        ({"retention_ms": 2**60}, "retention_ms"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1001}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"filter": {"namespace": "a"}}, "filter"),
    ]
    async with rows.unchanged():
        for arguments, field in wrong:
            await refused(engine.trim_retention(**arguments), "invalid_input", field)
