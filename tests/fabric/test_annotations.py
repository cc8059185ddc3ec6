"""What annotations tell: no result is refused that a plain call would be submitted with."""

from decimal import Decimal
from types import GenericAlias
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from annotations import DOUBTFUL, Typed
from flowfabric.fabric.annotations import can_fit
from flowfabric.worker.codec import NotSerializable, codec_of


def _in_container(one: Typed) -> st.SearchStrategy[Typed]:
    kind: Any = one[0]
    values = one[1]
    return st.sampled_from(
        [
            one,
            (GenericAlias(list, (kind,)), st.lists(values, min_size=1, max_size=2)),
            (GenericAlias(dict, (str, kind)), st.dictionaries(st.text(max_size=2), values, min_size=1, max_size=2)),
            (kind | None if kind is not None else None, values),
        ]
    )


CASES = st.sampled_from([one for one in DOUBTFUL if isinstance(one[0], type)]).flatmap(_in_container)


@given(given=CASES, wanted=CASES, data=st.data())
def test_a_result_is_refused_only_if_its_values_are_refused_as_arguments(
    given: Typed, wanted: Typed, data: st.DataObject
) -> None:
    # Numbers are the exception: Pydantic takes True and 1.0 for 1.
    assume(not {bool, float, Decimal}.intersection(_parts(given[0])))
    value = data.draw(given[1])
    try:
        codec_of(wanted[0]).checked(value)
        codec_of(given[0]).checked(value)
    except NotSerializable:
        return
    assert can_fit(given[0], wanted[0])


def _parts(kind: Any) -> tuple[Any, ...]:
    return (kind, *getattr(kind, "__args__", ()))


def test_every_annotation_fits_itself() -> None:
    for kind, _ in DOUBTFUL:
        assert can_fit(kind, kind), kind
