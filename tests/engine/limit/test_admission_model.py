"""Claims on a lane with limits lease what a walk in the order of the lane would lease, whatever the limits are.

The model knows nothing of queues, rounds or estimates: it walks over all executions, the best first, and admits each
that is within its limits. A rate that alone has denied an execution lets none through that comes after it.
"""

import os
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest

from engine.limit.budgets import budget, report
from engine.state import claim, new
from fixtures import Clock, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import NewExecution
from flowfabric.model.lease import ClaimedExecution

WINDOW = 60_000
RETRIES = {"retry_policy": {"max_retries": 1000, "backoff": {"type": "fixed", "delay_ms": 0}}}
EXAMPLES = int(os.environ.get("FF_TEST_EXAMPLES", "10"))
Key = tuple[UUID, str]


@dataclass
class Quota:
    """A quota; 0 disables a limit."""

    quota_policy_id: UUID
    cap: int
    rate: int
    is_keyed: bool
    is_weighted: bool


@dataclass
class Run:
    """An execution, and what limits it."""

    execution_id: str
    order: tuple[int, int]
    keys: list[Key]
    budgets: list[UUID]
    weight: int
    lease: ClaimedExecution | None = None
    has_ended: bool = False


@dataclass
class Model:
    """The limits, and what was admitted."""

    quotas: dict[UUID, Quota]
    exhausted: set[UUID] = field(default_factory=set)
    runs: list[Run] = field(default_factory=list)
    tokens: defaultdict[Key, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    guards: dict[tuple[Key, str], int] = field(default_factory=dict)

    def holders(self, key: Key) -> int:
        """How many leases hold a slot of a key."""
        return sum(run.lease is not None and key in run.keys for run in self.runs) if self.quotas[key[0]].cap else 0

    def in_window(self, key: Key, now: int) -> int:
        """The tokens of a key that were taken in the last window."""
        return sum(tokens for at, tokens in self.tokens[key] if at > now - WINDOW)

    def is_guarded(self, key: Key, run: Run, now: int) -> bool:
        """Whether an execution needs no token of a key."""
        return self.guards.get((key, run.execution_id), 0) > now

    def claim(self, limit: int, now: int) -> list[str]:
        """What a claim leases."""
        found: list[str] = []
        closed: set[Key] = set()
        taken: defaultdict[Key, int] = defaultdict(int)
        for run in sorted(self.runs, key=lambda run: run.order):
            if len(found) == limit:
                break
            if run.has_ended or run.lease is not None or not self.exhausted.isdisjoint(run.budgets):
                continue
            rated: list[Key] = []
            full = 0
            for key in run.keys:
                quota = self.quotas[key[0]]
                full += quota.cap > 0 and self.holders(key) + taken[key] >= quota.cap
                if quota.rate and not self.is_guarded(key, run, now):
                    weight = min(run.weight, quota.rate)
                    if key in closed or self.in_window(key, now) + weight > quota.rate:
                        rated.append(key)
                        full -= quota.cap > 0 and self.holders(key) + taken[key] >= quota.cap
            if full or rated:
                if len(rated) == 1 and not full:
                    closed.update(rated)
                continue
            for key in run.keys:
                quota = self.quotas[key[0]]
                taken[key] += 1
                if quota.rate and not self.is_guarded(key, run, now):
                    self.tokens[key].append((now, min(run.weight, quota.rate)))
                    self.guards[key, run.execution_id] = now + WINDOW
            found.append(run.execution_id)
        return found


async def _quotas(engine: Engine, chance: random.Random) -> list[Quota]:
    quotas = []
    for _ in range(5):
        quota = Quota(
            uuid4(),
            cap=chance.choice((0, 1, 2, 5)),
            rate=chance.choice((0, 0, 3, 8)),
            is_keyed=chance.random() < 0.5,
            is_weighted=chance.random() < 0.4,
        )
        await engine.create_quota_policy(
            quota.quota_policy_id,
            window_seconds=WINDOW // 1000,
            max_requests_per_window=quota.rate,
            max_concurrent=quota.cap,
            key_from="tag:app.key" if quota.is_keyed else None,
            weight_from="tag:app.weight" if quota.is_weighted else None,
        )
        quotas.append(quota)
    return quotas


class Lane:
    """A lane with limits, and the model of it."""

    def __init__(self, engine: Engine, clock: Clock, rows: Rows, chance: random.Random) -> None:
        self.engine = engine
        self.clock = clock
        self.rows = rows
        self.chance = chance
        self.model = Model({})
        self.own: list[Quota] = []
        self.budgets: list[UUID] = []
        self.attached: dict[str, Quota] = {}

    async def set_up(self) -> None:
        """Create the limits."""
        first, second, *self.own = await _quotas(self.engine, self.chance)
        self.model.quotas = {each.quota_policy_id: each for each in (first, second, *self.own)}
        self.attached = {"limited": first, "other": second}
        await self.engine.attach_quota("namespace", "limited", first.quota_policy_id)
        await self.engine.attach_quota("kind", "other", second.quota_policy_id)
        for _ in range(2):
            self.budgets.append(await budget(self.engine, hard={"tokens": 10}))

    async def create(self, count: int) -> None:
        """Create executions with limits of all kinds."""
        chance = self.chance
        given: list[tuple[dict[str, Any], list[Key], list[UUID], int]] = []
        for _ in range(count):
            namespace, kind = chance.choice(("limited", "tests")), chance.choice(("other", "job"))
            own = chance.choice((None, None, *self.own))
            budgets = [each for each in self.budgets if chance.random() < 0.2]
            tags = {"app.key": chance.choice("abc"), "app.weight": str(chance.choice((1, 1, 2, 5, 10**15)))}
            policy: dict[str, Any] = {**RETRIES, "budget_ids": [str(each) for each in budgets]}
            if own is not None:
                policy["quota_policy_id"] = str(own.quota_policy_id)
            quotas = [own] if own is not None else []
            quotas += [self.attached[each] for each in (namespace, kind) if each in self.attached]
            keys = [(each.quota_policy_id, tags["app.key"] if each.is_keyed else "default") for each in quotas]
            weight = max([int(tags["app.weight"]) for each in quotas if each.is_weighted], default=1)
            priority = chance.choice((0, 0, 0, 5, 9))
            arguments = new(namespace=namespace, execution_kind=kind, policy=policy, tags=tags, priority=priority)
            given.append((arguments, keys, budgets, weight))
        made = await self.engine.create_many([NewExecution(**arguments) for arguments, _, _, _ in given])
        for (arguments, keys, budgets, weight), created in zip(given, made, strict=True):
            order = (-arguments["priority"], len(self.model.runs))
            self.model.runs.append(Run(created.execution_id, order, keys, budgets, weight))  # type: ignore[union-attr]

    async def claim(self) -> None:
        """Claim, and compare with the model."""
        limit = self.chance.choice((1, 2, 3, 7, 20))
        claimed = await claim(self.engine, limit=limit, lease_ttl_ms=86_400_000)
        assert [each.execution_id for each in claimed] == self.model.claim(limit, await self.clock.now())
        leases = {each.execution_id: each for each in claimed}
        for run in self.model.runs:
            run.lease = leases.get(run.execution_id, run.lease)

    async def end_some(self) -> None:
        """End some leases in one of the ways there are."""
        for run in self.model.runs:
            if run.lease is not None and self.chance.random() < 0.5:
                run.has_ended = await self._end(run.lease)
                run.lease = None

    async def _end(self, lease: ClaimedExecution) -> bool:
        engine, handle = self.engine, lease.handle
        match self.chance.randrange(7):
            case 0:
                await engine.complete(handle, b"x")
            case 1:
                await engine.complete_many([(handle, b"x")])
            case 2:
                await engine.fail(handle, reason="x", classification="permanent")
            case 3:
                await engine.cancel_execution(execution_id=handle.execution_id, reason="x")
            case 4:
                await engine.fail(handle, reason="x")
                return False
            case 5:
                await engine.hand_back(handle)
                return False
            case _:
                await engine.revoke_lease(handle.execution_id, reason="x")
                return False
        return True

    async def change_budget(self) -> None:
        """Exhaust or reset a budget."""
        budget_id = self.chance.choice(self.budgets)
        if budget_id in self.model.exhausted:
            await self.engine.reset_budget(budget_id)
            self.model.exhausted.discard(budget_id)
        else:
            await report(self.engine, budget_id, tokens=10)
            self.model.exhausted.add(budget_id)

    async def check(self) -> None:
        """The slots in use and the tokens are those of the model, and nothing has to be corrected."""
        now = await self.clock.now()
        for row in await self.rows.of("quota_key"):
            key = row["quota_policy_id"], row["key"]
            quota = self.model.quotas[key[0]]
            returned = await self.rows.of("slot_return", quota_key_no=row["quota_key_no"])
            used = row["taken"] - sum(each["returned"] for each in returned)
            assert used == self.model.holders(key), key
            assert not quota.cap or used <= quota.cap, key
            pairs = zip(row["window_ats"], row["window_tokens"], strict=True)
            assert sum(tokens for at, tokens in pairs if at > now - WINDOW) == self.model.in_window(key, now), key


@pytest.mark.parametrize("seed", range(EXAMPLES))
async def test_a_claim_leases_what_a_walk_in_order_leases(engine: Engine, clock: Clock, rows: Rows, seed: int) -> None:
    await clock.stop()
    lane = Lane(engine, clock, rows, random.Random(seed))
    await lane.set_up()
    await lane.create(30)
    for _ in range(25):
        match lane.chance.randrange(8):
            case 0:
                await lane.create(5)
            case 1 | 2:
                await lane.end_some()
            case 3:
                await lane.change_budget()
            case 4:
                await clock.advance(ms=lane.chance.choice((1000, WINDOW // 2, WINDOW)))
            case _:
                await lane.claim()
        await lane.check()
    await engine.reconcile_quota_counters()
    await lane.check()
