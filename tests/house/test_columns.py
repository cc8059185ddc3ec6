"""A column that `short_columns` sends short is filled up again by every statement it goes to."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from flowfabric.db.statements import ROW_IDS, Statement, Statements

ENGINE = Path(__file__).parents[2] / "src" / "flowfabric" / "engine"
JUDGED_AGAIN = {("complete_leases", "lease_ids"), ("complete_leases", "attempt_ids")}
"""Fences that runs seldom share: one that misses its row here goes on to `end_leases`, which fills them up."""

ALL = [statement for path in sorted(ENGINE.rglob("*.sql")) for statement in Statements(path)]


def calls() -> list[tuple[str, str]]:
    """Where `short_columns` is called, as module and the constant that names the columns."""
    found = []
    for path in sorted(ENGINE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "short_columns":
                names = node.args[0]
                assert isinstance(names, ast.Name), f"{path.name}:{node.lineno}: name the columns by a constant"
                found.append((".".join(path.relative_to(ENGINE).with_suffix("").parts), names.id))
    return found


def is_filled_up(statement: Statement, name: str) -> bool:
    """Whether the first element of a column stands in for those that are missing."""
    place = re.escape(f"${statement.parameters.index(name) + 1}")
    first = rf"\(?{place}(::\w+\[\])?\)?\[1\]"
    forms = (
        rf"coalesce\([\w.]+, {first}",
        rf"case cardinality\({place}(::\w+\[\])?\) (when 0 then [^;]*? )?when 1 then {first} else [\w.]+ end",
    )
    text = " ".join(statement.sql.split())
    return any(re.search(form, text) for form in forms)


def test_columns_are_sent_short_somewhere() -> None:
    assert {module for module, _ in calls()} >= {
        "execution.create",
        "core.consequence",
        "wait.signal_batch",
        "wait.resume",
    }


@pytest.mark.parametrize(("module", "constant"), sorted(set(calls())))
def test_every_statement_fills_up_the_columns_that_may_be_short(module: str, constant: str) -> None:
    names = getattr(import_module(f"flowfabric.engine.{module}"), constant)
    fed = [statement for statement in ALL if set(names) <= set(statement.parameters)]
    assert fed, f"no statement takes {constant} of {module}"
    gaps = {
        (statement.name, name)
        for statement in fed
        for name in names
        if name != ROW_IDS and not is_filled_up(statement, name)
    }
    assert gaps <= JUDGED_AGAIN


def test_what_is_judged_again_is_named_by_a_statement() -> None:
    known = {(statement.name, name) for statement in ALL for name in statement.parameters}
    assert known >= JUDGED_AGAIN
