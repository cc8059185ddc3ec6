"""Revoking leases: an operator takes an execution away from its worker without ending it."""

from typing import TypeAlias
from uuid import UUID

from flowfabric.db.batch import Locked
from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.row import LockedExecution, Verdict, lock_execution
from flowfabric.engine.core.transition import Move
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.ids import ExecutionId, LeaseId, parse_execution_id, parse_uuid, row_key
from flowfabric.model.lease import AlreadySatisfied, Revoked
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.model.text import check_text

SQL = statements_beside(__file__)

DEFAULT_REASON = "operator_revoke"

_LOST = {
    OwnershipState.LEASE_REVOKED: "already_revoked",
    OwnershipState.LEASE_EXPIRED_RECLAIMABLE: "already_expired",
}

Ended: TypeAlias = tuple[list[LeaseEnd], list[Verdict | Locked]]


class Revoke:
    """The revoke operation."""

    def __init__(self, store: Store, lease_ends: LeaseEnds) -> None:
        self._store = store
        self._lease_ends = lease_ends

    async def revoke_lease(
        self,
        execution_id: ExecutionId | str,
        *,
        expected_lease_id: UUID | str | None = None,
        worker_instance_id: str | None = None,
        reason: str | None = None,
    ) -> Revoked | AlreadySatisfied:
        """Take the lease of an execution from its holder at once, so that the next claim takes the execution over.

        A lease that has expired is marked as expired instead.
        """
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        expected = LeaseId(parse_uuid(expected_lease_id, "expected_lease_id")) if expected_lease_id else None
        owner = "" if worker_instance_id is None else check_text(worker_instance_id, "worker_instance_id")
        text = DEFAULT_REASON if reason is None else check_text(reason, "reason") or DEFAULT_REASON

        async def end(transaction: Transaction, move: Move, reason: str | None = None) -> Ended:
            lease_ends = [LeaseEnd(parsed, move, reason=reason)]
            return lease_ends, await self._lease_ends.within(transaction, lease_ends)

        async def revoke(transaction: Transaction) -> tuple[Revoked | AlreadySatisfied, Ended]:
            locked = await lock_execution(transaction, parsed)
            if (unheld := _why_unheld(locked)) is not None:
                return AlreadySatisfied(reason=unheld), ([], [])
            if locked.has_expired:
                lease_ends, verdicts = await end(transaction, Move.LEASE_EXPIRED)
                # A renewal that was in progress has extended it otherwise.
                if _is_done(verdicts):
                    return AlreadySatisfied(reason="already_expired"), (lease_ends, verdicts)
            if owner:
                (row,) = await transaction.fetch(SQL.read_owner, partition_key=partition, execution_id=uuid)
                if row["worker_instance_id"] != owner:
                    return AlreadySatisfied(reason="different_worker_instance_id"), ([], [])
            assert locked.lease_id is not None, "a leased execution has a lease"
            if expected is not None and expected != locked.lease_id:
                raise error("stale_lease", f"expected_lease_id: the lease is {locked.lease_id}, got {expected}")
            revoked = Revoked(lease_id=LeaseId(locked.lease_id), lease_epoch=locked.lease_epoch)
            return revoked, await end(transaction, Move.LEASE_REVOKED, text)

        answer, (lease_ends, verdicts) = await self._store.transact(revoke, execution_id=parsed)
        await self._lease_ends.after_commit(lease_ends, verdicts)
        return answer


def _why_unheld(locked: LockedExecution) -> str | None:
    """Why there is no lease to revoke; None if there is one."""
    if locked.lifecycle_phase != LifecyclePhase.ACTIVE or locked.ownership_state == OwnershipState.UNOWNED:
        return "no_active_lease"
    return _LOST.get(OwnershipState(locked.ownership_state))


def _is_done(verdicts: list[Verdict | Locked]) -> bool:
    return any(isinstance(verdict, Verdict) and verdict.is_done for verdict in verdicts)
