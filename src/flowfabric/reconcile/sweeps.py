"""The table of sweeps: what runs in the background, how often, and when it is due."""

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta

from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.event import partitions
from flowfabric.engine.execution import retention
from flowfabric.engine.fleet import identities, sessions, workers
from flowfabric.engine.flow import backlog, blocked, cascade, siblings, summary
from flowfabric.engine.flow import retention as flow_retention
from flowfabric.engine.lease import expire
from flowfabric.engine.limit import admission, block, budget, quota
from flowfabric.engine.parts import Parts
from flowfabric.engine.stream import expire as streams
from flowfabric.engine.wait import timeout
from flowfabric.reconcile.due import Due
from flowfabric.settings import Settings


@dataclass(frozen=True, slots=True)
class Sweep:
    """A background job that runs in batches; any number of processes may run it at the same time."""

    name: str
    run: Callable[[Parts], Awaitable[int | SweepResult]]
    """Process one batch and return the number of items; rows locked by another session are left for the next batch."""
    _: KW_ONLY
    every: Callable[[Settings], timedelta]
    """The pause between two passes.

    For sweeps woken by timers it is the pause of the loop while timers are due. They share one loop, so the shortest
    pause applies; after a failure each sweep waits for its own.
    """
    batch: int
    """The size of a full batch, after which another follows without a pause, unless `run` returns a SweepResult."""
    is_due: Callable[[Due], bool]
    is_woken_by_timers: bool = False
    """Whether it runs as soon as a lease, delay, timeout or deadline is due instead of after `every`. The loop sees
    timers in the due index, and delays set by this process at once."""
    is_gentle: bool = False
    """Whether it pauses after a full batch for as long as the batch took, to leave half of the machine to live work.
    After ten seconds of full batches it stops pausing; otherwise the rows to delete could grow without bound."""

    async def run_batch(self, parts: Parts) -> SweepResult:
        """Process one batch."""
        swept = await self.run(parts)
        return swept if isinstance(swept, SweepResult) else SweepResult(swept, is_full=swept >= self.batch)


def _milliseconds(count: int) -> timedelta:
    return timedelta(milliseconds=count)


def _seconds(count: int) -> timedelta:
    return timedelta(seconds=count)


def _always(_: Due) -> bool:
    return True


