"""Statements kept in .sql files, with named parameters bound to positions once at import."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROW_IDS = "execution_ids"
_HEADER = re.compile(r"^-- (name|fragment): ([a-z][a-z0-9_]*)$", re.MULTILINE)
_INCLUDE = re.compile(r"^ *-- include: (?:([a-z][a-z0-9_]*)\.)?([a-z][a-z0-9_]*)$", re.MULTILINE)
_NOT_CODE = re.compile(r"'(?:[^']|'')*'|--[^\n]*")
_PARAMETER = re.compile(r"(?<![:\w]):([a-z][a-z0-9_]*)")


class Statement:
    """One SQL text and the order of its parameters."""

    __slots__ = ("name", "parameters", "sql")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        order: dict[str, int] = {}

        def bind(code: str) -> str:
            return _PARAMETER.sub(lambda found: f"${order.setdefault(found[1], len(order) + 1)}", code)

        pieces: list[str] = []
        position = 0
        for skipped in _NOT_CODE.finditer(text):
            pieces.append(bind(text[position : skipped.start()]))
            pieces.append("" if skipped[0].startswith("--") else skipped[0])
            position = skipped.end()
        pieces.append(bind(text[position:]))
        self.sql = f"/* {name} */ " + "".join(pieces).strip().rstrip(";")
        self.parameters = tuple(order)

    def arguments(self, values: Mapping[str, object]) -> list[object]:
        """The values in the order of the statement's positions; raise KeyError for a missing or unknown name."""
        if len(values) != len(self.parameters):
            raise KeyError(f"statement {self.name} takes {self.parameters}, got {tuple(values)}")
        return [values[name] for name in self.parameters]

    def __repr__(self) -> str:
        return f"Statement({self.name})"


class Statements:
    """The statements of one .sql file, each an attribute of its name.

    A fragment is a piece of SQL that statements and other fragments include; it is not a statement itself. A file may
    include the fragments of its neighbours: `-- include: claim.leased` is the fragment `leased` of `claim.sql`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8")
        heads = list(_HEADER.finditer(text))
        ends = [head.start() for head in heads[1:]] + [len(text)]
        texts: dict[str, dict[str, str]] = {"name": {}, "fragment": {}}
        for head, end in zip(heads, ends, strict=True):
            if head[2] in texts["name"] or head[2] in texts["fragment"]:
                raise ValueError(f"{path.name} has {head[2]} twice; give each statement and fragment its own name")
            texts[head[1]][head[2]] = text[head.end() : end].strip()
        self.fragments = MappingProxyType(texts["fragment"])
        self._by_name = MappingProxyType(
            {name: Statement(name, self._whole(each, (name,))) for name, each in texts["name"].items()}
        )

    def _whole(self, text: str, within: tuple[str, ...]) -> str:
        """A text with its includes replaced; `within` are the names of the texts that include it."""

        def fragment(found: re.Match[str]) -> str:
            file, name = found[1], found[2]
            owner = self if file is None else Statements(self.path.with_name(f"{file}.sql"))
            if name in within:
                raise ValueError(f"{self.path.name}: the fragment {name} includes itself")
            try:
                text = owner.fragments[name]
            except KeyError:
                raise ValueError(f"{owner.path.name} has no fragment {name} to include") from None
            return owner._whole(text, (*within, name))

        return _INCLUDE.sub(fragment, text)

    def __getattr__(self, name: str) -> Statement:
        try:
            return self._by_name[name]
        except KeyError:
            raise AttributeError(f"{self.path.name} has no statement {name}") from None

    def __iter__(self) -> Iterator[Statement]:
        return iter(self._by_name.values())


def statements_beside(module_file: str) -> Statements:
    """The statements of the .sql file next to a module, with the module's name."""
    return Statements(Path(module_file).with_suffix(".sql"))


def short_columns(names: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, object]:
    """Rows as one array per column, shortened where possible, since each element costs the driver and the server.

    `unnest` fills a short array with nulls. A column of nulls becomes an empty array. A column that repeats one value
    becomes an array with that one element, and the statement uses the first element in place of missing ones. The
    column of row ids is never shortened: its length is the number of rows.
    """
    return {
        name: column if name == ROW_IDS else short_column(column) for name, column in full_columns(names, rows).items()
    }


def short_column(column: Sequence[object]) -> Sequence[object]:
    """The column as an empty array if all values are null, as one element if all are equal, else unchanged."""
    # Most columns with different values already differ between their first and last element.
    if not column or column[-1] != column[0] or column.count(column[0]) != len(column):
        return column
    return () if column[0] is None else column[:1]


def full_columns(names: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, Sequence[object]]:
    """Rows as one array per column, each with one element per row."""
    columns: list[Sequence[object]] = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return dict(zip(names, columns, strict=True))


def array_text(values: Iterable[object]) -> str:
    """Ids as the text of a Postgres array: a column cannot hold arrays of different lengths."""
    return f"{{{','.join(map(str, values))}}}"
