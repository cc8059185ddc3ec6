"""Executions in each public state, one for each way that leads to it."""

import asyncpg

from engine.state import block
from engine.waits import suspend_args
from fixtures import Clock, Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.states import PublicState

DAY = 86_400_000


async def one_of(state: PublicState, given: Given, clock: Clock, connection: asyncpg.Connection) -> set[str]:
    """Create executions in a state, one for each way that leads to it."""
    engine: Engine = given.engine
    match state:
        case PublicState.WAITING:
            held = await given.created(lane_id="held")
            await engine.block_execution_for_admission(held, "paused_by_operator")
            return {held, await given.created(lane_id="rare")}
        case PublicState.DELAYED:
            return {await given.delayed(lane_id="rare"), (await given.backing_off(lane_id="other")).execution_id}
        case PublicState.RATE_LIMITED:
            execution_id = await given.created(lane_id="rare")
            await engine.block_execution_for_admission(execution_id, "waiting_for_quota")
            return {execution_id}
        case PublicState.WAITING_CHILDREN:
            # Without a flow, nothing leads to this state.
            execution_id = await given.created(lane_id="rare")
            await block(connection, execution_id, "blocked_by_dependencies", "waiting_for_children")
            return {execution_id}
        case PublicState.ACTIVE:
            lost = await given.reclaimable(lane_id="lost")
            running = await given.claimed(lane_id="rare", lease_ttl_ms=2 * DAY)
            return {lost.execution_id, running.execution_id}
        case PublicState.SUSPENDED:
            handle = await given.claimed(lane_id="rare")
            await engine.suspend(handle, suspend_args())
            return {handle.execution_id}
        case PublicState.RESUMABLE:
            handle = await given.claimed(lane_id="rare")
            await engine.delay(handle, 0)
            await engine.promote_delayed(execution_id=handle.execution_id)
            return {handle.execution_id}
        case PublicState.COMPLETED:
            return {await given.completed(lane_id="rare")}
        case PublicState.FAILED:
            return {await given.failed(lane_id="rare")}
        case PublicState.CANCELLED:
            return {await given.cancelled(lane_id="rare")}
        case PublicState.EXPIRED:
            execution_id = await given.created(lane_id="rare", execution_deadline_at=await clock.now() + 5)
            await clock.advance(seconds=1)
            await parts_of(engine).timeouts.expire_due()
            return {execution_id}
        case PublicState.SKIPPED:
            # Nothing leads to this state yet.
            execution_id = await given.cancelled(lane_id="rare")
            await connection.execute("update execution set terminal_outcome = 'skipped'")
            await connection.execute("update listed set public_state = 'skipped'")
            await connection.execute("update retained set terminal_outcome = 'skipped'")
            return {execution_id}
