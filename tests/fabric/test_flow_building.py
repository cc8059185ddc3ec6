"""Building flows: what is refused at the line that is wrong, and what nodes say when they are used as values."""

import dataclasses
import time
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple, NotRequired, TypedDict
from uuid import UUID, uuid4

import msgspec
import pydantic
import pytest

from flowfabric import Fabric, all_of, any_of, quorum
from flowfabric.errors import ConflictError, InvalidInputError
from flowfabric.fabric import flow as flows
from flowfabric.worker.upstreams import Described

fabric = Fabric()
other_fabric = Fabric()


@dataclasses.dataclass
class Report:
    rows: int


class Model(pydantic.BaseModel):
    rows: Any


class Typed(pydantic.BaseModel):
    at: bytes


@fabric.task
async def extract(source: str = "orders") -> int:
    return len(source)


@fabric.task
async def take(value: Any, *, named: Any = None) -> int:
    return 1


@fabric.task
async def count(rows: list[int]) -> int:
    return len(rows)


@fabric.task
async def typed(rows: dict[str, list[bytes]], pair: tuple[int, str] | None = None) -> int:
    return len(rows)


class Color(Enum):
    RED = "red"


class Row(TypedDict):
    at: date
    note: NotRequired[str]


class Pair(NamedTuple):
    left: int
    right: str


@fabric.task
async def raw() -> bytes:
    return b"\xff"


@fabric.task
async def ratio() -> float:
    return 2.0


@fabric.task
async def word() -> str:
    return "word"


@fabric.task
async def day() -> date:
    return date(2026, 1, 31)


@fabric.task
async def days() -> list[date]:
    return [date(2026, 1, 31)]


@fabric.task
async def report() -> Report:
    return Report(1)


@fabric.task
async def shapes(
    *,
    number: int = 0,
    text: str = "",
    texts: list[str] | None = None,
    either: date | str = "",
    decimal: Decimal = Decimal(0),
    report: Report | None = None,
    row: Row | None = None,
    pair: Pair | None = None,
    several: tuple[int, ...] = (),
    members: set[int] | None = None,
    by_color: dict[Color, int] | None = None,
    by_number: dict[int, int] | None = None,
    anything: Any = None,
) -> None: ...


@other_fabric.task
async def foreign() -> int:
    return 1


def described(flow: flows.Flow, index: int) -> Any:
    """The payload of a node, with the UUIDs of its upstream nodes replaced by their numbers."""
    numbers = {node._uuid: number for number, node in enumerate(flow._nodes)}
    payload = msgspec.json.decode(flow._news[index].input_payload, type=Described)
    places = [
        (place.path, [numbers[uuid] for uuid in place.upstreams], place.take, place.plain_bytes)
        for place in payload.places
    ]
    return msgspec.json.decode(bytes(payload.arguments)), places


def test_the_payload_has_null_at_the_places_of_nodes_and_no_markers() -> None:
    flow = fabric.flow("nightly")
    a, b, c = (flow.add(extract) for _ in range(3))
    flow.add(take, {"x": [1, a], "y": [b, "text"]}, named=all_of([c, a]))
    flow.add(take, quorum(2, of=[a, b, c]))
    flow.add(take, any_of([b, c]), named=1)
    shared = any_of([a, b], cancel_remaining=True)
    flow.add(take, shared, named=[shared])
    assert described(flow, 3) == (
        {"value": {"x": [1, None], "y": [None, "text"]}, "named": None},
        [
            (["value", "x", 1], [0], "one", []),
            (["value", "y", 0], [1], "one", []),
            (["named"], [2, 0], "all", []),
        ],
    )
    assert described(flow, 4)[1] == [(["value"], [0, 1, 2], 2, [])]
    assert described(flow, 5) == ({"value": None, "named": 1}, [(["value"], [1, 2], "one", [])])
    assert described(flow, 6)[1] == [(["value"], [0, 1], "one", []), (["named", 0], [0, 1], "one", [])]
    edges = [(edge.upstream, edge.downstream) for edge in flow._edges()]
    assert edges[:6] == [("0", "3"), ("1", "3"), ("2", "3"), ("0", "4"), ("1", "4"), ("2", "4")]
    assert len(edges) == 10
    assert [repr(policy) for policy in flow._groups().values()] == [
        "QuorumOfEdges(k=2, on_satisfied=<OnSatisfied.LET_RUN: 'let_run'>)",
        "AnyOfEdges(on_satisfied=<OnSatisfied.LET_RUN: 'let_run'>)",
        "AnyOfEdges(on_satisfied=<OnSatisfied.CANCEL_REMAINING: 'cancel_remaining'>)",
    ]


