import pytest

from flowfabric.model.attempt import FailureClass, FailureReason, failure_category


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
