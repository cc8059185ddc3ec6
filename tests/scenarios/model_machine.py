"""The machine that does everything twice, on the engine and on the model, and compares the two after every step."""

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.counts import miscounts
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import uuid7
from flowfabric.settings import Settings

from .model import Answer, Model
from .model_rows import Stage, agree, attempted, counted, differences, observe, seen, spoken
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
    Refusal,
    identity,
)

CALLS = ("once", "twice")
"""A worker that lost the reply of a call sends it again."""

_EMPTY = """
truncate execution, execution_input, execution_result, ready, timer, claim, retained, listed, execution_tag, attempt,
         event, idempotency_key, claim_grant
"""


class Deed(NamedTuple):
    """A step of the machine as a walk takes it: how often, and between which arguments it chooses."""

    name: str
    weight: int
    of_lease: bool
    choices: dict[str, tuple[Any, ...]]


DEEDS: list[Deed] = []
Function = TypeVar("Function", bound=Callable[..., None])


def does(*, weight: int = 1, of_lease: bool = False, **choices: tuple[Any, ...]) -> Callable[[Function], Any]:
    """Make a method a step, for Hypothesis and for walks alike."""

    def register(function: Function) -> Any:
        DEEDS.append(Deed(function.__name__, weight, of_lease, choices))
        strategies: dict[str, Any] = {name: st.sampled_from(values) for name, values in choices.items()}
        decorate: Any = rule(**strategies)
        needs_lease: Any = precondition(lambda machine: bool(machine.leases))
        return needs_lease(decorate(function)) if of_lease else decorate(function)

    return register


