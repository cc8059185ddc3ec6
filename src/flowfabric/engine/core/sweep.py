"""The result of one batch of a sweep."""

from collections.abc import Sequence
from typing import NamedTuple

from flowfabric.engine.core.wakeups import Work


class SweepResult(NamedTuple):
    """The number of items processed, whether more may be due, and where work became claimable."""

    done: int
    is_full: bool
    work: Sequence[Work] = ()
