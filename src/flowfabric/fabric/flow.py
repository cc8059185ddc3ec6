"""Flows: graphs of calls that are submitted together, in which results are the arguments of other calls."""

import inspect
import re
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar, cast, overload
from uuid import UUID, uuid5

from flowfabric.engine.parts import parts_of
from flowfabric.fabric.arguments import encode_with_nodes, has_nodes, hidden_node, refuse_hidden
from flowfabric.fabric.flow_run import FlowRun
from flowfabric.fabric.node import Group, Node, check_flow_of, shown_nodes
from flowfabric.fabric.options import budget_ids_of, budgets_in
from flowfabric.fabric.run import ABSENCE, Run
from flowfabric.fabric.task import Call, Task, TaskFabric
from flowfabric.model.edge import EdgePolicy
from flowfabric.model.errors import EngineError, InvalidInputError, TransportError, error
from flowfabric.model.execution import NewExecution
from flowfabric.model.flow import MAX_EDGES, MAX_NODES, FlowAlreadySatisfied, FlowEdge, FlowNode
from flowfabric.model.ids import FlowId, flow_partition, format_execution_id, mint_uuid_texts, parse_uuid, uuid7
from flowfabric.model.tag import check_tags
from flowfabric.model.text import check_items, check_short, check_text, shown
from flowfabric.worker.budget import Budget
from flowfabric.worker.heritage import heritage_of
from flowfabric.worker.upstreams import ENCODING

Params = ParamSpec("Params")
Returned = TypeVar("Returned")
Result = TypeVar("Result")

_SCOPE = UUID("6f1a3f0e-58a4-5c0b-9d5c-0f1f6b1c2a77")
"""The namespace of the UUIDs of flows whose id is any other text."""
_PLACE = re.compile(r"nodes\[(\d+)\]")


