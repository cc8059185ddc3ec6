"""Compares what processes were told with what the store holds: pure, so that it can be tried with lies."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .history import Line

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired", "skipped"})


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the store holds of an execution."""

    state: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Store:
    """What the store holds after everything has healed."""

    executions: Mapping[str, Kept]
    endings: Mapping[str, int] = field(default_factory=dict)
    """How many endings were recorded of an execution."""
    leases: frozenset[tuple[str, int, str]] = frozenset()
    """Every lease that was ever taken: execution, epoch, lease id."""
    signals: Sequence[tuple[str, str, str]] = ()
    """Every recorded signal: its id, its waitpoint, its idempotency key."""
    tags: Mapping[tuple[str, str], str] = field(default_factory=dict)
    kids: frozenset[str] = frozenset()
    inconsistencies: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Violation:
    """Something that must not be, with the lines of the histories that show it."""

    text: str
    lines: Sequence[Line] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One invariant: how often it was checked, and where it does not hold."""

    invariant: str
    checked: int
    violations: Sequence[Violation]


class _Telling:
    """The histories, by what was told."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._by_what: dict[str, list[Line]] = defaultdict(list)
        self._of_execution: dict[str, list[Line]] = defaultdict(list)
        for line in lines:
            self._by_what[line.what].append(line)
            if line["execution_id"]:
                self._of_execution[line["execution_id"]].append(line)

    def all(self, *whats: str) -> list[Line]:
        return [line for what in whats for line in self._by_what[what]]

    def of(self, execution_id: str) -> list[Line]:
        return self._of_execution[execution_id]


Check = Callable[[_Telling, Store], Verdict]
_CHECKS: list[Check] = []


def _invariant(name: str) -> Callable[[Callable[[_Telling, Store], tuple[int, list[Violation]]]], Check]:
    def register(check: Callable[[_Telling, Store], tuple[int, list[Violation]]]) -> Check:
        def judge(told: _Telling, store: Store) -> Verdict:
            checked, violations = check(told, store)
            return Verdict(invariant=name, checked=checked, violations=violations)

        _CHECKS.append(judge)
        return judge

    return register


def check(lines: Iterable[Line], store: Store) -> list[Verdict]:
    """Every invariant, with what breaks it."""
    told = _Telling(lines)
    return [judge(told, store) for judge in _CHECKS]


def _several(lines: Iterable[Line], key: Callable[[Line], Hashable]) -> tuple[int, dict[Hashable, list[Line]]]:
    """How many groups lines of one key form, and those groups that have more than one line."""
    groups: dict[Hashable, list[Line]] = defaultdict(list)
    for line in lines:
        groups[key(line)].append(line)
    return len(groups), {name: group for name, group in groups.items() if len(group) > 1}


@_invariant("an acknowledged submission is in the store")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    acknowledged = told.all("created", "duplicate")
    missing = [line for line in acknowledged if line["execution_id"] not in store.executions]
    wrong = [
        line
        for line in told.all("created")
        if line["execution_id"] in store.executions
        and store.executions[line["execution_id"]].payload.get("nonce") != line["nonce"]
    ]
    return len(acknowledged), [
        *(_lost("is not in the store", line, told) for line in missing),
        *(_lost("has another payload in the store", line, told) for line in wrong),
    ]


@_invariant("what is acknowledged can be read at once")
def _(told: _Telling, _: Store) -> tuple[int, list[Violation]]:
    reads = told.all("read")
    return len(reads), [_lost("was read as absent", line, told) for line in reads if line["state"] is None]


@_invariant("an acknowledged completion keeps its result")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    lines, violations = told.all("completed"), []
    for line in lines:
        kept = store.executions.get(line["execution_id"])
        if kept is None or kept.state != "completed" or (kept.result or {}).get("run") != line["run"]:
            violations.append(_lost(f"is stored as {kept}", line, told))
    return len(lines), violations


@_invariant("an acknowledged cancellation or failure stays")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    lines, violations = told.all("cancelled", "failed"), []
    for line in lines:
        kept = store.executions.get(line["execution_id"])
        if kept is None or kept.state != line.what:
            violations.append(_lost(f"is stored as {kept}", line, told))
    return len(lines), violations


@_invariant("acknowledged tags and keys are in the store")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    tags, keys = told.all("tagged"), told.all("rotated")
    lost = [line for line in tags if store.tags.get((line["execution_id"], line["tag"])) != line["value"]]
    lost += [line for line in keys if line["kid"] not in store.kids]
    return len(tags) + len(keys), [_lost("is not in the store", line, told) for line in lost]


@_invariant("what is known not to be done is not done")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    """Of what nobody else can have done: submissions with an id of their own, new tags, new keys, results of a run."""
    stored = {
        "submit": set(store.executions),
        "tag": {tag for _, tag in store.tags},
        "rotate": store.kids,
        "complete": {kept.result["run"] for kept in store.executions.values() if kept.result},
    }
    names = {"submit": "execution_id", "tag": "tag", "rotate": "kid", "complete": "run"}
    answered = {
        "created": "submit",
        "duplicate": "submit",
        "tagged": "tag",
        "rotated": "rotate",
        "completed": "complete",
    }
    may_be_done = {(line["of"], line[names[line["of"]]]) for line in told.all("unknown") if line["of"] in names}
    may_be_done |= {(of, line[names[of]]) for what, of in answered.items() for line in told.all(what)}
    refused = [line for line in told.all("refused") if line["of"] in names and line[names[line["of"]]]]
    known = {key: line for line in refused if (key := (line["of"], line[names[line["of"]]])) not in may_be_done}
    done = [line for (of, name), line in known.items() if name in stored[of]]
    return len(known), [_lost("was refused and is in the store", line, told) for line in done]


