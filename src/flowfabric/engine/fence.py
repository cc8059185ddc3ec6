"""What a fenced write finds when its lease does not hold."""

from dataclasses import dataclass, replace
from typing import Protocol, Self
from uuid import UUID, uuid4

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Fence, Handle, check_handle
from flowfabric.model.ids import AttemptId, ExecutionId, LeaseId, parse_uuid, row_key, split_execution_id
from flowfabric.model.states import CancelSource, HandleKind
from flowfabric.model.text import check_range, check_text

SQL = statements_beside(__file__)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The row a refused write met."""

    terminal_outcome: str
    lifecycle_phase: str
    lease_epoch: int
    attempt_id: UUID | None
    attempt_state: str = ""
    delay_until: int | None = None
    previous_attempt_index: int | None = None

    def is_run_of(self, handle: Handle) -> bool:
        """Whether the last run of the execution was the one this handle held."""
        return self.lease_epoch == handle.lease_epoch and self.attempt_id == handle.attempt_id


class Verdict(msgspec.Struct, frozen=True):
    """What a fenced write came to on one row: done, or why not; and what waits for its time, or for a worker, now."""

    code: str
    found: Found | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    work: tuple[str, int, int] | None = None
    """Lane, queue and place of what may be claimed now."""

    @property
    def is_done(self) -> bool:
        """Whether the write took place."""
        return self.code == "ok"

    def refusal(self, *, stale: str = "lease_conflict") -> EngineError:
        """The error of a write that did not take place; stale is the word for a fence that is not the current one."""
        if self.found is not None:
            return not_active(self.found)
        return error(stale if self.code == "stale_fence" else self.code)


DONE = Verdict("ok")
_read_found = msgspec.json.Decoder(Found).decode


def verdict_of(row: Record) -> Verdict:
    """The verdict a statement gave on a row it could lock."""
    found = row["found"]
    return Verdict(row["verdict"], None if found is None else _read_found(found))


def not_active(found: Found) -> EngineError:
    """The error that lets a caller who lost a reply tell whether the ending was its own."""
    return error(
        "execution_not_active",
        {
            "terminal_outcome": found.terminal_outcome,
            "lease_epoch": str(found.lease_epoch),
            "lifecycle_phase": found.lifecycle_phase,
            "attempt_id": str(found.attempt_id or ""),
        },
    )


async def lock_execution(transaction: Transaction, execution_id: ExecutionId) -> Record:
    """Wait for an execution's row and hold it, so that the next statement decides from what it is now."""
    row = await lock_if_there(transaction, execution_id)
    if row is None:
        raise error("execution_not_found")
    return row


async def lock_if_there(transaction: Transaction, execution_id: ExecutionId) -> Record | None:
    """Wait for an execution's row and hold it; None where there is none."""
    partition, uuid = split_execution_id(execution_id)
    rows = await transaction.fetch(SQL.lock_execution, partition_key=partition, execution_id=uuid)
    return rows[0] if rows else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenFence:
    """What the caller of a service form says of the lease: the whole fence, or nothing; and maybe the attempt."""

    fence: Fence | None
    attempt_index: int | None

    @classmethod
    def read(
        cls,
        lease_id: UUID | str | None,
        lease_epoch: int | None,
        attempt_id: UUID | str | None,
        attempt_index: int | None,
        *,
        source: str | None = None,
    ) -> Self:
        """Check what a caller says; a fence is given whole, and only who may override leases leaves it out."""
        if source is not None:
            check_text(source, "source")
        if attempt_index is not None:
            check_range(attempt_index, "attempt_index", 0, 2**31 - 1)
        if not lease_id and lease_epoch is None and not attempt_id:
            if source == CancelSource.OPERATOR_OVERRIDE:
                return cls(fence=None, attempt_index=attempt_index)
            raise error("invalid_input", "fence_required")
        if not lease_id or lease_epoch is None or not attempt_id:
            raise error("invalid_input", "partial_fence_triple")
        check_range(lease_epoch, "lease_epoch", 0, 2**63 - 1)
        fence = Fence(
            lease_id=LeaseId(parse_uuid(lease_id, "lease_id")),
            lease_epoch=lease_epoch,
            attempt_id=AttemptId(parse_uuid(attempt_id, "attempt_id")),
        )
        return cls(fence=fence, attempt_index=attempt_index)

    def against(self, held: Record) -> Fence:
        """The fence a held row is to be judged by: the given one, else the row's own."""
        fence = self.fence
        if fence is None:
            if held["lifecycle_phase"] != "active":
                raise not_active(found_in(held))
            fence = Fence(lease_id=held["lease_id"], lease_epoch=held["lease_epoch"], attempt_id=held["attempt_id"])
        if self.attempt_index is None or self.attempt_index == held["attempt_count"] - 1:
            return fence
        # The index counts like an id, after everything else: a lease nobody has ends the judgement where ids do.
        return replace(fence, lease_id=LeaseId(uuid4()))


class HeldLease(Protocol):
    """The lease of an execution that a transaction holds, and the time it is judged by."""

    @property
    def lifecycle_phase(self) -> str: ...
    @property
    def terminal_outcome(self) -> str: ...
    @property
    def ownership_state(self) -> str: ...
    @property
    def lease_epoch(self) -> int: ...
    @property
    def lease_id(self) -> UUID | None: ...
    @property
    def attempt_id(self) -> UUID | None: ...
    @property
    def lease_expires_at(self) -> int | None: ...
    @property
    def now(self) -> int: ...


def check_lease(held: HeldLease, fence: Handle | Fence) -> None:
    """Refuse a fence that a held execution is not under, in the order in which every fenced write judges it."""
    if held.lease_epoch != fence.lease_epoch:
        raise error("lease_conflict")
    if held.lifecycle_phase != "active":
        raise not_active(
            Found(
                terminal_outcome=held.terminal_outcome,
                lifecycle_phase=held.lifecycle_phase,
                lease_epoch=held.lease_epoch,
                attempt_id=held.attempt_id,
            )
        )
    if held.ownership_state == "lease_revoked":
        raise error("lease_revoked")
    if held.ownership_state != "leased" or held.lease_expires_at is None or held.lease_expires_at <= held.now:
        raise error("lease_expired")
    if held.lease_id != fence.lease_id or held.attempt_id != fence.attempt_id:
        raise error("lease_conflict")


def found_in(held: Record) -> Found:
    """What an execution that is not active is, for the error that says so."""
    return Found(
        terminal_outcome=held["terminal_outcome"],
        lifecycle_phase=held["lifecycle_phase"],
        lease_epoch=held["lease_epoch"],
        attempt_id=held["attempt_id"],
    )


def usable(handle: Handle) -> Handle:
    """The handle itself, where it stands for a lease this store can hold."""
    handle = check_handle(handle)
    if handle.kind is HandleKind.SUSPENDED:
        raise error("lease_conflict", "the lease ended with the suspension")
    row_key(handle.execution_id)
    return handle
