"""Engine: one method per operation of the specification, no logic."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

from flowfabric.engine.boot import Applied, Boot, NoOp
from flowfabric.engine.cancel import Cancel
from flowfabric.engine.claim import Claim
from flowfabric.engine.expire import Expire
from flowfabric.engine.feed import Feed
from flowfabric.engine.finish import Finish
from flowfabric.engine.lanes import Lanes
from flowfabric.engine.lease import Leases
from flowfabric.engine.release import Releases
from flowfabric.engine.retention import Retention
from flowfabric.engine.submit import Submit
from flowfabric.engine.view import Ended, View
from flowfabric.engine.workers import Workers
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import NewExecution
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.outcomes import (
    Cancelled,
    ClaimedExecution,
    Completed,
    Created,
    Duplicate,
    ExecutionInfo,
    FailureClass,
    FailureReason,
    Marked,
    NotRegistered,
    Refreshed,
    Registered,
    Renewed,
    RetryScheduled,
    TerminalFailed,
)
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.states import CancelSource, LaneState, PublicState
from flowfabric.settings import Settings

DEFAULT_LEASE_TTL_MS = 30_000


class Engine:
    """The engine on one Postgres; get one from `Engine.connect`."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self.settings = boot.settings
        store = boot.store
        self.wakeups = store.wakeups
        self.leases = Leases(store)
        self._releases = Releases(store, self.leases)
        self._submit = Submit(store)
        self._finish = Finish(store, self._releases)
        self._claim = Claim(store, self.leases, self._finish)
        self._cancel = Cancel(store, self._releases)
        self.expiry = Expire(store, self._releases)
        self.retention = Retention(store)
        self.feed = Feed(store)
        self.workers = Workers(store)
        self._lanes = Lanes(store)
        self._view = View(store)

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str | None = None, *, settings: Settings | None = None) -> AsyncIterator["Engine"]:
        """An engine on the named Postgres, on the configured one, or on the embedded one."""
        settings = settings or Settings()
        if url is not None:
            settings = settings.model_copy(update={"database_url": Settings(database_url=url).database_url})
        boot = await Boot.open(settings)
        engine = cls(boot)
        try:
            yield engine
        finally:
            await engine._close()

    @asynccontextmanager
    async def beside(self, *, pool_size: int = 1) -> AsyncIterator["Engine"]:
        """Another engine on the same store with connections of its own, for a thread with an event loop of its own."""
        settings = self._boot.address.model_copy(update={"database_pool_size": pool_size})
        async with Engine.connect(settings=settings) as engine:
            yield engine

    async def _close(self) -> None:
        await self._view.close()
        for family in (self._claim, self._submit, self._releases, self.leases):
            await family.drain()
        await self._boot.close()

    # execution

    async def create_execution(
        self,
        *,
        namespace: str,
        lane_id: str,
        execution_kind: str,
        input_payload: bytes,
        priority: int,
        creator_identity: str,
        execution_id: ExecutionId | str | None = None,
        payload_encoding: str | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy: ExecutionPolicy | Mapping[str, object] | str | bytes | None = None,
        delay_until: int | None = None,
        execution_deadline_at: int | None = None,
    ) -> Created | Duplicate:
        """Create an execution, once: a repeat of its id or of its live idempotency key is a `Duplicate`."""
        return await self._submit.create(
            NewExecution(
                namespace=namespace,
                lane_id=lane_id,
                execution_kind=execution_kind,
                input_payload=input_payload,
                priority=priority,
                creator_identity=creator_identity,
                execution_id=execution_id,
                payload_encoding=payload_encoding,
                idempotency_key=idempotency_key,
                tags=tags,
                policy=policy,
                delay_until=delay_until,
                execution_deadline_at=execution_deadline_at,
            )
        )

    async def create_many(self, items: Sequence[NewExecution]) -> list[Created | Duplicate | EngineError]:
        """Create up to a thousand executions in one statement, each with its own verdict."""
        return await self._submit.create_many(items)

    async def cancel(self, handle: Handle, reason: str) -> None:
        """End the run a handle holds as cancelled."""
        await self._cancel.cancel(handle, reason)

    async def cancel_execution(
        self,
        *,
        execution_id: ExecutionId | str,
        reason: str,
        source: str = CancelSource.OPERATOR_OVERRIDE,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
    ) -> Cancelled:
        """End an execution as cancelled from any state; cancelling it again changes nothing."""
        return await self._cancel.cancel_execution(execution_id, reason, source, lease_id, lease_epoch, attempt_id)

    # claim

    async def claim(
        self,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Sequence[str] = (),
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        max_wait_ms: int = 0,
    ) -> Handle | None:
        """Lease the best claimable execution of a lane; None when there is none within the wait."""
        claimed = await self.claim_many(
            lanes=(lane_id,),
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
            limit=1,
            max_wait_ms=max_wait_ms,
        )
        return claimed[0].handle if claimed else None

    async def claim_many(
        self,
        *,
        lanes: Sequence[str],
        worker_id: str,
        worker_instance_id: str,
        limit: int,
        capabilities: Sequence[str] = (),
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        max_wait_ms: int = 0,
    ) -> list[ClaimedExecution]:
        """Lease up to `limit` executions of several lanes, by priority, then age; empty when there are none."""
        return await self._claim.claim_many(
            lanes=lanes,
            capabilities=capabilities,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            limit=limit,
            max_wait_ms=max_wait_ms,
        )

    # lease

    async def renew(self, handle: Handle) -> Renewed:
        """Extend a lease by the time its handle holds."""
        return await self.leases.renew(handle)

    async def renew_many(self, handles: Sequence[Handle]) -> list[Renewed | EngineError]:
        """Extend up to a thousand leases in one statement, each with its own verdict."""
        return await self.leases.renew_many(handles)

    # finish

    async def progress(self, handle: Handle, *, percent: int | None = None, message: str | None = None) -> None:
        """Overwrite what a run reports of itself; what is absent keeps its value."""
        await self.leases.progress(handle, percent=percent, message=message)

    async def complete(self, handle: Handle, payload: bytes | None = None) -> None:
        """End a run in success with its result; a repeat of the call is success too."""
        await self._finish.complete(handle, payload)

    async def complete_many(self, items: Sequence[tuple[Handle, bytes | None]]) -> list[Completed | EngineError]:
        """End up to a thousand runs in success in one statement, each with its own verdict."""
        return await self._finish.complete_many(items)

    async def fail(
        self,
        handle: Handle,
        *,
        reason: FailureReason | str,
        classification: FailureClass | str = FailureClass.TRANSIENT,
        claimed: ClaimedExecution | None = None,
    ) -> RetryScheduled | TerminalFailed:
        """End an attempt in failure: tried again where the policy says so; `claimed` saves reading the policy."""
        return await self._finish.fail(handle, reason, classification, claimed)

    # worker

    async def register_worker(
        self,
        *,
        worker_id: str,
        worker_instance_id: str,
        lanes: Sequence[str],
        liveness_ttl_ms: int,
        namespace: str,
        capabilities: Sequence[str] = (),
    ) -> Registered | Refreshed:
        """Enter a worker process into the registry, or renew its entry."""
        return await self.workers.register(
            worker_id, worker_instance_id, lanes, capabilities, liveness_ttl_ms, namespace
        )

    async def heartbeat_worker(self, *, worker_instance_id: str, namespace: str) -> Refreshed | NotRegistered:
        """Keep a live registration alive."""
        return await self.workers.heartbeat(worker_instance_id, namespace)

    async def mark_worker_dead(self, *, worker_instance_id: str, namespace: str, reason: str) -> Marked | NotRegistered:
        """End a live registration; its leases are not touched."""
        return await self.workers.mark_dead(worker_instance_id, namespace, reason)

    # view

    async def read_execution_state(self, execution_id: ExecutionId | str) -> PublicState | None:
        """The public state of an execution."""
        return await self._view.state(execution_id)

    async def read_execution_info(self, execution_id: ExecutionId | str) -> ExecutionInfo | None:
        """What an operator sees of an execution."""
        return await self._view.info(execution_id)

    async def get_execution_result(self, execution_id: ExecutionId | str) -> bytes | None:
        """The result of a completed execution."""
        return await self._view.result(execution_id)

    async def wait_for_ending(self, execution_id: ExecutionId | str, *, timeout: float | None = None) -> Ended:
        """How an execution ended, as soon as it has."""
        return await self._view.wait_for_ending(execution_id, timeout)

    async def set_lane_state(self, lane_id: str, state: LaneState | str) -> None:
        """Change what a lane accepts: submissions, claims, both or neither."""
        await self._lanes.set_state(lane_id, state)

    async def server_time_ms(self) -> int:
        """The store's wall clock in milliseconds."""
        return await self._view.clock()

    async def ping(self) -> None:
        """One round trip to the store."""
        await self._view.clock()

    async def prepare(self) -> NoOp | Applied:
        """Bring the store to where this code can run on it."""
        return await self._boot.prepare()

    def backend_label(self) -> str:
        """What this engine stores in."""
        return "postgres"
