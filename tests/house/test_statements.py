"""Every statement is valid and used, and only the listed ones change the state of an execution."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from flowfabric.db.session import connect, session_settings
from flowfabric.db.statements import Statement, Statements
from flowfabric.engine.core.transition import (
    BLOCKED_BY_DEPENDENCIES,
    CLAIM_PARAMETERS,
    ESCALATED,
    HELD_FOR_CANCEL,
    PROMOTED,
    REPLAYED,
    block_parameters,
    completion_parameters,
    target_parameters,
)
from flowfabric.model.event import EventKind, WorkerEvent
from flowfabric.model.states import AttemptState, BlockingReason, EligibilityState, LifecyclePhase

ENGINE = Path(__file__).parents[2] / "src" / "flowfabric" / "engine"
FILES = sorted([*ENGINE.rglob("*.sql"), *(ENGINE.parent / "reconcile").glob("*.sql")])
ALL = {statement.name: statement for path in FILES for statement in Statements(path)}

VECTOR = (
    "lifecycle_phase",
    "ownership_state",
    "eligibility_state",
    "blocking_reason",
    "terminal_outcome",
    "attempt_state",
)

CREATES = {"insert_executions", "insert_alike", "insert_alike_of_instances", "insert_flow", "insert_part"}
MOVES = {
    "claim_by_route",
    "claim_by_queue",
    "lease_locked",
    "lease_admitted",
    "insert_grant",
    "mark_denied",
    "complete_leases",
    "end_leases",
    "promote_delayed",
    "replay_locked",
    "resume_locked",
    "escalate_locked",
    "block_by_dependencies",
    "hold_owed_members",
    "block_locked",
    "unblock_locked",
    "settle_entries",
    "resolve_edges",
    "promote_blocked",
}
"""The only statements that write the state of an execution."""

_UPDATE = re.compile(r"\bupdate execution\b(?: as)?(?: \w+)?\s+set\s(.*?)\s(?:from|where|returning)\s", re.DOTALL)
_INSERT = re.compile(r"\binsert into execution\b(?: as \w+)?\s*\((.*?)\)", re.DOTALL)


def assignments(statement: Statement) -> Iterator[tuple[str, str]]:
    """The state columns of `execution` that a statement sets, each with its expression."""
    for found in _UPDATE.finditer(statement.sql):
        for part in split(found[1]):
            column, _, expression = part.partition("=")
            if column.strip() in VECTOR:
                yield column.strip(), expression.strip()


def split(clause: str) -> list[str]:
    """The parts of a clause, split at commas outside parentheses."""
    parts, depth = [""], 0
    for letter in clause:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


@pytest.fixture(scope="module")
def python() -> str:
    """The text of every module of the engine."""
    folders = (ENGINE, ENGINE.parent / "reconcile")
    return "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))


def test_every_statement_name_is_unique() -> None:
    counted = Counter(statement.name for path in FILES for statement in Statements(path))
    assert [name for name, count in counted.items() if count > 1] == []


def heads(path: Path, kind: str) -> dict[str, str]:
    """The line below the name of each statement or fragment, which describes it."""
    return dict(re.findall(rf"^-- {kind}: (\w+)\n(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))


def undescribed(heads: dict[str, str]) -> list[str]:
    """The names whose next line is not a comment."""
    return [name for name, line in heads.items() if not re.fullmatch(r"-- [A-Z].*", line)]


def test_every_sql_file_has_a_module_and_every_statement_a_description() -> None:
    assert [path.name for path in FILES if not path.with_suffix(".py").exists()] == []
    assert [path.name for path in FILES if len(heads(path, "name")) != len(list(Statements(path)))] == []
    assert [name for path in FILES for name in undescribed(heads(path, "name"))] == []


async def test_every_statement_can_be_prepared(url: str) -> None:
    connection = await asyncpg.connect(url, server_settings=session_settings("flowfabric"))
    refused = []
    try:
        for name, statement in ALL.items():
            try:
                await connection.prepare(statement.sql)
            except asyncpg.PostgresError as error:
                refused.append(f"{name}: {error}")
    finally:
        await connection.close()
    assert refused == []


async def test_a_session_keeps_every_statement_prepared(url: str) -> None:
    explained = [statement for statement in ALL.values() if "lock table" not in statement.sql]
    connection = await connect(url, schema="flowfabric")
    try:
        for _ in range(2):
            for statement in explained:
                await connection.fetch(f"explain {statement.sql}", *[None] * len(statement.parameters))
        prepared = await connection.fetchval(
            "select count(*) from pg_prepared_statements where statement like 'explain%'"
        )
        assert prepared == len(explained)
    finally:
        await connection.close()


def test_every_fragment_is_used() -> None:
    unused = [f"{path.name}: {name}" for path in FILES for name in unused_fragments(path)]
    assert unused == []


def unused_fragments(path: Path) -> list[str]:
    """The fragments of a file that neither it nor a neighbour includes."""
    included = re.findall(r"-- include: (\w+)\n", path.read_text())
    for neighbour in path.parent.glob("*.sql"):
        included += re.findall(rf"-- include: {path.stem}\.(\w+)\n", neighbour.read_text())
    return [name for name in Statements(path).fragments if name not in included]


def test_an_unused_fragment_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "family.sql"
    path.write_text("-- fragment: a\nselect 1\n\n-- fragment: b\nselect 2\n\n-- name: find_it\n-- include: a\n;\n")
    assert unused_fragments(path) == ["b"]


def test_every_fragment_has_a_description() -> None:
    assert [path.name for path in FILES if len(heads(path, "fragment")) != len(Statements(path).fragments)] == []
    assert [name for path in FILES for name in undescribed(heads(path, "fragment"))] == []


def test_every_statement_is_used(python: str) -> None:
    assert [name for name in ALL if not re.search(rf"SQL\.{name}\b", python)] == []


def test_creates_write_known_labels() -> None:
    labels = {"execution_sequence"} | {
        member.value for enum in (LifecyclePhase, EligibilityState, BlockingReason, AttemptState) for member in enum
    }
    for name in CREATES:
        for literal in re.findall(
            r"'([a-z_]+)'", ALL[name].sql.partition("insert into execution (")[2].partition("from")[0]
        ):
            assert literal in labels, (name, literal)


def test_only_the_listed_statements_write_the_state_of_an_execution() -> None:
    creates = {name for name, statement in ALL.items() if _INSERT.search(statement.sql)}
    moves = {name for name, statement in ALL.items() if any(assignments(statement))}
    assert (creates, moves) == (CREATES, MOVES)


def test_a_transition_writes_no_literal_state() -> None:
    # A literal is allowed in a condition, but not as the value that is written.
    written = re.compile(r"^'|\b(then|else)\s+'")
    assert [
        (name, column, expression)
        for name in sorted(MOVES)
        for column, expression in assignments(ALL[name])
        if written.search(expression)
    ] == []


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("claim_by_route", CLAIM_PARAMETERS),
        ("claim_by_queue", CLAIM_PARAMETERS),
        ("lease_locked", CLAIM_PARAMETERS),
        ("lease_admitted", CLAIM_PARAMETERS),
        ("complete_leases", completion_parameters()),
        ("promote_delayed", PROMOTED),
        ("replay_locked", target_parameters(REPLAYED)),
        ("escalate_locked", ESCALATED),
        ("hold_owed_members", HELD_FOR_CANCEL),
        ("block_by_dependencies", BLOCKED_BY_DEPENDENCIES),
        ("block_locked", block_parameters(BlockingReason.WAITING_FOR_QUOTA)),
    ],
)
def test_a_transition_takes_every_target_column_as_a_parameter(name: str, parameters: dict[str, object]) -> None:
    given = {parameter for parameter in parameters if parameter.startswith("to_")}
    taken = {parameter for parameter in ALL[name].parameters if parameter.startswith("to_")}
    assert taken == given
    assert len(list(assignments(ALL[name]))) == len(given)


CLOCK_IN_CONDITION = {"complete_leases", "renew_leases"}
"""Statements that find each row by its key and may wait for its lock: they read the clock after the wait."""


def test_a_statement_reads_the_clock_once_unless_it_waits_for_locks() -> None:
    # A volatile call in a condition is evaluated for every row and prevents the use of an index.
    bare = re.compile(r"(<|>|=|between|and)\s*ff_now\(\)")
    assert {name for name, statement in ALL.items() if bare.search(statement.sql)} == CLOCK_IN_CONDITION


KINDS = {
    "claim_by_route": {EventKind.ACQUIRED, EventKind.RECLAIMED},
    "claim_by_queue": {EventKind.ACQUIRED, EventKind.RECLAIMED},
    "lease_locked": {EventKind.ACQUIRED, EventKind.RECLAIMED},
    "lease_admitted": {EventKind.ACQUIRED, EventKind.RECLAIMED},
    "renew_leases": {EventKind.RENEWED},
    "complete_leases": {EventKind.RELEASED},
    "end_leases": {EventKind.RELEASED, EventKind.ENDED, EventKind.EXPIRED, EventKind.REVOKED},
    "insert_deliveries": {EventKind.SIGNAL},
    "insert_alike_of_instances": {EventKind.TAG_ATTACHED},
    "insert_executions": {EventKind.TAG_ATTACHED},
    "insert_flow": {EventKind.TAG_ATTACHED},
    "insert_part": {EventKind.TAG_ATTACHED},
}
"""The kinds of events that statements write; resume_locked and set_tags take the kind from a parameter or a list."""

_EVENT = re.compile(r"\binsert into (event|worker_event) \(([^)]*)\)\s+(select\s.*?)\n\)", re.DOTALL)
_SUBQUERY = re.compile(r"\(\s*select\b(?:[^()]|\([^()]*\))*\)")
_SELECTED = re.compile(r"\bselect\s(.*?)\s+from\s", re.DOTALL)


def written(statement: Statement, table: str, column: str) -> Iterator[str]:
    """The expressions that a statement writes to a column of an event table, without the conditions in them."""
    for found in _EVENT.finditer(_SUBQUERY.sub("subquery", statement.sql)):
        for selected in _SELECTED.findall(found[3]) if found[1] == table else ():
            named = dict(zip((name.strip() for name in split(found[2])), split(selected), strict=True))
            if column in named:
                yield re.sub(r"\bcase\b.*?\bthen\b|\bwhen\b.*?\bthen\b", " ", named[column], flags=re.DOTALL)


def literals(statement: Statement, column: str) -> set[str]:
    """The literals that a statement writes to a column of `event`."""
    return {found for text in written(statement, "event", column) for found in re.findall(r"'(\w+)'", text)}


def test_statements_write_events_of_known_kinds() -> None:
    assert {name: literals(ALL[name], "kind") for name in KINDS} == KINDS
    for name, statement in ALL.items():
        assert literals(statement, "kind") <= set(EventKind), name


def test_statements_write_worker_events_of_every_kind() -> None:
    kinds = [text for statement in ALL.values() for text in written(statement, "worker_event", "kind")]
    assert {found for text in kinds for found in re.findall(r"'(\w+)'", text)} == set(WorkerEvent)


INDEXED = {"partition_key", "execution_id", "namespace_no", "lane_no", "created_at"}
"""The columns of `execution` that are in an index."""


def test_no_statement_changes_an_indexed_column_of_execution() -> None:
    changed = {
        (name, column.split("=")[0].strip())
        for name, statement in ALL.items()
        for found in _UPDATE.finditer(statement.sql)
        for column in split(found[1])
    }
    assert {column for _, column in changed} >= {"lifecycle_phase", "claim_no", "last_transition_at"}
    assert [each for each in changed if each[1] in INDEXED] == []
