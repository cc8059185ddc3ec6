"""The checker finds every kind of false history."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .checker import Store, StoredExecution, check
from .history import History, Record, read

ONE, TWO = "{fp:1}:1", "{fp:2}:2"
COMPLETED = StoredExecution(state="completed", payload={"nonce": "n1", "key": "k1"}, result={"run": "r1"})
CANCELLED = StoredExecution(state="cancelled", payload={"nonce": "n2"})

STORE: dict[str, Any] = {
    "executions": {ONE: COMPLETED, TWO: CANCELLED},
    "end_events": {ONE: 1, TWO: 1},
    "leases": frozenset({(ONE, 1, "l1")}),
    "signals": [("s1", "w1", "go")],
    "tags": {(ONE, "app.tag"): "value"},
    "kids": frozenset({"kid"}),
}
RECORDS: list[tuple[str, dict[str, Any]]] = [
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
    ("refused", {"operation": "submit", "execution_id": "{fp:3}:3"}),
    ("stopped", {"name": "worker"}),
]


def records(*more: tuple[str, dict[str, Any]]) -> list[Record]:
    """The records of a correct history, followed by these."""
    return [Record(event, float(at), "actor", fields) for at, (event, fields) in enumerate([*RECORDS, *more])]


def violated(history: list[Record], store: Store) -> dict[str, int]:
    """The violated invariants, with the number of violations."""
    return {verdict.invariant: len(verdict.violations) for verdict in check(history, store) if verdict.violations}


def stored(**changes: Any) -> Store:
    """The store of the correct history, with these changes."""
    return Store(**{**STORE, **changes})


def test_a_correct_history_passes_every_check() -> None:
    verdicts = check(records(), stored())
    assert [verdict.invariant for verdict in verdicts if verdict.violations] == []
    assert [verdict.invariant for verdict in verdicts if not verdict.checked] == []


FALSE_HISTORIES: dict[str, Callable[[], tuple[list[Record], Store]]] = {
    "an acknowledged submission is stored": lambda: (
        records(("created", {"execution_id": "{fp:9}:9", "nonce": "n9", "key": None})),
        stored(),
    ),
    "an acknowledged submission can be read at once": lambda: (
        records(("read", {"execution_id": ONE, "state": None})),
        stored(),
    ),
    "an acknowledged completion is stored with its result": lambda: (
        records(("completed", {"execution_id": ONE, "run": "r2"})),
        stored(),
    ),
    "an acknowledged cancellation or failure is stored": lambda: (
        records(("cancelled", {"execution_id": ONE})),
        stored(),
    ),
    "acknowledged tags and signing keys are stored": lambda: (records(("rotated", {"kid": "gone"})), stored()),
    "a refused call has no effect": lambda: (
        records(("refused", {"operation": "submit", "execution_id": "{fp:4}:4"})),
        stored(
            executions={**STORE["executions"], "{fp:4}:4": StoredExecution(state="cancelled")},
            end_events={**STORE["end_events"], "{fp:4}:4": 1},
        ),
    ),
    "an execution ends once": lambda: (records(), stored(end_events={ONE: 2, TWO: 1})),
    "a lease has one run": lambda: (
        records(("start", {"execution_id": ONE, "lease_id": "l1", "epoch": 1, "run": "r2"})),
        stored(),
    ),
    "the lease of a run is stored": lambda: (
        records(("claimed", {"execution_id": ONE, "lease_id": "l2", "epoch": 2})),
        stored(),
    ),
    "a stored result was returned by a run of its execution": lambda: (
        [record for record in records() if record.event != "end"],
        stored(),
    ),
    "an idempotency key has one execution": lambda: (
        records(("duplicate", {"execution_id": TWO, "key": "k1"})),
        stored(),
    ),
    "an accepted signal is stored once": lambda: (records(), stored(signals=[])),
    "every execution ends after the faults are healed": lambda: (
        [record for record in records() if record.event != "cancelled"],
        stored(
            executions={ONE: COMPLETED, TWO: StoredExecution(state="active", payload={"nonce": "n2"})},
            end_events={ONE: 1},
        ),
    ),
    "a process exits in time after SIGTERM, and not before": lambda: (
        records(("did not stop", {"name": "worker"})),
        stored(),
    ),
    "a call returns or raises an error of the engine": lambda: (
        records(("unexpected error", {"operation": "submit", "detail": "KeyError()"})),
        stored(),
    ),
    "the rows are consistent": lambda: (records(), stored(inconsistencies=[f"{ONE} lease_epoch: is lower"])),
}


@pytest.mark.parametrize("invariant", FALSE_HISTORIES)
def test_a_false_history_violates_exactly_its_invariant(invariant: str) -> None:
    assert violated(*FALSE_HISTORIES[invariant]()) == {invariant: 1}


def test_every_invariant_has_a_false_history() -> None:
    assert FALSE_HISTORIES.keys() == {verdict.invariant for verdict in check([], Store(executions={}))}


@pytest.mark.parametrize(
    ("more", "changes", "invariant"),
    [
        (
            [],
            {"executions": {ONE: StoredExecution(state="completed", result={"run": "r1"}), TWO: CANCELLED}},
            "submission is stored",
        ),
        (
            [],
            {"executions": {ONE: COMPLETED, TWO: StoredExecution(state="failed", payload={"nonce": "n2"})}},
            "failure is stored",
        ),
        ([], {"end_events": {ONE: 1, TWO: 0}}, "ends once"),
        ([], {"tags": {(ONE, "app.tag"): "other"}}, "tags and signing keys"),
        ([("start", {"execution_id": ONE, "lease_id": "l3", "epoch": 1, "run": "r3"})], {}, "one run"),
        ([("stopped", {"name": "worker", "code": 1})], {}, "exits in time"),
        ([("died", {"name": "worker", "code": 0})], {}, "exits in time"),
        ([], {"signals": [("s1", "w1", "go"), ("s2", "w1", "go")]}, "signal is stored once"),
        ([], {"executions": {ONE: COMPLETED, TWO: CANCELLED, "{fp:5}:5": COMPLETED}}, "key has one execution"),
        (
            [("refused", {"operation": "tag", "execution_id": ONE, "tag": "app.no"})],
            {"tags": {**STORE["tags"], (ONE, "app.no"): "value"}},
            "refused call has no effect",
        ),
        (
            [("refused", {"operation": "rotate", "kid": "no"})],
            {"kids": frozenset({"kid", "no"})},
            "refused call has no effect",
        ),
        (
            [("refused", {"operation": "complete", "execution_id": TWO, "run": "r2"})],
            {
                "executions": {
                    ONE: COMPLETED,
                    TWO: StoredExecution(state="completed", payload={"nonce": "n2"}, result={"run": "r2"}),
                }
            },
            "refused call has no effect",
        ),
    ],
)
def test_other_violations_of_an_invariant_are_found(
    more: list[tuple[str, dict[str, Any]]], changes: dict[str, Any], invariant: str
) -> None:
    assert any(invariant in name for name in violated(records(*more), stored(**changes)))


@pytest.mark.parametrize(
    "other", [("unknown", {"operation": "complete", "run": "r1"}), ("completed", {"execution_id": ONE, "run": "r1"})]
)
def test_a_refused_call_may_succeed_in_another_try(other: tuple[str, dict[str, Any]]) -> None:
    tries = [("refused", {"operation": "complete", "execution_id": ONE, "run": "r1"}), other]
    found = [record for record in records() if record.event != "completed"] + records(*tries)[len(RECORDS) :]
    assert violated(found, stored()) == {}


def test_a_violation_shows_the_records_of_its_execution() -> None:
    (violation,) = [
        one for verdict in check(records(), stored(end_events={ONE: 2, TWO: 1})) for one in verdict.violations
    ]
    assert {record.event for record in violation.records} >= {"created", "start", "end", "completed"}
    assert "completed" in str(violation.records[-1]) or "tagged" in str(violation.records[-1])


def test_histories_are_read_ordered_by_time(tmp_path: Path) -> None:
    first, second = History(tmp_path / "a", "first"), History(tmp_path / "b", "second")
    first.record("created", execution_id=ONE, key=None)
    second.record("start", execution_id=ONE)
    first.record("read", execution_id=ONE)
    found = read(tmp_path.iterdir())
    assert [record.event for record in found] == ["created", "start", "read"]
    assert found[1].actor.startswith("second/")
    assert found[0]["key"] is None
