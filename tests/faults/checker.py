"""Compares the histories of processes with the store; pure, so that it is tested with false histories."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .history import Record

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired", "skipped"})


@dataclass(frozen=True, kw_only=True)
class StoredExecution:
    """An execution as the store holds it."""

    state: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Store:
    """The content of the store after the faults are healed."""

    executions: Mapping[str, StoredExecution]
    end_events: Mapping[str, int] = field(default_factory=dict)
    """How many events say that an execution ended."""
    leases: frozenset[tuple[str, int, str]] = frozenset()
    """Every lease ever acquired: execution, epoch, lease id."""
    signals: Sequence[tuple[str, str, str]] = ()
    """Every stored signal: its id, its waitpoint, its idempotency key."""
    tags: Mapping[tuple[str, str], str] = field(default_factory=dict)
    kids: frozenset[str] = frozenset()
    inconsistencies: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A violation of an invariant, with the records that show it."""

    text: str
    records: Sequence[Record] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One invariant, how often it was checked, and its violations."""

    invariant: str
    checked: int
    violations: Sequence[Violation]


class _Histories:
    """The records of all histories, by event and by execution."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_event: dict[str, list[Record]] = defaultdict(list)
        self._by_execution: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self._by_event[record.event].append(record)
            if record["execution_id"]:
                self._by_execution[record["execution_id"]].append(record)

    def all(self, *events: str) -> list[Record]:
        return [record for event in events for record in self._by_event[event]]

    def of(self, execution_id: str) -> list[Record]:
        return self._by_execution[execution_id]


Check = Callable[[_Histories, Store], Verdict]
_CHECKS: list[Check] = []


def _invariant(name: str) -> Callable[[Callable[[_Histories, Store], tuple[int, list[Violation]]]], Check]:
    def register(check: Callable[[_Histories, Store], tuple[int, list[Violation]]]) -> Check:
        def judge(histories: _Histories, store: Store) -> Verdict:
            checked, violations = check(histories, store)
            return Verdict(invariant=name, checked=checked, violations=violations)

        _CHECKS.append(judge)
        return judge

    return register


def check(records: Iterable[Record], store: Store) -> list[Verdict]:
    """Check every invariant."""
    histories = _Histories(records)
    return [judge(histories, store) for judge in _CHECKS]