def test_a_call_without_nodes_is_stored_as_any_other() -> None:
    flow = fabric.flow("nightly")
    flow.add(extract, "orders")
    assert (flow._news[0].input_payload, flow._news[0].payload_encoding) == (b'{"source":"orders"}', "json")


def test_values_beside_nodes_are_checked_by_their_annotations() -> None:
    flow = fabric.flow("nightly")
    number = flow.add(extract)
    a = flow.add(raw)
    flow.add(typed, {"x": [b"\xff", a], "y": [b""]}, pair=(number, "b"))
    assert described(flow, 2)[0] == {"rows": {"x": ["/w==", None], "y": [""]}, "pair": [None, "b"]}
    for rows, pair, text in (
        ({"x": [7, a]}, None, "parameter 'rows': expected bytes, got 7"),
        ({"x": [a]}, (number, 7), "parameter 'pair': expected str, got 7"),
        ({"x": [a], "y": 7}, None, r"parameter 'rows': expected list\[bytes\], got 7"),
        ({"x": [b"", a]}, 7, "parameter 'pair': "),
    ):
        with pytest.raises(InvalidInputError, match=f"task 'typed', {text}"):
            flow.add(typed, rows, pair=pair)  # type: ignore[arg-type]
    assert len(flow._nodes) == 3


def test_results_and_containers_that_may_fit_are_accepted() -> None:
    flow: Any = fabric.flow("nightly")
    number, at, of_number = flow.add(extract), flow.add(day), flow.add(count, [])
    for named in (
        {"by_color": {Color.RED: number}, "by_number": {1: number, 2: number}},
        {"number": number, "decimal": number, "text": "x"},
        {"either": at, "row": {"at": at}, "pair": (number, "x"), "several": (number, 1, of_number)},
        {"pair": Pair(number, "x"), "texts": [flow.add(word)]},
        {"report": flow.add(report), "anything": {"a": [number, None]}},
        {"anything": all_of([number, of_number]), "number": number},
    ):
        flow.add(shapes, **named)
    assert described(flow, 5)[0] == {"by_color": {"red": None}, "by_number": {"1": None, "2": None}}


class Made:
    """A flow with two nodes, and the functions whose arguments are wrong, without their types."""

    any_of: Any = staticmethod(any_of)
    all_of: Any = staticmethod(all_of)
    fabric: Any = fabric

    def __init__(self) -> None:
        self.flow: Any = fabric.flow("f")
        self.a, self.b = self.flow.add(extract), self.flow.add(extract)

    def shaped(self, **named: Any) -> Any:
        return self.flow.add(shapes, **named)


def holding_itself(node: object) -> list[object]:
    value = [node]
    value.append(value)
    return value


