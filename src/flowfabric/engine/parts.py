"""The parts of an engine: its services, built once per engine, and how the worker and the reconciler reach them."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from flowfabric.engine.bulk.matching import Matching
from flowfabric.engine.bulk.replays import MatchingReplays
from flowfabric.engine.core.consequence import Attachment, Consequence, LeaseEnds
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.event.feed import Feeds
from flowfabric.engine.event.partitions import EventPartitions
from flowfabric.engine.execution.cancel import Cancel
from flowfabric.engine.execution.cancel_many import CancelMany
from flowfabric.engine.execution.create import Create
from flowfabric.engine.execution.limits import LimitRules
from flowfabric.engine.execution.priority import Priority
from flowfabric.engine.execution.results import Results
from flowfabric.engine.execution.retention import Retention
from flowfabric.engine.execution.submit import Submit
from flowfabric.engine.execution.tags import Tags
from flowfabric.engine.fleet.identities import Identities
from flowfabric.engine.fleet.lanes import Lanes
from flowfabric.engine.fleet.sessions import Sessions
from flowfabric.engine.fleet.workers import Workers
from flowfabric.engine.flow.backlog import CancelBacklog
from flowfabric.engine.flow.blocked import Blocked
from flowfabric.engine.flow.cancel import FlowCancel
from flowfabric.engine.flow.cascade import Cascade
from flowfabric.engine.flow.ending import FlowEndings
from flowfabric.engine.flow.graph import Graph
from flowfabric.engine.flow.park import ChildWaits
from flowfabric.engine.flow.replay import Replays
from flowfabric.engine.flow.resolve import Resolver
from flowfabric.engine.flow.retention import FlowRetention
from flowfabric.engine.flow.siblings import Siblings
from flowfabric.engine.flow.submit import SubmitFlow
from flowfabric.engine.flow.summary import FlowSummaries
from flowfabric.engine.flow.tags import FlowTags
from flowfabric.engine.lease.catch_up import CatchUp
from flowfabric.engine.lease.claim import Claim
from flowfabric.engine.lease.claim_named import NamedClaims
from flowfabric.engine.lease.delay import Delays
from flowfabric.engine.lease.expire import LeaseExpiry, Timeouts
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.lease.grant import Grants, delete_grants
from flowfabric.engine.lease.limited import LimitedClaims
from flowfabric.engine.lease.reclaim import Reclaim
from flowfabric.engine.lease.renew import Renewals
from flowfabric.engine.lease.revoke import Revoke
from flowfabric.engine.lifecycle import Lifecycle, Shutdown
from flowfabric.engine.limit.admission import Admission
from flowfabric.engine.limit.attach import Attach
from flowfabric.engine.limit.block import Blocks, Unblocking
from flowfabric.engine.limit.booking import Bookings
from flowfabric.engine.limit.budget import Budgets
from flowfabric.engine.limit.fairness import Fairness
from flowfabric.engine.limit.quota import Quotas
from flowfabric.engine.limit.reserve import Reservations
from flowfabric.engine.limit.spend import Spending
from flowfabric.engine.operation import Services
from flowfabric.engine.read.consistency import Consistency
from flowfabric.engine.read.counting import Counting
from flowfabric.engine.read.explain import Explain
from flowfabric.engine.read.flow_listing import FlowListing
from flowfabric.engine.read.flows import Flows
from flowfabric.engine.read.listing import Listing
from flowfabric.engine.read.members import Members
from flowfabric.engine.read.upstreams import Upstreams
from flowfabric.engine.read.view import View
from flowfabric.engine.store import Store
from flowfabric.engine.stream.append import Streams
from flowfabric.engine.stream.close import end_streams
from flowfabric.engine.stream.expire import STREAM_PAUSE_SECONDS, StreamExpiry
from flowfabric.engine.stream.tail import Tails
from flowfabric.engine.wait.close import close_suspensions
from flowfabric.engine.wait.deliver import Signals
from flowfabric.engine.wait.resume import Resumes
from flowfabric.engine.wait.suspend import Suspend
from flowfabric.engine.wait.timeout import SuspensionTimeouts
from flowfabric.engine.wait.waitpoint import Waitpoints

CONSEQUENCES: Mapping[Attachment, Consequence] = {
    Attachment.GRANT: delete_grants,
    Attachment.SUSPENSION: close_suspensions,
    Attachment.STREAM: end_streams,
}
"""What to do for each kind of attachment when the lease or the execution ends; `Parts` adds those of its services."""


class Parts:
    """The services of one engine, including those that only the worker and the reconciler use."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        settings, store = lifecycle.settings, lifecycle.store
        self.lifecycle = lifecycle
        self.store_key = lifecycle.store_key
        self.wakeups = store.wakeups
        self.services = services = Services()
        services.add(lifecycle)
        keys = services.add(lifecycle.keys)

        bookings = Bookings(store)
        services.add(Spending(store, bookings))
        reservations = services.add(Reservations(store, bookings))
        consequences = {**CONSEQUENCES, Attachment.RESERVATION: reservations.return_reservations}
        lease_ends = services.add(LeaseEnds(store, consequences))
        expiry_quarantine = Quarantine(settings.lease_expiry_interval_ms / 1000)
        self.lease_expiry = services.add(LeaseExpiry(store, lease_ends, expiry_quarantine))

        self.limit_rules = services.add(LimitRules(store))
        submit = services.add(Submit(Create(store, self.limit_rules), store, patience_ms=settings.submit_patience_ms))
        services.add(Cancel(store, lease_ends))
        self.cancel_many = services.add(CancelMany(store, lease_ends))
        services.add(Priority(store))
        services.add(Tags(store))
        results = services.add(Results(store))

        renewals = services.add(Renewals(store, self.lease_expiry))
        finish = services.add(Finish(store, lease_ends))
        self.delays = services.add(Delays(store, lease_ends, Quarantine(settings.delayed_promoter_interval_ms / 1000)))
        self.timeouts = services.add(Timeouts(store, lease_ends, Quarantine(settings.attempt_timeout_interval_s)))
        self.admission = admission = Admission(store)
        self.catch_up = services.add(CatchUp(self.lease_expiry, self.delays, admission.return_since))
        limited_claims = LimitedClaims(store, admission, self.catch_up, finish)
        claims = services.add(Claim(store, self.catch_up, finish, limited_claims))
        grants = services.add(Grants(store, keys, self.catch_up, finish, limited_claims, admission))
        named_claims = services.add(NamedClaims(store, keys, admission))
        services.add(Reclaim(store, grants, named_claims, lease_ends))
        services.add(Revoke(store, lease_ends))

        services.add(Waitpoints(store, keys, self.lease_expiry))
        suspend = services.add(Suspend(store, keys, lease_ends, self.lease_expiry))
        resumes = services.add(Resumes(store))
        self.signals = services.add(Signals(store, keys, resumes))
        self.suspension_timeouts = services.add(
            SuspensionTimeouts(
                store,
                lease_ends,
                resumes,
                Quarantine(settings.suspension_timeout_interval_s),
                Quarantine(settings.pending_wp_expiry_interval_s),
            )
        )
        self.streams = services.add(Streams(store))
        self.stream_expiry = services.add(StreamExpiry(store, Quarantine(STREAM_PAUSE_SECONDS)))
        self.retention = services.add(Retention(store, Quarantine(settings.retention_trimmer_interval_s)))

        self.quotas = services.add(Quotas(store, self.limit_rules, admission.return_expired))
        blocks = services.add(Blocks(store))
        self.unblocking = services.add(Unblocking(store, blocks, Quarantine(settings.unblock_interval_s)))

        resolver = Resolver(store, lease_ends)
        services.add(Graph(store, resolver, self.limit_rules))
        services.add(ChildWaits(store, lease_ends))
        services.add(FlowTags(store))
        services.add(SubmitFlow(store, self.limit_rules, patience_ms=settings.submit_patience_ms))
        self.cascade = services.add(Cascade(store, resolver))
        services.add(Replays(store, resolver, self.cascade))
        self.blocked = services.add(Blocked(store, resolver, self.cascade))
        self.siblings = services.add(
            Siblings(store, self.cancel_many, Quarantine(settings.edge_cancel_dispatcher_interval_s))
        )
        self.cancel_backlog = services.add(
            CancelBacklog(store, self.cancel_many, Quarantine(settings.cancel_reconciler_interval_s))
        )
        self.flow_cancel = services.add(FlowCancel(store, self.cancel_backlog, grace_ms=settings.cancel_grace_ms))
        self.flow_summaries = services.add(
            FlowSummaries(
                store,
                Quarantine(settings.flow_projector_interval_s),
                interval_ms=settings.flow_projector_interval_s * 1000,
            )
        )
        flow_endings = services.add(FlowEndings(store))
        self.flow_retention = services.add(FlowRetention(store, Quarantine(settings.retention_trimmer_interval_s)))
        self.attach = services.add(Attach(store, self.limit_rules, self.unblocking.limit_detached))
        services.add(Fairness(store, self.limit_rules))
        self.members = services.add(Members(store))
        self.upstreams = services.add(Upstreams(store))

        self.budgets = services.add(Budgets(store, Quarantine(settings.budget_reset_interval_s)))

        # Tails and subscriptions that are woken at once leave connections for others.
        half = max(settings.database_pool_size // 2, 1)
        queries = asyncio.Semaphore(half)
        self.tails = services.add(
            Tails(
                store,
                results,
                queries=queries,
                repeated_queries=asyncio.Semaphore(half),
                max_operations=settings.max_concurrent_stream_ops,
            )
        )
        feeds = services.add(Feeds(store, queries=queries))
        self.event_partitions = services.add(EventPartitions(store))
        self.sessions = services.add(Sessions(store))
        self.workers = services.add(Workers(store, self.unblocking.worker_registered))
        self.identities = services.add(Identities(store))
        for kind in (Lanes, View, Explain, Flows, FlowListing, Listing, Counting, Consistency):
            services.add(kind(store))
        self.replays = MatchingReplays(store, services[Listing], services[Replays])
        services.add(Matching(services[Listing], services[View], self.cancel_many, self.replays, services[Priority]))
        waits = (self.tails, feeds, self.flow_cancel, flow_endings)
        drained = (
            self.tails,
            feeds,
            submit,
            self.limit_rules,
            self.signals,
            suspend,
            self.streams,
            lease_ends,
            renewals,
            bookings,
        )
        cascades = (self.flow_cancel, self.cascade, self.siblings)
        drains = [
            results.close,
            flow_endings.close,
            limited_claims.close,
            *(service.drain for service in (*drained, *cascades)),
        ]
        self.shutdown = services.add(Shutdown(claims, self.flow_cancel, (results, *waits), drains))

    @property
    def store(self) -> Store:
        """The database as the operations see it."""
        return self.lifecycle.store


class HasParts(Protocol):
    """An object with parts: an engine."""

    @property
    def _parts(self) -> Parts: ...


def parts_of(engine: HasParts) -> Parts:
    """Return the parts of an engine, for the layers above it; not public API."""
    return engine._parts
