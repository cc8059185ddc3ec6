"""What a fenced write finds when its lease does not hold."""

from uuid import UUID

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Handle, check_handle
from flowfabric.model.ids import ExecutionId, row_key, split_execution_id
from flowfabric.model.states import HandleKind

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
    """What a fenced write came to on one row: done, or why not."""

    code: str
    found: Found | None = None
    delay_until: int | None = None

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


async def lock_execution(transaction: Transaction, execution_id: ExecutionId) -> None:
    """Wait for an execution's row and hold it, so that the next statement decides from what it is now."""
    partition, uuid = split_execution_id(execution_id)
    if not await transaction.fetch(SQL.lock_execution, partition_key=partition, execution_id=uuid):
        raise error("execution_not_found")


def usable(handle: Handle) -> Handle:
    """The handle itself, where it stands for a lease this store can hold."""
    handle = check_handle(handle)
    if handle.kind is HandleKind.SUSPENDED:
        raise error("lease_conflict", "the lease ended with the suspension")
    row_key(handle.execution_id)
    return handle