REFUSED: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda m: m.flow.add(extract._handler.function), TypeError, "expected a Task, got <function extract"),
    (lambda m: m.flow.add(extract("x")), TypeError, "got a call of 'extract' .*write flow.add\\(extract, ...\\)"),
    (lambda m: m.flow.add(extract.bind("x")), TypeError, "got a call of 'extract' .*write flow.add\\(extract, ...\\)"),
    (
        lambda m: m.flow.add(extract.submit("x")),
        TypeError,
        "got a call of 'extract' .*write flow.add\\(extract, ...\\)",
    ),
    (lambda m: m.flow.add(m.a), TypeError, "expected a Task, got <node 1 .*; write flow.add\\(task, node\\)"),
    (lambda m: m.flow.add(extract, "x", "y"), TypeError, "task 'extract': takes 1 positional argument, got 2"),
    (lambda m: m.flow.add(foreign), TypeError, "task 'foreign' belongs to another fabric"),
    (lambda m: m.flow.add(extract.options(idempotency_key="k")), InvalidInputError, "fabric.flow\\(kind, id=...\\)"),
    (lambda m: m.flow.add(take), TypeError, "task 'take': missing a required argument: 'value'"),
    (lambda m: m.flow.add(take, m.a, nmaed=1), TypeError, "no such argument: 'nmaed'"),
    (lambda m: m.flow.add(extract, 7), InvalidInputError, "parameter 'source': expected str, got 7"),
    (
        lambda m: m.flow.add(take, fabric.flow("x").add(extract)),
        InvalidInputError,
        "node 1 of flow 'x'.* another flow",
    ),
    (
        lambda m: m.flow.add(take, all_of([fabric.flow("x").add(extract)])),
        InvalidInputError,
        "belongs to another flow",
    ),
    (lambda m: all_of([m.a, fabric.flow("x").add(extract)]), InvalidInputError, "all_of: .* another flow"),
    (
        lambda m: m.flow.add(take, {m.a}),
        InvalidInputError,
        "node 1 of flow 'f'.*is inside a set, a dataclass or a model",
    ),
    (lambda m: m.flow.add(take, Report(rows=m.a)), InvalidInputError, "is inside a set, a dataclass or a model"),
    (lambda m: m.flow.add(take, [Model(rows=m.a), m.b]), InvalidInputError, "is inside a set, a dataclass or a model"),
    (lambda m: m.flow.add(take, {m.a: 1}), InvalidInputError, "is a key of a dict; results can only be values"),
    (lambda m: m.flow.add(take, {1.5: m.a}), InvalidInputError, "the key 1.5 \\(float\\); use text"),
    (lambda m: m.flow.add(take, {True: m.a}), InvalidInputError, "the key True \\(bool\\); use text"),
    (
        lambda m: m.flow.add(take, any_of([m.a]), named=m.b),
        InvalidInputError,
        "waits for <any_of of 1 nodes>, and cannot",
    ),
    (lambda m: m.flow.add(take, m.b, named=quorum(1, of=[m.a])), InvalidInputError, "let another task take the group"),
    (lambda m: m.flow.add(take, any_of([m.a]), named=any_of([m.a])), InvalidInputError, "cannot wait for <any_of"),
    (lambda m: m.flow.add(take, any_of([m.a]), named=all_of([m.a, m.b])), InvalidInputError, "cannot wait for <all_of"),
    (lambda m: m.flow.add(take, quorum(1, of=[m.a, m.b]), named=m.a), InvalidInputError, "cannot wait for <node 1"),
    (lambda m: m.flow.add(take, m.a, named=any_of([m.a, m.b])), InvalidInputError, "cannot wait for <node 1"),
    (lambda m: m.flow.after(m.flow.add(take, any_of([m.a, m.b])), m.a), InvalidInputError, "cannot wait for <node 1"),
    (lambda m: m.flow.after(m.flow.add(take, m.a), any_of([m.a, m.b])), InvalidInputError, "cannot wait for <node 1"),
    (
        lambda m: m.flow.after(m.flow.add(take, any_of([m.a, m.b])), all_of([m.a])),
        InvalidInputError,
        "cannot wait for <all_of",
    ),
    (lambda m: m.flow.add(take, holding_itself(m.a)), InvalidInputError, "contains itself, or is nested too deeply"),
    (lambda m: m.flow.add(take, {1: m.a, "1": m.b}), InvalidInputError, "the key 1 \\(int\\); use text"),
    (lambda m: m.flow.add(take, (m.a, 1)), InvalidInputError, r"\(tuple\) would come back as a list"),
    (lambda m: m.shaped(by_number={"a": m.a}), InvalidInputError, r"the key 'a' \(str\); expected int"),
    (lambda m: m.shaped(texts={"x": m.flow.add(day)}), InvalidInputError, r"expected list\[str\] \| None, got {.*dict"),
    (lambda m: m.shaped(number=[m.a]), InvalidInputError, r"'number': expected int, got \[<node 1"),
    (lambda m: m.shaped(number=all_of([m.a])), InvalidInputError, "expected int, got <all_of .* a list of results"),
    (lambda m: m.shaped(number=quorum(1, of=[m.a])), InvalidInputError, "expected int, got <quorum"),
    (lambda m: m.shaped(several=all_of([m.a])), InvalidInputError, r"expected tuple\[int, ...\], got <all_of"),
    (lambda m: m.shaped(members=[m.a]), InvalidInputError, r"expected set\[int\] \| None, got \[<node 1"),
    (
        lambda m: m.flow.add(count, any_of([m.a])),
        InvalidInputError,
        r"expected list\[int\], got <node 1.* result is int",
    ),
    (lambda m: m.flow.add(count, (m.a,)), InvalidInputError, r"expected list\[int\], got \(<node 1"),
    (lambda m: m.shaped(pair=(m.a, "x", 1)), InvalidInputError, "of length 2, got .* of length 3"),
    (lambda m: m.shaped(report={"rows": m.a}), InvalidInputError, r"expected .*Report \| None, got {'rows'"),
    (lambda m: m.shaped(row={"note": m.flow.add(day)}), InvalidInputError, "has no 'at', which a Row must have"),
    (
        lambda m: m.shaped(row={"at": m.flow.add(day), "x": 1}),
        InvalidInputError,
        "has 'x', which a Row does not have",
    ),
    (lambda m: m.shaped(row={"at": m.a}), InvalidInputError, "expected date, got <node 1 .* whose result is int"),
    (lambda m: m.shaped(text=m.a), InvalidInputError, "'text': expected str, got <node 1 .* whose result is int"),
    (lambda m: m.shaped(number=m.flow.add(ratio)), InvalidInputError, "expected int, got <node 3 .* result is float"),
    (lambda m: m.shaped(text=m.flow.add(raw)), InvalidInputError, "expected str, got <node 3 .* whose result is bytes"),
    (lambda m: m.shaped(text=m.flow.add(day)), InvalidInputError, "expected str, got <node 3 .* whose result is date"),
    (lambda m: m.shaped(texts=[m.a]), InvalidInputError, "expected str, got <node 1 .* whose result is int"),
    (lambda m: m.shaped(texts=m.flow.add(days)), InvalidInputError, r"whose result is list\[datetime.date\]"),
    (lambda m: m.shaped(row=m.flow.add(report)), InvalidInputError, "whose result is Report"),
    (lambda m: m.shaped(anything=m.flow.add(report)), InvalidInputError, "whose result is Report, would arrive as"),
    (lambda m: m.shaped(anything=m.flow.add(days)), InvalidInputError, "would arrive as plain JSON; annotate"),
    (lambda m: quorum(3, of=[m.a, m.b]), InvalidInputError, "k must be a whole number from 1 to 2, .* got 3"),
    (lambda m: quorum(0, of=[m.a, m.b]), InvalidInputError, "k must be a whole number from 1 to 2, .* got 0"),
    (lambda m: quorum(True, of=[m.a, m.b]), InvalidInputError, "k must be a whole number"),
    (lambda _: any_of([]), InvalidInputError, "any_of: no nodes were given; it takes at least one"),
    (lambda _: all_of([]), InvalidInputError, "all_of: no nodes were given; pass the list itself"),
    (lambda _: quorum(1, of=[]), InvalidInputError, "quorum: no nodes were given"),
    (lambda m: any_of([m.a, m.a]), InvalidInputError, "any_of: <node 1 .*> is given twice"),
    (
        lambda m: any_of(m.a),
        TypeError,
        "any_of: expected a list of nodes, got one node; write any_of\\(\\[node\\]\\)",
    ),
    (lambda m: all_of(all_of([m.a])), TypeError, "groups cannot be nested"),
    (lambda m: all_of([any_of([m.a])]), TypeError, "groups cannot be nested"),
    (lambda m: m.all_of([1]), TypeError, "all_of: expected only nodes, got 1; make nodes with flow.add"),
    (lambda _: all_of("ab"), TypeError, "all_of: expected a list of nodes made by flow.add"),
    (lambda m: m.any_of([m.a], cancel_remaining=1), InvalidInputError, "cancel_remaining must be True or False"),
    (lambda m: m.flow.after(1, m.a), TypeError, "flow.after: expected a node made by flow.add"),
    (lambda m: m.flow.after(m.a, 1), TypeError, "flow.after: expected nodes .*, got 1; flow.add makes nodes"),
    (lambda m: m.flow.after(m.a, [m.b]), TypeError, "write flow.after\\(node, \\*nodes\\)"),
    (lambda m: m.flow.after(m.a, fabric.flow("x").add(extract)), InvalidInputError, "after: .* another flow"),
    (lambda m: m.flow.after(fabric.flow("x").add(extract), m.a), InvalidInputError, "after: .* another flow"),
    (lambda m: m.flow.after(m.a, m.a), ConflictError, "<node 1 .*> -> <node 1 .*> is a cycle"),
    (
        lambda m: (m.flow.after(m.a, m.b), m.flow.after(m.b, m.a)),
        ConflictError,
        "cycle_detected: flow.after: <node 2.* -> <node 1.* -> <node 2",
    ),
    (
        lambda m: (m.flow.add(take, m.a), m.flow.after(m.a, m.flow.add(take, m.b), m.flow._nodes[2])),
        ConflictError,
        "is a cycle",
    ),
    (lambda m: m.flow.after(m.flow.add(take, any_of([m.a])), m.b), InvalidInputError, "cannot wait for <node 2"),
    (lambda m: m.flow.after(m.flow.add(take, m.a), any_of([m.b])), InvalidInputError, "waits for <any_of of 1 nodes>"),
    (lambda _: fabric.flow(""), InvalidInputError, "kind: must not be empty"),
    (lambda _: fabric.flow("x", id=""), InvalidInputError, "id: must not be empty"),
    (lambda m: m.fabric.flow("x", id=5), InvalidInputError, "id: must be text or a UUID, got 5; write id=str"),
    (lambda _: fabric.flow("x", tags={"customer": "1"}), InvalidInputError, "tag key 'customer' must be"),
    (lambda _: fabric.flow_run("x"), InvalidInputError, "flow_id: must be a UUID, got 'x'"),
]


