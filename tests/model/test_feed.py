from typing import Any

import pytest

from flowfabric.model.errors import EngineError
from flowfabric.model.event import FAMILY_KINDS, RARE_FAMILIES, CompletionOutcome, EventFamily, EventKind
from flowfabric.model.feed import CompletionEvent, CompletionKind, ReportedOutcome, ScannerFilter
from flowfabric.model.ids import ExecutionId


def test_every_kind_of_event_belongs_to_a_feed() -> None:
    assert set(FAMILY_KINDS) == set(EventFamily)
    assert {kind for kinds in FAMILY_KINDS.values() for kind in kinds} == set(EventKind)


def test_rare_families_have_no_common_kinds() -> None:
    common = {EventKind.ACQUIRED, EventKind.RENEWED, EventKind.RELEASED, EventKind.ENDED}
    assert [family for family in RARE_FAMILIES if common & set(FAMILY_KINDS[family])] == []


def test_every_stored_outcome_is_reported_by_its_word() -> None:
    assert [outcome.literal for outcome in CompletionOutcome] == [outcome.value for outcome in ReportedOutcome]


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        ("success", CompletionKind.SUCCESS),
        ("failed", CompletionKind.FAILURE),
        ("cancelled", CompletionKind.CANCELLED),
        ("expired", CompletionKind.OTHER),
        ("skipped", CompletionKind.OTHER),
        ("resumable", CompletionKind.OTHER),
    ],
)
def test_an_outcome_is_of_one_of_four_kinds(outcome: str, kind: CompletionKind) -> None:
    event = CompletionEvent(
        cursor=b"", execution_id=ExecutionId("x"), at=0, outcome=ReportedOutcome(outcome), flow_id=None, event_id=1
    )
    assert event.kind is kind


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ({"namespace": 1}, "invalid_input", "filter.namespace: must be text"),
        ({"namespace": "a\0"}, "invalid_input", "NUL"),
        ({"namespace": ""}, "invalid_input", "filter.namespace: must not be empty"),
        ({"instance_tag": "app.tenant=acme"}, "invalid_input", "must be the key and the value of a tag"),
        ({"instance_tag": ("app.tenant",)}, "invalid_input", "must be the key and the value of a tag"),
        ({"instance_tag": ("tenant", "acme")}, "invalid_tag_key", "must be namespaced"),
        ({"instance_tag": ("app.tenant", 7)}, "invalid_input", "filter.instance_tag: must be text"),
    ],
)
def test_a_filter_that_can_match_nothing_is_refused(arguments: Any, code: str, message: str) -> None:
    with pytest.raises(EngineError, match=message) as refused:
        ScannerFilter(**arguments)
    assert refused.value.code == code
