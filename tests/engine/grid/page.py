"""Writes docs/states.md from the table: `python -m tests.engine.grid.page > docs/states.md`."""

from collections.abc import Iterator

from .operations import OPERATIONS
from .states import STATES
from .table import TABLE, Expected, Moved, Refused, Row, Same

INTRODUCTION = """\
# States and operations

<!-- Written by `python -m tests.engine.grid.page > docs/states.md`; do not edit by hand. -->

What every operation does to an execution in every state it can meet it in. The tables are the ones the tests walk:
each state is reached through real operations on a real Postgres, each operation is called, and everything it leaves is
compared with the line that stands here.

How to read them:

- **→ state** is a move. It is one commit: the seven dimensions of the state, the attempt, the events and the stamps
  change together or not at all.
- `code` is a refusal. It leaves no trace. One refusal is a move as well: a call under a lease that has
  run out marks it.
- Anything else is an answer that changes nothing.
- Behind a move stand the events it writes. `released completed>success` is one event that ends a lease and the
  execution; `ended>cancelled` ends an execution that nobody held.

A move stamps `last_transition_at` and `last_mutation_at`; what leaves the state as it is (a renewal, progress, a tag, a
marked lease) stamps `last_mutation_at` only. `started_at` is set by the first lease and stays. `completed_at` is set
exactly while the execution has ended. The lease epoch rises by one with every lease and never falls.

Where it is not said otherwise a retry is left, nothing waits for children, and *the worker* is the one that holds the
lease or the grant; searches are made by another one.
"""

GROUPS = {
    "Creating": ("create_execution",),
    "Claiming": ("claim", "claim_many", "scan_eligible_executions"),
    "Claiming by name and by grant": (
        "claim_for_worker",
        "issue_claim_grant",
        "claim_execution",
        "claim_resumed_execution",
        "claim_from_resume_grant",
        "issue_grant_and_claim",
    ),
    "Reclaiming by grant": ("issue_reclaim_grant", "reclaim_execution"),
    "Keeping a lease": ("renew", "renew_many", "renew_lease", "progress", "mark_lease_expired_if_due"),
    "Ending or parking a run": (
        "complete",
        "complete_many",
        "complete_execution",
        "fail",
        "fail for good",
        "fail_execution",
        "fail_execution for good",
        "delay",
        "wait_children",
        "hand_back",
    ),
    "Cancelling": ("cancel", "cancel_execution"),
    "Time": ("promote_delayed", "expire_execution"),
    "Sweeps": ("mark lapsed leases", "promote delayed work", "expire what is late"),
    "Everything else": ("set_execution_tag",),
    "With the lease of another epoch": ("a former holder", "a former fence"),
}

_NAMES = {state.vector: name for name, state in reversed(STATES.items())}


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_states(), *_operations()])


def _states() -> Iterator[str]:
    yield "## States\n"
    yield "| state | is | phase / ownership / eligibility / blocking / outcome / attempt / public |"
    yield "|---|---|---|"
    for name, state in STATES.items():
        vector = "–" if state.vector is None else " / ".join(state.vector.split("/"))
        yield f"| {name} | {state.means} | {vector} |"
    yield ""


def _operations() -> Iterator[str]:
    for group, names in GROUPS.items():
        yield f"## {group}\n"
        rows: dict[tuple[Expected, ...], list[str]] = {}
        for title, operation in OPERATIONS.items():
            is_stale = operation.variant.startswith("a former") and operation.name != "cancel_execution"
            if (operation.variant if is_stale else operation.name) in names:
                rows.setdefault(tuple(TABLE[title].values()), []).append(_title(operation.name if is_stale else title))
        for row, titles in rows.items():
            yield f"### {'; '.join(titles)}\n"
            yield from _outcomes(dict(zip(STATES, row, strict=True)))


def _title(title: str) -> str:
    """An operation as code, with its variant in brackets behind it."""
    name, _, variant = title.partition(", ")
    operation, has_more, _ = name.partition(" for good")
    shown = operation if " " in operation else f"`{operation}`"
    return shown + has_more + (f" ({variant})" if variant and variant != "sweep" else "")


def _outcomes(row: Row) -> Iterator[str]:
    yield "| in | happens | tells |"
    yield "|---|---|---|"
    for (happens, tells), states in _by_outcome(row).items():
        named = "any other" if len(states) > len(STATES) // 2 else ", ".join(states)
        yield f"| {named} | {happens} | {tells} |"
    yield ""


def _by_outcome(row: Row) -> dict[tuple[str, str], list[str]]:
    """The states of each outcome: moves first, then answers, then refusals; what most states have in common last."""
    order = (Moved, Same, Refused)
    found: dict[tuple[str, str], list[str]] = {}
    for state, expected in sorted(row.items(), key=lambda item: order.index(type(item[1]))):
        found.setdefault((_happens(expected), _tells(expected)), []).append(state)
    return dict(sorted(found.items(), key=lambda item: len(item[1]) > len(STATES) // 2))


def _happens(expected: Expected) -> str:
    match expected:
        case Refused(code=code, marks=marks):
            return f"`{code}`, **→ lease_expired**" if marks else f"`{code}`"
        case Same(answer=answer):
            return answer
        case Moved(to=None, answer=answer):
            return "done" if answer == "nothing" else answer
        case Moved(to=to, answer=answer):
            target = _NAMES.get(to) or str(to).rsplit("/", 1)[1]
            return f"**→ {target}**" + ("" if answer == "nothing" else f", {answer}")


def _tells(expected: Expected) -> str:
    match expected:
        case Moved(tells=tells):
            return ", ".join(f"`{event}`" for event in tells)
        case Refused(marks=True):
            return "`expired`"
        case _:
            return ""


if __name__ == "__main__":
    print(page(), end="")
