"""What one batch of a sweep has done."""

from collections.abc import Sequence
from typing import NamedTuple

from flowfabric.engine.core.wakeups import Work


class SweepResult(NamedTuple):
    """How many items of a batch are done, whether another batch may follow at once, and what may be claimed now."""

    done: int
    is_full: bool
    work: Sequence[Work] = ()
