"""The result of one batch of a sweep, and how large a batch may be."""

from collections.abc import Sequence
from typing import NamedTuple

from flowfabric.engine.core.wakeups import Work

PASS_SECONDS = 0.2
"""For how long a pass of a sweep that may meet locked rows begins with further items: the sweeps share a loop, and
others must not wait for long."""
REDUCE_BITS = 2
"""A batch after a timeout is a quarter as large: few timeouts are enough to reach the size that is fast enough."""
RAISE_AFTER = 8
"""After how many batches in time the next one is twice as large."""


class SweepResult(NamedTuple):
    """The number of items processed, whether more may be due, and where work became claimable."""

    done: int
    is_full: bool
    work: Sequence[Work] = ()


class BatchSize:
    """How large the batches of one sweep are at the moment: smaller after timeouts, until they are in time again."""

    def __init__(self) -> None:
        self._reduced_bits = 0
        self._in_time = 0

    @property
    def is_reduced(self) -> bool:
        """Whether a batch is smaller than its limits allow."""
        return self._reduced_bits > 0

    def of(self, limit: int) -> int:
        """The limit that applies now instead of this one, at least 1."""
        return max(1, limit >> self._reduced_bits)

    def reduce(self) -> None:
        """Make the next batches smaller, because one was not in time."""
        self._reduced_bits += REDUCE_BITS
        self._in_time = 0

    def reset(self) -> None:
        """Make the next batch as large as its limits allow."""
        self._reduced_bits = self._in_time = 0

    def record_in_time(self) -> None:
        """Count a batch that was in time; several in a row make the next batches larger."""
        self._in_time += 1
        if self._in_time >= RAISE_AFTER:
            self._reduced_bits, self._in_time = max(0, self._reduced_bits - 1), 0
