"""What a delivery costs does not grow with the signals that came before it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flowfabric.db.database import Transaction
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.model.conditions import AllOf, ByName, Condition, Count, CountKind, OperatorOnly, Single
from flowfabric.model.signals import DEFAULT_MAXLEN

from .sending import Waiting, signals, waiting
from .waits import args, fresh, suspension

FEW = 20
MANY = DEFAULT_MAXLEN + FEW
MET = "resume_condition_satisfied"

# Entries that scans of the tables of waits gave, in this transaction so far.
_TOUCHED = """
select coalesce(sum(pg_stat_get_xact_tuples_returned(r.oid)), 0)::int
  from pg_class c
 cross join lateral (
       select c.oid union all select i.indexrelid from pg_index i where i.indrelid = c.oid) r(oid)
 where c.relnamespace = 'flowfabric'::regnamespace and c.relname in ('suspension', 'waitpoint', 'signal', 'signal_key')
"""


class Cost:
    """What the statements of deliveries took and touched: bytes of parameters and rows, by statement."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.touched: dict[str, int] = {}

    async def of(self, delivery: Any) -> tuple[dict[str, int], dict[str, int]]:
        """What one delivery costs."""
        self.sent, self.touched = {}, {}
        await delivery
        return dict(self.sent), dict(self.touched)


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Cost:
    """The cost of deliveries, counted while they run."""
    seen = Cost()

    async def fetch(transaction: Transaction, statement: Statement, **values: object) -> Any:
        arguments = statement.arguments(values)
        before = await transaction.connection.fetchval(_TOUCHED)
        found = await transaction.connection.fetch(statement.sql, *arguments)
        seen.touched[statement.name] = await transaction.connection.fetchval(_TOUCHED) - before
        seen.sent[statement.name] = sum(len(str(argument)) for argument in arguments)
        return found

    monkeypatch.setattr(Transaction, "fetch", fetch)
    return seen


async def take(wait: Waiting, count: int, **overrides: Any) -> None:
    """Let a wait take so many signals."""
    await asyncio.gather(*(wait.send("vote", **overrides) for _ in range(count)))


def votes(n: int) -> Count:
    return Count(n=n, count_kind=CountKind.DISTINCT_SIGNALS, waitpoints=("wait",))


async def test_a_count_of_signals_takes_the_thousandth_like_the_first(
    engine: Engine, given: Any, rows: Any, cost: Cost
) -> None:
    wait = await waiting(engine, given, resume_condition=votes(MANY + 2))
    await take(wait, 1)
    first = await cost.of(wait.send("vote"))
    await take(wait, MANY - 2)
    assert await cost.of(wait.send("vote")) == first
    assert {"read_deliveries", "insert_deliveries"} <= set(first[0])
    assert not {"list_satisfiers", "take_overflow"} & set(first[0])
    closer = await wait.send("vote")
    assert closer.effect == MET
    closed = await suspension(rows, wait.execution_id)
    stored = await signals(rows, wait.execution_id)
    assert closed["satisfier_ids"] == [row["signal_id"] for row in stored]
    assert (len(stored), closed["satisfier_ids"][-1]) == (MANY + 2, closer.signal_id)


def sources(n: int) -> Condition:
    return Count(n=n, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=("wait",))


def one_and_votes(n: int) -> Condition:
    return AllOf((Single(waitpoint_key="wait", matcher=ByName("go")), votes(n + 1)))


@pytest.mark.parametrize("condition", [sources, one_and_votes], ids=["sources", "a tree"])
async def test_a_condition_that_must_know_its_satisfiers_reads_them_and_sends_none(
    engine: Engine, given: Any, rows: Any, cost: Cost, condition: Callable[[int], Condition]
) -> None:
    wait = await waiting(engine, given, resume_condition=condition(FEW + 2))
    for at in range(FEW):
        await wait.send("vote", source_identity=f"s{at + 10}")
    sent, touched = await cost.of(wait.send("go", source_identity="s1"))
    assert touched["list_satisfiers"] >= FEW
    second, _ = await cost.of(wait.send("noise", source_identity="s10"))
    assert {**sent, "insert_deliveries": 0} == {**second, "insert_deliveries": 0}
    assert "take_overflow" not in sent
    assert await wait.said("vote", source_identity="s2") == MET


async def test_a_full_log_gives_up_what_came_too_much_and_no_more_is_read(
    engine: Engine, given: Any, rows: Any, cost: Cost
) -> None:
    wait = await waiting(engine, given, resume_condition=OperatorOnly())
    await take(wait, 5, signal_maxlen=5)
    before, _ = await cost.of(wait.send("vote", signal_maxlen=6))
    assert "take_overflow" not in before
    await take(wait, MANY, signal_maxlen=5)
    _, touched = await cost.of(wait.send("vote", signal_maxlen=5))
    # Of what the deliveries just before deleted, the index may still hold entries: a mail of a hundred at most.
    assert touched["take_overflow"] <= 5 + 1 + 2 * 100
    assert len(await signals(rows, wait.execution_id)) == 5


async def test_what_one_waitpoint_counted_keeps_no_noise_of_another(engine: Engine, given: Any, rows: Any) -> None:
    condition = Count(
        n=FEW, count_kind=CountKind.DISTINCT_SIGNALS, matcher=ByName("vote"), waitpoints=("wait", "other")
    )
    asked = args(waitpoints=(fresh("wait"), fresh("other")), resume_condition=condition)
    wait = await waiting(engine, given, asked)
    await take(wait, 10)
    for at in range(6):
        await wait.send(f"noise{at}", "other", signal_maxlen=2)
    noise = [row["signal_name"] for row in await signals(rows, wait.execution_id) if row["waitpoint_key"] == "other"]
    assert noise == ["noise4", "noise5"]
