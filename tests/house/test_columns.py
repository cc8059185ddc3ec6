"""Every statement that takes a column from `short_columns` repeats its first value for the missing ones.

`short_columns` sends a column whose values are all equal as one value.
"""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from flowfabric.db.statements import ROW_IDS, Statement, Statements

ENGINE = Path(__file__).parents[2] / "src" / "flowfabric" / "engine"
CHECKED_AGAIN = {("complete_leases", "lease_ids"), ("complete_leases", "attempt_ids")}
"""Fences that executions seldom share: if one does not match here, `end_leases` checks it again."""

ALL = [statement for path in sorted(ENGINE.rglob("*.sql")) for statement in Statements(path)]


def calls() -> list[tuple[str, str]]:
    """The calls of `short_columns`: the module and the constant that names the columns."""
    found = []
    for path in sorted(ENGINE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "short_columns":
                names = node.args[0]
                assert isinstance(names, ast.Name), (
                    f"{path.name}:{node.lineno}: pass the column names as a module constant"
                )
                found.append((".".join(path.relative_to(ENGINE).with_suffix("").parts), names.id))
    return found


def repeats_first_value(statement: Statement, name: str) -> bool:
    """Whether the statement uses the first value of a column for the missing ones."""
    place = re.escape(f"${statement.parameters.index(name) + 1}")
    first = rf"\(?{place}(::\w+\[\])?\)?\[1\]"
    forms = (
        rf"coalesce\([\w.]+, {first}",
        rf"case cardinality\({place}(::\w+\[\])?\) (when 0 then [^;]*? )?when 1 then {first} else [\w.]+ end",
    )
    text = " ".join(statement.sql.split())
    return any(re.search(form, text) for form in forms)


def test_the_calls_of_short_columns_are_found() -> None:
    assert {module for module, _ in calls()} >= {
        "execution.create",
        "core.consequence",
        "wait.signal_batch",
        "wait.resume",
    }


@pytest.mark.parametrize(("module", "constant"), sorted(set(calls())))
def test_every_statement_repeats_the_first_value_of_a_short_column(module: str, constant: str) -> None:
    names = getattr(import_module(f"flowfabric.engine.{module}"), constant)
    takers = [statement for statement in ALL if set(names) <= set(statement.parameters)]
    assert takers, f"no statement takes all columns of {module}.{constant}"
    gaps = {
        (statement.name, name)
        for statement in takers
        for name in names
        if name != ROW_IDS and not repeats_first_value(statement, name)
    }
    assert gaps <= CHECKED_AGAIN


def test_every_exception_names_a_parameter() -> None:
    known = {(statement.name, name) for statement in ALL for name in statement.parameters}
    assert known >= CHECKED_AGAIN
