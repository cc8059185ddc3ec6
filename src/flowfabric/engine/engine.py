"""Engine: every operation, on one Postgres."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from flowfabric.engine.core.consequence import Attachment, Consequence, LeaseEnds
from flowfabric.engine.core.keys import Keys
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.event.partitions import EventPartitions
from flowfabric.engine.execution.cancel import Cancel
from flowfabric.engine.execution.create import Create
from flowfabric.engine.execution.results import Results
from flowfabric.engine.execution.retention import Retention
from flowfabric.engine.execution.submit import Submit
from flowfabric.engine.execution.tags import Tags
from flowfabric.engine.fleet.identities import Identities
from flowfabric.engine.fleet.lanes import Lanes
from flowfabric.engine.fleet.sessions import Sessions
from flowfabric.engine.fleet.workers import Workers
from flowfabric.engine.lease.catch_up import CatchUp
from flowfabric.engine.lease.claim import Claim
from flowfabric.engine.lease.claim_named import NamedClaims
from flowfabric.engine.lease.delay import Delays
from flowfabric.engine.lease.expire import LeaseExpiry, Timeouts
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.lease.grant import Grants, take_grants
from flowfabric.engine.lease.reclaim import Reclaim
from flowfabric.engine.lease.renew import Renewals
from flowfabric.engine.lifecycle import Lifecycle, Shutdown
from flowfabric.engine.operation import Rooms, operation
from flowfabric.engine.read.consistency import Consistency
from flowfabric.engine.read.counting import Counting
from flowfabric.engine.read.explain import Explain
from flowfabric.engine.read.listing import Listing
from flowfabric.engine.read.view import View
from flowfabric.engine.store import Store
from flowfabric.engine.wait.close import close_suspensions
from flowfabric.engine.wait.deliver import Signals
from flowfabric.engine.wait.resume import Resumes
from flowfabric.engine.wait.suspend import Suspend
from flowfabric.engine.wait.timeout import SuspensionTimeouts
from flowfabric.engine.wait.waitpoint import Waitpoints
from flowfabric.model.errors import error
from flowfabric.model.support import NAMED_OPERATIONS, Capabilities, capabilities_of, identify
from flowfabric.settings import Settings
from flowfabric.version import __version__

STAGE = "alpha"

CONSEQUENCES: Mapping[Attachment, Consequence] = {
    Attachment.GRANT: take_grants,
    Attachment.SUSPENSION: close_suspensions,
}
"""What follows for each thing that hangs on an execution when its lease, or it, ends."""


class Engine:
    """The engine on one Postgres; get one from `Engine.connect`."""

    # Executions: creating, cancelling, tags, results.
    create_execution = operation(Submit.create_execution)
    create_many = operation(Submit.create_many)
    cancel = operation(Cancel.cancel)
    cancel_execution = operation(Cancel.cancel_execution)
    set_execution_tag = operation(Tags.set_execution_tag)
    set_execution_tags = operation(Tags.set_execution_tags)
    get_execution_tag = operation(Tags.get_execution_tag)
    wait_for_ending = operation(Results.wait_for_ending)

    # Claims: by search, by grant, by name.
    claim = operation(Claim.claim)
    claim_many = operation(Claim.claim_many)
    claim_for_worker = operation(Grants.claim_for_worker)
    scan_eligible_executions = operation(Grants.scan_eligible_executions)
    issue_claim_grant = operation(Grants.issue_claim_grant)
    claim_execution = operation(NamedClaims.claim_execution)
    claim_resumed_execution = operation(NamedClaims.claim_resumed_execution)
    claim_from_resume_grant = operation(NamedClaims.claim_from_resume_grant)
    issue_grant_and_claim = operation(NamedClaims.issue_grant_and_claim)

    # Leases: renewing, expiring, reclaiming.
    renew = operation(Renewals.renew)
    renew_many = operation(Renewals.renew_many)
    renew_lease = operation(Renewals.renew_lease)
    progress = operation(Renewals.progress)
    mark_lease_expired_if_due = operation(LeaseExpiry.mark_lease_expired_if_due)
    list_expired_leases = operation(LeaseExpiry.list_expired_leases)
    issue_reclaim_grant = operation(Reclaim.issue_reclaim_grant)
    reclaim_execution = operation(Reclaim.reclaim_execution)

    # The end of a run: finished, put aside, out of time.
    complete = operation(Finish.complete)
    complete_many = operation(Finish.complete_many)
    fail = operation(Finish.fail)
    complete_execution = operation(Finish.complete_execution)
    fail_execution = operation(Finish.fail_execution)
    delay = operation(Delays.delay)
    wait_children = operation(Delays.wait_children)
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

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.settings = lifecycle.settings
        self.store_key = lifecycle.store_key
        self._rooms = rooms = Rooms()
        self._lifecycle = rooms.add(lifecycle)
        store, keys = lifecycle.store, rooms.add(lifecycle.keys)
        self.wakeups = store.wakeups

        lease_ends = rooms.add(LeaseEnds(store, CONSEQUENCES))
        expiry_quarantine = Quarantine(self.settings.lease_expiry_interval_ms / 1000)
        self.lease_expiry = rooms.add(LeaseExpiry(store, lease_ends, expiry_quarantine))

        submit = rooms.add(Submit(Create(store), store, patience_ms=self.settings.submit_patience_ms))
        rooms.add(Cancel(store, lease_ends))
        rooms.add(Tags(store))
        results = rooms.add(Results(store))

        renewals = rooms.add(Renewals(store, self.lease_expiry))
        finish = rooms.add(Finish(store, lease_ends))
        self.delays = rooms.add(
            Delays(store, lease_ends, Quarantine(self.settings.delayed_promoter_interval_ms / 1000))
        )
        self.timeouts = rooms.add(Timeouts(store, lease_ends, Quarantine(self.settings.attempt_timeout_interval_s)))
        self.catch_up = rooms.add(CatchUp(self.lease_expiry, self.delays))
        claims = rooms.add(Claim(store, self.catch_up, finish))
        grants = rooms.add(Grants(store, keys, self.catch_up, finish))
        named_claims = rooms.add(NamedClaims(store, keys))
        rooms.add(Reclaim(store, grants, named_claims, lease_ends))

        rooms.add(Waitpoints(store, keys, self.lease_expiry))
        suspend = rooms.add(Suspend(store, keys, lease_ends, self.lease_expiry))
        resumes = rooms.add(Resumes(store))
        signals = rooms.add(Signals(store, keys, resumes))
        self.suspension_timeouts = rooms.add(
            SuspensionTimeouts(
                store,
                lease_ends,
                resumes,
                Quarantine(self.settings.suspension_timeout_interval_s),
                Quarantine(self.settings.pending_wp_expiry_interval_s),
            )
        )
        self.retention = rooms.add(Retention(store, Quarantine(self.settings.retention_trimmer_interval_s)))

        self.event_partitions = rooms.add(EventPartitions(store))
        self.sessions = rooms.add(Sessions(store))
        self.workers = rooms.add(Workers(store))
        self.identities = rooms.add(Identities(store))
        for kind in (Lanes, View, Explain, Listing, Counting, Consistency):
            rooms.add(kind(store))
        drained = (submit, signals, suspend, lease_ends, renewals)
        self._shutdown = rooms.add(Shutdown(claims, results, [room.drain for room in drained]))

    if not TYPE_CHECKING:
        # Type checkers know only what is offered. At run time any operation that has a name can be called.
        def __getattr__(self, name: str) -> object:
            """An operation that is named but not offered: calling it raises an error that says so."""
            if name not in NAMED_OPERATIONS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

            async def refuse(*_: object, **__: object) -> None:
                raise error("unavailable", f"{name}: not offered by this version")

            async def refuse_each(*_: object, **__: object) -> AsyncIterator[object]:
                await refuse()
                yield

            return refuse_each if name.startswith("subscribe_") else refuse

    @property
    def store(self) -> Store:
        """The database as the operations see it."""
        return self._lifecycle.store

    def backend_label(self) -> str:
        """What this engine stores in."""
        return "postgres"

    def capabilities(self) -> Capabilities:
        """Which backend this is and what it offers."""
        identity = identify(self.backend_label(), __version__, STAGE)
        return capabilities_of(identity, lambda name: hasattr(type(self), name))

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str | None = None, *, settings: Settings | None = None) -> AsyncIterator["Engine"]:
        """An engine on the named Postgres, on the configured one, or on the embedded one."""
        settings = settings or Settings()
        if url is not None:
            settings = settings.model_copy(update={"database_url": Settings(database_url=url).database_url})
        async with cls._on(await Lifecycle.open(settings)) as engine:
            yield engine

    @asynccontextmanager
    async def beside(self, *, pool_size: int = 1) -> AsyncIterator["Engine"]:
        """Another engine on the same store with connections of its own, for a thread with an event loop of its own."""
        settings = self._lifecycle.address.model_copy(update={"database_pool_size": pool_size})
        async with self._on(await Lifecycle.open(settings, beside=self._lifecycle)) as engine:
            yield engine

    @classmethod
    @asynccontextmanager
    async def _on(cls, lifecycle: Lifecycle) -> AsyncIterator["Engine"]:
        engine = cls(lifecycle)
        try:
            yield engine
        finally:
            await engine._close()

    async def _close(self) -> None:
        """End waits, answer calls under way, and leave the store."""
        await self._shutdown.close()
        await self._lifecycle.close()
