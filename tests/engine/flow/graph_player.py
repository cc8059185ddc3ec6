"""Plays random scripts on a flow of the engine and on the model, and compares both after every step."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from uuid import UUID, uuid4

from engine.waits import suspend_args
from fixtures import uuid_of
from flowfabric.engine.core.wakeups import CascadeKey
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.flow import FlowEdge, FlowNode, FlowSubmitted
from flowfabric.model.handle import Handle
from flowfabric.model.ids import flow_partition, mint_for_flow

from .graph_model import HOUR_MS, MAX_REPLAYS, Edge, GraphModel, Group, Member
from .graph_scripts import DEADLINES_MS, DELAYS_MS, POLICIES, Script, Step, policy_of
from .graph_store import MAX_SWEEPS, GraphStore, crashed, differences, modelled

RESULTS = (None, b"small", b"large" * 100)
"""A member has no result, one in its row, or one in a table of its own; the number of its end makes it unique."""
CANCELLATIONS = ("cancel_all", "cancel_pending", "flow_only")
MAX_MEMBERS = 8
MAX_EDGES = 24


class Player:
    """Plays one script."""

    def __init__(self, store: GraphStore, script: Script) -> None:
        self._store = store
        self._script = script
        self._engine = store.engine
        self._handles: dict[int, Handle] = {}
        self._ids: list[str] = []
        self._numbers: dict[UUID, int] = {}
        self._results = 0
        self.taken: list[str] = []
        self.counts: Counter[str] = Counter()

    async def play(self) -> None:
        """Submit the flow, take every step, and bring the flow to its end."""
        await self._submit()
        await self._compare()
        for wanted in self._script.steps:
            # What is not possible is replaced by what moves the flow on.
            for name in (wanted.name, "run" if wanted.value % 3 else "claim", "settle"):
                step = replace(wanted, name=name)
                self.taken.append(str(step))
                if await STEPS[name](self, step):
                    self.counts[name] += 1
                    await self._compare()
                    break
                self.taken.pop()
        await self._come_to_rest()
        if not self._model.is_cancelled:
            await self._cancel_flow(Step("cancel_flow", 0, 0))
        await self._come_to_rest()
        for number, member in enumerate(self._model.members):
            if member.is_live:
                await self._cancel(Step("cancel", self._live().index(number), 0))
        await self._come_to_rest()
        assert self._model.live == 0
        await self._compare()
        found = await self._engine.find_inconsistencies()
        assert not found, found

    # The flow.

    async def _submit(self) -> None:
        script, count = self._script, len(self._script.policies)
        inbound = Counter(down for _, down, _ in script.edges)
        groups: dict[int, Group] = {}
        for number in sorted(inbound):
            found = POLICIES[script.policies[number]]
            groups[number] = Group(found.policy, min(found.k, inbound[number]), found.cancels_siblings)
        now = await self._store.clock.now()
        timings = [(DEADLINES_MS[each % 5], DELAYS_MS[each // 5 % 5]) for each in script.timings]
        answer = await self._engine.submit_flow(
            flow_kind="dag",
            namespace="tests",
            nodes=[
                FlowNode(
                    name=str(number),
                    lane_id=f"lane-{number}",
                    execution_kind="job",
                    input_payload=b"input",
                    creator_identity="test",
                    delay_ms=timings[number][1],
                    policy=None
                    if timings[number][0] is None
                    else {"timeout_policy": {"execution_deadline_ms": timings[number][0]}},
                )
                for number in range(count)
            ],
            edges=[
                FlowEdge(upstream=str(up), downstream=str(down), data_passing_ref="input" if has_data else None)
                for up, down, has_data in script.edges
            ],
            groups={str(number): policy_of(group) for number, group in groups.items()},
        )
        assert isinstance(answer, FlowSubmitted)
        self._flow_id = answer.flow_id
        self._ids = [answer.execution_ids[str(number)] for number in range(count)]
        self._numbers = {UUID(uuid_of(each)): number for number, each in enumerate(self._ids)}
        (derived,) = await self._store.connection.fetchrow(
            "select derived_state from flow where flow_id = $1", self._flow_id
        )
        self._model = model = GraphModel(now, derived)
        for deadline_ms, delay_ms in timings:
            member = Member(b"input", deadline_ms=deadline_ms)
            member.deadline_at = None if deadline_ms is None else now + deadline_ms
            if delay_ms is not None:
                member.phase, member.delay_until = "delayed", now + delay_ms
            model.add(member)
        model.groups = groups
        for edge_id, (up, down, has_data) in zip(answer.edge_ids, script.edges, strict=True):
            model.stage(Edge(str(edge_id), up, down, has_data))
        for edge in model.edges:
            model.apply(edge)

    async def _compare(self) -> None:
        found = differences(await self._store.stored(self._flow_id, self._numbers), modelled(self._model))
        assert not found, "\n".join(found)

    async def _come_to_rest(self) -> None:
        """Settle, reconcile and drain until nothing is left."""
        model = self._model
        while True:
            await self._settle(Step("settle", 0, -1))
            await self._compare()
            await self._reconcile(Step("reconcile", 0, 0))
            await self._drain(Step("drain", 0, 0))
            await self._compare()
            if not model.queue:
                break
        found = await self._engine.find_inconsistencies()
        assert not found, found
        for table in ("cascade_entry", "pending_cancel_group"):
            assert await self._store.connection.fetchval(f"select count(*) from {table}") == 0

    # Choosing.

    def _in(self, *phases: str) -> list[int]:
        return [number for number, member in enumerate(self._model.members) if member.phase in phases]

    def _live(self) -> list[int]:
        return [number for number, member in enumerate(self._model.members) if member.is_live]

    def _result(self, value: int) -> bytes | None:
        self._results += 1
        found = RESULTS[value % len(RESULTS)]
        return None if found is None else found + str(self._results).encode()

    async def _after(self, call: Awaitable[object], step: Step) -> bool:
        """Make a call, in a process that may crash meanwhile; return whether it did."""
        if step.crash is None:
            await call
            return False
        form, nth = step.crash
        found = await crashed(call, self._store, form, nth)
        self.counts.update(found)
        return bool(found[form])

    # Steps on members.

    async def _claim(self, step: Step) -> bool:
        if found := self._in("waiting", "lost"):
            await self._lease(found[step.which % len(found)])
        return bool(found)

    async def _lease(self, number: int) -> None:
        self._store.parts.wakeups.watermarks.clear()
        (claimed,) = await self._engine.claim_many(
            lanes=(f"lane-{number}",),
            worker_id="worker",
            worker_instance_id="worker-1",
            lease_ttl_ms=HOUR_MS - 1,
            limit=1,
        )
        assert claimed.execution_id == self._ids[number]
        assert claimed.input_payload == self._model.members[number].payload
        self._handles[number] = claimed.handle
        self._model.claim(number)

    async def _run(self, step: Step) -> bool:
        """Claim a member and end it: mostly in success."""
        if not (found := self._in("waiting", "lost")):
            return False
        number = found[step.which % len(found)]
        await self._lease(number)
        if step.value % 4 == 3:
            await self._fail_member(number)
        else:
            await self._complete_members([number], step.value)
        return True

    async def _complete(self, step: Step) -> bool:
        if found := self._in("active"):
            await self._complete_members([found[step.which % len(found)]], step.value)
        return bool(found)

    async def _complete_together(self, step: Step) -> bool:
        """Complete every active member in one call: they share an entry of the cascade."""
        found = self._in("active")
        if len(found) > 1:
            await self._complete_members(found, step.value)
        return len(found) > 1

    async def _complete_members(self, numbers: Sequence[int], value: int) -> None:
        results = {number: self._result(value + nth) for nth, number in enumerate(numbers)}
        verdicts = await self._engine.complete_many([(self._handles[each], results[each]) for each in numbers])
        assert not any(isinstance(verdict, EngineError) for verdict in verdicts), verdicts
        for number in numbers:
            self._model.end(number, "success", results[number])

    async def _fail(self, step: Step) -> bool:
        if found := self._in("active"):
            await self._fail_member(found[step.which % len(found)])
        return bool(found)

    async def _fail_member(self, number: int) -> None:
        await self._engine.fail(self._handles[number], reason="no luck", classification="permanent")
        self._model.end(number, "failed")

    async def _cancel(self, step: Step) -> bool:
        if found := self._live():
            number = found[step.which % len(found)]
            await self._engine.cancel_execution(execution_id=self._ids[number], reason="not wanted")
            self._model.end(number, "cancelled")
        return bool(found)

    async def _delay(self, step: Step) -> bool:
        if found := self._in("active"):
            number = found[step.which % len(found)]
            until = self._model.now + HOUR_MS // 2 + step.value % 2 * HOUR_MS
            await self._engine.delay(self._handles[number], until)
            self._model.release(number, "delayed", until)
        return bool(found)

    async def _suspend(self, step: Step) -> bool:
        if found := self._in("active"):
            number = found[step.which % len(found)]
            await self._engine.suspend(self._handles[number], suspend_args())
            self._model.release(number, "suspended")
        return bool(found)

    async def _resume(self, step: Step) -> bool:
        if found := self._in("suspended"):
            number = found[step.which % len(found)]
            await self._engine.resume_execution(execution_id=self._ids[number], trigger_type="operator")
            self._model.release(number, "waiting")
        return bool(found)

    async def _wait_children(self, step: Step) -> bool:
        if found := self._in("active"):
            number = found[step.which % len(found)]
            await self._engine.wait_children(self._handles[number])
            self._model.wait_children(number)
        return bool(found)

    async def _revoke(self, step: Step) -> bool:
        if found := self._in("active"):
            number = found[step.which % len(found)]
            await self._engine.revoke_lease(self._ids[number], reason="test")
            self._model.members[number].phase = "lost"
        return bool(found)

    async def _pass_time(self, step: Step) -> bool:
        if step.which % 2:
            return False
        await self._store.clock.advance(ms=HOUR_MS)
        parts = self._store.parts
        await parts.lease_expiry.sweep_batch()
        await parts.delays.promote_due()
        await parts.timeouts.expire_due()
        self._model.pass_time(HOUR_MS)
        return True

    # Steps on the graph.

    async def _add(self, step: Step) -> bool:
        """Add a member with a policy, and stage an edge to it."""
        number = len(self._ids)
        if number >= MAX_MEMBERS or self._model.is_cancelled:
            return False
        execution_id = mint_for_flow(self._flow_id, self._store.parts.store.rules.partitions)
        await self._engine.create_execution(
            execution_id=execution_id,
            namespace="tests",
            lane_id=f"lane-{number}",
            execution_kind="job",
            input_payload=b"input",
            priority=0,
            creator_identity="test",
        )
        await self._engine.add_execution_to_flow(self._flow_id, execution_id)
        self._ids.append(execution_id)
        self._numbers[UUID(uuid_of(execution_id))] = number
        self._model.add(Member(b"input"))
        policy = POLICIES[step.value % len(POLICIES)]
        await self._engine.set_edge_group_policy(self._flow_id, execution_id, policy_of(policy))
        self._model.groups[number] = Group(policy.policy, policy.k, policy.cancels_siblings)
        await self._stage_edge(step.which % number, number, has_data=bool(step.value % 2))
        return True

    async def _stage(self, step: Step) -> bool:
        count = len(self._ids)
        if self._model.is_cancelled or len(self._model.edges) >= MAX_EDGES:
            return False
        down = 1 + step.which % (count - 1)
        await self._stage_edge(step.value % down, down, has_data=bool(step.value % 2))
        return True

    async def _stage_edge(self, up: int, down: int, *, has_data: bool) -> None:
        found = await self._engine.describe_flow(self._flow_id)
        assert found is not None
        edge = Edge(str(uuid4()), up, down, has_data)
        await self._engine.stage_dependency_edge(
            self._flow_id,
            edge_id=edge.key,
            upstream_execution_id=self._ids[up],
            downstream_execution_id=self._ids[down],
            data_passing_ref="input" if has_data else None,
            expected_graph_revision=found.graph_revision,
        )
        self._model.stage(edge)

    async def _apply(self, step: Step) -> bool:
        if found := [edge for edge in self._model.edges if edge.state == "staged"]:
            edge = found[step.which % len(found)]
            await self._engine.apply_dependency_to_child(
                self._flow_id,
                edge_id=edge.key,
                upstream_execution_id=self._ids[edge.up],
                downstream_execution_id=self._ids[edge.down],
                graph_revision=0,
            )
            self._model.apply(edge)
        return bool(found)

    # Steps of the cascade.

    async def _settle(self, step: Step) -> bool:
        """Settle all queued ends or some; after a crash the second engine settles what the first has left."""
        queued = await self._store.queued(self._flow_id)
        events = list(dict.fromkeys(event for event, _, _ in queued))
        if step.crash is None and step.value >= 0:
            events = [event for nth, event in enumerate(events) if (step.value + step.which * nth) % 3]
        if not events:
            return False
        settled = [(self._numbers[each], outcome) for event, each, outcome in queued if event in events]
        partition = flow_partition(self._flow_id, self._store.parts.store.rules.partitions.flow)
        keys = [CascadeKey(partition, event) for event in events]

        async def settle() -> None:
            if step.which % 2:
                settled_by = self._store.parts.cascade
                settled_by._queue_entries(keys)
                await settled_by.drain()
                return
            left = keys
            for _ in range(MAX_SWEEPS):
                _, left, is_cut = await self._store.parts.cascade._settle(left)
                if not is_cut:
                    break
            assert not left, "an entry is left that nobody has locked"

        has_crashed = await self._after(settle(), step)
        if has_crashed:
            await self._store.settle_left_over()
            await self._model_settles(settled)
        else:
            self._model.settle(settled)
        return True

    async def _reconcile(self, step: Step) -> bool:
        """Settle everything and let the safety net look for what is left."""
        order = [(self._numbers[each], outcome) for _, each, outcome in await self._store.queued(self._flow_id)]
        await self._store.settle_left_over()
        await self._model_settles(order)
        before = await self._store.stored(self._flow_id, self._numbers)
        if await self._after(self._store.parts.blocked.reconcile(), step):
            if before != await self._store.stored(self._flow_id, self._numbers):
                # A pass that was committed may have ended upstreams of other members.
                self._model.reconcile()
            await self._store.other.blocked.reconcile()
        self._model.reconcile()
        return True

    async def _drain(self, step: Step) -> bool:
        if not any(group.is_flagged for group in self._model.groups.values()):
            return False
        has_crashed = await self._after(self._store.parts.siblings.dispatch(), step)
        if has_crashed:
            await self._store.other.siblings.dispatch()
        self._model.drain_siblings()
        return True

    async def _reconcile_siblings(self, _: Step) -> bool:
        if not any(group.is_flagged for group in self._model.groups.values()):
            return False
        await self._store.parts.siblings.reconcile()
        self._model.reconcile_siblings()
        return True

    # Steps of operators.

    async def _replay(self, step: Step) -> bool:
        ended = [number for number, member in enumerate(self._model.members) if not member.is_live]
        if not ended:
            return False
        number = ended[step.which % len(ended)]
        model, execution_id = self._model, self._ids[number]
        is_refused = model.members[number].replays >= MAX_REPLAYS
        is_queued = not is_refused and number in [each for each, _ in model.queue]
        # The engine settles the flow before it replays a member whose end is queued.
        order = [(self._numbers[each], outcome) for _, each, outcome in await self._store.queued(self._flow_id)]
        call = partial(self._replay_by, execution_id, ["max_replays_exhausted"] if is_refused else [])
        if await self._after(call(self._engine), step):
            info = await self._store.second.read_execution_info(execution_id)
            assert info is not None
            if info.state_vector.lifecycle_phase == "terminal":
                if is_queued:
                    await self._store.settle_left_over()
                await call(self._store.second)
        if is_queued:
            await self._model_settles(order)
        if not is_refused:
            model.replay(number)
        return True

    async def _model_settles(self, order: Sequence[tuple[int, str]]) -> None:
        """Let the model settle these ends, and those that this queues."""
        self._model.now = await self._store.clock.now()
        self._model.settle(order)
        while self._model.queue:
            self._model.settle(list(self._model.queue))

    async def _replay_by(self, execution_id: str, refusals: Sequence[str], engine: Engine) -> None:
        try:
            await engine.replay_execution(execution_id=execution_id, allow_cancelled_flow=True)
        except EngineError as refusal:
            if refusal.code not in refusals:
                raise

    async def _cancel_flow(self, step: Step) -> bool:
        # Little happens in a flow that is cancelled early.
        if self._model.is_cancelled or step.which % 4:
            return False
        policy = CANCELLATIONS[step.value % len(CANCELLATIONS)]
        await self._engine.cancel_flow(self._flow_id, reason="not wanted", cancellation_policy=policy)
        await self._store.parts.flow_cancel.drain()
        self._model.cancel_flow(policy)
        return True


STEPS: Mapping[str, Callable[[Player, Step], Awaitable[bool]]] = {
    "run": Player._run,
    "claim": Player._claim,
    "complete": Player._complete,
    "complete together": Player._complete_together,
    "fail": Player._fail,
    "cancel": Player._cancel,
    "delay": Player._delay,
    "suspend": Player._suspend,
    "resume": Player._resume,
    "wait for children": Player._wait_children,
    "revoke": Player._revoke,
    "pass time": Player._pass_time,
    "add": Player._add,
    "stage": Player._stage,
    "apply": Player._apply,
    "settle": Player._settle,
    "reconcile": Player._reconcile,
    "drain siblings": Player._drain,
    "reconcile siblings": Player._reconcile_siblings,
    "replay": Player._replay,
    "cancel the flow": Player._cancel_flow,
}
"""What each step of a script does; it returns whether that was possible."""