class EngineAgainstModel(RuleBasedStateMachine):
    """Does everything twice: on the engine and on the model."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(START)
        self.leases: list[tuple[Lease, Handle]] = []
        self.names: list[str] = []
        self.run = self.stage.run
        self.run(self.stage.connection.execute(_EMPTY))
        self._set_clock()
        self._open()

    def _open(self) -> None:
        self.stack = AsyncExitStack()
        connecting = Engine.connect(settings=Settings(database_url=self.stage.url, database_pool_size=2, listen=False))
        self.engine: Engine = self.run(self.stack.enter_async_context(connecting))
        # The machine does what is due, so that a claim finds what the model says and no more.
        self.parts = parts_of(self.engine)
        self.parts.catch_up.is_swept = True

    def _set_clock(self) -> None:
        self.run(self.stage.connection.execute("update test_clock set offset_ms = $1", self.model.now))

    def teardown(self) -> None:
        self.run(self.stack.aclose())

    # What is at hand.

    def name(self, which: int, wanted: Callable[[Execution], object] = lambda one: one.phase != "terminal") -> str:
        """The name of an execution, those that are wanted first, or one that nobody has."""
        if which < 0 or not self.names:
            return f"{{fp:3}}:{uuid7()}"
        ordered = sorted(self.names, key=lambda name: not wanted(self.model.executions[name]))
        return ordered[which % len(ordered)]

    def lane(self, name: str) -> str:
        found = self.model.executions.get(name)
        return found.lane if found else "north"

    def lease(self, which: int) -> tuple[Lease, Handle]:
        """A lease that somebody remembers, those that still hold first."""

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
        """Do one thing on both sides; the answers must agree. Twice, where a worker has lost the first reply."""
        for _ in range(2 if how == "twice" else 1):
            try:
                expected = on_model()
            except Refusal as refusal:
                expected = ("refused", refusal.code)
            try:
                answer = self.run(on_engine())
                got = spoken(answer)
            except EngineError as refusal:
                answer, got = None, ("refused", refusal.code)
            assert agree(expected, got), f"the model says {expected}, the engine {got}"
        return expected, answer

    def hold(self, claimed: Any, ttl_ms: int) -> None:
        """Remember a lease as its worker does."""
        handle = claimed.handle
        self.leases.append((Lease(handle.execution_id, handle.lease_epoch, handle.attempt_index, ttl_ms), handle))

    # Creating and claiming.

    @initialize(policies=st.lists(st.sampled_from(POLICIES), min_size=2, max_size=4))
    def begin(self, policies: list[Policy | None]) -> None:
        for policy in policies:
            self.create("north", 0, policy, (), None, None, None)
        self.claim_many("ann", LANES, (), 3, 30_000)

    @does(
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
        written = None if policy is None else policy.written()
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

    @does(weight=2, worker=WORKERS, lanes=LANE_SETS, offered=OFFERS, limit=(1, 3), ttl_ms=TTLS, kinds=KINDS)
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

    @does(weight=3, worker=WORKERS, lane=LANES, offered=OFFERS, kinds=KINDS)
    def claim_for_worker(self, worker: str, lane: str, offered: tuple[str, ...], kinds: tuple[str, ...] | None) -> None:
        self.both(
            lambda: self.model.claim_for_worker(lane, worker, offered, kinds, 5_000),
            lambda: self.engine.claim_for_worker(
                lane_id=lane, worker_capabilities=offered, kinds=kinds, **identity(worker)
            ),
        )

    @does(weight=5, which=NAMES, worker=WORKERS, offered=OFFERS, kind=("claim", "reclaim"))
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

    @does(
        weight=6,
        which=NAMES,
        worker=("grantee", "grantee", *WORKERS),
        ttl_ms=TTLS,
        operation=(None, None, None, "claim_execution", "claim_resumed_execution", "reclaim_execution"),
    )
    def claim_named(self, which: int, worker: str, ttl_ms: int, operation: str | None) -> None:
        """Claim by name: as the state asks for, where no operation is given."""
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

    @does(which=NAMES, ttl_ms=TTLS)
    def issue_grant_and_claim(self, which: int, ttl_ms: int) -> None:
        name = self.name(which, lambda one: one.eligibility == "eligible_now")
        self.both(
            lambda: self.model.issue_grant_and_claim(name, ttl_ms),
            lambda: self.engine.issue_grant_and_claim(
                execution_id=name, lane_id=self.lane(name), lease_duration_ms=ttl_ms
            ),
        )

    # Under a lease.

    @does(weight=2, of_lease=True, which=NTH, how=CALLS, operation=("renew", "progress"))
    def keep(self, which: int, how: str, operation: str) -> None:
        lease, handle = self.lease(which)
        if operation == "renew":
            self.both(lambda: self.model.renew(lease), lambda: self.engine.renew(handle), how=how)
        else:
            self.both(lambda: self.model.report(lease, 50), lambda: self.engine.progress(handle, percent=50), how=how)

    @does(weight=2, of_lease=True, which=NTH, how=CALLS, operation=("complete", "cancel"))
    def end(self, which: int, how: str, operation: str) -> None:
        lease, handle = self.lease(which)
        if operation == "complete":
            self.both(lambda: self.model.complete(lease), lambda: self.engine.complete(handle, b"x"), how=how)
        else:
            self.both(lambda: self.model.cancel(lease, "no"), lambda: self.engine.cancel(handle, "no"), how=how)

    @does(of_lease=True, first=NTH, second=NTH)
    def complete_many(self, first: int, second: int) -> None:
        held = [self.lease(first), self.lease(second)]
        self.both(
            lambda: tuple(attempted(self.model.complete, lease) for lease, _ in held),
            lambda: self.engine.complete_many([(handle, b"x") for _, handle in held]),
        )

    @does(weight=3, of_lease=True, which=NTH, classification=CLASSES, how=CALLS)
    def fail(self, which: int, classification: str, how: str) -> None:
        lease, handle = self.lease(which)
        self.both(
            lambda: self.model.fail(lease, "no luck", classification),
            lambda: self.engine.fail(handle, reason="no luck", classification=classification),
            how=how,
        )

    @does(weight=3, of_lease=True, which=NTH, delay_ms=(None, "back", -10, 0, 1_000, 25_000), how=CALLS)
    def park(self, which: int, delay_ms: int | str | None, how: str) -> None:
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

    # By a control plane.

    @does(
        of_lease=True,
        which=NTH,
        operation=("renew_lease", "complete_execution", "fail_execution"),
        is_operator=(True, False),
    )
    def serve(self, which: int, operation: str, is_operator: bool) -> None:  # noqa: FBT001
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

    @does(which=NAMES, how=CALLS, source=("operator_override", "lease_holder"))
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

    # Time.

    @does(ms=(1, 999, 1_000))
    def wait(self, ms: int) -> None:
        self.model.now += ms
        self._set_clock()
        # Watermarks end with the time of the machine, which the moved clock does not touch.
        self.parts.wakeups.watermarks.clear()

    @does(weight=5, ms=(1_000, 5_000, 20_000, 30_000), worker=WORKERS, limit=(0, 1, 2))
    def go_on(self, ms: int, worker: str, limit: int) -> None:
        """Time passes, what is due is done, and a worker looks for work."""
        self.wait(ms)
        self.sweep_leases()
        self.sweep_delays()
        self.sweep_expiries()
        if limit:
            self.claim_many(worker, LANES, ("gpu",), limit, 30_000)

    @does(weight=2, ms=(5_000, 20_000, 30_000, GRANT_MEMORY_MS))
    def wait_longer(self, ms: int) -> None:
        self.wait(ms)

    @does(which=NAMES, phase=("attempt_timeout", "execution_deadline"))
    def expire_execution(self, which: int, phase: str) -> None:
        name = self.name(which, lambda one: one.timeout_at if phase == "attempt_timeout" else one.deadline_at)
        self.both(lambda: self.model.expire_execution(name, phase), lambda: self.engine.expire_execution(name, phase))

    @does(which=NAMES, operation=("promote_delayed", "mark_lease_expired_if_due"))
    def look_at(self, which: int, operation: str) -> None:
        is_promotion = operation == "promote_delayed"
        name = self.name(which, lambda one: one.delay_until if is_promotion else one.ownership == "leased")
        self.both(lambda: getattr(self.model, operation)(name), lambda: getattr(self.engine, operation)(name))

    @does()
    def sweep_leases(self) -> None:
        # The engine counts claims and the model leases: the rows tell whether they agree.
        self.model.sweep("leases")
        self.run(self.parts.lease_expiry.sweep())

    @does(weight=2)
    def sweep_delays(self) -> None:
        self._sweep("delays", self.parts.delays.promote_due)

    @does()
    def sweep_expiries(self) -> None:
        self.run(self.parts.retention.purge_grants())
        self._sweep("expiries", self.parts.timeouts.expire_due)

    def _sweep(self, what: str, sweep: Callable[[], Awaitable[int]]) -> None:
        self.both(lambda: ("count", self.model.sweep(what)), lambda: counted(sweep()))

    # Crashes.

    @does(who=(*WORKERS, "the engine"))
    def crash(self, who: str) -> None:
        """A worker forgets its leases, or the engine all it has in memory."""
        self.leases = [(lease, handle) for lease, handle in self.leases if handle.worker_instance_id != who]
        if who == "the engine":
            self.run(self.stack.aclose())
            self._open()

    @does(of_lease=True, which=NTH, what=("complete", "fail"))
    def the_engine_dies_within_a_call(self, which: int, what: str) -> None:
        """Nobody hears the answer: the call was done whole, or not at all."""
        lease, handle = self.lease(which)
        done = copy.deepcopy(self.model)
        if what == "complete":
            attempted(done.complete, lease)
            calling: Awaitable[object] = self.engine.complete(handle, b"x")
        else:
            attempted(done.fail, lease, "no luck", "transient")
            calling = self.engine.fail(handle, reason="no luck")

        async def die() -> None:
            task = asyncio.ensure_future(calling)
            await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError, EngineError):
                await task
            await self.stack.aclose()

        self.run(die())
        self._open()
        if self.run(observe(self.stage.connection)) != seen(self.model):
            self.model = done

    @invariant()
    def the_rows_are_those_of_the_model(self) -> None:
        found = differences(self.run(observe(self.stage.connection)), seen(self.model))
        found += self.run(miscounts(self.engine, self.stage.connection))
        assert not found, found

    def walk(self, chance: random.Random, steps: int) -> None:
        """Take steps at random; each is noted in `taken` before it is taken."""
        self.taken: list[str] = []
        self.begin(policies=chance.choices(POLICIES, k=3))
        weights = [deed.weight for deed in DEEDS]
        for _ in range(steps):
            (deed,) = chance.choices(DEEDS, weights)
            if deed.of_lease and not self.leases:
                continue
            arguments = {name: chance.choice(values) for name, values in deed.choices.items()}
            self.taken.append(f"{deed.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})")
            getattr(self, deed.name)(**arguments)
            self.the_rows_are_those_of_the_model()
        assert self.run(self.engine.find_inconsistencies()) == []
