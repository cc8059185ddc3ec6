"""One bad execution never keeps a claim from the good ones of the batch, nor from those behind it in its queue."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from engine.limit.budgets import budget
from engine.limit.limits import limited, quota
from engine.state import claim, items, made, new
from fixtures import Clock, Given, uuid_of
from flowfabric.engine.engine import Engine


class Batch:
    """99 good executions of a quota, behind a bad one."""

    def __init__(self, engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection) -> None:
        self.engine = engine
        self.given = given
        self.clock = clock
        self.connection = connection
        self.quota = uuid4()

    async def bad(self, policy: dict[str, Any] | None = None, **overrides: Any) -> str:
        """The first execution of the lane, with the quota of the good ones unless a policy is given."""
        return await self.given.created(
            policy=limited(self.quota) if policy is None else policy, priority=9, **overrides
        )

    async def lock(self, query: str, *values: object) -> AbstractAsyncContextManager[None]:
        """Lock rows until the block ends."""

        @asynccontextmanager
        async def locked() -> AsyncIterator[None]:
            async with self.connection.transaction():
                await self.connection.execute(query, *values)
                yield

        return locked()


@asynccontextmanager
async def _as_it_is() -> AsyncIterator[None]:
    yield


Worst = Callable[[Batch], Awaitable[AbstractAsyncContextManager[None]]]


async def _locked(batch: Batch) -> AbstractAsyncContextManager[None]:
    bad = await batch.bad()
    return await batch.lock("select from execution where execution_id = $1 for update", uuid_of(bad))


async def _locked_entry(batch: Batch) -> AbstractAsyncContextManager[None]:
    bad = await batch.bad()
    return await batch.lock("select from ready where execution_id = $1 for update", uuid_of(bad))


async def _at_reclaim_limit(batch: Batch) -> AbstractAsyncContextManager[None]:
    bad = await batch.bad({**limited(batch.quota), "max_reclaim_count": 1})
    for _ in range(2):
        assert len(await claim(batch.engine)) == 1
        await batch.engine.revoke_lease(bad, reason="x")
    return _as_it_is()


async def _corrupt(batch: Batch) -> AbstractAsyncContextManager[None]:
    corrupt = await quota(batch.engine, running=1)
    await batch.bad(limited(corrupt))
    await batch.connection.execute("update quota_policy set max_concurrent = -1 where quota_policy_id = $1", corrupt)
    return _as_it_is()


async def _corrupt_rate(batch: Batch) -> AbstractAsyncContextManager[None]:
    corrupt = await quota(batch.engine, rate=1)
    await batch.bad(limited(corrupt))
    await batch.connection.execute(
        "update quota_policy set max_requests_per_window = -5, window_seconds = -1 where quota_policy_id = $1", corrupt
    )
    return _as_it_is()


async def _heavy(batch: Batch) -> AbstractAsyncContextManager[None]:
    heavy = uuid4()
    await batch.engine.create_quota_policy(heavy, 60, 10, 0, weight_from="payload:/weight")
    await batch.bad(limited(heavy), input_payload=b'{"weight": 1}')
    assert len(await claim(batch.engine)) == 1
    await batch.bad(limited(heavy), input_payload=b'{"weight": 9007199254740991}')
    return _as_it_is()


async def _many_quotas(batch: Batch) -> AbstractAsyncContextManager[None]:
    bad = await batch.bad(namespace="other")
    keys = [uuid4() for _ in range(15)]
    for key in keys:
        await batch.engine.create_quota_policy(key, 60, 0, 1)
        await batch.engine.check_admission(key, execution_id=bad, window_seconds=60, rate_limit=0, concurrency_cap=0)
    await batch.engine.check_admission(
        keys[-1],
        execution_id=await batch.given.created(lane_id="elsewhere"),
        window_seconds=60,
        rate_limit=0,
        concurrency_cap=1,
    )
    await batch.connection.execute(
        """update queue set quota_key_nos = quota_key_nos || array(select quota_key_no from quota_key
            where quota_policy_id = any($1::uuid[]) order by quota_key_no)
            where queue_no = (select queue_no from execution where execution_id = $2)""",
        keys,
        uuid_of(bad),
    )
    return _as_it_is()


async def _locked_budget(batch: Batch) -> AbstractAsyncContextManager[None]:
    locked = await budget(batch.engine, hard={"tokens": 1})
    await batch.engine.report_usage_admin(locked, dimensions=["tokens"], deltas=[1])
    await batch.bad({"budget_ids": [str(locked)]})
    return await batch.lock(
        """select from budget b join budget_account using (budget_id) join budget_usage using (budget_id)
             join budget_limit using (budget_id) for update"""
    )


async def _granted(batch: Batch) -> AbstractAsyncContextManager[None]:
    bad = await batch.bad()
    await batch.engine.issue_claim_grant(
        execution_id=bad, lane_id="default", worker_id="other", worker_instance_id="other-1", grant_ttl_ms=60_000
    )
    return _as_it_is()


async def _unwanted(batch: Batch) -> AbstractAsyncContextManager[None]:
    await batch.bad(execution_kind="unwanted")
    return _as_it_is()


WORST: dict[str, Worst] = {
    "locked": _locked,
    "entry locked": _locked_entry,
    "at its reclaim limit": _at_reclaim_limit,
    "of a corrupt quota": _corrupt,
    "of a corrupt rate": _corrupt_rate,
    "too heavy": _heavy,
    "of sixteen quota keys": _many_quotas,
    "of a locked budget": _locked_budget,
    "granted": _granted,
    "of another kind": _unwanted,
}


@pytest.mark.parametrize("fair_by", [None, "namespace"])
@pytest.mark.parametrize("worst", WORST)
async def test_good_executions_are_claimed_beside_a_bad_one(
    engine: Engine,
    given: Given,
    clock: Clock,
    connection: asyncpg.Connection,
    altered_rows: None,
    worst: str,
    fair_by: str | None,
) -> None:
    batch = Batch(engine, given, clock, connection)
    await engine.create_quota_policy(batch.quota, 60, 0, 100)
    prepared = await WORST[worst](batch)
    if fair_by is not None:
        await engine.set_lane_fairness(lane_id="default", fair_by=fair_by)
    good = await made(engine, *[new(policy=limited(batch.quota)) for _ in range(99)])
    async with prepared:
        runs = await claim(engine, limit=100, kinds=("job",))
    assert [run.execution_id for run in runs] == good


@pytest.mark.parametrize("fair_by", [None, "namespace"])
async def test_a_locked_head_does_not_hide_the_one_behind_it(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, fair_by: str | None
) -> None:
    policy = limited(await quota(engine, running=1))
    ids = [await given.created(policy=policy) for _ in range(6)]
    if fair_by is not None:
        await engine.set_lane_fairness(lane_id="default", fair_by=fair_by)
    async with connection.transaction():
        locked = [uuid_of(each) for each in ids[:4]]
        await connection.execute("select from execution where execution_id = any($1::uuid[]) for update", locked)
        (run,) = await claim(engine)
    assert run.execution_id == ids[4]
    await engine.complete(run.handle, b"")
    assert [each.execution_id for each in await claim(engine)] == [ids[0]]


async def test_a_granted_head_does_not_hide_the_one_behind_it(engine: Engine, given: Given, clock: Clock) -> None:
    policy = limited(await quota(engine, running=8))
    ids = [await given.created(policy=policy) for _ in range(6)]
    await engine.set_lane_fairness(lane_id="default", fair_by="namespace")
    for each in ids[:5]:
        await engine.issue_claim_grant(
            execution_id=each, lane_id="default", worker_id="other", worker_instance_id="other-1"
        )
    (run,) = await claim(engine, limit=1)
    assert run.execution_id == ids[5]
    assert await claim(engine, limit=1) == []


async def test_lighter_executions_do_not_pass_a_heavy_one(engine: Engine, given: Given, clock: Clock) -> None:
    await clock.stop()
    tokens: UUID = uuid4()
    await engine.create_quota_policy(tokens, 60, 10, 0, key_from=None, weight_from="payload:/tokens")
    policy = limited(tokens)

    async def create(count: int) -> str:
        return await given.created(policy=policy, input_payload=b'{"tokens": %d}' % count)

    first, heavy, *light = [await create(count) for count in (6, 9, 1, 1, 1)]
    (run,) = await claim(engine)
    assert run.execution_id == first
    await engine.complete(run.handle, b"")
    await clock.advance(seconds=59)
    assert await claim(engine) == []
    await clock.advance(seconds=1)
    runs = await claim(engine)
    assert [each.execution_id for each in runs] == [heavy, light[0]]
    await engine.complete_many([(each.handle, b"") for each in runs])
    await clock.advance(seconds=60)
    assert [each.execution_id for each in await claim(engine)] == light[1:]


async def test_every_kind_of_create_is_limited(engine: Engine, given: Given, clock: Clock) -> None:
    policy = limited(await quota(engine, running=3))
    await engine.create_many(items(*[new(policy=policy) for _ in range(2)]))
    await given.created(policy=policy)
    flow = {"lane_id": "default", "execution_kind": "job", "input_payload": b"1", "creator_identity": "test"}
    await engine.submit_flow(flow_kind="dag", namespace="tests", nodes=[{"name": "a", "policy": policy, **flow}])
    await given.created(policy=policy)
    assert len(await claim(engine)) == 3
