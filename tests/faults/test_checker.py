"""The checker of histories finds every kind of lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .checker import Kept, Store, check
from .history import History, Line, read

ONE, TWO = "{fp:1}:1", "{fp:2}:2"
KEPT = Kept(state="completed", payload={"nonce": "n1", "key": "k1"}, result={"run": "r1"})
CANCELLED = Kept(state="cancelled", payload={"nonce": "n2"})

STORE: dict[str, Any] = {
    "executions": {ONE: KEPT, TWO: CANCELLED},
    "endings": {ONE: 1, TWO: 1},
    "leases": frozenset({(ONE, 1, "l1")}),
    "signals": [("s1", "w1", "go")],
    "tags": {(ONE, "app.tag"): "value"},
    "kids": frozenset({"kid"}),
}
TOLD: list[tuple[str, dict[str, Any]]] = [
    ("created", {"execution_id": ONE, "nonce": "n1", "key": "k1"}),
    ("duplicate", {"execution_id": ONE, "key": "k1"}),
    ("read", {"execution_id": ONE, "state": "waiting"}),
    ("created", {"execution_id": TWO, "nonce": "n2", "key": None}),
    ("start", {"execution_id": ONE, "lease_id": "l1", "epoch": 1, "run": "r1"}),
    ("end", {"execution_id": ONE, "lease_id": "l1", "run": "r1", "how": "returned"}),
    ("completed", {"execution_id": ONE, "run": "r1"}),
    ("cancelled", {"execution_id": TWO}),
    ("accepted", {"execution_id": ONE, "signal_id": "s1", "waitpoint_id": "w1"}),
    ("tagged", {"execution_id": ONE, "tag": "app.tag", "value": "value"}),
    ("rotated", {"kid": "kid"}),
    ("refused", {"of": "submit", "execution_id": "{fp:3}:3"}),
    ("stopped", {"name": "worker"}),
]


def lines(*more: tuple[str, dict[str, Any]]) -> list[Line]:
    """A history in which everything is right, and what a test adds to it."""
    return [Line(what, float(at), "actor", fields) for at, (what, fields) in enumerate([*TOLD, *more])]


def broken(history: list[Line], store: Store) -> dict[str, int]:
    """The invariants that do not hold, with the number of violations."""
    return {verdict.invariant: len(verdict.violations) for verdict in check(history, store) if verdict.violations}


def stored(**changes: Any) -> Store:
    """The right store with some of it changed."""
    return Store(**{**STORE, **changes})


def test_nothing_is_found_where_everything_is_right_and_everything_is_checked() -> None:
    verdicts = check(lines(), stored())
    assert [verdict.invariant for verdict in verdicts if verdict.violations] == []
    assert [verdict.invariant for verdict in verdicts if not verdict.checked] == []


LIES: dict[str, Callable[[], tuple[list[Line], Store]]] = {
    "an acknowledged submission is in the store": lambda: (
        lines(("created", {"execution_id": "{fp:9}:9", "nonce": "n9", "key": None})),
        stored(),
    ),
    "what is acknowledged can be read at once": lambda: (
        lines(("read", {"execution_id": ONE, "state": None})),
        stored(),
    ),
    "an acknowledged completion keeps its result": lambda: (
        lines(("completed", {"execution_id": ONE, "run": "r2"})),
        stored(),
    ),
    "an acknowledged cancellation or failure stays": lambda: (lines(("cancelled", {"execution_id": ONE})), stored()),
    "acknowledged tags and keys are in the store": lambda: (lines(("rotated", {"kid": "gone"})), stored()),
    "what is known not to be done is not done": lambda: (
        lines(("refused", {"of": "submit", "execution_id": "{fp:4}:4"})),
        stored(
            executions={**STORE["executions"], "{fp:4}:4": Kept(state="cancelled")},
            endings={**STORE["endings"], "{fp:4}:4": 1},
        ),
    ),
    "an execution has one ending": lambda: (lines(), stored(endings={ONE: 2, TWO: 1})),
    "a lease has one run": lambda: (
        lines(("start", {"execution_id": ONE, "lease_id": "l1", "epoch": 1, "run": "r2"})),
        stored(),
    ),
    "a run has a lease that the store knows": lambda: (
        lines(("claimed", {"execution_id": ONE, "lease_id": "l2", "epoch": 2})),
        stored(),
    ),
    "a stored result is that of a run that ended": lambda: (
        [line for line in lines() if line.what != "end"],
        stored(),
    ),
    "a key has one execution": lambda: (lines(("duplicate", {"execution_id": TWO, "key": "k1"})), stored()),
    "an accepted signal is recorded once": lambda: (lines(), stored(signals=[])),
    "everything has ended after the healing": lambda: (
        [line for line in lines() if line.what != "cancelled"],
        stored(
            executions={ONE: KEPT, TWO: Kept(state="active", payload={"nonce": "n2"})},
            endings={ONE: 1},
        ),
    ),
    "a process ends in time when it is told to, and not before": lambda: (
        lines(("did not stop", {"name": "worker"})),
        stored(),
    ),
    "a call ends in an answer or an error of the engine": lambda: (
        lines(("surprise", {"of": "submit", "detail": "KeyError()"})),
        stored(),
    ),
    "the rows are consistent": lambda: (lines(), stored(inconsistencies=[f"{ONE} lease_epoch: is lower"])),
}


@pytest.mark.parametrize("invariant", LIES)
def test_a_history_that_breaks_an_invariant_breaks_that_one(invariant: str) -> None:
    assert broken(*LIES[invariant]()) == {invariant: 1}


def test_every_invariant_has_a_history_that_breaks_it() -> None:
    assert LIES.keys() == {verdict.invariant for verdict in check([], Store(executions={}))}


@pytest.mark.parametrize(
    ("more", "changes", "invariant"),
    [
        ([], {"executions": {ONE: Kept(state="completed", result={"run": "r1"}), TWO: CANCELLED}}, "submission is in"),
        ([], {"executions": {ONE: KEPT, TWO: Kept(state="failed", payload={"nonce": "n2"})}}, "failure stays"),
        ([], {"endings": {ONE: 1, TWO: 0}}, "one ending"),
        ([], {"tags": {(ONE, "app.tag"): "other"}}, "tags and keys"),
        ([("start", {"execution_id": ONE, "lease_id": "l3", "epoch": 1, "run": "r3"})], {}, "one run"),
        ([("stopped", {"name": "worker", "code": 1})], {}, "ends in time"),
        ([("died", {"name": "worker", "code": 0})], {}, "ends in time"),
        ([], {"signals": [("s1", "w1", "go"), ("s2", "w1", "go")]}, "signal is recorded once"),
        ([], {"executions": {ONE: KEPT, TWO: CANCELLED, "{fp:5}:5": KEPT}}, "key has one execution"),
        (
            [("refused", {"of": "tag", "execution_id": ONE, "tag": "app.no"})],
            {"tags": {**STORE["tags"], (ONE, "app.no"): "value"}},
            "known not to be done",
        ),
        (
            [("refused", {"of": "rotate", "kid": "no"})],
            {"kids": frozenset({"kid", "no"})},
            "known not to be done",
        ),
        (
            [("refused", {"of": "complete", "execution_id": TWO, "run": "r2"})],
            {"executions": {ONE: KEPT, TWO: Kept(state="completed", payload={"nonce": "n2"}, result={"run": "r2"})}},
            "known not to be done",
        ),
    ],
)
def test_other_ways_to_break_an_invariant_are_found(
    more: list[tuple[str, dict[str, Any]]], changes: dict[str, Any], invariant: str
) -> None:
    assert any(invariant in name for name in broken(lines(*more), stored(**changes)))


@pytest.mark.parametrize(
    "other", [("unknown", {"of": "complete", "run": "r1"}), ("completed", {"execution_id": ONE, "run": "r1"})]
)
def test_what_was_refused_once_may_be_done_by_another_try(other: tuple[str, dict[str, Any]]) -> None:
    tries = [("refused", {"of": "complete", "execution_id": ONE, "run": "r1"}), other]
    told = [line for line in lines() if line.what != "completed"] + lines(*tries)[len(TOLD) :]
    assert broken(told, stored()) == {}


def test_a_violation_shows_the_lines_of_its_execution() -> None:
    (violation,) = [one for verdict in check(lines(), stored(endings={ONE: 2, TWO: 1})) for one in verdict.violations]
    assert {line.what for line in violation.lines} >= {"created", "start", "end", "completed"}
    assert "completed" in str(violation.lines[-1]) or "tagged" in str(violation.lines[-1])


def test_histories_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    first, second = History(tmp_path / "a", "first"), History(tmp_path / "b", "second")
    first.tell("created", execution_id=ONE, key=None)
    second.tell("start", execution_id=ONE)
    first.tell("read", execution_id=ONE)
    told = read(tmp_path.iterdir())
    assert [line.what for line in told] == ["created", "start", "read"]
    assert told[1].actor.startswith("second/")
    assert told[0]["key"] is None