class Flow:
    """A graph of calls to submit together, made by `fabric.flow("nightly")`.

        flow = fabric.flow("nightly")
        rows = flow.add(extract, "orders")
        parts = [flow.add(transform, rows, part=n) for n in range(5)]
        flow.add(load, all_of(parts))
        run = await flow.submit()

    A node that is passed to another one is an edge: the other task starts when the first has succeeded, with its result
    as the argument.
    """

    def __init__(
        self,
        fabric: TaskFabric,
        kind: str,
        *,
        id: UUID | str | None,
        tags: Mapping[str, str] | None,
        budgets: Iterable[Budget | UUID | str],
        quota: UUID | str | None,
    ) -> None:
        self._fabric = fabric
        self.kind = check_short(kind, "kind")
        """What it is a flow of."""
        self._has_own_id = id is not None
        self._flow_id = _flow_id_of(fabric, kind, id)
        self._tags = check_tags(tags) or None
        given = check_items(budgets, "budgets")
        self._budget_ids = budget_ids_of(given)
        self._budgets = budgets_in(given)
        self._quota = None if quota is None else parse_uuid(quota, "quota")
        self._nodes: list[Node] = []
        self._news: list[NewExecution] = []
        """What is submitted for each node."""
        self._edge_count = 0
        self._has_backward_edges = False
        """Whether a node waits for one that was added later, so that a new edge may close a cycle."""
        self._is_submitted = False

    def __repr__(self) -> str:
        """Return `Flow(<kind>, <count> nodes)`."""
        return f"Flow({self.kind!r}, {len(self._nodes)} nodes)"

    @property
    def id(self) -> str:
        """The id of the flow, also before it is submitted: `fabric.flow_run(flow.id)` finds its run in any process."""
        return str(self._flow_id)

    @overload
    def add(
        self,
        task: Task[..., Params, Coroutine[Any, Any, Result]],
        /,
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> Result: ...
    @overload
    def add(self, task: Task[..., Params, Returned], /, *args: Params.args, **kwargs: Params.kwargs) -> Returned: ...
    def add(self, task: Task[..., ..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Add a call of a task, and return its node, which stands for its result: `rows = flow.add(extract, source)`.

        Nodes, and groups made by `all_of`, `any_of` and `quorum`, may be arguments, also in lists, tuples and dicts.
        `flow.add(extract.options(retries=3), source)` changes options of the task for this call; a delay and a deadline
        count from the submission of the flow.
        """
        self._check_open()
        self._check_task(task)
        if len(self._nodes) >= MAX_NODES:
            raise error("invalid_input", f"flow {self.kind!r}: a flow is submitted with at most {MAX_NODES} nodes")
        pending: list[Node | Group] = []
        encoding = "json"
        try:
            if has_nodes(args, kwargs):
                payload, pending = encode_with_nodes(task._handler, args, kwargs)
                encoding = ENCODING
            else:
                payload = task._handler.encode(args, kwargs)
        except InvalidInputError:
            if (hidden := hidden_node(args, kwargs)) is not None:
                raise refuse_hidden(task.name, hidden) from None
            raise
        index = len(self._nodes)
        node = Node(self, index, task, self._uuid_of(index))
        self._connect(node, pending)
        self._nodes.append(node)
        self._news.append(task._new(payload, encoding=encoding))
        return node

    def after(self, node: object, *upstreams: object) -> None:
        """Let a node start only after others have succeeded, without their results: `flow.after(load, check, lock)`.

        The others may also be one group, such as `flow.after(load, any_of(checks))`.
        """
        self._check_open()
        if not isinstance(node, Node):
            raise TypeError(f"flow.after: expected a node made by flow.add(...), got {shown(node)}")
        check_flow_of([node], self, "flow.after")
        pending: list[Node | Group] = []
        for upstream in upstreams:
            if not isinstance(upstream, Node | Group):
                advice = (
                    "write flow.after(node, *nodes)" if isinstance(upstream, list | tuple) else "flow.add makes nodes"
                )
                raise TypeError(f"flow.after: expected nodes or a group of nodes, got {shown(upstream)}; {advice}")
            pending.append(upstream)
        self._connect(node, pending)

    async def submit(self) -> FlowRun:
        """Submit the whole flow in one transaction, and return its run; the flow is durable when this returns.

        If a flow with this id was submitted before, nothing is compared or changed, and its run is returned, with
        `is_duplicate` set. So a submission whose answer was lost can be repeated.
        """
        if not self._nodes:
            raise error("invalid_input", f"flow {self.kind!r} has no nodes; add some with flow.add(task, ...)")
        engine = self._fabric.engine
        await self._prepare()
        heritage = await heritage_of(engine)
        partition = flow_partition(self._flow_id, parts_of(engine).store.rules.partitions.flow)
        try:
            made = await engine.submit_flow(
                flow_kind=self.kind,
                namespace=self._fabric.namespace,
                nodes=self._flow_nodes(partition),
                edges=self._edges(),
                groups=self._groups(),
                tags=self._tags,
                flow_id=self._flow_id,
                budget_ids=tuple(dict.fromkeys((*self._budget_ids, *heritage.budget_ids))),
                quota_policy_id=self._quota,
            )
        except EngineError as refused:
            self._is_submitted |= isinstance(refused, TransportError) and refused.outcome_unknown
            raise self._with_name(refused) from None
        self._is_submitted = True
        is_duplicate = isinstance(made, FlowAlreadySatisfied)
        # Another process may have submitted another graph under this id.
        absence = f"{ABSENCE}, or the flow that is stored under this id has another graph" if is_duplicate else ABSENCE
        runs: list[Run[Any]] = [
            Run(
                self._fabric,
                format_execution_id(partition, node._uuid),
                node._task._handler,
                is_duplicate=is_duplicate,
                is_checked=not is_duplicate,
                absence=absence,
            )
            for node in self._nodes
        ]
        return FlowRun(self._fabric, self._flow_id, self._nodes, runs, is_duplicate=is_duplicate)

    async def _prepare(self) -> None:
        """Create the limits of the tasks, and the budgets, once in a process."""
        for task in {id(node._task): node._task for node in self._nodes}.values():
            await task._prepare()
        for budget in self._budgets:
            await budget.create(self._fabric.engine)

    def _uuid_of(self, index: int) -> str:
        # The same ids in every process that submits the flow, so that each of them finds the runs of its nodes.
        return str(uuid5(self._flow_id, str(index))) if self._has_own_id else mint_uuid_texts(1)[0]

    def _check_open(self) -> None:
        if self._is_submitted:
            raise error(
                "invalid_input",
                f"flow {self.kind!r} is submitted, and its graph is fixed; make a new flow for more nodes",
            )

    def _check_task(self, task: object) -> None:
        if isinstance(task, Call) or inspect.iscoroutine(task):
            name = task._task.name if isinstance(task, Call) else _name_of_call(task)
            if inspect.iscoroutine(task):
                task.close()
            raise TypeError(
                f"flow.add: got a call of {name!r} instead of a task and its arguments; write flow.add({name}, ...)"
            )
        if isinstance(task, Node | Group):
            raise TypeError(f"flow.add: expected a Task, got {task!r}; write flow.add(task, node)")
        if not isinstance(task, Task):
            raise TypeError(f"flow.add: expected a Task, got {shown(task)}; decorate the function with @fabric.task")
        if task._fabric is not self._fabric:
            raise TypeError(f"flow.add: task {task.name!r} belongs to another fabric than the flow")
        if "idempotency_key" in task._options:
            raise error(
                "invalid_input",
                f"flow.add: task {task.name!r} has an idempotency_key, which a node cannot have; a flow is submitted "
                "once by its id: fabric.flow(kind, id=...)",
            )
        if "parent" in task._options:
            raise error(
                "invalid_input",
                f"flow.add: task {task.name!r} has a parent, which a node cannot have; give the flow its limits: "
                "fabric.flow(kind, budgets=..., quota=...)",
            )

    def _connect(self, node: Node, pending: Sequence[Node | Group]) -> None:
        """Let a node wait for these nodes and groups, in addition to those that it waits for."""
        group = node._group
        single: Node | Group | None = None
        if group is None and node._upstreams:
            single = self._nodes[next(iter(node._upstreams))]
        added: dict[int, None] = {}
        for each in pending:
            members = [each] if isinstance(each, Node) else each._nodes
            check_flow_of(members, self, "flow.add" if node._index == len(self._nodes) else "flow.after")
            if isinstance(each, Group) and each._needs is not None:
                if group is not None and group is not each:
                    raise _mixed(node, group, each)
                group = each
            else:
                single = each if single is None else single
            added.update(dict.fromkeys(member._index for member in members))
        if group is not None and single is not None:
            raise _mixed(node, group, single)
        new = [at for at in added if at not in node._upstreams]
        if self._edge_count + len(new) > MAX_EDGES:
            raise error(
                "invalid_input",
                f"flow {self.kind!r}: a flow is submitted with at most {MAX_EDGES} edges, and {node!r} would be the "
                f"{self._edge_count + len(new)}th; let a task between them collect what many nodes need",
            )
        is_backward = any(at >= node._index for at in new)
        if is_backward or (self._has_backward_edges and node._index < len(self._nodes)):
            self._refuse_cycle(node, new)
        self._has_backward_edges |= is_backward
        node._group = group
        node._upstreams.update(dict.fromkeys(new))
        self._edge_count += len(new)

    def _refuse_cycle(self, node: Node, upstreams: Sequence[int]) -> None:
        """Refuse edges from nodes that wait for this one."""
        # Walks upstream from the new upstreams; `via` has the node from which each one was reached.
        via: dict[int, int | None] = dict.fromkeys(upstreams)
        waiting = list(upstreams)
        while waiting:
            at = waiting.pop()
            if at == node._index:
                path = [at]
                while (before := via[path[-1]]) is not None:
                    path.append(before)
                around = [self._nodes[each] for each in (*path, node._index)]
                raise error(
                    "cycle_detected",
                    f"flow.after: {shown_nodes(around)} is a cycle; each of these nodes would wait for the one before",
                )
            for upstream in self._nodes[at]._upstreams:
                if upstream not in via:
                    via[upstream] = at
                    waiting.append(upstream)

    def _flow_nodes(self, partition: int) -> list[FlowNode]:
        return [
            FlowNode(
                name=str(node._index),
                execution_id=format_execution_id(partition, node._uuid),
                lane_id=new.lane_id,
                execution_kind=new.execution_kind,
                input_payload=new.input_payload,
                creator_identity=new.creator_identity,
                priority=new.priority,
                payload_encoding=new.payload_encoding,
                tags=new.tags,
                policy=new.policy,
                delay_ms=new.delay_ms,
            )
            for node, new in zip(self._nodes, self._news, strict=True)
        ]

    def _edges(self) -> list[FlowEdge]:
        names = [str(index) for index in range(len(self._nodes))]
        return [
            FlowEdge(upstream=names[upstream], downstream=names[node._index])
            for node in self._nodes
            for upstream in node._upstreams
        ]

    def _groups(self) -> dict[str, EdgePolicy]:
        return {str(node._index): node._group._policy for node in self._nodes if node._group is not None}

    def _with_name(self, refused: EngineError) -> EngineError:
        """Return the error of a refused submission, with the node that it is about."""
        place = _PLACE.match(refused.detail) if isinstance(refused.detail, str) else None
        if place is None:
            return refused
        node = self._nodes[int(place[1])]
        return error(refused.code, f"{node!r}{cast('str', refused.detail)[place.end() :].replace('.', ', ', 1)}")


def _name_of_call(call: "CoroutineType[Any, Any, Any]") -> str:
    """Return the name of the task whose call or submission a coroutine is."""
    task = None if call.cr_frame is None else call.cr_frame.f_locals.get("self")
    return task.name if isinstance(task, Task) else call.__name__


def _mixed(node: Node, group: Group, other: Node | Group) -> EngineError:
    return error(
        "invalid_input",
        f"{node!r} waits for {group!r}, and cannot wait for {other!r} as well: a node waits either for one any_of or "
        "quorum, or for all of its nodes; let another task take the group, and pass its node",
    )


def _flow_id_of(fabric: TaskFabric, kind: str, given: object) -> FlowId:
    """Return the id of a flow: a new one, the given UUID, or one that is derived from any other text."""
    if given is None:
        return FlowId(uuid7())
    if isinstance(given, UUID):
        return FlowId(given)
    if not isinstance(given, str):
        raise error("invalid_input", f"id: must be text or a UUID, got {shown(given)}; write id=str(...)")
    text = check_text(given, "id")
    if not text:
        raise error("invalid_input", "id: must not be empty; leave it out to submit without one")
    try:
        return FlowId(UUID(text))
    except ValueError:
        return FlowId(uuid5(_SCOPE, f"{fabric.namespace}\0{kind}\0{text}"))
