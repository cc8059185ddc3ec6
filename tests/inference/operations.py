"""What type checkers infer about the operations of the engine.

Checked by mypy and pyright in strict mode, and never run. An ignore comment on a line without an error is itself an
error, so every such line states what must be refused.
"""

from typing import assert_type

from flowfabric import Engine
from flowfabric.feeds import (
    AnyInstanceTagEvent,
    AnyLeaseEvent,
    CompletionEvent,
    FeedEvent,
    LeaseAcquired,
    LeaseExpired,
    LeaseReclaimed,
    LeaseReleased,
    LeaseRenewed,
    LeaseReplayInitiated,
    LeaseRevoked,
    ScannerFilter,
    Subscription,
)
from flowfabric.outcomes import ClaimedExecution, Created, Duplicate, Handle


async def inferred(engine: Engine) -> None:
    """The return types of operations, called on an engine and on its class."""
    claimed = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=10)
    assert_type(claimed, list[ClaimedExecution])
    assert_type(await engine.claim(lane_id="default", worker_id="w", worker_instance_id="w-1"), Handle | None)
    created = await engine.create_execution(
        namespace="n", lane_id="default", execution_kind="k", input_payload=b"", priority=0, creator_identity="me"
    )
    assert_type(created, Created | Duplicate)
    assert_type(await Engine.get_execution_result(engine, created.execution_id), bytes | None)
    subscription = engine.subscribe_completion(b"", ScannerFilter(namespace="n"))
    assert_type(subscription, Subscription[CompletionEvent])
    assert_type(await subscription, Subscription[CompletionEvent])
    assert_type(Engine.subscribe_instance_tags(engine), Subscription[AnyInstanceTagEvent])
    async with engine.subscribe_lease_history() as leases:
        async for event in leases:
            assert_type(event, AnyLeaseEvent)
            # Complete without a last case: type checkers report a missing one.
            match event:
                case LeaseAcquired() | LeaseRenewed() | LeaseReleased() | LeaseExpired() | LeaseRevoked():
                    assert_type(event.lease_epoch, int)
                case LeaseReclaimed():
                    assert_type(event.new_owner, str | None)
                case LeaseReplayInitiated():
                    assert_type(event.reason, str | None)
    followed: list[Subscription[FeedEvent]] = [subscription, leases]
    assert_type(followed[0].cursor, bytes)


async def refused(engine: Engine, handle: Handle) -> None:
    """Calls with wrong arguments."""
    await engine.complete(1)  # type: ignore[arg-type]  # pyright: ignore
    await engine.complete(handle, b"1", b"2")  # type: ignore[call-arg]  # pyright: ignore
    await engine.claim(lane="default")  # type: ignore[call-arg]  # pyright: ignore
    engine.subscribe_completion("text")  # type: ignore[arg-type]  # pyright: ignore
    await engine.make_coffee()  # type: ignore[attr-defined]  # pyright: ignore
