"""Pauses between tries: they grow up to a limit and differ between processes."""

from itertools import islice

from flowfabric.pauses import pauses


def test_pauses_double_up_to_the_longest_and_are_shortened_by_a_quarter_at_most() -> None:
    for pause, whole in zip(pauses(1, 10), (1, 2, 4, 8, 10, 10), strict=False):
        assert 0.75 * whole <= pause <= whole


def test_two_that_wait_do_not_wait_alike() -> None:
    assert list(islice(pauses(1, 10), 5)) != list(islice(pauses(1, 10), 5))
