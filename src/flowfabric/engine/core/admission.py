"""What claims need of the limits: which of the executions they have locked they may lease."""

from collections.abc import Collection, Sequence
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
    nth: int = 0
    """Its position in the order of the claim."""
    hidden_nth: int | None = None
    """The position of the first one of its queue for which there should be no room, so that it is not locked."""
    has_guards: bool = False
    """Whether its queue may have executions that were admitted before, and need less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """It may be leased; these are the quota keys of which it then holds a slot."""

    slot_keys: Sequence[int] = ()
    end: int | None = None
    """The position after which the claim takes nothing before it looks again: it has taken less than it might have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Denied:
    """It may not be leased now: why, and when it may be tried again if that is known."""

    reason: BlockingReason
    detail: str
    retry_after_ms: int | None = None
    """When it may be tried again, if no other execution gives something back before."""
    closed_keys: Sequence[int] = ()
    """The quota keys whose rate it waits for, which admit nothing that comes after it."""
    end: int | None = None
    """The position after which the claim takes nothing before it looks again."""


class Admissions(Protocol):
    """Decides which executions of a claim are within their limits."""

    async def admit(
        self, transaction: Transaction, candidates: Sequence[Candidate], *, closed_keys: Collection[int] = ()
    ) -> Sequence[Admitted | Denied | None]:
        """Admit locked executions in the order given, as far as their limits allow, and book what they take.

        None for those that come after an `end`.

        The first that is denied of each queue is marked as blocked. A rate that alone has denied an execution
        admits none after it, nor do those of `closed_keys`, so that a heavy one is not passed by lighter ones for ever.
        Locks what it changes until the transaction ends.
        """
        ...

    async def take_slots(
        self, transaction: Transaction, execution_id: UUID, quota_key_nos: Sequence[int], held: Sequence[int]
    ) -> Sequence[int]:
        """Take the slots of a locked execution without a test; return the quota keys of which it then holds one.

        These keys limit it, and it holds slots of the keys `held` already.
        """
        ...
