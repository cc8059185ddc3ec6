"""Statements in files: named parameters become positions, and nothing else of the text changes its meaning."""

from pathlib import Path

import pytest

from flowfabric.db.statements import Statement, Statements, statements_beside


def test_a_parameter_has_one_position_however_often_it_is_named() -> None:
    statement = Statement("find", "select :b, :a, :b")
    assert statement.sql == "/* find */ select $1, $2, $1"
    assert statement.parameters == ("b", "a")


def test_values_are_given_in_the_order_of_the_positions() -> None:
    statement = Statement("find", "select :b, :a")
    assert statement.arguments({"a": 1, "b": 2}) == [2, 1]


@pytest.mark.parametrize("values", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "x": 2}])
def test_values_that_do_not_fit_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(KeyError):
        Statement("find", "select :b, :a").arguments(values)


@pytest.mark.parametrize(
    "text",
    ["select a::int", "select ':a'", "select 'it''s :a'", "select '--' as \"x\"", "select x[1:2]"],
)
def test_what_only_looks_like_a_parameter_is_left_alone(text: str) -> None:
    statement = Statement("find", text)
    assert (statement.sql, statement.parameters) == (f"/* find */ {text}", ())


def test_a_parameter_may_be_cast() -> None:
    assert Statement("find", "select :ids::uuid[]").sql == "/* find */ select $1::uuid[]"


def test_comments_and_the_last_semicolon_are_not_sent() -> None:
    assert Statement("find", "-- Finds :it.\nselect 1 -- one\n;\n").sql.split() == ["/*", "find", "*/", "select", "1"]


def test_an_apostrophe_in_a_comment_quotes_nothing() -> None:
    statement = Statement("find", "select :a -- the row's own\n, ':b'")
    assert statement.parameters == ("a",)


def test_a_file_holds_its_statements_by_name(tmp_path: Path) -> None:
    (tmp_path / "family.sql").write_text(
        "-- name: find_it\n-- Finds it.\nselect :a;\n\n-- name: lose_it\n-- Loses it.\nselect 2;\n"
    )
    statements = statements_beside(str(tmp_path / "family.py"))
    assert [statement.name for statement in statements] == ["find_it", "lose_it"]
    assert statements.find_it.parameters == ("a",)
    assert repr(statements.lose_it) == "Statement(lose_it)"


def test_a_name_that_is_not_there_is_told_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "family.sql").write_text("-- name: lose_it\n-- Loses it.\nselect 2;\n")
    with pytest.raises(AttributeError, match=r"family\.sql has no statement find_it"):
        _ = Statements(tmp_path / "family.sql").find_it
