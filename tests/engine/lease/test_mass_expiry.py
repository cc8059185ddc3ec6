"""Many leases that expire at once are marked by statements of limited size, each in its own transaction."""

import asyncpg
import pytest

from engine.state import claim, items, new
from fixtures import Clock, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease import expire
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError

TTL_MS = 10_000


@pytest.fixture(autouse=True)
def small_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expire, "SWEEP_LIMIT", 10)
    monkeypatch.setattr(expire, "MARK_LIMIT", 40)


async def leased(engine: Engine, clock: Clock, count: int) -> None:
    """Let the leases of one claim for `count` executions expire."""
    await engine.create_many(items(*[new()] * count))
    assert len(await claim(engine, limit=count, lease_ttl_ms=TTL_MS)) == count
    await clock.advance(ms=TTL_MS + 1)


async def test_a_sweep_marks_up_to_its_limit_and_reports_more(engine: Engine, clock: Clock) -> None:
    await leased(engine, clock, 95)
    swept = [await parts_of(engine).lease_expiry.sweep_batch() for _ in range(3)]
    assert [(each.done, each.is_full) for each in swept] == [(40, True), (40, True), (15, False)]
    assert await engine.find_inconsistencies() == []


async def test_leases_stay_marked_when_a_later_statement_is_cancelled(
    engine: Engine, clock: Clock, connection: asyncpg.Connection, rows: Rows
) -> None:
    await leased(engine, clock, 40)
    slow = [row["execution_id"] for row in await rows.of("execution")][25]
    await connection.execute(
        f"""create function test_slow() returns trigger language plpgsql as $$
            begin
              if new.execution_id = '{slow}' then raise query_canceled; end if;
              return new;
            end $$"""
    )
    trigger = "create trigger test_slow before update on execution for each row execute function test_slow()"
    await connection.execute(trigger)
    with pytest.raises(EngineError) as given_up:
        await parts_of(engine).lease_expiry.sweep()
    assert given_up.value.retryable
    marked = await rows.of("execution", ownership_state="lease_expired_reclaimable")
    assert len(marked) == 20
