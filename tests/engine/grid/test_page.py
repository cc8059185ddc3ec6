"""docs/states.md shows the table of the grid."""

from pathlib import Path

from flowfabric.model.errors import CODES

from .operations import OPERATIONS
from .page import GROUPS, page
from .table import TABLE, Refused

PAGE = Path(__file__).parents[3] / "docs" / "states.md"


def test_the_page_of_states_is_current() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(), "generate it again: python -m tests.engine.grid.page > docs/states.md"


def test_every_operation_has_a_place_on_the_page() -> None:
    placed = {name for names in GROUPS.values() for name in names}
    assert {operation.name for operation in OPERATIONS.values()} <= placed


def test_every_refusal_is_a_known_code() -> None:
    codes = {expected.code for row in TABLE.values() for expected in row.values() if isinstance(expected, Refused)}
    assert codes <= set(CODES)
