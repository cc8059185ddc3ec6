"""A state machine that runs every operation on the engine and on the model and compares them after every step."""

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from engine.counts import miscounts
from engine.state import IS_WHOLE
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import uuid7

from .model import Model
from .model_operators import Answer
from .model_rows import (
    Store,
    agree,
    differences,
    engine_answer,
    model_answer,
    model_state,
    stored_state,
    sweep_answer,
)
from .model_steps import STEPS, step
from .model_values import (
    CLASSES,
    GRANT_MEMORY_MS,
    KINDS,
    LANE_SETS,
    LANES,
    NAMES,
    NTH,
    OFFERS,
    POLICIES,
    START,
    TTLS,
    WORKERS,
    Execution,
    Lease,
    Policy,
    identity,
)

CALLS = ("once", "twice")
"""A worker that has lost the answer of a call repeats it."""

COUNTS_EVERY = 1 if IS_WHOLE else 4
"""How many steps lie between two comparisons of the counts."""


class EngineAgainstModel(RuleBasedStateMachine):
    """Runs every operation on the engine and on the model."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(START)
        self.leases: list[tuple[Lease, Handle]] = []
        self.names: list[str] = []
        self.taken: list[str] = []
        self.checks = 0
        self.run = self.store.run
        self.store.begin(START)

    @property
    def engine(self) -> Engine:
        return self.store.engine

    # Choosing executions and leases.

    def name(self, which: int, wanted: Callable[[Execution], object] = lambda one: one.phase != "terminal") -> str:
        """The name of an execution, the wanted ones first, or one that does not exist."""
        if which < 0 or not self.names:
            return f"{{fp:3}}:{uuid7()}"
        ordered = sorted(self.names, key=lambda name: not wanted(self.model.executions[name]))
        return ordered[which % len(ordered)]

    def lane(self, name: str) -> str:
        found = self.model.executions.get(name)
        return found.lane if found else "north"

    def lease(self, which: int) -> tuple[Lease, Handle]:
        """A lease that a worker remembers, the valid ones first."""

        def is_over(held: tuple[Lease, Handle]) -> bool:
            one = self.model.executions[held[0].execution]
            return one.phase != "active" or one.epoch != held[0].epoch

        return sorted(self.leases, key=is_over)[which % len(self.leases)]

    def grantee(self, name: str, worker: str) -> str:
        one = self.model.executions.get(name)
        return one.grant.worker if worker == "grantee" and one and one.grant else worker

    def both(
        self, on_model: Callable[[], Answer], on_engine: Callable[[], Awaitable[Any]], *, how: str = "once"
    ) -> tuple[Answer, Any]:
        """Call the model and the engine, whose answers must agree; twice if a worker has lost the first answer."""
        for _ in range(2 if how == "twice" else 1):
            expected = model_answer(on_model)
            try:
                answer = self.run(on_engine())
                got = engine_answer(answer)
            except EngineError as refusal:
                answer, got = None, ("refused", refusal.code)
            assert agree(expected, got), f"the model says {expected}, the engine {got}"
        return expected, answer

    def hold(self, claimed: Any, ttl_ms: int) -> None:
        """Remember the lease of a claim."""
        handle = claimed.handle
        self.leases.append((Lease(handle.execution_id, handle.lease_epoch, handle.attempt_index, ttl_ms), handle))

    # Creating and claiming.

    @initialize(policies=st.lists(st.sampled_from(POLICIES), min_size=2, max_size=4))
    def begin(self, policies: list[Policy | None]) -> None:
        for policy in policies:
            self.create("north", 0, policy, (), None, None, None)
        self.claim_many("ann", LANES, (), 3, 30_000)

    @step(
        weight=6,
        lane=LANES,
        priority=(0, 0, 5, 9_999),
        policy=POLICIES,
        required=((), (), ("gpu",)),
        kind=("job", "job", "other"),
        delay_ms=(None, None, 0, 1_000, 50_000),
        deadline_ms=(None, None, 45_000),
        key=(None, None, "a", "b"),
        again=(None, None, None, 0),
    )
    def create(
        self,
        lane: str,
        priority: int,
        policy: Policy | None,
        required: tuple[str, ...],
        delay_ms: int | None,
        deadline_ms: int | None,
        key: str | None,
        again: int | None = None,
        kind: str = "job",
    ) -> None:
        name = f"{{fp:3}}:{uuid7()}" if again is None else self.name(again)
        now = self.model.now
        delay_until = None if delay_ms is None else now + delay_ms
        deadline_at = None if deadline_ms is None else now + deadline_ms
        written = None if policy is None else policy.as_json()
        if written is not None and required:
            written["routing_requirements"] = {"required_capabilities": list(required)}
        required = required if written is not None else ()
        answer, _ = self.both(
            lambda: self.model.create(
                name,
                lane=lane,
                priority=priority,
                policy=policy,
                required=required,
                kind=kind,
                delay_until=delay_until,
                deadline_at=deadline_at,
                key=key,
            ),
            lambda: self.engine.create_execution(
                execution_id=name,
                namespace="tests",
                lane_id=lane,
                execution_kind=kind,
                input_payload=b"{}",
                priority=priority,
                creator_identity="test",
                policy=written,
                delay_until=delay_until,
                execution_deadline_at=deadline_at,
                idempotency_key=key,
            ),
        )
        if answer[0] == "Created":
            self.names.append(name)

    @step(weight=2, worker=WORKERS, lanes=LANE_SETS, offered=OFFERS, limit=(1, 3), ttl_ms=TTLS, kinds=KINDS)
    def claim_many(
        self,
        worker: str,
        lanes: tuple[str, ...],
        offered: tuple[str, ...],
        limit: int,
        ttl_ms: int,
        kinds: tuple[str, ...] | None = None,
    ) -> None:
        _, claimed = self.both(
            lambda: tuple(self.model.claim(lanes, offered, kinds, limit, ttl_ms)),
            lambda: self.engine.claim_many(
                lanes=lanes, capabilities=offered, kinds=kinds, limit=limit, lease_ttl_ms=ttl_ms, **identity(worker)
            ),
        )
        for one in claimed or ():
            self.hold(one, ttl_ms)

    @step(weight=3, worker=WORKERS, lane=LANES, offered=OFFERS, kinds=KINDS)
    def claim_for_worker(self, worker: str, lane: str, offered: tuple[str, ...], kinds: tuple[str, ...] | None) -> None:
        self.both(
            lambda: self.model.claim_for_worker(lane, worker, offered, kinds, 5_000),
            lambda: self.engine.claim_for_worker(
                lane_id=lane, worker_capabilities=offered, kinds=kinds, **identity(worker)
            ),
        )

    @step(weight=5, which=NAMES, worker=WORKERS, offered=OFFERS, kind=("claim", "reclaim"))
    def grant(self, which: int, worker: str, offered: tuple[str, ...], kind: str) -> None:
        name = self.name(which, lambda one: one.is_claimable and (one.ownership != "unowned") == (kind == "reclaim"))
        on_model = self.model.issue_claim_grant if kind == "claim" else self.model.issue_reclaim_grant
        on_engine = self.engine.issue_claim_grant if kind == "claim" else self.engine.issue_reclaim_grant
        self.both(
            lambda: on_model(name, worker, offered, 5_000),
            lambda: on_engine(
                execution_id=name, lane_id=self.lane(name), worker_capabilities=offered, **identity(worker)
            ),
        )

    @step(
        weight=6,
        which=NAMES,
        worker=("grantee", "grantee", *WORKERS),
        ttl_ms=TTLS,
        operation=(None, None, None, "claim_execution", "claim_resumed_execution", "reclaim_execution"),
    )
    def claim_named(self, which: int, worker: str, ttl_ms: int, operation: str | None) -> None:
        """Claim by execution id, with the operation that fits the state unless one is given."""
        name = self.name(which, lambda one: one.public == "resumable" or one.grant)
        if operation is None and (one := self.model.executions.get(name)):
            by_grant = "reclaim_execution" if one.phase == "active" and ttl_ms == TTLS[0] else "claim_execution"
            operation = "claim_resumed_execution" if one.public == "resumable" else by_grant
        call = operation or "claim_execution"
        worker = self.grantee(name, worker)
        _, claimed = self.both(
            lambda: getattr(self.model, call)(name, worker, ttl_ms),
            lambda: getattr(self.engine, call)(
                execution_id=name, lane_id=self.lane(name), lease_ttl_ms=ttl_ms, **identity(worker)
            ),
        )
        if hasattr(claimed, "handle"):
            self.hold(claimed, ttl_ms)

    @step(which=NAMES, ttl_ms=TTLS)
    def issue_grant_and_claim(self, which: int, ttl_ms: int) -> None:
        name = self.name(which, lambda one: one.eligibility == "eligible_now")
        self.both(
            lambda: self.model.issue_grant_and_claim(name, ttl_ms),
            lambda: self.engine.issue_grant_and_claim(
                execution_id=name, lane_id=self.lane(name), lease_duration_ms=ttl_ms
            ),
        )

    # Under a lease.

    @step(weight=2, needs_lease=True, which=NTH, how=CALLS, operation=("renew", "progress"))
    def renew_or_report(self, which: int, how: str, operation: str) -> None:
        lease, handle = self.lease(which)
        if operation == "renew":
            self.both(lambda: self.model.renew(lease), lambda: self.engine.renew(handle), how=how)
        else:
            self.both(lambda: self.model.report(lease, 50), lambda: self.engine.progress(handle, percent=50), how=how)

    @step(weight=2, needs_lease=True, which=NTH, how=CALLS, operation=("complete", "cancel"))
    def complete_or_cancel(self, which: int, how: str, operation: str) -> None:
        lease, handle = self.lease(which)
        if operation == "complete":
            self.both(lambda: self.model.complete(lease), lambda: self.engine.complete(handle, b"x"), how=how)
        else:
            self.both(lambda: self.model.cancel(lease, "no"), lambda: self.engine.cancel(handle, "no"), how=how)

    @step(needs_lease=True, first=NTH, second=NTH)
    def complete_many(self, first: int, second: int) -> None:
        held = [self.lease(first), self.lease(second)]
        self.both(
            lambda: tuple(model_answer(self.model.complete, lease) for lease, _ in held),
            lambda: self.engine.complete_many([(handle, b"x") for _, handle in held]),
        )

    @step(weight=3, needs_lease=True, which=NTH, classification=CLASSES, how=CALLS)
    def fail(self, which: int, classification: str, how: str) -> None:
        lease, handle = self.lease(which)
        self.both(
            lambda: self.model.fail(lease, "no luck", classification),
            lambda: self.engine.fail(handle, reason="no luck", classification=classification),
            how=how,
        )

    @step(weight=3, needs_lease=True, which=NTH, delay_ms=(None, "back", -10, 0, 1_000, 25_000), how=CALLS)
    def delay_or_release(self, which: int, delay_ms: int | str | None, how: str) -> None:
        lease, handle = self.lease(which)
        if isinstance(delay_ms, str):
            self.both(
                lambda: self.model.wait_children(lease, "handed_back"), lambda: self.engine.hand_back(handle), how=how
            )
        elif delay_ms is None:
            self.both(lambda: self.model.wait_children(lease), lambda: self.engine.wait_children(handle), how=how)
        else:
            until = self.model.now + delay_ms
            self.both(lambda: self.model.delay(lease, until), lambda: self.engine.delay(handle, until), how=how)

    # From a control plane.

    @step(
        needs_lease=True,
        which=NTH,
        operation=("renew_lease", "complete_execution", "fail_execution"),
        is_operator=(True, False),
    )
    def call_from_control_plane(self, which: int, operation: str, is_operator: bool) -> None:  # noqa: FBT001
        lease, handle = self.lease(which)
        fence: dict[str, Any] = {
            "lease_id": handle.lease_id,
            "lease_epoch": handle.lease_epoch,
            "attempt_id": handle.attempt_id,
            "attempt_index": handle.attempt_index,
        }
        given = None if is_operator else lease
        named = {"execution_id": lease.execution, **({"source": "operator_override"} if is_operator else fence)}
        if operation == "renew_lease":
            self.both(
                lambda: self.model.renew(lease, "stale_lease", 2_000),
                lambda: self.engine.renew_lease(execution_id=lease.execution, **fence, lease_ttl_ms=2_000),
            )
        elif operation == "complete_execution":
            self.both(
                lambda: self.model.complete_execution(lease.execution, given),
                lambda: self.engine.complete_execution(**named),
            )
        else:
            self.both(
                lambda: self.model.fail_execution(lease.execution, given, "broken", "transient"),
                lambda: self.engine.fail_execution(**named, failure_reason="broken", failure_category="transient"),
            )

    @step(which=NAMES, how=CALLS, source=("operator_override", "lease_holder"))
    def cancel_execution(self, which: int, how: str, source: str) -> None:
        name = self.name(which)
        held = [(lease, handle) for lease, handle in self.leases if lease.execution == name]
        lease, handle = held[-1] if held and source == "lease_holder" else (None, None)
        fence: dict[str, Any] = (
            {} if handle is None else {"lease_id": handle.lease_id, "lease_epoch": handle.lease_epoch}
        )
        self.both(
            lambda: self.model.cancel_execution(name, "unwanted", source, lease),
            lambda: self.engine.cancel_execution(execution_id=name, reason="unwanted", source=source, **fence),
            how=how,
        )

    @step(weight=3, which=NAMES)
    def replay_execution(self, which: int) -> None:
        name = self.name(which, lambda one: one.phase == "terminal")
        self.both(lambda: self.model.replay_execution(name), lambda: self.engine.replay_execution(execution_id=name))

    # Time.

    @step(ms=(1, 999, 1_000))
    def wait(self, ms: int) -> None:
        self.model.now += ms
        self.store.set_clock(self.model.now)

    @step(weight=5, ms=(1_000, 5_000, 20_000, 30_000), worker=WORKERS, limit=(0, 1, 2))
    def wait_sweep_and_claim(self, ms: int, worker: str, limit: int) -> None:
        """Advance the clock, run the sweeps and claim."""
        self.wait(ms)
        self.sweep_leases()
        self.sweep_delays()
        self.sweep_expiries()
        if limit:
            self.claim_many(worker, LANES, ("gpu",), limit, 30_000)

    @step(weight=2, ms=(5_000, 20_000, 30_000, GRANT_MEMORY_MS))
    def wait_longer(self, ms: int) -> None:
        self.wait(ms)

    @step(which=NAMES, how=CALLS)
    def revoke_lease(self, which: int, how: str) -> None:
        name = self.name(which, lambda one: one.ownership == "leased")
        self.both(lambda: self.model.revoke_lease(name), lambda: self.engine.revoke_lease(name, reason="x"), how=how)

    @step(which=NAMES, priority=(-1, 5, 20_000))
    def change_priority(self, which: int, priority: int) -> None:
        name = self.name(which, lambda one: one.eligibility == "eligible_now")
        self.both(
            lambda: self.model.change_priority(name, priority), lambda: self.engine.change_priority(name, priority)
        )

    @step(which=NAMES, phase=("attempt_timeout", "execution_deadline"))
    def expire_execution(self, which: int, phase: str) -> None:
        name = self.name(which, lambda one: one.timeout_at if phase == "attempt_timeout" else one.deadline_at)
        self.both(lambda: self.model.expire_execution(name, phase), lambda: self.engine.expire_execution(name, phase))

    @step(which=NAMES, operation=("promote_delayed", "mark_lease_expired_if_due"))
    def promote_or_mark(self, which: int, operation: str) -> None:
        is_promotion = operation == "promote_delayed"
        name = self.name(which, lambda one: one.delay_until if is_promotion else one.ownership == "leased")
        self.both(lambda: getattr(self.model, operation)(name), lambda: getattr(self.engine, operation)(name))

    @step()
    def sweep_leases(self) -> None:
        # The engine returns the number of claims, the model that of leases: only the rows are compared.
        self.model.sweep("leases")
        self.run(self.store.parts.lease_expiry.sweep())

    @step(weight=2)
    def sweep_delays(self) -> None:
        self._sweep("delays", self.store.parts.delays.promote_due)

    @step()
    def sweep_expiries(self) -> None:
        self.run(self.store.parts.retention.purge_grants())
        self._sweep("expiries", self.store.parts.timeouts.expire_due)

    def _sweep(self, what: str, sweep: Callable[[], Awaitable[int]]) -> None:
        self.both(lambda: ("count", self.model.sweep(what)), lambda: sweep_answer(sweep()))

    # Crashes.

    @step(who=(*WORKERS, "the engine"))
    def crash(self, who: str) -> None:
        """A worker loses its leases, or the engine loses its memory."""
        self.leases = [(lease, handle) for lease, handle in self.leases if handle.worker_instance_id != who]
        if who == "the engine":
            self.run(self.store.close_engine())
            self.run(self.store.open_engine())

    @step(needs_lease=True, which=NTH, what=("complete", "fail"))
    def kill_engine_within_call(self, which: int, what: str) -> None:
        """Close the engine within a call, which must have taken effect completely or not at all."""
        lease, handle = self.lease(which)
        done = copy.deepcopy(self.model)
        if what == "complete":
            model_answer(done.complete, lease)
            calling: Awaitable[object] = self.engine.complete(handle, b"x")
        else:
            model_answer(done.fail, lease, "no luck", "transient")
            calling = self.engine.fail(handle, reason="no luck")

        async def die() -> None:
            task = asyncio.ensure_future(calling)
            await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError, EngineError):
                await task
            await self.store.close_engine()
            await self.store.open_engine()

        self.run(die())
        if self.run(stored_state(self.store.connection)) != model_state(self.model):
            self.model = done

    @invariant()
    def the_rows_are_those_of_the_model(self) -> None:
        found = differences(self.run(stored_state(self.store.connection)), model_state(self.model))
        self.checks += 1
        if self.checks % COUNTS_EVERY == 0:
            found += self.run(miscounts(self.engine, self.store.connection))
        assert not found, found

    def walk(self, rng: random.Random, length: int) -> None:
        """Take random steps; `taken` lists them, the last one included if it fails."""
        self.begin(policies=rng.choices(POLICIES, k=3))
        weights = [each.weight for each in STEPS]
        for _ in range(length):
            (chosen,) = rng.choices(STEPS, weights)
            if chosen.needs_lease and not self.leases:
                continue
            arguments = {name: rng.choice(values) for name, values in chosen.choices.items()}
            self.taken.append(f"{chosen.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})")
            getattr(self, chosen.name)(**arguments)
            self.the_rows_are_those_of_the_model()
        assert self.run(self.engine.find_inconsistencies()) == []
