"""Plays random scripts on a flow of the engine and on the model, and compares both after every step."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from uuid import UUID, uuid4

from fixtures import uuid_of
from flowfabric.engine.core.wakeups import CascadeKey
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import flow_partition, mint_for_flow

from .graph_faults import NO_FAULT, Fault
from .graph_members import MemberSteps
from .graph_model import MAX_REPLAYS, Edge, Group, Member
from .graph_scripts import POLICIES, Script, Step, policy_of
from .graph_store import MAX_SWEEPS, GraphStore

CANCELLATIONS = ("cancel_all", "cancel_pending", "flow_only")
MAX_MEMBERS = 8
MAX_EDGES = 24
LOCKED_PASSES = 8
"""How often the cascade is settled while a row is locked."""


class Player(MemberSteps):
    """Plays one script."""

    def __init__(self, store: GraphStore, script: Script) -> None:
        super().__init__(store, script)
        self.taken: list[str] = []

    async def play(self) -> None:
        """Submit the flow, take every step, and bring the flow to its end."""
        await self._submit()
        await self._compare()
        for wanted in self._script.steps:
            # What is not possible is replaced by what moves the flow on.
            for name in (wanted.name, "run" if wanted.value % 3 else "claim", "settle", "replay"):
                step = replace(wanted, name=name)
                self.taken.append(str(step))
                if await STEPS[name](self, step):
                    self.counts[name] += 1
                    await self._compare()
                    break
                self.taken.pop()
        await self._come_to_rest()
        await self._cancel_owed(Step("cancel what is owed", 0, 0))
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

    async def _come_to_rest(self) -> None:
        """Settle, reconcile and drain until nothing is left."""
        model = self._model
        while True:
            await self._settle(Step("settle", 0, -1, self._script.rest))
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

    # Steps on the graph.

    async def _add(self, step: Step) -> bool:
        """Add a member with a policy, and stage an edge to it; one of the calls has the fault of the step."""
        number = len(self._ids)
        if number >= MAX_MEMBERS or self._model.is_cancelled:
            return False
        faults = [step.fault if nth == step.value % 4 else NO_FAULT for nth in range(4)]
        execution_id = mint_for_flow(self._flow_id, self._store.parts.store.rules.partitions)
        await self._repeated(
            "add",
            faults[0],
            lambda engine: engine.create_execution(
                execution_id=execution_id,
                namespace="tests",
                lane_id=f"lane-{number}",
                execution_kind="job",
                input_payload=b"input",
                priority=0,
                creator_identity="test",
            ),
        )
        await self._repeated("add", faults[1], lambda engine: engine.add_execution_to_flow(self._flow_id, execution_id))
        self._ids.append(execution_id)
        self._numbers[UUID(uuid_of(execution_id))] = number
        self._model.add(Member(b"input"))
        policy = POLICIES[step.value // 4 % len(POLICIES)]
        await self._repeated(
            "add",
            faults[2],
            lambda engine: engine.set_edge_group_policy(self._flow_id, execution_id, policy_of(policy)),
        )
        self._model.groups[number] = Group(policy.policy, policy.k, policy.cancels_siblings)
        await self._stage_edge(step.which % number, number, faults[3], has_data=bool(step.value % 2))
        return True

    async def _stage(self, step: Step) -> bool:
        count = len(self._ids)
        if self._model.is_cancelled or len(self._model.edges) >= MAX_EDGES:
            return False
        down = 1 + step.which % (count - 1)
        await self._stage_edge(step.value % down, down, step.fault, has_data=bool(step.value % 2))
        return True

    async def _stage_edge(self, up: int, down: int, fault: Fault, *, has_data: bool) -> None:
        edge = Edge(str(uuid4()), up, down, has_data)

        async def stage(engine: Engine) -> None:
            found = await engine.describe_flow(self._flow_id)
            assert found is not None
            await engine.stage_dependency_edge(
                self._flow_id,
                edge_id=edge.key,
                upstream_execution_id=self._ids[up],
                downstream_execution_id=self._ids[down],
                data_passing_ref="input" if has_data else None,
                expected_graph_revision=found.graph_revision,
            )

        await self._repeated("stage", fault, stage, refusals=("dependency_already_exists",))
        self._model.stage(edge)

    async def _apply(self, step: Step) -> bool:
        if found := [edge for edge in self._model.edges if edge.state == "staged"]:
            edge = found[step.which % len(found)]
            await self._repeated(
                "apply",
                step.fault,
                lambda engine: engine.apply_dependency_to_child(
                    self._flow_id,
                    edge_id=edge.key,
                    upstream_execution_id=self._ids[edge.up],
                    downstream_execution_id=self._ids[edge.down],
                    graph_revision=0,
                ),
            )
            self._model.apply(edge)
        return bool(found)

    # Steps of the cascade.

    async def _settle(self, step: Step) -> bool:
        """Settle all queued ends or some; after a crash the second engine settles what the first has left."""
        queued = await self._store.queued(self._flow_id)
        events = list(dict.fromkeys(event for event, _, _ in queued))
        if step.fault.crash is None and step.value >= 0:
            events = [event for nth, event in enumerate(events) if (step.value + step.which * nth) % 3]
        if not events:
            return False
        settled = [(self._numbers[each], outcome) for event, each, outcome in queued if event in events]
        partition = flow_partition(self._flow_id, self._store.parts.store.rules.partitions.flow)
        left = [CascadeKey(partition, event) for event in events]
        # Edges that are left because of a lock are resolved behind later ones, in an order that only shows in between.
        is_whole = self._script.edge_limit >= MAX_EDGES or step.fault.lock is None

        async def settle(passes: int) -> None:
            nonlocal left
            for _ in range(passes):
                if left:
                    _, left, _ = await self._store.parts.cascade._settle(left)
                    await self._model_resolves(settled)

        async def settle_in_the_background() -> None:
            self._store.parts.cascade._queue_entries(left)
            await self._store.parts.cascade.drain()

        is_background = step.which % 2 == 1 and is_whole
        work = settle_in_the_background() if is_background else settle(LOCKED_PASSES if step.fault.lock else MAX_SWEEPS)
        locked = self._locked_member(step.fault)
        open_edges = [edge for edge in self._model.edges if edge.state == "unsatisfied"]
        if step.fault == NO_FAULT:
            await work
        elif await self._disturbed("settle", step.fault, work, self._settling()):
            stored = await self._store.stored(self._flow_id, self._numbers)
            ended = {number for number, _ in settled}
            for edge in open_edges if locked is not None else ():
                is_open = stored[f"edge {edge.key}"] == "unsatisfied"
                assert is_open or edge.down != locked, "an edge is resolved although its child is locked"
                if self._script.edge_limit >= MAX_EDGES and self._successor is self._engine and edge.down != locked:
                    assert is_open is (edge.up not in ended), "an edge is left because another child is locked"
            await self._model_resolves(settled)
            still = {event for event, _, _ in await self._store.queued(self._flow_id)} & {*events}
            left = [CascadeKey(partition, event) for event in events if event in still]
            if left and step.fault.lock is not None and self._successor is self._engine:
                self.counts[f"settle: left behind a locked {step.fault.lock[0]}"] += 1
            if self._successor is self._engine:
                await settle(MAX_SWEEPS)
            else:
                await self._store.settle_left_over(lambda: self._model_resolves(settled))
                await self._model_settles(settled)
                return True
        assert is_background or not left, "an entry is left that nobody has locked"
        self._model.settle(settled)
        return True

    async def _model_resolves(self, settled: Sequence[tuple[int, str]]) -> None:
        """Let the model resolve the edges that the engine has resolved, of these ends and of those that this queues."""
        stored = await self._store.stored(self._flow_id, self._numbers)
        self._model.now = await self._store.clock.now()
        queued = [each for each in self._model.queue if each not in settled]
        for number, outcome in (*settled, *queued):
            self._model.resolve_those(number, outcome, lambda edge: stored[f"edge {edge.key}"] != "unsatisfied")

    async def _reconcile(self, step: Step) -> bool:
        """Settle everything and let the safety net look for what is left."""
        order = [(self._numbers[each], outcome) for _, each, outcome in await self._store.queued(self._flow_id)]
        await self._store.settle_left_over()
        await self._model_settles(order)
        before = await self._store.stored(self._flow_id, self._numbers)
        work = self._store.parts.blocked.reconcile()
        if step.fault == NO_FAULT:
            await work
        elif await self._disturbed("reconcile", step.fault, work):
            if before != await self._store.stored(self._flow_id, self._numbers):
                # A pass that was committed may have ended upstreams of other members.
                self._model.reconcile()
            await parts_of(self._successor).blocked.reconcile()
        self._model.reconcile()
        return True

    async def _drain(self, step: Step) -> bool:
        if not any(group.is_flagged for group in self._model.groups.values()):
            return False
        length = 1 + 7 * sum(group.is_flagged for group in self._model.groups.values())
        await self._repeated(
            "drain siblings", step.fault, lambda engine: parts_of(engine).siblings.dispatch(), length=length
        )
        self._model.drain_siblings()
        return True

    async def _reconcile_siblings(self, step: Step) -> bool:
        if not any(group.is_flagged for group in self._model.groups.values()):
            return False
        await self._repeated("reconcile siblings", step.fault, lambda engine: parts_of(engine).siblings.reconcile())
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
        fault = step.fault
        if is_queued and self._script.edge_limit < MAX_EDGES:
            # The order in which several passes resolve edges past a locked row does not show afterwards.
            fault = replace(fault, lock=None)

        length = 14 + (6 + self._settling() if is_queued else 0)

        async def replay(engine: Engine) -> None:
            if engine is self._store.second and is_queued:
                await self._store.settle_left_over()
            await engine.replay_execution(execution_id=execution_id, allow_cancelled_flow=True)

        refusals = ("max_replays_exhausted",) if is_refused else ("execution_not_terminal",)
        try:
            await self._repeated("replay", fault, replay, length=length, refusals=refusals)
        except EngineError as refusal:
            if not is_refused or refusal.code not in refusals:
                raise
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

    async def _cancel_header(self, step: Step) -> bool:
        """Cancel the flow, and leave its members to the sweep."""
        if self._model.is_cancelled or step.which % 4:
            return False
        policy = CANCELLATIONS[step.value % 2]
        await self._repeated(
            "cancel the header",
            step.fault,
            lambda engine: engine.cancel_flow_header(
                self._flow_id, reason="not wanted", cancellation_policy=policy, grace_ms=0
            ),
            length=7,
        )
        self._model.cancel_header(policy)
        return True

    async def _cancel_owed(self, step: Step) -> bool:
        if not self._model.owed:
            return False
        await self._repeated(
            "cancel what is owed", step.fault, lambda engine: parts_of(engine).cancel_backlog.reconcile_due(), length=8
        )
        self._model.cancel_owed()
        return True

    async def _cancel_flow(self, step: Step) -> bool:
        # Little happens in a flow that is cancelled early.
        if self._model.is_cancelled or step.which % 4:
            return False
        policy = CANCELLATIONS[step.value % len(CANCELLATIONS)]
        is_repeated = False

        async def cancel(engine: Engine) -> None:
            nonlocal is_repeated
            sweeps, is_repeated = is_repeated, True
            await engine.cancel_flow(self._flow_id, reason="not wanted", cancellation_policy=policy, grace_ms=0)
            await parts_of(engine).flow_cancel.drain()
            if sweeps:
                # The members that the first call has not cancelled.
                await parts_of(engine).cancel_backlog.reconcile_due()

        await self._repeated("cancel the flow", step.fault, cancel, length=12)
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
    "cancel the header": Player._cancel_header,
    "cancel what is owed": Player._cancel_owed,
}
"""What each step of a script does; it returns whether that was possible."""
