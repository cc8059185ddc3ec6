"""Random operations on budgets: after every step the counters are those of a plain model.

`FF_TEST_EXAMPLES=1000` runs that many new examples; a failure prints how to repeat it.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.flow.graph_store import GraphStore
from engine.state import claim, made, new, refused, rounds
from flowfabric.engine.engine import Engine
from flowfabric.model.budget import (
    AlreadyReserved,
    AlreadySettled,
    BudgetAlreadySatisfied,
    BudgetCreated,
    HardBreach,
    Ok,
    Reserved,
    Settled,
    SoftBreach,
)
from flowfabric.model.edge import AlreadyApplied
from flowfabric.model.handle import Handle
from flowfabric.reconcile.loop import Reconciler

from .budgets import definition

EXAMPLES = int(os.environ.get("FF_TEST_EXAMPLES", "0"))
DIMENSIONS = ("a", "b")
KEYS = ("", "k", "l")
LEASE_MS = 30_000

amounts = strategies.dictionaries(strategies.sampled_from(DIMENSIONS), strategies.integers(1, 6), min_size=1)
runs = strategies.integers(0, 2)
reservation_keys = strategies.sampled_from(("x", "y"))


class BudgetAgainstModel(RuleBasedStateMachine):
    """One budget with a hard limit of 20 and a soft one of 12 for `a`, and of 30 for `b`, and three runs."""

    store: GraphStore

    def __init__(self) -> None:
        super().__init__()
        self.budget_id: UUID = uuid4()
        self.limits: dict[str, int] = {}
        self.soft: dict[str, int] = {}
        self.used: Counter[str] = Counter()
        self.ledger: dict[str, Counter[str]] = {}
        self.reserved: dict[tuple[str, str], Mapping[str, int]] = {}
        self.keys: set[str] = set()
        self.settled: set[tuple[str, int, str]] = set()
        self.breaches = 0
        self.is_created = False
        self.has_overspent = False
        self.handles: list[Handle] = []
        self.past: list[Handle] = []

    @property
    def engine(self) -> Engine:
        return self.store.engine

    def call(self, work: Any) -> Any:
        return self.store.run(work)

    @initialize()
    def claim_runs(self) -> None:
        lane = f"lane {self.budget_id.hex}"

        async def prepare() -> None:
            await made(self.engine, *[new(lane_id=lane) for _ in range(3)])
            self.handles = [one.handle for one in await claim(self.engine, lane, lease_ttl_ms=LEASE_MS)]

        self.lane = lane
        self.call(prepare())

    def teardown(self) -> None:
        async def cancel() -> None:
            for handle in self.handles:
                await self.engine.cancel_execution(execution_id=handle.execution_id, reason="done")

        self.call(cancel())

    # The model.

    def held(self, dimension: str) -> int:
        return sum(each.get(dimension, 0) for each in self.reserved.values())

    def breached(self, wanted: Mapping[str, int]) -> HardBreach | None:
        for name in sorted(wanted):
            total = self.used[name] + self.held(name)
            if name in self.limits and total + wanted[name] > self.limits[name]:
                self.breaches += 1
                return HardBreach(
                    dimension=name, current_usage=total, hard_limit=self.limits[name], on_hard_limit="fail"
                )
        return None

    def expected_report(self, wanted: Mapping[str, int], key: str) -> Any:
        if key in self.keys:
            return AlreadyApplied()
        if (breach := self.breached(wanted)) is not None:
            return breach
        self.keys |= {key} - {""}
        self.used.update(wanted)
        for name in sorted(wanted):
            if name in self.soft and self.used[name] > self.soft[name]:
                return SoftBreach(dimension=name, current_usage=self.used[name], soft_limit=self.soft[name])
        return Ok()

    # The steps.

    @rule()
    def create(self) -> None:
        lists = {"dimensions": list(DIMENSIONS), "hard_limits": [20, 30], "soft_limits": [12, 0]}
        answer = self.call(self.engine.create_budget(self.budget_id, **definition(**lists)))
        kind = BudgetAlreadySatisfied if self.is_created else BudgetCreated
        assert answer == kind(budget_id=self.budget_id)
        self.is_created = True
        self.limits, self.soft = {"a": 20, "b": 30}, {"a": 12}
        self.has_overspent |= any(self.used[name] + self.held(name) > limit for name, limit in self.limits.items())

    @rule(wanted=amounts, key=strategies.sampled_from(KEYS))
    def report(self, wanted: dict[str, int], key: str) -> None:
        answer = self.call(
            self.engine.report_usage_admin(
                self.budget_id, dimensions=list(wanted), deltas=list(wanted.values()), dedup_key=key
            )
        )
        assert answer == self.expected_report(wanted, key)

    @rule(wanted=amounts, key=strategies.sampled_from(KEYS), nth=runs)
    def spend(self, wanted: dict[str, int], key: str, nth: int) -> None:
        execution_id = self.handles[nth].execution_id
        answer = self.call(self.engine.record_spend(self.budget_id, execution_id, deltas=wanted, idempotency_key=key))
        assert answer == self.expected_report(wanted, key)
        if isinstance(answer, Ok | SoftBreach):
            self.ledger.setdefault(execution_id, Counter()).update(wanted)

    @rule(wanted=amounts, nth=runs, key=reservation_keys)
    def reserve(self, wanted: dict[str, int], nth: int, key: str) -> None:
        handle = self.handles[nth]
        answer = self.call(self.engine.reserve(handle, self.budget_id, amounts=wanted, reservation_key=key))
        place = handle.execution_id, key
        if place in self.reserved:
            assert answer == AlreadyReserved()
        elif (handle.execution_id, handle.lease_epoch, key) in self.settled:
            assert answer == AlreadySettled()
        elif (breach := self.breached(wanted)) is not None:
            assert answer == breach
        else:
            self.reserved[place] = wanted
            left = {
                name: self.limits[name] - self.used[name] - self.held(name) for name in wanted if name in self.limits
            }
            assert answer == Reserved(remaining=left)

    @rule(nth=runs, key=reservation_keys, share=strategies.floats(0, 1))
    def settle_within(self, nth: int, key: str, share: float) -> None:
        handle = self.handles[nth]
        reserved = self.reserved.get((handle.execution_id, key), {})
        self.settle(handle, key, {name: int(amount * share) for name, amount in reserved.items()})

    @rule(nth=runs, key=reservation_keys, costs=amounts)
    def settle_anything(self, nth: int, key: str, costs: dict[str, int]) -> None:
        self.settle(self.handles[nth], key, costs)

    @precondition(lambda self: self.past)
    @rule(data=strategies.data(), key=reservation_keys, costs=amounts)
    def settle_late(self, data: Any, key: str, costs: dict[str, int]) -> None:
        self.settle(data.draw(strategies.sampled_from(self.past)), key, costs)

    def settle(self, handle: Handle, key: str, costs: Mapping[str, int]) -> None:
        answer = self.call(self.engine.settle(handle, self.budget_id, reservation_key=key, amounts=costs))
        name = handle.execution_id, handle.lease_epoch, key
        if name in self.settled:
            assert answer == AlreadySettled()
            return
        self.settled.add(name)
        is_current = handle in self.handles
        reserved = self.reserved.pop((handle.execution_id, key), {}) if is_current else {}
        self.used.update(costs)
        self.ledger.setdefault(handle.execution_id, Counter()).update(costs)
        over = [
            each
            for each in sorted(costs)
            if costs[each] > reserved.get(each, 0)
            and each in self.limits
            and self.used[each] + self.held(each) > self.limits[each]
        ]
        assert isinstance(answer, Settled)
        assert (answer.breach.dimension if answer.breach else None) == (over[0] if over else None)
        self.breaches += bool(over)
        self.has_overspent |= bool(over)

    @rule(nth=runs, key=reservation_keys)
    def release_reservation(self, nth: int, key: str) -> None:
        handle = self.handles[nth]
        self.call(self.engine.release_reservation(handle, self.budget_id, reservation_key=key))
        self.reserved.pop((handle.execution_id, key), None)

    @rule(nth=runs)
    def release(self, nth: int) -> None:
        execution_id = self.handles[nth].execution_id
        self.call(self.engine.release_budget(self.budget_id, execution_id))
        self.used.subtract(self.ledger.pop(execution_id, Counter()))

    @rule()
    def reset(self) -> None:
        if not self.is_created:
            self.call(refused(self.engine.reset_budget(self.budget_id), "budget_not_found"))
            return
        self.call(self.engine.reset_budget(self.budget_id))
        self.used.clear()
        self.ledger.clear()
        self.has_overspent = any(self.held(name) > limit for name, limit in self.limits.items())

    @rule(nth=runs)
    def give_up_the_lease(self, nth: int) -> None:
        handle = self.handles[nth]
        self.call(self.engine.hand_back(handle))
        self.claim_again([handle])

    @rule()
    def let_the_leases_expire(self) -> None:
        async def expire() -> None:
            await self.store.clock.advance(ms=LEASE_MS + 1)
            await Reconciler(self.engine).catch_up()

        self.call(expire())
        self.claim_again(self.handles)

    def claim_again(self, lost: list[Handle]) -> None:
        for handle in lost:
            self.reserved = {place: each for place, each in self.reserved.items() if place[0] != handle.execution_id}
        self.past += lost
        claimed = self.call(claim(self.engine, self.lane, lease_ttl_ms=LEASE_MS))
        fresh = {one.execution_id: one.handle for one in claimed}
        assert fresh.keys() == {handle.execution_id for handle in lost}
        self.handles = [fresh.get(each.execution_id, each) for each in self.handles]

    # What holds after every step.

    @invariant()
    def the_counters_are_those_of_the_model(self) -> None:
        async def read() -> tuple[Any, ...]:
            usage = "select dimension, used, reserved from budget_usage where budget_id = $1"
            ledger = "select dimension, sum(spent)::bigint from budget_spend where budget_id = $1 group by 1"
            breaches = "select coalesce(max(breach_count), 0) from budget_account where budget_id = $1"
            connection = self.store.connection
            return (
                await connection.fetch(usage, self.budget_id),
                await connection.fetch(ledger, self.budget_id),
                await connection.fetchval(breaches, self.budget_id),
                (await self.engine.reconcile_budget_counters()).processed,
            )

        usage, ledger, breaches, corrected = self.call(read())
        assert corrected == 0
        assert {row[0]: row[1] for row in usage if row[1]} == {name: used for name, used in self.used.items() if used}
        assert {row[0]: row[2] for row in usage if row[2]} == {
            name: held for name in DIMENSIONS if (held := self.held(name))
        }
        spent = sum(self.ledger.values(), Counter[str]())
        assert {row[0]: row[1] for row in ledger if row[1]} == dict(spent)
        assert all(spent[name] <= self.used[name] for name in spent)
        assert breaches == self.breaches
        if not self.has_overspent:
            assert all(row[1] + row[2] <= self.limits[row[0]] for row in usage if row[0] in self.limits)


@pytest.fixture
def machine(url: str) -> Iterator[type[BudgetAgainstModel]]:
    """The state machine on the database of the test, with a clock that only the machine moves."""
    store = GraphStore(url)
    yield type("BudgetAgainstModel", (BudgetAgainstModel,), {"store": store})
    store.close()


@pytest.mark.timeout(600)
def test_budgets_agree_with_the_model(machine: type[BudgetAgainstModel]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or len(rounds(12, whole=100)),
            stateful_step_count=40,
            derandomize=not EXAMPLES,
            print_blob=True,
            deadline=None,
            database=None,
            phases=list(Phase) if EXAMPLES else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
