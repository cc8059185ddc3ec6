import re

from flowfabric.model.attempt import (
    MAX_ERROR_TYPE_CHARACTERS,
    MAX_MESSAGE_BYTES,
    MAX_TRACEBACK_BYTES,
    FailureClass,
    FailureReason,
    failure_category,
)
from model.cases import for_each


@for_each(
    "reason, category",
    [
        (FailureReason("boom"), "transient"),
        (FailureReason("boom", detail=""), "transient"),
        (FailureReason("boom", detail=b""), "transient"),
        (FailureReason("boom", detail=b"\xff"), "transient"),
        (FailureReason("boom", detail="rate_limited"), "rate_limited"),
        (FailureReason("boom", detail=b"rate_limited"), "rate_limited"),
    ],
)
def test_a_readable_detail_is_the_category_of_a_failure(reason: FailureReason, category: str) -> None:
    assert failure_category(reason, FailureClass.TRANSIENT) == category


def test_the_literals_of_failure_classes() -> None:
    assert [str(word) for word in FailureClass] == ["transient", "permanent", "infra_crash", "timeout", "cancelled"]


BOUNDS = {"message": MAX_MESSAGE_BYTES, "traceback": MAX_TRACEBACK_BYTES}


def bounded(field: str, text: str) -> str:
    """Return one field of a failure as it is stored."""
    given = {"message": "x", field: text}
    stored: str = getattr(FailureReason(**given).bounded(), field)
    return stored


def test_the_limits_are_those_of_the_manual() -> None:
    assert (MAX_ERROR_TYPE_CHARACTERS, MAX_MESSAGE_BYTES, MAX_TRACEBACK_BYTES) == (256, 4096, 16384)


@for_each("field", BOUNDS)
@for_each("letter", ["x", "é", "✓", "\U0001f600"])
def test_a_text_at_the_limit_is_kept_and_a_longer_one_is_cut(field: str, letter: str) -> None:
    most = BOUNDS[field]
    whole = letter * (most // len(letter.encode())) + "." * (most % len(letter.encode()))
    assert len(whole.encode()) == most
    assert bounded(field, whole) == whole
    cut = bounded(field, whole + "!")
    assert most - 8 <= len(cut.encode()) <= most
    assert (cut[0], cut[-1]) == (letter, "!")


@for_each("field", BOUNDS)
@for_each("size", [20_000, 200_000])
def test_a_cut_text_names_the_number_of_characters_left_out(field: str, size: int) -> None:
    text = "".join(f"{n:6}✓\n" for n in range(size // 8))
    found = re.fullmatch(r"(.*?)(\s\.\.\. (\d+) characters omitted \.\.\.\s)(.*)", bounded(field, text), re.DOTALL)
    assert found is not None
    head, gap, left_out, tail = found.groups()
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(left_out) + len(tail) == len(text)
    assert abs(len(head.encode()) - len(tail.encode())) <= 8
    # In a traceback the gap is on its own line.
    assert (gap[0], gap[-1]) == (("\n", "\n") if field == "traceback" else (" ", " "))


@for_each("field", BOUNDS)
def test_characters_that_cannot_be_stored_are_replaced(field: str) -> None:
    assert bounded(field, "a\0b\ud800c") == "a\N{REPLACEMENT CHARACTER}b?c"
    cut = bounded(field, "\0" * 10_000 + "\ud800" * 10_000)
    assert len(cut.encode()) <= BOUNDS[field]
    assert (cut[0], cut[-1]) == ("\N{REPLACEMENT CHARACTER}", "?")


def test_a_long_error_type_is_cut() -> None:
    assert bounded("error_type", "é" * 256) == "é" * 256
    assert bounded("error_type", "é" * 256 + "x") == "é" * 256
    assert bounded("error_type", "a\0\ud800") == "a\N{REPLACEMENT CHARACTER}?"


def test_missing_and_empty_fields_of_a_failure_stay_as_they_are() -> None:
    assert FailureReason("x", detail="y").bounded() == FailureReason("x", detail="y")
    assert FailureReason("x", error_type="", traceback="").bounded() == FailureReason("x", error_type="", traceback="")
