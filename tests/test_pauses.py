"""Pauses between retries: they grow up to a limit and differ between processes."""

import asyncio
from itertools import islice

import pytest

from flowfabric.pauses import is_set_within, pauses


def test_pauses_double_up_to_the_longest_and_lose_at_most_a_quarter_to_jitter() -> None:
    for pause, whole in zip(pauses(1, 10), (1, 2, 4, 8, 10, 10), strict=False):
        assert 0.75 * whole <= pause <= whole


def test_two_sequences_of_pauses_differ() -> None:
    assert list(islice(pauses(1, 10), 5)) != list(islice(pauses(1, 10), 5))


async def test_a_wait_cancelled_while_its_event_is_set_is_cancelled() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(is_set_within(event, 60))
    for _ in range(3):
        await asyncio.sleep(0)
    event.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
