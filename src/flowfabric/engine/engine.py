"""Engine: every operation, on one Postgres."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from flowfabric.engine.bulk.matching import Matching
from flowfabric.engine.core.keys import Keys
from flowfabric.engine.event.feed import Feeds
from flowfabric.engine.execution.cancel import Cancel
from flowfabric.engine.execution.priority import Priority
from flowfabric.engine.execution.results import Results
from flowfabric.engine.execution.retention import Retention
from flowfabric.engine.execution.submit import Submit
from flowfabric.engine.execution.tags import Tags
from flowfabric.engine.fleet.lanes import Lanes
from flowfabric.engine.fleet.workers import Workers
from flowfabric.engine.flow.backlog import CancelBacklog
from flowfabric.engine.flow.blocked import Blocked
from flowfabric.engine.flow.cancel import FlowCancel
from flowfabric.engine.flow.cascade import Cascade
from flowfabric.engine.flow.ending import FlowEndings
from flowfabric.engine.flow.graph import Graph
from flowfabric.engine.flow.park import ChildWaits
from flowfabric.engine.flow.replay import Replays
from flowfabric.engine.flow.siblings import Siblings
from flowfabric.engine.flow.submit import SubmitFlow
from flowfabric.engine.flow.summary import FlowSummaries
from flowfabric.engine.flow.tags import FlowTags
from flowfabric.engine.lease.claim import Claim
from flowfabric.engine.lease.claim_named import NamedClaims
from flowfabric.engine.lease.delay import Delays
from flowfabric.engine.lease.expire import LeaseExpiry, Timeouts
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.lease.grant import Grants
from flowfabric.engine.lease.reclaim import Reclaim
from flowfabric.engine.lease.renew import Renewals
from flowfabric.engine.lease.revoke import Revoke
from flowfabric.engine.lifecycle import Lifecycle, Shutdown
from flowfabric.engine.limit.attach import Attach
from flowfabric.engine.limit.block import Blocks
from flowfabric.engine.limit.budget import Budgets
from flowfabric.engine.limit.fairness import Fairness
from flowfabric.engine.limit.quota import Quotas
from flowfabric.engine.limit.reserve import Reservations
from flowfabric.engine.limit.spend import Spending
from flowfabric.engine.operation import operation
from flowfabric.engine.parts import Parts
from flowfabric.engine.read.consistency import Consistency
from flowfabric.engine.read.counting import Counting
from flowfabric.engine.read.explain import Explain
from flowfabric.engine.read.flow_listing import FlowListing
from flowfabric.engine.read.flows import Flows
from flowfabric.engine.read.listing import Listing
from flowfabric.engine.read.view import View
from flowfabric.engine.stream.append import Streams
from flowfabric.engine.stream.tail import Tails
from flowfabric.engine.wait.deliver import Signals
from flowfabric.engine.wait.resume import Resumes
from flowfabric.engine.wait.suspend import Suspend
from flowfabric.engine.wait.timeout import SuspensionTimeouts
from flowfabric.engine.wait.waitpoint import Waitpoints
from flowfabric.loops import check_engine_loop
from flowfabric.model.errors import error
from flowfabric.model.support import NAMED_OPERATIONS, Capabilities, capabilities_of, identify
from flowfabric.settings import Settings
from flowfabric.version import __version__

STAGE = "alpha"


class Engine:
    """The engine on one Postgres; get one from `Engine.connect`."""

    # Executions: creating, cancelling, replaying, priorities, tags, results, deleting.
    create_execution = operation(Submit.create_execution)
    create_many = operation(Submit.create_many)
    cancel = operation(Cancel.cancel)
    cancel_execution = operation(Cancel.cancel_execution)
    replay_execution = operation(Replays.replay_execution)
    change_priority = operation(Priority.change_priority)
    set_execution_tag = operation(Tags.set_execution_tag)
    set_execution_tags = operation(Tags.set_execution_tags)
    get_execution_tag = operation(Tags.get_execution_tag)
    wait_for_ending = operation(Results.wait_for_ending)
    trim_retention = operation(Retention.trim_retention)

    # Operations on all executions that match a filter.
    cancel_matching = operation(Matching.cancel_matching)
    replay_matching = operation(Matching.replay_matching)
    change_priority_matching = operation(Matching.change_priority_matching)

    # Claims: from the queues, by grant, by id.
    claim = operation(Claim.claim)
    claim_many = operation(Claim.claim_many)
    claim_for_worker = operation(Grants.claim_for_worker)
    scan_eligible_executions = operation(Grants.scan_eligible_executions)
    issue_claim_grant = operation(Grants.issue_claim_grant)
    claim_execution = operation(NamedClaims.claim_execution)
    claim_resumed_execution = operation(NamedClaims.claim_resumed_execution)
    claim_from_resume_grant = operation(NamedClaims.claim_from_resume_grant)
    issue_grant_and_claim = operation(NamedClaims.issue_grant_and_claim)

    # Leases: renewing, expiring, revoking, reclaiming.
    renew = operation(Renewals.renew)
    renew_many = operation(Renewals.renew_many)
    renew_lease = operation(Renewals.renew_lease)
    progress = operation(Renewals.progress)
    mark_lease_expired_if_due = operation(LeaseExpiry.mark_lease_expired_if_due)
    list_expired_leases = operation(LeaseExpiry.list_expired_leases)
    revoke_lease = operation(Revoke.revoke_lease)
    issue_reclaim_grant = operation(Reclaim.issue_reclaim_grant)
    reclaim_execution = operation(Reclaim.reclaim_execution)

    # Ending a run: complete, fail, delay, hand back, time out.
    complete = operation(Finish.complete)
    complete_many = operation(Finish.complete_many)
    fail = operation(Finish.fail)
    complete_execution = operation(Finish.complete_execution)
    fail_execution = operation(Finish.fail_execution)
    delay = operation(Delays.delay)
    wait_children = operation(ChildWaits.wait_children)
    hand_back = operation(Delays.hand_back)
    promote_delayed = operation(Delays.promote_delayed)
    expire_execution = operation(Timeouts.expire_execution)

    # Waits: suspending, waitpoints, signals, resuming.
    suspend = operation(Suspend.suspend)
    suspend_by_triple = operation(Suspend.suspend_by_triple)
    create_waitpoint = operation(Waitpoints.create_waitpoint)
    close_waitpoint = operation(Waitpoints.close_waitpoint)
    read_waitpoint_token = operation(Waitpoints.read_waitpoint_token)
    list_pending_waitpoints = operation(Waitpoints.list_pending_waitpoints)
    list_suspended = operation(Waitpoints.list_suspended)
    deliver_signal = operation(Signals.deliver_signal)
    deliver_approval_signal = operation(Signals.deliver_approval_signal)
    observe_signals = operation(Signals.observe_signals)
    resume_execution = operation(Resumes.resume_execution)
    expire_suspension = operation(SuspensionTimeouts.expire_suspension)

    # Limits: what they are attached to, and the fairness of lanes.
    attach_budget = operation(Attach.attach_budget)
    attach_quota = operation(Attach.attach_quota)
    detach_budget = operation(Attach.detach_budget)
    detach_quota = operation(Attach.detach_quota)
    list_attachments = operation(Attach.list_attachments)
    set_lane_fairness = operation(Fairness.set_lane_fairness)

    # Flows: the cascade.
    cascade_completion = operation(Cascade.cascade_completion)
    resolve_dependency = operation(Blocked.resolve_dependency)
    promote_blocked_to_eligible = operation(Blocked.promote_blocked_to_eligible)
    drain_sibling_cancel_group = operation(Siblings.drain_sibling_cancel_group)
    reconcile_sibling_cancel_group = operation(Siblings.reconcile_sibling_cancel_group)

    # Flows: cancelling.
    cancel_flow = operation(FlowCancel.cancel_flow)
    cancel_flow_header = operation(FlowCancel.cancel_flow_header)
    ack_cancel_member = operation(CancelBacklog.ack_cancel_member)

    # Flows: graphs of executions.
    submit_flow = operation(SubmitFlow.submit_flow)
    create_flow = operation(Graph.create_flow)
    add_execution_to_flow = operation(Graph.add_execution_to_flow)
    set_edge_group_policy = operation(Graph.set_edge_group_policy)
    stage_dependency_edge = operation(Graph.stage_dependency_edge)
    apply_dependency_to_child = operation(Graph.apply_dependency_to_child)
    set_flow_tag = operation(FlowTags.set_flow_tag)
    set_flow_tags = operation(FlowTags.set_flow_tags)
    get_flow_tag = operation(FlowTags.get_flow_tag)
    describe_flow = operation(Flows.describe_flow)
    list_flows = operation(FlowListing.list_flows)
    describe_edge = operation(Flows.describe_edge)
    list_edges = operation(Flows.list_edges)
    evaluate_flow_eligibility = operation(Flows.evaluate_flow_eligibility)

    # Flows: summaries and ends.
    project_flow_summary = operation(FlowSummaries.project_flow_summary)
    read_flow_summary = operation(FlowSummaries.read_flow_summary)
    wait_for_flow = operation(FlowEndings.wait_for_flow)

    # Limits: quotas, and blocked executions.
    create_quota_policy = operation(Quotas.create_quota_policy)
    change_quota_policy = operation(Quotas.change_quota_policy)
    read_quota_policy_limits = operation(Quotas.read_quota_policy_limits)
    check_admission = operation(Quotas.check_admission)
    release_admission = operation(Quotas.release_admission)
    reconcile_quota_counters = operation(Quotas.reconcile_quota_counters)
    block_execution_for_admission = operation(Blocks.block_execution_for_admission)
    unblock_execution = operation(Blocks.unblock_execution)

    # Streams: frames and summaries.
    append_frame = operation(Streams.append_frame)
    read_stream = operation(Tails.read_stream)
    tail_stream = operation(Tails.tail_stream)
    read_summary = operation(Tails.read_summary)

    # Feeds of events.
    subscribe_completion = operation(Feeds.subscribe_completion)
    subscribe_lease_history = operation(Feeds.subscribe_lease_history)
    subscribe_signal_delivery = operation(Feeds.subscribe_signal_delivery)
    subscribe_operator_events = operation(Feeds.subscribe_operator_events)
    subscribe_instance_tags = operation(Feeds.subscribe_instance_tags)

    # Budgets: definitions, usage, reservations.
    create_budget = operation(Budgets.create_budget)
    reset_budget = operation(Budgets.reset_budget)
    change_budget_limits = operation(Budgets.change_budget_limits)
    get_budget_status = operation(Budgets.get_budget_status)
    read_budget_usage_and_limits = operation(Budgets.read_budget_usage_and_limits)
    reconcile_budget_counters = operation(Budgets.reconcile_budget_counters)
    report_usage = operation(Spending.report_usage)
    report_usage_admin = operation(Spending.report_usage_admin)
    record_spend = operation(Spending.record_spend)
    release_budget = operation(Spending.release_budget)
    reserve = operation(Reservations.reserve)
    settle = operation(Reservations.settle)
    release_reservation = operation(Reservations.release_reservation)

    # Signing keys.
    seed_waitpoint_hmac_secret = operation(Keys.seed_waitpoint_hmac_secret)
    rotate_waitpoint_hmac_secret_all = operation(Keys.rotate_waitpoint_hmac_secret_all)
    list_waitpoint_hmac_kids = operation(Keys.list_waitpoint_hmac_kids)

    # Workers and lanes.
    register_worker = operation(Workers.register_worker)
    heartbeat_worker = operation(Workers.heartbeat_worker)
    mark_worker_dead = operation(Workers.mark_worker_dead)
    list_workers = operation(Workers.list_workers)
    set_lane_state = operation(Lanes.set_lane_state)
    list_lanes = operation(Lanes.list_lanes)

    # Reads.
    read_execution_state = operation(View.read_execution_state)
    read_execution_info = operation(View.read_execution_info)
    read_execution_status = operation(View.read_execution_status)
    get_execution_result = operation(View.get_execution_result)
    describe_execution = operation(View.describe_execution)
    read_execution_context = operation(View.read_execution_context)
    read_current_attempt_index = operation(View.read_current_attempt_index)
    read_total_attempt_count = operation(View.read_total_attempt_count)
    read_exec_core_fields = operation(View.read_exec_core_fields)
    resolve_execution_flow_id = operation(View.resolve_execution_flow_id)
    get_execution_namespace = operation(View.get_execution_namespace)
    list_attempts = operation(View.list_attempts)
    list_executions = operation(Listing.list_executions)
    count_executions = operation(Counting.count_executions)
    explain = operation(Explain.explain)
    find_inconsistencies = operation(Consistency.find_inconsistencies)

    # The store and this process.
    server_time_ms = operation(View.server_time_ms)
    ping = operation(View.ping)
    prepare = operation(Lifecycle.prepare)
    shutdown_prepare = operation(Shutdown.shutdown_prepare)

    def __init__(self, parts: Parts) -> None:
        self.settings = parts.lifecycle.settings
        self._parts = parts
        self._services = parts.services
        self._loop = asyncio.get_running_loop()

    if not TYPE_CHECKING:
        # Type checkers see only implemented operations. At run time every operation of the specification is callable.
        def __getattr__(self, name: str) -> object:
            """Return a stand-in for an operation of the specification that raises `unavailable` when called."""
            if name not in NAMED_OPERATIONS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

            async def refuse(*_: object, **__: object) -> None:
                raise error("unavailable", f"{name}: not implemented in flowfabric {__version__}")

            return refuse

    def backend_label(self) -> str:
        """The name of the storage backend."""
        return "postgres"

    def capabilities(self) -> Capabilities:
        """The backend's name and version, and which operations it implements."""
        identity = identify(self.backend_label(), __version__, STAGE)
        return capabilities_of(identity, lambda name: hasattr(type(self), name))

    @classmethod
    def connect(
        cls, url: str | None = None, *, settings: Settings | None = None
    ) -> AbstractAsyncContextManager["Engine"]:
        """Open an engine on the Postgres at `url`, else on the configured one, else on an embedded one."""
        return _Connection(cls._connected(url, settings))

    @classmethod
    @asynccontextmanager
    async def _connected(cls, url: str | None, settings: Settings | None) -> AsyncIterator["Engine"]:
        settings = settings or Settings()
        if url is not None:
            settings = settings.model_copy(update={"database_url": Settings(database_url=url).database_url})
        async with cls._on(await Lifecycle.open(settings)) as engine:
            yield engine

    @classmethod
    @asynccontextmanager
    async def _on(cls, lifecycle: Lifecycle) -> AsyncIterator["Engine"]:
        parts = Parts(lifecycle)
        try:
            yield cls(parts)
        finally:
            await parts.shutdown.close()
            await lifecycle.close()


class _Connection(AbstractAsyncContextManager[Engine]):
    """Closes an engine in the event loop in which it was connected; elsewhere it refuses, and the engine stays open."""

    def __init__(self, connected: AbstractAsyncContextManager[Engine]) -> None:
        self._connected = connected
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Engine:
        engine = await self._connected.__aenter__()
        self._loop = asyncio.get_running_loop()
        return engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        check_engine_loop(self._loop)
        return await self._connected.__aexit__(kind, error, trace)


@asynccontextmanager
async def second_engine(engine: Engine, *, pool_size: int = 1) -> AsyncIterator[Engine]:
    """Open a second engine on the same store with its own connections, for a thread with its own event loop.

    It sends hints to other processes but does not listen for theirs: its waits poll.
    """
    lifecycle = engine._parts.lifecycle
    settings = lifecycle.address.model_copy(update={"database_pool_size": pool_size})
    async with Engine._on(await Lifecycle.open(settings, first=lifecycle)) as other:
        yield other
