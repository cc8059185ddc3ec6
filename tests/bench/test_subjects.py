"""The subjects that measure FlowFabric run, and bench/README.md describes every figure."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from flowfabric.bench import (
    ours_counts,
    ours_dead_rows,
    ours_feeds,
    ours_flows,
    ours_limits,
    ours_limits_pinned,
    ours_neighbour,
    ours_pinned,
    ours_queues,
    ours_renew,
    ours_result,
    ours_streams,
)
from flowfabric.bench.meter import Meter, fields_of, postmaster_of
from flowfabric.bench.observer import SQL, observing, pinned
from flowfabric.bench.ours import SQL as STORE
from flowfabric.bench.ours import check, engine_on, fill, noop, noops
from flowfabric.bench.ours_cost import measure as measure_cost
from flowfabric.bench.subject import Figures, Task
from flowfabric.feeds import OLDEST, ScannerFilter

README = Path(__file__).parents[2] / "bench" / "README.md"
TINY = 0.001


@pytest.fixture
def described() -> set[str]:
    """The names of figures in bench/README.md."""
    return set(re.findall(r"`([a-z0-9_]+)`", README.read_text(encoding="utf-8")))


def check_figures(figures: Figures, described: set[str]) -> None:
    """Fail for a figure that is negative or not described."""
    assert set(figures) - described == set()
    assert all(figure.value >= 0 for figure in figures.values())


async def test_results_are_measured_within_and_across_processes(
    empty_url: str, described: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours_result, "MANY", 50)
    monkeypatch.setattr(ours_result, "IDLE_S", 0.001)
    figures = await ours_result.measure(Task(url=empty_url, scale=TINY))
    assert set(figures) == {"submit_to_result", "submit_to_result_across", "results_3000"}
    check_figures(figures, described)


async def test_appends_and_tails_within_and_across_processes_are_measured(
    empty_url: str, described: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours_streams, "TAILS", 20)
    monkeypatch.setattr(ours_streams, "BURSTS", 1)
    figures = await ours_streams.measure(Task(url=empty_url, scale=TINY))
    assert {"frames_grouped", "frames_one_commit", "append_to_tail_across", "tails_200_probe"} <= set(figures)
    check_figures(figures, described)


async def test_a_probe_that_is_cancelled_counts_the_time_it_has_waited(empty_url: str) -> None:
    async with engine_on(empty_url) as engine:
        seconds: list[float] = []
        probing = asyncio.create_task(ours_streams.probe(engine, seconds))
        await asyncio.sleep(0)
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    assert len(seconds) == 1


async def test_feeds_are_read_beside_a_worker_and_from_a_cursor(
    empty_url: str, described: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours_feeds, "TENANTS", 100)
    monkeypatch.setattr(ours_feeds, "DRAINS", 1)
    monkeypatch.setattr(ours_feeds, "STEP", 1_000)
    figures = await ours_feeds.measure(Task(url=empty_url, scale=TINY))
    assert {"feed_catch_up", "feed_sparse", "feed_lag_p99", "feed_lag_across_p99"} <= set(figures)
    check_figures(figures, described)


async def test_flows_are_run_and_their_members_cancelled(
    empty_url: str, described: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CHAINS": 3, "HOPS": 3, "SIBLINGS": 20, "RUNS": 1}.items():
        monkeypatch.setattr(ours_flows, name, value)
    figures = await ours_flows.measure(Task(url=empty_url, scale=TINY))
    assert {"flow_chains", "flow_hop_p99", "flow_fan_rate", "sibling_cancel_p99", "flow_cancel"} <= set(figures)
    check_figures(figures, described)


async def test_rates_within_limits_and_without_are_measured(
    empty_url: str, described: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours_limits, "RUNS", 1)
    monkeypatch.setattr(ours_limits, "PROCESSES", 2)
    figures = await ours_limits.measure(Task(url=empty_url, scale=TINY))
    assert {"limits_worker_tight", "limits_worker_rated", "limits_engine_500_keyed"} <= set(figures)
    assert figures["over_admissions"].value == 0
    check_figures(figures, described)


async def test_executions_leased_beyond_a_cap_are_counted(empty_url: str) -> None:
    async with engine_on(empty_url) as engine, observing(empty_url) as observer:
        (since,) = await observer.read(STORE.read_clock)
        await fill(engine, noops(), 1_000)
        for count in (200, 300):
            await engine.claim_many(
                lanes=["bench"], worker_id="bench", worker_instance_id="bench-1", limit=count, lease_ttl_ms=60_000
            )
        for cap, beyond in ((500, 0), (499, 1), (100, 400)):
            assert await observer.read(STORE.count_over_admissions, since, cap) == (beyond,)
        assert await observer.read(STORE.count_over_admissions, since + 60_000, 0) == (0,)


async def test_a_backlog_with_a_limit_and_an_open_transaction_is_measured(empty_url: str, described: set[str]) -> None:
    figures = await ours_limits_pinned.measure(Task(url=empty_url, scale=TINY))
    assert {"limits_pinned_first", "limits_pinned_free_last"} <= set(figures)
    check_figures(figures, described)


async def test_the_wait_beside_a_noisy_neighbour_is_measured(empty_url: str, described: set[str]) -> None:
    figures = await ours_neighbour.measure(Task(url=empty_url, scale=0.01))
    assert figures["neighbour_service"].value >= 1000 * ours_neighbour.SERVICE_S
    assert {"neighbour_fair_p95", "neighbour_capped_mean"} <= set(figures)
    check_figures(figures, described)


async def test_the_measured_times_of_cancellations_end_when_every_member_is_cancelled(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours_flows, "SIBLINGS", 20)
    async with engine_on(empty_url) as engine, observing(empty_url) as observer:
        await ours_flows.cancel_siblings(engine, observer)
        # All but the child, which nothing claims.
        assert await observer.read(STORE.count_retained) == (21,)
        await ours_flows.cancel_members(engine, 30)
        assert await observer.read(STORE.count_retained) == (51,)
        counts = await engine.count_executions(by=("state",))
    assert {each.public_state: each.count for each in counts} == {"completed": 1, "cancelled": 50, "waiting": 1}


def test_a_fan_spreads_from_one_node_and_leads_to_one() -> None:
    names, edges = ours_flows.fan(2)
    assert names == ["first", "m0", "m1", "last"]
    assert edges == [("first", "m0"), ("first", "m1"), ("m0", "last"), ("m1", "last")]
    assert ours_flows.chain(3) == (["n0", "n1", "n2"], [("n0", "n1"), ("n1", "n2")])


async def test_exactly_the_wanted_completions_are_produced(empty_url: str) -> None:
    async with engine_on(empty_url) as engine, observing(empty_url) as observer:
        await ours_feeds.produce(engine, ours_feeds.of_tenants(50), 1_300)
        assert await observer.read(STORE.count_retained) == (1_300,)
        assert await observer.ask(STORE.is_drained)
        one = ScannerFilter(instance_tag=(ours_feeds.TAG, "tenant-0"))
        await ours_feeds.catch_up(engine, 26, OLDEST, filter=one)
        cursor = await ours_feeds.catch_up(engine, 1_000, OLDEST)
        await ours_feeds.catch_up(engine, 300, cursor)


async def test_the_cost_of_an_execution_is_measured(empty_url: str, described: set[str]) -> None:
    figures = await measure_cost(Task(url=empty_url, scale=TINY))
    check_figures(figures, described)
    for suffix in ("", "_no_fpi"):
        wal = {name: figures[f"wal_{name}{suffix}"].value for name in ("submit", "claim_finish", "worker", "execution")}
        assert wal["execution"] == wal["submit"] + wal["worker"]
        assert wal["submit"] > 0
        assert wal["claim_finish"] > 0
    assert 0 <= figures["hot_worker"].value <= 1


@pytest.mark.parametrize("claim", [1_000, 10])
async def test_the_rows_written_by_a_round_of_renewals_are_counted(empty_url: str, claim: int) -> None:
    async with observing(empty_url) as observer:
        seconds, writes = await ours_renew.renewals(empty_url, observer, running=1_000, claim=claim)
        assert await observer.ask(SQL.is_alone)
    assert seconds > 0
    assert 0 < writes < 5_000


async def test_claims_from_many_queues_are_measured(
    empty_url: str, described: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours_queues, "QUEUES", 20)
    figures = await ours_queues.measure(Task(url=empty_url, scale=TINY))
    assert len(figures) == 9
    check_figures(figures, described)


async def test_counts_and_plain_counts_are_measured(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours_counts, "LEASE_MS", 500)
    monkeypatch.setattr(ours_counts, "MARGIN_S", 0.01)
    figures = await ours_counts.measure(Task(url=empty_url, scale=0.01))
    assert set(figures) == {"count_1k_ended", "group_by_1k_ended", "count_1k_waiting", "group_by_1k_waiting"}


async def test_claims_with_an_open_transaction_are_measured(
    empty_url: str, described: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short, but each half is long enough for some claims and starts on a busy machine.
    monkeypatch.setattr(ours_pinned, "SECONDS", 1)
    monkeypatch.setattr(ours_pinned, "TENTH", 0.5)
    check_figures(await ours_pinned.measure(Task(url=empty_url, scale=1)), described)


async def test_claims_and_timer_checks_past_dead_rows_are_measured(
    empty_url: str, described: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours_dead_rows, "LEASE_MS", 500)
    monkeypatch.setattr(ours_dead_rows, "MARGIN_S", 0.01)
    check_figures(await ours_dead_rows.measure(Task(url=empty_url, scale=TINY)), described)


async def test_waiting_for_other_sessions_ignores_a_pinned_one(empty_url: str) -> None:
    async with observing(empty_url) as observer:
        async with engine_on(empty_url), pinned(empty_url):
            assert not await observer.ask(SQL.is_alone)
        async with engine_on(empty_url) as engine:
            await fill(engine, noops(), 1_000)
            check(await engine.create_many([noop(kind="another")]))
        async with pinned(empty_url):
            await observer.until_alone()


async def test_a_meter_reads_the_log_that_the_server_has_written(empty_url: str) -> None:
    async with observing(empty_url) as observer:
        meter = await Meter.of(observer)
        before = await meter.read()
        async with engine_on(empty_url):
            pass
        figures = await meter.since(before, count=2, name="start")
        after = await meter.read()
    assert 0 < figures["wal_start"].value <= (after.log - before.log) / 2
    assert before.cpu is None or after.cpu is None or after.cpu >= before.cpu


def test_a_process_other_than_postgres_has_no_postmaster() -> None:
    assert postmaster_of(os.getpid()) is None


def test_the_fields_of_a_process_start_after_its_name(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("12 (a b) c) S 7 1 1\n")
    assert fields_of(tmp_path) == ["S", "7", "1", "1"]
