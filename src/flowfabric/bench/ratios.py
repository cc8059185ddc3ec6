"""Medians over the rounds of a run, and ratios within each round."""

import statistics
from collections.abc import Mapping, Sequence

from flowfabric.bench.subject import Figure, Figures

PEERS = ("pgqueuer", "awa", "absurd", "procrastinate", "dbos")
LIMITS = ("tagged", "shared", "tight", "keyed", "rated")
BEFORE = "before:"
"""The prefix of the figures of the other checkout."""

RATIOS = {
    **{f"worker_end_to_end/{peer}": ("worker_end_to_end", f"{peer}_worker_end_to_end") for peer in PEERS},
    **{f"submit_batch/{peer}": ("submit_batch", f"{peer}_submit_batch") for peer in PEERS},
    # At its fastest batch size.
    "worker_end_to_end/pgqueuer": ("worker_end_to_end", "pgqueuer_worker_end_to_end_best"),
    "worker_end_to_end/raw_claim100_complete100": ("worker_end_to_end", "raw_claim100_complete100"),
    "worker_default_slots/worker_end_to_end": ("worker_default_slots", "worker_end_to_end"),
    "engine_claim_finish/raw_claim100_complete100": ("engine_claim_finish", "raw_claim100_complete100"),
    "engine_claim_finish_100/raw_claim100_complete100": ("engine_claim_finish_100", "raw_claim100_complete100"),
    "submit_batch/raw_insert100": ("submit_batch", "raw_insert100"),
    "submit_batch_100/raw_insert100": ("submit_batch_100", "raw_insert100"),
    "submit_batch_1500b_tag/raw_insert100_1500b": ("submit_batch_1500b_tag", "raw_insert100_1500b"),
    "signal_resume_burst/complete_burst": ("signal_resume_burst", "complete_burst"),
    "signal_resume_burst/engine_claim_finish": ("signal_resume_burst", "engine_claim_finish"),
    "frames_grouped/frames_one_commit": ("frames_grouped", "frames_one_commit"),
    "feed_catch_up_last/feed_catch_up_first": ("feed_catch_up_last", "feed_catch_up_first"),
    "feed_drain/feed_drain_alone": ("feed_drain", "feed_drain_alone"),
    "feed_drain_across/feed_drain_alone": ("feed_drain_across", "feed_drain_alone"),
    "flow_fan_rate/flow_fan_plain": ("flow_fan_rate", "flow_fan_plain"),
    **{
        f"limits_worker_{limit}/limits_worker_free": (f"limits_worker_{limit}", "limits_worker_free")
        for limit in LIMITS
    },
    **{
        f"limits_engine_{batch}_{limit}/limits_engine_{batch}_free": (
            f"limits_engine_{batch}_{limit}",
            f"limits_engine_{batch}_free",
        )
        for batch in (100, 500)
        for limit in ("roomy",)
    },
    "limits_worker_keyed/limits_worker_tagged": ("limits_worker_keyed", "limits_worker_tagged"),
    **{
        f"limits_engine_{batch}_keyed/limits_engine_{batch}_tagged": (
            f"limits_engine_{batch}_keyed",
            f"limits_engine_{batch}_tagged",
        )
        for batch in (100, 500)
    },
    "limits_pinned_last/limits_pinned_first": ("limits_pinned_last", "limits_pinned_first"),
    "limits_pinned_free_last/limits_pinned_free_first": ("limits_pinned_free_last", "limits_pinned_free_first"),
    **{
        f"neighbour_{how}_{name}/neighbour_service": (f"neighbour_{how}_{name}", "neighbour_service")
        for how in ("fair", "capped")
        for name in ("mean", "p95")
    },
    "soak_last_tenth/soak_first_tenth": ("soak_last_tenth", "soak_first_tenth"),
    **{f"claim_{size}/claim_20k": (f"claim_{size}", "claim_20k") for size in ("1m", "100k")},
    **{f"claim_{size}_mixed/claim_20k_mixed": (f"claim_{size}_mixed", "claim_20k_mixed") for size in ("1m", "100k")},
    **{
        f"queues_1000_claim_{size}{named}/queues_1_claim_{size}": (
            f"queues_1000_claim_{size}{named}",
            f"queues_1_claim_{size}",
        )
        for named in ("", "_named")
        for size in (1, 64, 500)
    },
    "count_1m_ended/group_by_1m_ended": ("count_1m_ended", "group_by_1m_ended"),
    "count_1m_waiting/group_by_1m_waiting": ("count_1m_waiting", "group_by_1m_waiting"),
    "pinned_claim_last/pinned_claim_first": ("pinned_claim_last", "pinned_claim_first"),
    "pinned_backlog_last/pinned_backlog_first": ("pinned_backlog_last", "pinned_backlog_first"),
    "pinned_start_last/pinned_start_first": ("pinned_start_last", "pinned_start_first"),
}


def medians(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over the rounds that contain it."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    found = {name: [figures[name] for figures in rounds if name in figures] for name in names}
    return {
        name: Figure(value=statistics.median(each.value for each in figures), unit=figures[0].unit)
        for name, figures in found.items()
    }


def ratios(rounds: Sequence[Figures], wanted: Mapping[str, tuple[str, str]] = RATIOS) -> dict[str, float]:
    """The median of each ratio over the rounds that contain both figures.

    Both figures of a ratio are from the same round. A round in which the second figure is 0 is left out.
    """
    found: dict[str, float] = {}
    for name, (above, below) in wanted.items():
        values = [
            each[above].value / each[below].value
            for each in rounds
            if above in each and below in each and each[below].value
        ]
        if values:
            found[name] = statistics.median(values)
    return found


def ratios_of_versions(rounds: Sequence[Figures]) -> dict[str, tuple[str, str]]:
    """The ratio of every figure to the figure of the other version, and the usual ratios of each version."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {
        **{f"{name}/before": (name, f"{BEFORE}{name}") for name in names if f"{BEFORE}{name}" in names},
        **{
            f"{prefix}{ratio}": (f"{prefix}{above}", f"{prefix}{below}")
            for prefix in ("", BEFORE)
            for ratio, (above, below) in RATIOS.items()
        },
    }