def test_what_cannot_be_built_is_refused_at_once_and_leaves_the_flow_as_it_was(subtests: pytest.Subtests) -> None:
    for wrong, refusal, text in REFUSED:
        with subtests.test(text):
            made = Made()
            flow = made.flow
            with pytest.raises(refusal, match=text):
                wrong(made)
            # A refused line adds nothing; the cases with several lines add before.
            assert [node._index for node in flow._nodes] == list(range(len(flow._nodes)))
            assert len(flow._nodes) == len(flow._news)
            assert flow._edge_count == sum(len(node._upstreams) for node in flow._nodes)


MISUSES: list[Callable[[Any], object]] = [
    lambda node: node.rows,
    lambda node: node[0],
    lambda node: list(node),
    lambda node: len(node),
    lambda node: bool(node),
    lambda node: 1 if node else 0,
    lambda node: str(node),
    lambda node: f"{node}",
    lambda node: f"{node:>5}",
    lambda node: node + 1,
    lambda node: 1 + node,
    lambda node: node * 2,
    lambda node: node < 1,
    lambda node: node == 1,
    lambda node: node != "a",
    lambda node: int(node),
    lambda node: range(node),
    lambda node: node(),
    lambda node: 1 in node,
    lambda node: node | {},
    lambda node: -node,
    lambda node: [*node],
    lambda node: dict(**node),
]


