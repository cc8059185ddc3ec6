"""Statements in .sql files: named parameters become positions, and the rest of the text keeps its meaning."""

from pathlib import Path

import pytest

from flowfabric.db.statements import Statement, Statements, statements_beside


def test_a_repeated_parameter_has_one_position() -> None:
    statement = Statement("find", "select :b, :a, :b")
    assert statement.sql == "/* find */ select $1, $2, $1"
    assert statement.parameters == ("b", "a")


def test_values_are_passed_in_the_order_of_the_positions() -> None:
    statement = Statement("find", "select :b, :a")
    assert statement.arguments({"a": 1, "b": 2}) == [2, 1]


@pytest.mark.parametrize("values", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "x": 2}])
def test_missing_and_unknown_values_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(KeyError):
        Statement("find", "select :b, :a").arguments(values)


@pytest.mark.parametrize(
    "text",
    ["select a::int", "select ':a'", "select 'it''s :a'", "select '--' as \"x\"", "select x[1:2]"],
)
def test_text_that_only_looks_like_a_parameter_is_unchanged(text: str) -> None:
    statement = Statement("find", text)
    assert (statement.sql, statement.parameters) == (f"/* find */ {text}", ())


def test_a_parameter_may_be_cast() -> None:
    assert Statement("find", "select :ids::uuid[]").sql == "/* find */ select $1::uuid[]"


def test_comments_and_the_last_semicolon_are_not_sent() -> None:
    assert Statement("find", "-- Finds :it.\nselect 1 -- one\n;\n").sql.split() == ["/*", "find", "*/", "select", "1"]


def test_an_apostrophe_in_a_comment_does_not_start_a_string() -> None:
    statement = Statement("find", "select :a -- the row's own\n, ':b'")
    assert statement.parameters == ("a",)


def test_the_statements_of_a_file_are_attributes(tmp_path: Path) -> None:
    (tmp_path / "family.sql").write_text(
        "-- name: find_it\n-- Finds it.\nselect :a;\n\n-- name: lose_it\n-- Loses it.\nselect 2;\n"
    )
    statements = statements_beside(str(tmp_path / "family.py"))
    assert [statement.name for statement in statements] == ["find_it", "lose_it"]
    assert statements.find_it.parameters == ("a",)
    assert repr(statements.lose_it) == "Statement(lose_it)"


def test_an_unknown_statement_is_reported_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "family.sql").write_text("-- name: lose_it\n-- Loses it.\nselect 2;\n")
    with pytest.raises(AttributeError, match=r"family\.sql has no statement find_it"):
        _ = Statements(tmp_path / "family.sql").find_it


def in_file(folder: Path, text: str) -> Statements:
    (folder / "family.sql").write_text(text)
    return Statements(folder / "family.sql")


FRAGMENT = "-- fragment: ids\n-- Some ids.\nselect unnest(:ids::int[]) as id\n\n"


def test_an_include_is_replaced_by_the_text_of_the_fragment(tmp_path: Path) -> None:
    statements = in_file(
        tmp_path,
        FRAGMENT
        + "-- name: find_it\n-- Finds it.\nwith i as (\n  -- include: ids\n) select :a from i;\n\n"
        + "-- name: find_them\n-- Finds them.\n-- include: ids\n;\n",
    )
    assert " ".join(statements.find_it.sql.split()) == (
        "/* find_it */ with i as ( select unnest($1::int[]) as id ) select $2 from i"
    )
    assert statements.find_it.parameters == ("ids", "a")
    assert statements.find_them.parameters == ("ids",)


def test_a_fragment_is_not_a_statement(tmp_path: Path) -> None:
    statements = in_file(tmp_path, FRAGMENT + "-- name: find_it\n-- Finds it.\n-- include: ids\n;\n")
    assert [statement.name for statement in statements] == ["find_it"]
    with pytest.raises(AttributeError, match=r"family\.sql has no statement ids"):
        _ = statements.ids


@pytest.mark.parametrize("name", ["other", "lose_it"])
def test_an_include_of_anything_but_a_fragment_is_refused_with_its_file_and_name(tmp_path: Path, name: str) -> None:
    text = FRAGMENT + f"-- name: find_it\n-- Finds it.\n-- include: {name}\n;\n\n-- name: lose_it\nselect 1;\n"
    with pytest.raises(ValueError, match=rf"^family\.sql has no fragment {name} to include$"):
        in_file(tmp_path, text)


def test_a_fragment_may_include_another(tmp_path: Path) -> None:
    text = FRAGMENT + "-- fragment: more\n-- include: ids\n\n-- name: find_it\n-- include: more\n;\n"
    assert in_file(tmp_path, text).find_it.parameters == ("ids",)


def test_a_fragment_that_includes_itself_is_refused(tmp_path: Path) -> None:
    text = "-- fragment: one\n-- include: two\n\n-- fragment: two\n-- include: one\n\n"
    text += "-- name: find_it\n-- include: one\n;\n"
    with pytest.raises(ValueError, match=r"^family\.sql: the fragment one includes itself$"):
        in_file(tmp_path, text)


def test_a_statement_may_include_a_fragment_of_a_neighbour(tmp_path: Path) -> None:
    in_file(tmp_path, FRAGMENT)
    path = tmp_path / "other.sql"
    path.write_text("-- name: find_it\n-- include: family.ids\n;\n")
    assert Statements(path).find_it.parameters == ("ids",)
    path.write_text("-- name: find_it\n-- include: family.others\n;\n")
    with pytest.raises(ValueError, match=r"^family\.sql has no fragment others to include$"):
        Statements(path)


@pytest.mark.parametrize("kind", ["name", "fragment"])
def test_a_repeated_name_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match=r"^family\.sql has ids twice"):
        in_file(tmp_path, FRAGMENT + f"-- {kind}: ids\n-- Other ids.\nselect 1;\n")
