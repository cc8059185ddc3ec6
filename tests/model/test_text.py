import pytest

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.text import check_text


@pytest.mark.parametrize("text", ["", "plain", "ünïcode \U0001f600", "line\nbreak"])
def test_text_the_store_can_hold_is_taken(text: str) -> None:
    assert check_text(text, "namespace") is text


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "é\0", None, 3, b"x"])
def test_text_the_store_cannot_hold_is_refused_by_its_field(text: object) -> None:
    with pytest.raises(InvalidInputError, match="invalid_input: namespace: "):
        check_text(text, "namespace")
