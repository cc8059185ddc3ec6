"""What the readers of feeds rely on: how event ids and transaction ids are assigned."""

import asyncpg
import pytest

from faults.operations import OPERATIONS
from faults.scene import Scene
from fixtures import Clock, Engines, Rows


@pytest.fixture
def alteration() -> str:
    """An event is refused if its transaction has no id before the event gets its id."""
    return """
        create function test_xid() returns xid8 language plpgsql as $$
        begin
          if pg_current_xact_id_if_assigned() is null then
            raise exception 'an event id is drawn before the transaction has an id';
          end if;
          return pg_current_xact_id();
        end $$;
        alter table event alter xid set default test_xid();
        alter table event_default alter xid set default test_xid();
        """


async def test_the_altered_database_refuses_an_event_before_its_transaction_has_an_id(
    connection: asyncpg.Connection,
) -> None:
    insert = """insert into event (at, partition_key, kind, namespace_no, execution_id)
                values (1, 1, 'ended', 1, gen_random_uuid())"""
    # Every 32nd number of a sequence is logged, which assigns an id to the transaction.
    await connection.execute("select nextval(pg_get_serial_sequence('event', 'event_id'))")
    with pytest.raises(asyncpg.RaiseError, match="before the transaction has an id"):
        await connection.execute(insert)
    async with connection.transaction():
        await connection.execute("select pg_current_xact_id()")
        await connection.execute(insert)


async def test_every_writer_of_events_has_a_transaction_id_before_it_draws_an_event_id(
    engines: Engines, clock: Clock, connection: asyncpg.Connection, rows: Rows
) -> None:
    """So a transaction that begins after a snapshot draws only higher ids than those in the snapshot."""
    await clock.stop()
    engine = await engines()
    scene = Scene(engine, clock, connection)
    for operation in OPERATIONS.values():
        if operation.is_read:
            continue
        subject = await scene.subject(lane_id=operation.title[:60])
        await operation.prepare(subject)
        await operation.call(engine, subject)
        await scene.clean_up(subject)
    kinds = {row["kind"] for row in await rows.of("event")}
    assert kinds >= {"acquired", "renewed", "released", "ended", "expired", "reclaimed", "signal", "operator_resumed"}


async def test_event_ids_are_drawn_one_by_one(connection: asyncpg.Connection) -> None:
    """A session that caches numbers of the sequence would use low ones late."""
    query = "select seqcache from pg_sequence where seqrelid = pg_get_serial_sequence('event', 'event_id')::regclass"
    assert await connection.fetchval(query) == 1
