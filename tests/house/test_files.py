"""Files are short, SQL is in .sql files, and every public name is listed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import flowfabric

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "flowfabric"
LONGEST = 500

SOURCES = sorted((*PACKAGE.rglob("*.py"), *PACKAGE.glob("engine/**/*.sql")))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# The start of a statement, with enough of the text after it to distinguish it from a sentence.
_SQL = re.compile(
    r"^\s*(select\s.+\sfrom\s|insert\s+into\s|update\s+\S+\s+set\s|delete\s+from\s|with\s+\w+\s+as\s"
    r"|(create|alter|drop|truncate|lock)\s+(table|index|type|function|schema|database|view)\s|select\s+\w+\()",
    re.IGNORECASE | re.DOTALL,
)


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """The string constants of a module, except docstrings, with their line numbers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_no_file_is_longer_than_the_limit() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (*SOURCES, *TESTS)}
    assert {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > LONGEST} == {}


def test_python_strings_contain_no_sql() -> None:
    # The benchmark also creates databases and uses the tables of other systems.
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in PACKAGE.rglob("*.py")
        if path.parent not in (PACKAGE / "db", PACKAGE / "bench")
        for line, text in strings(path)
        if _SQL.search(text)
    ]
    assert found == []


def test_sql_in_a_string_is_detected(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Select nothing from here."""\nx = "select 1 from t"\ny = "the update of a set"\n')
    assert [line for line, text in strings(module) if _SQL.search(text)] == [2]


def test_every_name_in_all_exists_and_every_public_name_is_in_all() -> None:
    listed = getattr(flowfabric, "__all__", [])
    assert len(listed) == len(set(listed))
    assert [name for name in listed if not hasattr(flowfabric, name)] == []
    public = {
        name
        for name, value in vars(flowfabric).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - set(listed) == set()


def test_the_package_contains_no_type_ignore() -> None:
    assert [str(path) for path in PACKAGE.rglob("*.py") if "type: ignore" in path.read_text(encoding="utf-8")] == []
