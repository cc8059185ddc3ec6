"""The cost of a delivery does not grow with the number of earlier signals."""

import asyncio
from typing import Any

import asyncpg
import pytest

from engine.sending import Waiting, running, signals, waiting
from engine.state import claim, refused
from engine.waits import fresh, suspend_args, suspend_run, suspension
from fixtures import Given, Rows
from flowfabric.db.database import Transaction
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import AllOf, ByName, Condition, Count, CountKind, OperatorOnly, Single
from flowfabric.model.ids import WaitpointId
from flowfabric.model.signal import DEFAULT_MAXLEN
from flowfabric.model.waitpoint import UsePending

FEW = 20
MANY = DEFAULT_MAXLEN + FEW
SATISFIED = "resume_condition_satisfied"

# Rows that scans of the suspension and signal tables have returned so far in this transaction.
_TOUCHED = """
select coalesce(sum(pg_stat_get_xact_tuples_returned(r.oid)), 0)::int
  from pg_class c
 cross join lateral (
       select c.oid union all select i.indexrelid from pg_index i where i.indrelid = c.oid) r(oid)
 where c.relnamespace = 'flowfabric'::regnamespace
   and c.relname in ('suspension', 'waitpoint', 'signal', 'idempotency_key')
"""


class Cost:
    """The cost of deliveries by statement: bytes of parameters sent, and rows touched."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.touched: dict[str, int] = {}

    async def of(self, delivery: Any) -> tuple[dict[str, int], dict[str, int]]:
        """The cost of one delivery."""
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
    """Deliver signals concurrently."""
    await asyncio.gather(*(wait.send("vote", **overrides) for _ in range(count)))


def votes(n: int) -> Count:
    return Count(n=n, count_kind=CountKind.DISTINCT_SIGNALS, waitpoints=("wait",))


async def test_a_count_of_signals_costs_the_same_for_the_last_signal_as_for_the_first(
    engine: Engine, given: Given, rows: Rows, cost: Cost
) -> None:
    wait = await waiting(engine, given, resume_condition=votes(MANY + 2))
    await take(wait, 1)
    first = await cost.of(wait.send("vote"))
    await take(wait, MANY - 2)
    assert await cost.of(wait.send("vote")) == first
    assert {"read_deliveries", "insert_deliveries"} <= set(first[0])
    assert not {"list_satisfiers", "take_overflow"} & set(first[0])
    closing_signal = await wait.send("vote")
    assert closing_signal.effect == SATISFIED
    closed = await suspension(rows, wait.execution_id)
    stored = await signals(rows, wait.execution_id)
    assert closed["satisfier_ids"] == [row["signal_id"] for row in stored]
    assert (len(stored), closed["satisfier_ids"][-1]) == (MANY + 2, closing_signal.signal_id)


def sources(n: int) -> Condition:
    return Count(n=n, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=("wait",))


def one_and_votes(n: int) -> Condition:
    return AllOf((Single(waitpoint_key="wait", matcher=ByName("go")), votes(n + 1)))


async def test_a_condition_that_needs_its_satisfiers_reads_them_and_sends_none(
    engine: Engine, given: Given, rows: Rows, cost: Cost, subtests: pytest.Subtests
) -> None:
    for condition in (sources, one_and_votes):
        with subtests.test(condition.__name__):
            wait = await waiting(engine, given, resume_condition=condition(FEW + 2))
            for at in range(FEW):
                await wait.send("vote", source_identity=f"s{at + 10}")
            sent, touched = await cost.of(wait.send("go", source_identity="s1"))
            assert touched["list_satisfiers"] >= FEW
            second, _ = await cost.of(wait.send("noise", source_identity="s10"))
            assert {**sent, "insert_deliveries": 0} == {**second, "insert_deliveries": 0}
            assert "take_overflow" not in sent
            assert await wait.effect_of("vote", source_identity="s2") == SATISFIED
            await claim(engine)


async def test_trimming_a_full_log_reads_no_more_than_its_length(
    engine: Engine, given: Given, rows: Rows, cost: Cost, connection: asyncpg.Connection
) -> None:
    wait = await waiting(engine, given, resume_condition=OperatorOnly())
    await take(wait, 5, signal_maxlen=5)
    before, _ = await cost.of(wait.send("vote", signal_maxlen=6))
    assert "take_overflow" not in before
    await take(wait, MANY, signal_maxlen=5)
    # The index keeps the entries of deleted signals until a vacuum.
    await connection.execute("vacuum signal")
    _, touched = await cost.of(wait.send("vote", signal_maxlen=5))
    assert touched["take_overflow"] <= 2 * (5 + 1)
    assert len(await signals(rows, wait.execution_id)) == 5


async def test_signals_counted_at_one_waitpoint_do_not_keep_uncounted_ones_of_another(
    engine: Engine, given: Given, rows: Rows
) -> None:
    condition = Count(
        n=FEW, count_kind=CountKind.DISTINCT_SIGNALS, matcher=ByName("vote"), waitpoints=("wait", "other")
    )
    request = suspend_args(waitpoints=(fresh("wait"), fresh("other")), resume_condition=condition)
    wait = await waiting(engine, given, request)
    await take(wait, 10)
    for at in range(6):
        await wait.send(f"noise{at}", "other", signal_maxlen=2)
    noise = [row["signal_name"] for row in await signals(rows, wait.execution_id) if row["waitpoint_key"] == "other"]
    assert noise == ["noise4", "noise5"]


async def test_counted_signals_do_not_keep_uncounted_ones_of_a_pending_waitpoint(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await running(engine, given)
    outcome = await suspend_run(
        engine,
        wait.handle,
        waitpoints=(fresh("other"),),
        resume_condition=Count(n=FEW, count_kind=CountKind.DISTINCT_SIGNALS, waitpoints=("other",)),
    )
    wait.on(outcome.details)
    for _ in range(10):
        await wait.send("vote", "other")
    for at in range(6):
        await wait.send(f"early{at}", signal_maxlen=2)
    kept = [row["signal_name"] for row in await signals(rows, wait.execution_id) if row["waitpoint_key"] == "wait"]
    assert kept == ["early4", "early5"]


async def test_a_full_log_keeps_buffered_signals_that_were_counted(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await running(engine, given)
    for name in ("vote", "noise", "vote", "noise", "vote"):
        await wait.send(name)
    condition = Count(n=5, count_kind=CountKind.DISTINCT_SIGNALS, matcher=ByName("vote"), waitpoints=("wait",))
    ahead = UsePending(waitpoint_id=WaitpointId(wait.points["wait"].waitpoint_id))
    outcome = await suspend_run(engine, wait.handle, waitpoints=(ahead,), resume_condition=condition)
    for at in range(6):
        await wait.send(f"late{at}", signal_maxlen=2)
    names = [row["signal_name"] for row in await signals(rows, wait.execution_id)]
    assert names == ["vote", "vote", "vote", "late4", "late5"]
    assert [await wait.effect_of("vote"), await wait.effect_of("vote")] == ["appended_to_waitpoint", SATISFIED]
    seen = await engine.observe_signals(outcome.handle)
    assert [one.signal_name for one in seen if one.satisfier] == ["vote"] * 5


async def test_a_wrong_token_does_not_read_the_counted_signals(engine: Engine, given: Given, cost: Cost) -> None:
    wait = await waiting(engine, given, resume_condition=sources(FEW))
    await wait.send("vote", source_identity="one")
    _, touched = await cost.of(refused(wait.send("vote", waitpoint_token="k1:" + "0" * 64), "invalid_token"))
    assert "read_deliveries" in touched
    assert "list_satisfiers" not in touched