SWEEPS = (
    Sweep(
        "silent_sessions",
        lambda parts: parts.sessions.end_silent(),
        every=lambda _: _seconds(2),
        batch=sessions.ENDED_LIMIT,
        is_due=lambda due: due.has_silent_sessions,
    ),
    Sweep(
        "lease_expiry",
        lambda parts: parts.lease_expiry.sweep_batch(),
        every=lambda settings: _milliseconds(settings.lease_expiry_interval_ms),
        batch=expire.CLAIM_LIMIT,
        is_due=lambda due: due.expired_claims > 0,
        is_woken_by_timers=True,
    ),
    Sweep(
        "delayed_promoter",
        lambda parts: parts.delays.promote_due(),
        every=lambda settings: _milliseconds(settings.delayed_promoter_interval_ms),
        batch=expire.SWEEP_LIMIT,
        is_due=lambda due: due.elapsed_delays > 0,
        is_woken_by_timers=True,
    ),
    Sweep(
        "expiry",
        lambda parts: parts.timeouts.expire_due(),
        every=lambda settings: _seconds(
            min(settings.attempt_timeout_interval_s, settings.execution_deadline_interval_s)
        ),
        batch=expire.SWEEP_LIMIT,
        is_due=lambda due: due.expiries > 0,
        is_woken_by_timers=True,
    ),
    Sweep(
        "suspension_timeout",
        lambda parts: parts.suspension_timeouts.expire_due(),
        every=lambda settings: _seconds(settings.suspension_timeout_interval_s),
        batch=timeout.TIMEOUT_LIMIT,
        is_due=lambda due: due.suspension_timeouts > 0,
        is_woken_by_timers=True,
    ),
    Sweep(
        "pending_wp_expiry",
        lambda parts: parts.suspension_timeouts.close_pending(),
        every=lambda settings: _seconds(settings.pending_wp_expiry_interval_s),
        batch=timeout.WAITPOINT_LIMIT,
        is_due=lambda due: due.has_expired_waitpoints,
    ),
    Sweep(
        "cascade",
        lambda parts: parts.cascade.settle_left_over(since=parts.store.due_watermark.since - cascade.LEFT_OVER_MS),
        every=lambda _: _seconds(1),
        batch=cascade.ENTRY_LIMIT,
        is_due=lambda due: due.has_cascade_entries,
        is_woken_by_timers=True,
    ),
    Sweep(
        "grant_slots",
        lambda parts: parts.admission.return_expired(),
        every=lambda _: _seconds(1),
        batch=admission.EXPIRED_LIMIT,
        is_due=lambda due: due.has_expired_slots,
    ),
    Sweep(
        "unblock",
        lambda parts: parts.unblocking.unblock_batch(),
        every=lambda settings: _seconds(settings.unblock_interval_s),
        batch=block.PAGE_LIMIT,
        is_due=lambda due: due.has_blocked,
    ),
    Sweep(
        "dependency_reconciler",
        lambda parts: parts.blocked.reconcile(),
        every=lambda settings: _seconds(settings.dependency_reconciler_interval_s),
        batch=blocked.PAGE_LIMIT,
        is_due=_always,
        is_gentle=True,
    ),
    Sweep(
        "edge_cancel_dispatcher",
        lambda parts: parts.siblings.dispatch(),
        every=lambda settings: _seconds(settings.edge_cancel_dispatcher_interval_s),
        batch=siblings.GROUP_LIMIT,
        is_due=lambda due: due.has_pending_groups,
    ),
    Sweep(
        "edge_cancel_reconciler",
        lambda parts: parts.siblings.reconcile(),
        every=lambda settings: _seconds(settings.edge_cancel_reconciler_interval_s),
        batch=siblings.GROUP_LIMIT,
        is_due=lambda due: due.has_pending_groups,
    ),
    Sweep(
        "cancel_reconciler",
        lambda parts: parts.cancel_backlog.reconcile_due(),
        every=lambda settings: _seconds(settings.cancel_reconciler_interval_s),
        batch=backlog.SWEEP_LIMIT,
        is_due=lambda due: due.has_due_cancellations,
    ),
    Sweep(
        "budget_reset",
        lambda parts: parts.budgets.reset_due(),
        every=lambda settings: _seconds(settings.budget_reset_interval_s),
        batch=budget.RESET_LIMIT,
        is_due=lambda due: due.has_due_budgets,
    ),
    Sweep(
        "budget_reconciler",
        lambda parts: parts.budgets.recount_next(),
        every=lambda settings: _seconds(settings.budget_reconciler_interval_s),
        batch=budget.RECOUNT_LIMIT,
        is_due=lambda due: due.has_budgets,
        is_gentle=True,
    ),
    Sweep(
        "flow_projector",
        lambda parts: parts.flow_summaries.project_due(),
        every=lambda settings: _seconds(settings.flow_projector_interval_s),
        batch=summary.FLOW_LIMIT,
        is_due=lambda due: due.has_due_flows,
        is_gentle=True,
    ),
    Sweep(
        "quota_reconciler",
        lambda parts: parts.quotas.reconcile_batch(),
        every=lambda settings: _seconds(settings.quota_reconciler_interval_s),
        batch=quota.PAGE_LIMIT,
        is_due=lambda due: due.has_quota_keys,
        is_gentle=True,
    ),
    Sweep(
        "retention_trimmer",
        lambda parts: parts.retention.trim_batch(),
        every=lambda settings: _seconds(settings.retention_trimmer_interval_s),
        batch=retention.TRIM_LIMIT,
        is_due=lambda due: due.has_retained,
        is_gentle=True,
    ),
    Sweep(
        "flow_retention",
        lambda parts: parts.flow_retention.trim_batch(),
        every=lambda settings: _seconds(settings.retention_trimmer_interval_s),
        batch=flow_retention.FLOW_LIMIT,
        is_due=_always,
        is_gentle=True,
    ),
    Sweep(
        "stream_expiry",
        lambda parts: parts.stream_expiry.sweep_batch(),
        every=lambda _: _seconds(5),
        batch=streams.STREAM_LIMIT,
        is_due=lambda due: due.has_due_streams,
        is_gentle=True,
    ),
    Sweep(
        "dedup_sweep",
        lambda parts: parts.retention.purge_keys(),
        every=lambda _: _seconds(60),
        batch=retention.PURGE_LIMIT,
        is_due=lambda due: due.has_expired_keys,
        is_gentle=True,
    ),
    Sweep(
        "quota_guard_expiry",
        lambda parts: parts.quotas.purge_guards(),
        every=lambda _: _seconds(60),
        batch=quota.GUARD_LIMIT,
        is_due=lambda due: due.has_expired_guards,
        is_gentle=True,
    ),
    Sweep(
        "claim_grant_expiry",
        lambda parts: parts.retention.purge_grants(),
        every=lambda _: _seconds(1),
        batch=retention.PURGE_LIMIT,
        is_due=lambda due: due.has_old_grants,
    ),
    Sweep(
        "worker_registry_ttl_sweep",
        lambda parts: parts.workers.sweep_expired(),
        every=lambda _: _seconds(30),
        batch=workers.SWEEP_LIMIT,
        is_due=lambda due: due.has_expired_workers,
    ),
    Sweep(
        "worker_identity_trim",
        lambda parts: parts.identities.purge(),
        every=lambda _: _seconds(60),
        batch=identities.PURGE_LIMIT,
        is_due=lambda due: due.has_old_identities,
        is_gentle=True,
    ),
    Sweep(
        "event_partitions",
        lambda parts: parts.event_partitions.keep_partitions(),
        every=lambda _: _seconds(60),
        batch=partitions.TRIM_LIMIT,
        is_due=_always,
    ),
    Sweep(
        "outbox_trim",
        lambda parts: parts.event_partitions.trim_events(),
        every=lambda _: _seconds(60),
        batch=partitions.TRIM_LIMIT,
        is_due=_always,
        is_gentle=True,
    ),
    Sweep(
        "worker_event_trim",
        lambda parts: parts.event_partitions.trim_worker_events(),
        every=lambda _: _seconds(60),
        batch=partitions.TRIM_LIMIT,
        is_due=_always,
        is_gentle=True,
    ),
)
"""In the order they run: sweeps that make work claimable first, sweeps that only free space last."""