def test_a_node_that_is_used_as_a_value_says_what_to_do_instead(subtests: pytest.Subtests) -> None:
    flow = fabric.flow("nightly")
    node = flow.add(extract)
    for nth, misuse in enumerate(MISUSES):
        with subtests.test(str(nth)):
            with pytest.raises((TypeError, AttributeError), match=r"node 1 of flow 'nightly'|must be a mapping"):
                misuse(node)
            with pytest.raises((TypeError, AttributeError), match=r"any_of of 1 nodes|must be a mapping"):
                misuse(any_of([node]))
    probe: Any = node
    with pytest.raises(
        AttributeError, match=r"has no 'rows' yet: it is the result of task 'extract'.*flow_run\.run\(node\)"
    ):
        _ = probe.rows
    assert repr(node) == "<node 1 of flow 'nightly': task 'extract'>"
    assert repr(quorum(1, of=[node])) == "<quorum(1) of 1 nodes>"
    assert {node: 1}[node] == 1
    assert node in [flow.add(extract), node]
    assert not hasattr(node, "__length_hint__")


async def test_a_node_cannot_be_awaited() -> None:
    node: Any = fabric.flow("nightly").add(extract)
    with pytest.raises(TypeError, match="has no value yet"):
        await node
    with pytest.raises(TypeError, match="has no value yet"):
        async for _ in node:
            pass


