"""A quorum as a flow: five judges read a draft, the first three verdicts decide, and the other judges are cancelled."""

import asyncio

from flowfabric import Fabric, quorum

fabric = Fabric(lane="judges")


@fabric.task
async def write(topic: str) -> str:
    """Write a draft."""
    return f"Everything about {topic}"


@fabric.task
async def judge(draft: str, number: int) -> str:
    """Judge a draft; one judge has no opinion, and one never comes to an end."""
    if number == 0:
        raise ValueError("no opinion")
    if number == 4:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("judge 4 is cancelled: three verdicts are enough")
            raise
    await asyncio.sleep(0.2)  # reading
    return "publish" if draft.startswith("Everything") else "reject"


@fabric.task
async def decide(verdicts: list[str]) -> str:
    """Follow the majority of three."""
    return max(verdicts, key=verdicts.count)


async def main() -> None:
    """Let five judges decide on a draft."""
    flow = fabric.flow("review")
    draft = flow.add(write, "queues")
    judges = [flow.add(judge, draft, number) for number in range(5)]
    decision = flow.add(decide, quorum(3, of=judges, cancel_remaining=True))
    async with fabric, fabric.worker():
        run = await flow.submit()
        print(f"decision: {await run.run(decision).result(timeout=60)}")
        print(f"the flow has {await run.wait(timeout=60)}")
        states = sorted([(await run.run(node).status()).state.value for node in judges])
        print(f"judges: {', '.join(states)}")


if __name__ == "__main__":
    asyncio.run(main())