@_invariant("an execution has one ending")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    violations = []
    for execution_id, kept in store.executions.items():
        expected = 1 if kept.state in TERMINAL else 0
        if (found := store.endings.get(execution_id, 0)) != expected:
            text = f"{execution_id} is {kept.state} and has {found} endings"
            violations.append(Violation(text=text, lines=told.of(execution_id)))
    return len(store.executions), violations


@_invariant("a lease has one run")
def _(told: _Telling, _: Store) -> tuple[int, list[Violation]]:
    runs = told.all("start", "claimed")
    leases, repeated = _several(runs, lambda line: line["lease_id"])
    epochs = _several(runs, lambda line: (line["execution_id"], line["epoch"]))[1]
    return leases, [
        *(Violation(text=f"lease {lease} has {len(group)} runs", lines=group) for lease, group in repeated.items()),
        *(
            Violation(text=f"{name} has {len(group)} runs of one epoch", lines=group)
            for name, group in epochs.items()
            if len({line["lease_id"] for line in group}) > 1
        ),
    ]


@_invariant("a run has a lease that the store knows")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    runs = told.all("start", "claimed")
    unknown = [line for line in runs if (line["execution_id"], line["epoch"], line["lease_id"]) not in store.leases]
    return len(runs), [_lost("ran under a lease that was never taken", line, told) for line in unknown]


@_invariant("a stored result is that of a run that ended")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    ended = {line["run"]: line for line in told.all("end") if line["how"] == "returned"}
    completed = [(name, kept) for name, kept in store.executions.items() if kept.state == "completed"]
    violations = []
    for execution_id, kept in completed:
        run = ended.get((kept.result or {}).get("run", ""))
        if run is None or run["execution_id"] != execution_id:
            text = f"{execution_id} completed with {kept.result}, which no run of it returned"
            violations.append(Violation(text=text, lines=told.of(execution_id)))
    return len(completed), violations


@_invariant("a key has one execution")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    answers: dict[str, list[Line]] = defaultdict(list)
    for line in told.all("created", "duplicate"):
        if line["key"]:
            answers[line["key"]].append(line)
    stored = Counter(kept.payload["key"] for kept in store.executions.values() if kept.payload.get("key"))
    return len(answers.keys() | stored.keys()), [
        *(
            Violation(text=f"key {key} was answered with several executions", lines=lines)
            for key, lines in answers.items()
            if len({line["execution_id"] for line in lines}) > 1
        ),
        *(
            Violation(text=f"key {key} is that of {count} executions", lines=answers[key])
            for key, count in stored.items()
            if count > 1
        ),
    ]


@_invariant("an accepted signal is recorded once")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    accepted = told.all("accepted")
    recorded = Counter(signal_id for signal_id, _, _ in store.signals)
    keys = Counter((waitpoint, key) for _signal, waitpoint, key in store.signals)
    return len(accepted) + len(keys), [
        *(
            _lost(f"is recorded {recorded[line['signal_id']]} times", line, told)
            for line in accepted
            if recorded[line["signal_id"]] != 1
        ),
        *(
            Violation(text=f"waitpoint {waitpoint} has {count} signals under the key {key}")
            for (waitpoint, key), count in keys.items()
            if count > 1
        ),
    ]


@_invariant("everything has ended after the healing")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    open_ones = {name: kept for name, kept in store.executions.items() if kept.state not in TERMINAL}
    return len(store.executions), [
        Violation(text=f"{name} is still {kept.state}", lines=told.of(name)) for name, kept in open_ones.items()
    ]


@_invariant("a process ends in time when it is told to, and not before")
def _(told: _Telling, _: Store) -> tuple[int, list[Violation]]:
    stopped, late, died = told.all("stopped"), told.all("did not stop"), told.all("died")
    violations = [Violation(text=f"{line['name']} was killed at last", lines=[line]) for line in late]
    violations += [
        Violation(text=f"{line['name']} ended with exit code {line['code']}", lines=[line])
        for line in (*died, *(line for line in stopped if line["code"]))
    ]
    return len(stopped) + len(late) + len(died), violations


@_invariant("a call ends in an answer or an error of the engine")
def _(told: _Telling, _: Store) -> tuple[int, list[Violation]]:
    surprises = told.all("surprise")
    others = told.all("created", "duplicate", "completed", "accepted", "unknown", "refused")
    return len(surprises) + len(others), [Violation(text=line["detail"], lines=[line]) for line in surprises]


@_invariant("the rows are consistent")
def _(told: _Telling, store: Store) -> tuple[int, list[Violation]]:
    return len(store.executions), [
        Violation(text=each, lines=told.of(each.partition(" ")[0])) for each in store.inconsistencies
    ]


def _lost(text: str, line: Line, told: _Telling) -> Violation:
    execution_id = line["execution_id"]
    name = execution_id or line["kid"]
    return Violation(text=f"{name} ({line.what}) {text}", lines=told.of(execution_id) if execution_id else [line])