def test_the_id_of_a_flow_is_a_uuid_or_derived_from_its_text() -> None:
    given = uuid4()
    assert fabric.flow("a", id=given).id == fabric.flow("b", id=str(given)).id == str(given)
    assert fabric.flow("a", id="monday").id == fabric.flow("a", id="monday").id
    texts = [("a", "monday", fabric), ("b", "monday", fabric), ("a", "friday", fabric)]
    ids = {flow_fabric.flow(kind, id=text).id for kind, text, flow_fabric in texts}
    assert len(ids | {Fabric(namespace="n").flow("a", id="monday").id, fabric.flow("a").id, fabric.flow("a").id}) == 6
    assert all(UUID(each) for each in ids)


def test_a_node_has_the_same_id_in_every_process_if_its_flow_has_one() -> None:
    first, second = (fabric.flow("a", id="monday") for _ in range(2))
    for flow in (first, second):
        flow.add(extract)
        flow.add(extract, "other")
    assert [node._uuid for node in first._nodes] == [node._uuid for node in second._nodes]
    assert len({node._uuid for node in first._nodes}) == 2


def test_the_options_of_a_task_are_those_of_its_node() -> None:
    flow = fabric.flow("nightly")
    flow.add(extract.options(priority=5, lane="slow", tags={"app.a": "b"}, delay=2, retries=3), "x")
    new = flow._flow_nodes(7)[0]
    assert (new.priority, new.lane_id, new.tags, new.delay_ms, new.execution_kind) == (
        5,
        "slow",
        {"app.a": "b"},
        2000,
        "extract",
    )
    assert (new.policy, new.creator_identity) == (extract.options(retries=3).bind()._new.policy, fabric._identity)
    assert str(new.execution_id).startswith("{fp:7}:")


def test_the_limits_of_a_flow_are_checked_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "MAX_NODES", 4)
    monkeypatch.setattr(flows, "MAX_EDGES", 3)
    flow = fabric.flow("nightly")
    a, b = flow.add(extract), flow.add(extract)
    flow.add(take, [a, b, a])
    with pytest.raises(InvalidInputError, match=r"at most 3 edges, and <node 4 .* would be the 4th"):
        flow.add(take, [a, b])
    flow.add(take, b)
    with pytest.raises(InvalidInputError, match="flow 'nightly': a flow is submitted with at most 4 nodes"):
        flow.add(extract)


def test_adding_nodes_takes_linear_time() -> None:
    def seconds(nodes: int) -> float:
        # The time of this process alone: the machine may be busy with other work.
        began = time.process_time()
        flow = fabric.flow("nightly")
        first = flow.add(extract)
        many = [flow.add(take, first, named=n) for n in range(nodes)]
        last = flow.add(count, all_of(many))
        for node in many[:100]:
            flow.after(last, node)
        return time.process_time() - began

    seconds(100)
    assert min(seconds(10_000) for _ in range(3)) < 30 * max(seconds(1_000), 0.01)
