"""Deleting old worker identities reads each lease once, however many identities are old."""

import asyncpg
import pytest

from creates import new
from fixtures import Clock, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.fleet.identities import PURGE_LIMIT
from flowfabric.engine.parts import parts_of
from house.filled import STATISTICS
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

CLAIMS = 2_000
LOST = 200


@pytest.mark.parametrize("statistics", STATISTICS)
async def test_deleting_old_identities_reads_each_lease_once(
    engine: Engine, connection: asyncpg.Connection, clock: Clock, rows: Rows, touched: Touched, statistics: str
) -> None:
    await clock.stop()
    await engine.create_many([new() for _ in range(LOST)])
    lost = await engine.claim_many(
        lanes=("default",), worker_id="w", worker_instance_id="lost", limit=LOST, lease_ttl_ms=1000
    )
    assert len(lost) == LOST
    await clock.advance(ms=1000)
    assert await parts_of(engine).lease_expiry.sweep() == LOST
    await connection.execute("update worker_identity set seen_at = 0")
    await connection.execute(
        """insert into worker_identity (worker_id, worker_instance_id, seen_at)
           select 'w', 'w-' || n, n from generate_series(1, 999) n"""
    )
    # A hundred of them hold half of the claims; the other half belongs to other workers.
    await connection.execute(
        f"""insert into claim (partition_key, claim_no, worker_no, expires_at, execution_ids)
            select 0, n,
                   case when n % 2 = 0 then 1000000 + n else (
                     select worker_no from worker_identity where worker_instance_id = 'w-' || (1 + n % 200)) end,
                   ff_now() + 60000, array(select gen_random_uuid() from generate_series(1, 5))
              from generate_series(1, {CLAIMS}) n"""
    )
    await connection.execute(VACUUM)
    if statistics == "statistics":
        await connection.execute("analyze")
    assert PURGE_LIMIT == 1000
    assert await parts_of(engine).identities.purge() == 1000 - 1 - 100
    read = touched.by_table("take_old_identities")
    assert read["claim"] <= CLAIMS
    # Each lost lease has an index entry and a row in `listed`, and is then found by the key of its execution.
    assert read["listed"] <= 2 * LOST
    assert read["execution"] <= 2 * LOST
    left = {row["worker_instance_id"] for row in await rows.of("worker_identity")}
    assert left == {"lost", *(f"w-{n}" for n in range(2, 201, 2))}
