"""What claims need of the limits: which of the executions they have locked they may lease."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.model.states import BlockingReason

LIMITED = "limited claims"
"""Every route whose queues may have limits requires a capability that begins with this word.

No worker can offer it, as it contains a space. Only claims that admit add it to the capabilities of their worker, so
other claims, and those of processes without admission, do not see these routes.
"""


def is_reserved(capability: str) -> bool:
    """Whether a required capability only keeps claims without admission away from a route."""
    return capability.startswith(LIMITED)


class Candidate(NamedTuple):
    """An execution that a claim has locked and may lease, and what decides about its admission."""

    partition_key: int
    execution_id: UUID
    queue_no: int
    quota_key_nos: Sequence[int]
    """The keys of the quotas that limit it."""
    budget_detail: str | None
    """Which budget is exhausted, if one is."""
    weight: int = 1
    """How many tokens of a rate it takes."""
    slot_keys: Sequence[int] = ()
    """The quota keys of which it holds a slot already, by a grant."""
    is_markable: bool = False
    """Whether it is stored as claimable, so that a denial marks it as blocked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """It may be leased; these are the quota keys of which it then holds a slot."""

    slot_keys: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Denied:
    """It may not be leased now: why, and when it may be tried again if that is known."""

    reason: BlockingReason
    detail: str
    retry_after_ms: int | None = None
    """When it may be tried again, if no other execution gives something back before."""


class Admissions(Protocol):
    """Decides which executions of a claim are within their limits."""

    async def admit(self, transaction: Transaction, candidates: Sequence[Candidate]) -> Sequence[Admitted | Denied]:
        """Admit locked executions in the order given, as far as their limits allow, and book what they take.

        The first that is denied of each queue is marked as blocked. Locks what it changes until the transaction ends.
        """
        ...

    async def take_slots(self, transaction: Transaction, partition_key: int, execution_id: UUID) -> Sequence[int]:
        """Take the slots of a locked execution without a test; return the quota keys of which it then holds one."""
        ...
