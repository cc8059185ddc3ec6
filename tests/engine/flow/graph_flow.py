"""A random flow while it is played: its members, its model, the comparison of both, and calls under faults."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar
from uuid import UUID, uuid4

from fixtures import uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.flow import FlowEdge, FlowNode, FlowSubmitted
from flowfabric.model.handle import Handle
from flowfabric.model.ids import FlowId, format_execution_id

from .graph_faults import NO_FAULT, Fault
from .graph_model import Edge, GraphModel, Group, Member
from .graph_scripts import DEADLINES_MS, DELAYS_MS, POLICIES, Script, policy_of
from .graph_store import GraphStore, differences, modelled

Answer = TypeVar("Answer")

LENGTH = 5
"""About how many statements and commits most calls have."""
HOP = 6
"""About how many statements and the commit settle the edges of one transaction."""

_MEMBERS = """
select e.partition_key, e.execution_id from execution e join lane l using (lane_no)
 where e.flow_id = $1 order by l.lane_id
"""
_EDGES = "select edge_id from edge where flow_id = $1 order by edge_no"


class PlayedFlow:
    """The flow of a script, and its model."""

    def __init__(self, store: GraphStore, script: Script) -> None:
        self._store = store
        self._script = script
        self._engine = store.engine
        self._handles: dict[int, Handle] = {}
        self._ids: list[str] = []
        self._numbers: dict[UUID, int] = {}
        self._flow_id = FlowId(uuid4())
        self.counts: Counter[str] = Counter()
        """How often each step, each crash and each effect of a lock occurred."""
        self.points: Counter[int] = Counter()
        """At which statements calls were cut."""
        self.lengths: Counter[int] = Counter()
        """How many statements the calls had that were watched and not cut."""

    async def _submit(self) -> None:
        script, count = self._script, len(self._script.policies)
        inbound = Counter(down for _, down, _ in script.edges)
        groups: dict[int, Group] = {}
        for number in sorted(inbound):
            found = POLICIES[script.policies[number]]
            groups[number] = Group(found.policy, min(found.k, inbound[number]), found.cancels_siblings)
        now = await self._store.clock.now()
        timings = [(DEADLINES_MS[each % 5], DELAYS_MS[each // 5 % 5]) for each in script.timings]
        nodes = [
            FlowNode(
                name=str(number),
                lane_id=f"lane-{number}",
                execution_kind="job",
                input_payload=b"input",
                creator_identity="test",
                delay_ms=delay_ms,
                policy=None if deadline_ms is None else {"timeout_policy": {"execution_deadline_ms": deadline_ms}},
            )
            for number, (deadline_ms, delay_ms) in enumerate(timings)
        ]
        edges = [
            FlowEdge(upstream=str(up), downstream=str(down), data_passing_ref="input" if has_data else None)
            for up, down, has_data in script.edges
        ]
        answer = await self._repeated(
            "submit",
            script.submission,
            lambda engine: engine.submit_flow(
                flow_id=self._flow_id,
                flow_kind="dag",
                namespace="tests",
                nodes=nodes,
                edges=edges,
                groups={str(number): policy_of(group) for number, group in groups.items()},
            ),
        )
        connection = self._store.connection
        for partition, uuid in await connection.fetch(_MEMBERS, self._flow_id):
            self._ids.append(format_execution_id(partition, uuid))
        edge_ids = [edge_id for (edge_id,) in await connection.fetch(_EDGES, self._flow_id)]
        if isinstance(answer, FlowSubmitted):
            assert answer.edge_ids == edge_ids
            assert answer.execution_ids == {str(number): each for number, each in enumerate(self._ids)}
        self._numbers = {UUID(uuid_of(each)): number for number, each in enumerate(self._ids)}
        derived = await connection.fetchval("select derived_state from flow where flow_id = $1", self._flow_id)
        self._model = model = GraphModel(now, derived)
        for deadline_ms, delay_ms in timings:
            member = Member(b"input", deadline_ms=deadline_ms)
            member.deadline_at = None if deadline_ms is None else now + deadline_ms
            if delay_ms is not None:
                member.phase, member.delay_until = "delayed", now + delay_ms
            model.add(member)
        assert len(model.members) == len(self._ids) == count
        model.groups = groups
        for edge_id, (up, down, has_data) in zip(edge_ids, script.edges, strict=True):
            model.stage(Edge(str(edge_id), up, down, has_data))
        for edge in model.edges:
            model.apply(edge)

    async def _compare(self) -> None:
        found = differences(await self._store.stored(self._flow_id, self._numbers), modelled(self._model))
        assert not found, "\n".join(found)

    # Choosing.

    def _in(self, *phases: str) -> list[int]:
        return [number for number, member in enumerate(self._model.members) if member.phase in phases]

    def _live(self) -> list[int]:
        return [number for number, member in enumerate(self._model.members) if member.is_live]

    def _settling(self) -> int:
        """About how many statements settle all ends that are queued."""
        queued = {number for number, _ in self._model.queue}
        edges = sum(edge.up in queued and edge.state == "unsatisfied" for edge in self._model.edges)
        return HOP * (1 + edges // self._script.edge_limit)

    # Calls under faults.

    async def _disturbed(self, name: str, fault: Fault, call: Awaitable[object], length: int = LENGTH) -> bool:
        """Make a call of about `length` statements while a row is locked and in a process that may crash.

        Return whether it has to be repeated.
        """
        crashes = self._store.crashes
        with crashes.watch(fault.point(length)):
            async with self._store.locked(self._lock(fault)):
                try:
                    await call
                except EngineError as failure:
                    is_refused = fault.lock is not None and failure.code == "retry_exhausted"
                    if not (crashes.has_crashed or is_refused):
                        raise
                    if fault.lock is not None and not crashes.has_crashed:
                        self.counts[f"{name}: refused because of a locked {fault.lock[0]}"] += 1
            has_crashed, statements = crashes.has_crashed, crashes.statements
        if has_crashed and fault.crash is not None:
            form, _ = fault.crash
            self.counts[form] += 1
            self.counts[f"{name}: {form}"] += 1
            if form != "answer lost":
                self.points[statements] += 1
            await self._store.wait_for_cut()
        else:
            self.lengths[statements] += 1
        self._successor = self._store.second if has_crashed else self._engine
        return has_crashed or fault.lock is not None

    def _lock(self, fault: Fault) -> tuple[str, UUID] | None:
        if fault.lock is None:
            return None
        kind, which = fault.lock
        if kind == "flow":
            return kind, self._flow_id
        found: Sequence[int] = range(len(self._ids))
        if kind != "member":
            waited_for = {edge.down for edge in self._model.edges if edge.state == "unsatisfied"}
            found = sorted(waited_for or self._model.groups)
        return kind, UUID(uuid_of(self._ids[found[which % len(found)]]))

    def _locked_member(self, fault: Fault) -> int | None:
        """The member that another session locks during a call."""
        lock = self._lock(fault)
        return self._numbers[lock[1]] if lock is not None and lock[0] in ("child", "member") else None

    async def _repeated(
        self,
        name: str,
        fault: Fault,
        call: Callable[[Engine], Awaitable[Answer]],
        *,
        length: int = LENGTH,
        refusals: Iterable[str] = (),
    ) -> Answer | None:
        """Make a call under faults and repeat it if it was disturbed: after a crash, by the other engine.

        `refusals` are the codes by which a repetition says that the first call was done; the model tells whether.
        """
        answers: list[Answer] = []

        async def first() -> None:
            answers.append(await call(self._engine))

        if fault == NO_FAULT or not await self._disturbed(name, fault, first(), length):
            return answers[0] if answers else await call(self._engine)
        try:
            return await call(self._successor)
        except EngineError as refusal:
            if refusal.code not in refusals:
                raise
        return None
