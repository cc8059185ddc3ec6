"""Claims restricted to kinds or to a namespace."""

from typing import Any

from engine.cases import Cases
from engine.state import claim, ids, made, new, refused
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.grant import Granted, NoWork


async def test_a_claim_takes_only_the_kinds_it_names(engine: Engine, rows: Rows) -> None:
    first, second, third, fourth = await made(engine, *(new(execution_kind=kind) for kind in ("a", "b", "c", "a")))
    assert ids(await claim(engine, kinds=["a", "nowhere"])) == [first, fourth]
    async with rows.unchanged():
        assert await claim(engine, kinds=("a", "nowhere")) == []
    assert ids(await claim(engine, kinds={"c", "b"})) == [second, third]


async def test_a_kind_may_have_any_length(engine: Engine) -> None:
    long = "k" * 100_000
    created = await made(engine, new(execution_kind=long), new(execution_kind=long + "!"), new(execution_kind=""))
    assert ids(await claim(engine, kinds=[long])) == created[:1]
    assert ids(await claim(engine, kinds=["", long + "!"])) == created[1:]


async def test_a_claim_orders_several_kinds_by_priority_then_age(engine: Engine) -> None:
    given = [("a", 0), ("b", 5), ("c", 9), ("a", 5), ("b", 0), ("a", 9), ("d", 9)]
    created = await made(engine, *(new(execution_kind=kind, priority=priority) for kind, priority in given))
    expected = [created[at] for at in (2, 5, 1, 3, 0, 4)]
    assert ids(await claim(engine, kinds=["c", "a", "b"], limit=4)) == expected[:4]
    assert ids(await claim(engine, kinds=["a", "b", "c"])) == expected[4:]


async def test_a_claim_takes_only_the_namespace_it_names(engine: Engine, rows: Rows) -> None:
    ours, theirs = await made(engine, new(), new(namespace="others"))
    assert ids(await claim(engine, namespace="others")) == [theirs]
    assert ids(await claim(engine, namespace="nobody's")) == []
    async with rows.unchanged():
        assert await claim(engine, namespace="others") == []
    assert ids(await claim(engine)) == [ours]


async def test_a_claim_without_kinds_or_namespace_takes_all(engine: Engine) -> None:
    kinds = ("b", "a", "b", "c", "a", "b", "c", "a", "b")
    created = await made(engine, *(new(execution_kind=k, namespace=f"n{at % 3}") for at, k in enumerate(kinds)))
    assert ids(await claim(engine)) == created


async def test_a_claim_must_match_lane_kind_namespace_and_capabilities(engine: Engine) -> None:
    gpu = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    wanted: dict[str, Any] = {"lane_id": "a", "execution_kind": "k", "namespace": "n", "policy": gpu}
    others: list[dict[str, Any]] = [{"lane_id": "b"}, {"execution_kind": "x"}, {"namespace": "x"}, {"policy": None}]
    *rest, only = await made(engine, *(new(**{**wanted, **other}) for other in others), new(**wanted))
    exact: dict[str, Any] = {"kinds": ["k"], "namespace": "n"}
    *_, plain = rest
    assert ids(await claim(engine, "a", **exact)) == [plain]
    assert ids(await claim(engine, "a", **exact, capabilities=["gpu"])) == [only]
    assert ids(await claim(engine, "a", "b", capabilities=["gpu"])) == rest[:3]


async def test_executions_of_another_kind_do_not_hide_those_behind_them(engine: Engine, rows: Rows) -> None:
    await made(engine, *[new(execution_kind="rare", priority=9000)] * 100)
    (behind,) = await made(engine, new())
    assert ids(await claim(engine, limit=1, kinds=["job"])) == [behind]
    assert len(await rows.of("execution", public_state="waiting", attempt_count=0)) == 100


async def test_a_claim_by_kind_finds_lost_leases_and_retries(engine: Engine, given: Given, clock: Clock) -> None:
    lost = await given.reclaimable(execution_kind="a")
    retried = await given.backing_off(delay_ms=1000, execution_kind="b", lane_id="other")
    await clock.advance(seconds=1)
    assert await claim(engine, "default", "other", kinds=["x"]) == []
    assert ids(await claim(engine, "default", "other", kinds=["a"])) == [lost.execution_id]
    assert ids(await claim(engine, "default", "other", kinds=["b"])) == [retried.execution_id]


async def test_claim_accepts_kinds_and_a_namespace(engine: Engine) -> None:
    a, b = await made(engine, new(execution_kind="a"), new(execution_kind="b", namespace="n"))
    asked: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    assert await engine.claim(**asked, kinds=["a"], namespace="n") is None
    handle = await engine.claim(**asked, namespace="n")
    assert handle is not None
    assert handle.execution_id == b
    handle = await engine.claim(**asked, kinds=["a"])
    assert handle is not None
    assert handle.execution_id == a


async def test_claim_for_worker_accepts_kinds_and_a_namespace(engine: Engine) -> None:
    a, b, c = await made(engine, new(execution_kind="a"), new(execution_kind="b"), new(namespace="n"))
    asked: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    for wanted, expected in (
        ({"kinds": ["b"]}, b),
        ({"kinds": ["b"]}, None),
        ({"namespace": "n"}, c),
        ({"kinds": ["a", "b"], "namespace": "n"}, None),
        ({}, a),
    ):
        found = await engine.claim_for_worker(**asked, **wanted)
        assert isinstance(found, NoWork if expected is None else Granted)
        assert expected is None or (isinstance(found, Granted) and found.execution_id == expected)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kinds": []}, "kinds: must name 1 to 1000 kinds, got 0; write None for any kind"),
    ({"kinds": [f"k{at}" for at in range(1001)]}, "got 1001"),
    ({"kinds": "job"}, "kinds: expected a list or another collection, got 'job'"),
    ({"kinds": [5]}, "kinds: must be text"),
    ({"kinds": [[]]}, "kinds: must be text, got []"),
    ({"kinds": ["a\0b"]}, "kinds: must not contain NUL"),
    ({"namespace": ""}, "namespace: must not be empty"),
    ({"namespace": 5}, "namespace: must be text"),
]


async def test_wrong_kinds_and_namespaces_are_refused(engine: Engine, rows: Rows) -> None:
    worker: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    with Cases() as cases:
        async with rows.unchanged():
            for wrong, detail in WRONG:
                for call in (
                    claim(engine, **wrong),
                    engine.claim(**worker, **wrong),
                    engine.claim_for_worker(**worker, **wrong),
                ):
                    with cases(str(wrong)[:80]):
                        await refused(call, "invalid_input", detail)
