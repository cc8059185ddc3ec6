"""Claims over many queues take the best of all of them, in order."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import asyncpg
import pytest

from engine.cases import SWEEPS_WHOLE, in_turn
from engine.state import claim, ids, made, new
from fixtures import Engines, uuid_of
from flowfabric.db.database import Database
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.scans import Wanted
from flowfabric.engine.parts import parts_of


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each claim statement ran."""
    made: Counter[str] = Counter()
    fetch = Database.fetch

    async def count(database: Database, statement: Statement, values: Mapping[str, object], **others: Any) -> Any:
        if statement.name.startswith("claim_by_"):
            made[statement.name] += 1
        return await fetch(database, statement, values, **others)

    monkeypatch.setattr(Database, "fetch", count)
    return made


def best_first(created: list[str], priorities: list[int]) -> list[str]:
    """The executions by priority, then age."""
    return [created[at] for at in sorted(range(len(created)), key=lambda at: -priorities[at])]


@in_turn("seed", range(8) if SWEEPS_WHOLE else range(3))
async def test_claims_take_the_best_of_all_queues_in_order(engine: Engine, searches: Counter[str], seed: int) -> None:
    searches.clear()
    draw = random.Random(seed)
    count = draw.choice((2, 5, 40, 150))
    # From evenly filled queues to a few that hold nearly everything.
    weights = [1 / (nth + 1) ** draw.choice((0, 1, 3)) for nth in range(count)]
    kinds = draw.choices([f"k{nth}" for nth in range(count)], weights, k=600 if SWEEPS_WHOLE else 200)
    priorities = [draw.choice(draw.choice(([0], [0, 1, 9000]))) for _ in kinds]
    created = await made(
        engine, *(new(execution_kind=kind, priority=at) for kind, at in zip(kinds, priorities, strict=True))
    )
    expected = best_first(created, priorities)
    taken = 0
    claims = 0
    while taken < len(expected):
        limit = draw.choice((1, 2, 7, 50, 200))
        found = ids(await claim(engine, limit=limit))
        assert found == expected[taken : taken + limit]
        taken += len(found)
        claims += 1
    assert searches == {"claim_by_route": claims}


async def test_a_few_queues_with_the_oldest_executions_are_claimed_in_order(
    engine: Engine, searches: Counter[str]
) -> None:
    dense = [f"dense{at % 9}" for at in range(900)]
    sparse = [f"sparse{at % 24}" for at in range(72)]
    young = [f"young{at}" for at in range(67)]
    created: list[str] = []
    for kinds in (dense, sparse, young):
        created += await made(engine, *(new(execution_kind=kind) for kind in kinds))
    searches.clear()
    assert ids(await claim(engine, limit=100)) == created[:100]
    assert searches == {"claim_by_route": 1}
    assert ids(await claim(engine, limit=1000)) == created[100:]


async def test_one_statement_claims_everything_from_the_only_queue_with_executions(
    engine: Engine, searches: Counter[str]
) -> None:
    await made(engine, *(new(execution_kind=f"k{at}") for at in range(50)))
    assert len(await claim(engine, limit=50)) == 50
    created = await made(engine, *[new(execution_kind="k7")] * 100)
    searches.clear()
    assert ids(await claim(engine, limit=60)) == created[:60]
    assert ids(await claim(engine, limit=60)) == created[60:]
    assert searches == {"claim_by_route": 2}


async def test_locked_rows_do_not_hide_other_queues(
    engine: Engine, connection: asyncpg.Connection, searches: Counter[str]
) -> None:
    created = await made(engine, *(new(execution_kind=f"k{at % 10}") for at in range(100)))
    held = created[:40]
    async with connection.transaction():
        await connection.execute(
            "select from execution where execution_id = any($1::uuid[]) for update", [uuid_of(one) for one in held]
        )
        assert ids(await claim(engine, limit=50)) == created[40:90]
        assert searches == {"claim_by_route": 1}
    # The watermarks are past the locked rows; when nothing is left there, the claim searches everything.
    assert ids(await claim(engine, limit=100)) == created[90:]
    assert ids(await claim(engine, limit=100)) == held


async def test_concurrent_claims_over_many_queues_take_each_row_once(engines: Engines) -> None:
    rivals = [await engines() for _ in range(3)]
    count = 900 if SWEEPS_WHOLE else 300
    created = await made(rivals[0], *(new(execution_kind=f"k{at % 70}", priority=at % 3) for at in range(count)))

    async def take(rival: Engine) -> list[str]:
        taken: list[str] = []
        while found := ids(await claim(rival, limit=37)):
            taken += found
        return taken

    taken = await asyncio.gather(*map(take, rivals))
    assert sorted(one for some in taken for one in some) == sorted(created)


@in_turn("few", [None, tuple(f"k{at}" for at in range(8))])
async def test_watermarks_move_past_what_was_claimed(
    lasting_watermarks: None, engine: Engine, few: tuple[str, ...] | None
) -> None:
    kinds = [f"k{at % 30}" for at in range(240)]
    priorities = [at % 2 for at in range(240)]
    created = await made(
        engine, *(new(execution_kind=kind, priority=at) for kind, at in zip(kinds, priorities, strict=True))
    )
    kind_of = dict(zip(created, kinds, strict=True))
    expected = [one for one in best_first(created, priorities) if few is None or kind_of[one] in few]
    wanted = Wanted.of(("default",), (), few, None)
    watermarks = parts_of(engine).wakeups.watermarks
    for at in range(0, len(expected), 40):
        assert ids(await claim(engine, limit=40, kinds=few)) == expected[at : at + 40]
        sources, firsts, lasts = (watermarks.of_routes(wanted) if few is None else watermarks.of_queues(wanted)).spans()
        assert sources == sorted(sources)
        assert all(first <= last for first, last in zip(firsts, lasts, strict=True))
    assert len(set(sources)) == (1 if few is None else 8)
    late = await made(engine, new(execution_kind="k3", priority=1), new(execution_kind="new"))
    assert ids(await claim(engine, kinds=few)) == (late if few is None else late[:1])