def _several(records: Iterable[Record], key: Callable[[Record], Hashable]) -> tuple[int, dict[Hashable, list[Record]]]:
    """Group records by a key; return the number of groups, and the groups with several records."""
    groups: dict[Hashable, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return len(groups), {name: group for name, group in groups.items() if len(group) > 1}


@_invariant("an acknowledged submission is stored")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    acknowledged = histories.all("created", "duplicate")
    missing = [record for record in acknowledged if record["execution_id"] not in store.executions]
    wrong = [
        record
        for record in histories.all("created")
        if record["execution_id"] in store.executions
        and store.executions[record["execution_id"]].payload.get("nonce") != record["nonce"]
    ]
    return len(acknowledged), [
        *(_violation("is not stored", record, histories) for record in missing),
        *(_violation("is stored with another payload", record, histories) for record in wrong),
    ]


@_invariant("an acknowledged submission can be read at once")
def _(histories: _Histories, _: Store) -> tuple[int, list[Violation]]:
    reads = histories.all("read")
    return len(reads), [_violation("was not found", record, histories) for record in reads if record["state"] is None]


@_invariant("an acknowledged completion is stored with its result")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    records, violations = histories.all("completed"), []
    for record in records:
        stored = store.executions.get(record["execution_id"])
        if stored is None or stored.state != "completed" or (stored.result or {}).get("run") != record["run"]:
            violations.append(_violation(f"is stored as {stored}", record, histories))
    return len(records), violations


@_invariant("an acknowledged cancellation or failure is stored")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    records, violations = histories.all("cancelled", "failed"), []
    for record in records:
        stored = store.executions.get(record["execution_id"])
        if stored is None or stored.state != record.event:
            violations.append(_violation(f"is stored as {stored}", record, histories))
    return len(records), violations


@_invariant("acknowledged tags and signing keys are stored")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    tags, keys = histories.all("tagged"), histories.all("rotated")
    lost = [record for record in tags if store.tags.get((record["execution_id"], record["tag"])) != record["value"]]
    lost += [record for record in keys if record["kid"] not in store.kids]
    return len(tags) + len(keys), [_violation("is not stored", record, histories) for record in lost]


_EFFECT_FIELDS = {"submit": "execution_id", "tag": "tag", "rotate": "kid", "complete": "run"}
"""The field that identifies the effect of an operation; only one call can have that effect."""
_OPERATIONS = {
    "created": "submit",
    "duplicate": "submit",
    "tagged": "tag",
    "rotated": "rotate",
    "completed": "complete",
}
"""The operation that an event acknowledges."""


def _effects(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """The records whose effect can be identified, by operation and effect."""
    found = {}
    for record in records:
        operation = _OPERATIONS.get(record.event) or record["operation"]
        effect = record[_EFFECT_FIELDS.get(operation, "")]
        if effect:
            found[operation, effect] = record
    return found


@_invariant("a refused call has no effect")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    """Except if another call with the same effect was acknowledged or has an unknown outcome."""
    stored = {
        "submit": set(store.executions),
        "tag": {tag for _, tag in store.tags},
        "rotate": store.kids,
        "complete": {execution.result["run"] for execution in store.executions.values() if execution.result},
    }
    possible = _effects(histories.all("unknown", *_OPERATIONS))
    refused = {key: record for key, record in _effects(histories.all("refused")).items() if key not in possible}
    done = [record for (operation, effect), record in refused.items() if effect in stored[operation]]
    return len(refused), [_violation("was refused but is stored", record, histories) for record in done]


@_invariant("an execution ends once")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    violations = []
    for execution_id, stored in store.executions.items():
        expected = 1 if stored.state in TERMINAL else 0
        if (found := store.end_events.get(execution_id, 0)) != expected:
            text = f"{execution_id} is {stored.state} and has {found} end events"
            violations.append(Violation(text=text, records=histories.of(execution_id)))
    return len(store.executions), violations


@_invariant("a lease has one run")
def _(histories: _Histories, _: Store) -> tuple[int, list[Violation]]:
    runs = histories.all("start", "claimed")
    leases, repeated = _several(runs, lambda record: record["lease_id"])
    epochs = _several(runs, lambda record: (record["execution_id"], record["epoch"]))[1]
    return leases, [
        *(Violation(text=f"lease {lease} has {len(group)} runs", records=group) for lease, group in repeated.items()),
        *(
            Violation(text=f"{name} has {len(group)} runs of one epoch", records=group)
            for name, group in epochs.items()
            if len({record["lease_id"] for record in group}) > 1
        ),
    ]


@_invariant("the lease of a run is stored")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    runs = histories.all("start", "claimed")
    unknown = [
        record for record in runs if (record["execution_id"], record["epoch"], record["lease_id"]) not in store.leases
    ]
    return len(runs), [_violation("ran under a lease that is not stored", record, histories) for record in unknown]


@_invariant("a stored result was returned by a run of its execution")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    ended = {record["run"]: record for record in histories.all("end") if record["how"] == "returned"}
    completed = [(name, stored) for name, stored in store.executions.items() if stored.state == "completed"]
    violations = []
    for execution_id, stored in completed:
        run = ended.get((stored.result or {}).get("run", ""))
        if run is None or run["execution_id"] != execution_id:
            text = f"{execution_id} completed with {stored.result}, which no run of it returned"
            violations.append(Violation(text=text, records=histories.of(execution_id)))
    return len(completed), violations


@_invariant("an idempotency key has one execution")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    answers: dict[str, list[Record]] = defaultdict(list)
    for record in histories.all("created", "duplicate"):
        if record["key"]:
            answers[record["key"]].append(record)
    stored = Counter(stored.payload["key"] for stored in store.executions.values() if stored.payload.get("key"))
    return len(answers.keys() | stored.keys()), [
        *(
            Violation(text=f"key {key} was answered with different executions", records=records)
            for key, records in answers.items()
            if len({record["execution_id"] for record in records}) > 1
        ),
        *(
            Violation(text=f"key {key} is stored with {count} executions", records=answers[key])
            for key, count in stored.items()
            if count > 1
        ),
    ]


@_invariant("an accepted signal is stored once")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    accepted = histories.all("accepted")
    recorded = Counter(signal_id for signal_id, _, _ in store.signals)
    keys = Counter((waitpoint, key) for _signal, waitpoint, key in store.signals)
    return len(accepted) + len(keys), [
        *(
            _violation(f"is stored {recorded[record['signal_id']]} times", record, histories)
            for record in accepted
            if recorded[record["signal_id"]] != 1
        ),
        *(
            Violation(text=f"waitpoint {waitpoint} has {count} signals under the key {key}")
            for (waitpoint, key), count in keys.items()
            if count > 1
        ),
    ]


@_invariant("every execution ends after the faults are healed")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    open_ones = {name: stored for name, stored in store.executions.items() if stored.state not in TERMINAL}
    return len(store.executions), [
        Violation(text=f"{name} is still {stored.state}", records=histories.of(name))
        for name, stored in open_ones.items()
    ]


@_invariant("a process exits in time after SIGTERM, and not before")
def _(histories: _Histories, _: Store) -> tuple[int, list[Violation]]:
    stopped, late, died = histories.all("stopped"), histories.all("did not stop"), histories.all("died")
    violations = [
        Violation(text=f"{record['name']} did not exit in time and was killed", records=[record]) for record in late
    ]
    violations += [
        Violation(text=f"{record['name']} exited with code {record['code']}", records=[record])
        for record in (*died, *(record for record in stopped if record["code"]))
    ]
    return len(stopped) + len(late) + len(died), violations


@_invariant("a call returns or raises an error of the engine")
def _(histories: _Histories, _: Store) -> tuple[int, list[Violation]]:
    unexpected = histories.all("unexpected error")
    others = histories.all("created", "duplicate", "completed", "accepted", "unknown", "refused")
    return len(unexpected) + len(others), [Violation(text=record["detail"], records=[record]) for record in unexpected]


@_invariant("the rows are consistent")
def _(histories: _Histories, store: Store) -> tuple[int, list[Violation]]:
    return len(store.executions), [
        Violation(text=each, records=histories.of(each.partition(" ")[0])) for each in store.inconsistencies
    ]


def _violation(text: str, record: Record, histories: _Histories) -> Violation:
    execution_id = record["execution_id"]
    name = execution_id or record["kid"]
    return Violation(
        text=f"{name} ({record.event}) {text}", records=histories.of(execution_id) if execution_id else [record]
    )
