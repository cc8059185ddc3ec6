"""A deploy that two different people must approve."""

import asyncio

from flowfabric import Context, Fabric, Run
from flowfabric.conditions import ByName, Count, CountKind
from flowfabric.outcomes import Accepted

fabric = Fabric(lane="deploys")

TWO_APPROVERS = Count(n=2, count_kind=CountKind.DISTINCT_SOURCES, matcher=ByName("approve"), waitpoints=("deploy",))


@fabric.task
async def deploy(ctx: Context, version: str) -> str:
    """Suspend until two people have approved; the function then runs again from its first line."""
    if not ctx.is_resumed:
        await ctx.suspend(condition=TWO_APPROVERS, reason_code="waiting_for_approval")
    approvers = [signal.source_identity for signal in ctx.resumed_signals() if signal.satisfier]
    return f"{version} is live, approved by {' and '.join(approvers)}"


async def send_decision(run: Run[str], person: str, decision: str) -> None:
    """Deliver a signal, as an approval page would when somebody presses a button.

    A signal needs the token of its waitpoint. Only trusted code can read tokens from the engine.
    """
    engine = fabric.engine
    (waitpoint,) = (await engine.list_pending_waitpoints(execution_id=run.id)).entries
    token = await engine.read_waitpoint_token(execution_id=run.id, waitpoint_id=waitpoint.waitpoint_id)
    answer = await engine.deliver_signal(
        execution_id=run.id,
        waitpoint_id=waitpoint.waitpoint_id,
        waitpoint_token=token,
        signal_name=decision,
        signal_category="approval",
        source_type="user",
        source_identity=person,
    )
    print(f"{person} says {decision}: {answer.disposition if isinstance(answer, Accepted) else 'duplicate'}")


async def wait_until_suspended(run: Run[str]) -> None:
    """Wait until the run is suspended."""
    while True:
        if (await run.status()).state == "suspended":
            return
        await asyncio.sleep(0.05)


async def main() -> None:
    """Deploy with the approvals of Ada and Grace."""
    async with fabric, fabric.worker():
        run = await deploy.submit("v42")
        await wait_until_suspended(run)
        await send_decision(run, "Ada", "approve")
        await send_decision(run, "Ada", "approve")  # the same person counts once
        await send_decision(run, "Linus", "reject")
        print(f"the deploy is {(await run.status()).state}")
        await send_decision(run, "Grace", "approve")
        print(await run.result(timeout=30))


if __name__ == "__main__":
    asyncio.run(main())
