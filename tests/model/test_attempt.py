import re

import pytest

from flowfabric.model.attempt import (
    MAX_ERROR_TYPE_CHARACTERS,
    MAX_MESSAGE_BYTES,
    MAX_TRACEBACK_BYTES,
    FailureClass,
    FailureReason,
    failure_category,
)


@pytest.mark.parametrize(
    ("reason", "category"),
    [
        (FailureReason("boom"), "transient"),
        (FailureReason("boom", detail=""), "transient"),
        (FailureReason("boom", detail=b""), "transient"),
        (FailureReason("boom", detail=b"\xff"), "transient"),
        (FailureReason("boom", detail="rate_limited"), "rate_limited"),
        (FailureReason("boom", detail=b"rate_limited"), "rate_limited"),
    ],
)
def test_a_readable_detail_names_the_category_of_a_failure(reason: FailureReason, category: str) -> None:
    assert failure_category(reason, FailureClass.TRANSIENT) == category


def test_failure_classes_are_their_categories() -> None:
    assert [str(word) for word in FailureClass] == ["transient", "permanent", "infra_crash", "timeout", "cancelled"]


BOUNDS = {"message": MAX_MESSAGE_BYTES, "traceback": MAX_TRACEBACK_BYTES}


def bounded(field: str, text: str) -> str:
    """What is stored of one field of a failure."""
    given = {"message": "x", field: text}
    stored: str = getattr(FailureReason(**given).bounded(), field)
    return stored


def test_the_bounds_are_those_the_manual_names() -> None:
    assert (MAX_ERROR_TYPE_CHARACTERS, MAX_MESSAGE_BYTES, MAX_TRACEBACK_BYTES) == (256, 4096, 16384)


@pytest.mark.parametrize("field", BOUNDS)
@pytest.mark.parametrize("letter", ["x", "é", "✓", "\U0001f600"])
def test_a_text_of_exactly_the_bound_is_kept_whole_and_one_byte_more_is_cut(field: str, letter: str) -> None:
    most = BOUNDS[field]
    whole = letter * (most // len(letter.encode())) + "." * (most % len(letter.encode()))
    assert len(whole.encode()) == most
    assert bounded(field, whole) == whole
    cut = bounded(field, whole + "!")
    assert most - 8 <= len(cut.encode()) <= most
    assert (cut[0], cut[-1]) == (letter, "!")


@pytest.mark.parametrize("field", BOUNDS)
@pytest.mark.parametrize("size", [20_000, 5_000_000])
def test_what_is_cut_counts_the_characters_between_its_beginning_and_its_end(field: str, size: int) -> None:
    text = "".join(f"{n:6}✓\n" for n in range(size // 8))
    found = re.fullmatch(r"(.*?)(\s\.\.\. (\d+) characters left out \.\.\.\s)(.*)", bounded(field, text), re.DOTALL)
    assert found is not None
    head, gap, left_out, tail = found.groups()
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(left_out) + len(tail) == len(text)
    assert abs(len(head.encode()) - len(tail.encode())) <= 8
    # In a traceback it is a line of its own.
    assert (gap[0], gap[-1]) == (("\n", "\n") if field == "traceback" else (" ", " "))


@pytest.mark.parametrize("field", BOUNDS)
def test_text_the_store_cannot_hold_is_replaced_at_a_cut_too(field: str) -> None:
    assert bounded(field, "a\0b\ud800c") == "a\N{REPLACEMENT CHARACTER}b?c"
    cut = bounded(field, "\0" * 10_000 + "\ud800" * 10_000)
    assert len(cut.encode()) <= BOUNDS[field]
    assert (cut[0], cut[-1]) == ("\N{REPLACEMENT CHARACTER}", "?")


def test_the_name_of_a_class_is_cut_at_its_bound() -> None:
    assert bounded("error_type", "é" * 256) == "é" * 256
    assert bounded("error_type", "é" * 256 + "x") == "é" * 256
    assert bounded("error_type", "a\0\ud800") == "a\N{REPLACEMENT CHARACTER}?"


def test_what_is_not_told_of_an_exception_stays_untold() -> None:
    assert FailureReason("x", detail="y").bounded() == FailureReason("x", detail="y")
    assert FailureReason("x", error_type="", traceback="").bounded() == FailureReason("x", error_type="", traceback="")
