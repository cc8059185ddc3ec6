"""Cancellation of executions: by the lease holder, or by a source that may override the lease."""

from uuid import UUID

from flowfabric.db.batch import Locked
from flowfabric.db.database import Transaction
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.row import LockedExecution, Verdict, check_lease_handle, lock_execution, not_active
from flowfabric.engine.core.transition import Move
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.execution import Cancelled
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, check_storable, parse_execution_id, parse_uuid
from flowfabric.model.states import CancelSource, PublicState
from flowfabric.model.text import check_text

_OVERRIDING_SOURCES = frozenset(
    {CancelSource.OPERATOR_OVERRIDE, CancelSource.FLOW_CASCADE, CancelSource.SYSTEM_TIMEOUT}
)
"""Sources that may cancel a running execution without the fence of its lease."""


class Cancel:
    """The cancel operations."""

    def __init__(self, store: Store, lease_ends: LeaseEnds) -> None:
        self._store = store
        self._lease_ends = lease_ends

    async def cancel(self, handle: Handle, reason: str) -> None:
        """Cancel an execution as its lease holder; cancelling the same run again changes nothing."""
        handle = check_lease_handle(handle)
        reason = check_text(reason, "reason")
        lease_end = LeaseEnd(
            handle.execution_id,
            Move.CANCELLED,
            fence=handle,
            reason=reason,
            source=CancelSource.LEASE_HOLDER,
        )
        verdict = await self._lease_ends.one(lease_end)
        found = verdict.found
        is_repeat = found is not None and found.terminal_outcome == "cancelled" and found.is_run_of(handle)
        if not verdict.is_done and not is_repeat:
            raise verdict.refusal()

    async def cancel_execution(
        self,
        *,
        execution_id: ExecutionId | str,
        reason: str,
        source: str = CancelSource.OPERATOR_OVERRIDE,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
    ) -> Cancelled:
        """Cancel an execution in any state that is not terminal; cancelling it again changes nothing."""
        parsed = parse_execution_id(execution_id)
        reason = check_text(reason, "reason")
        source = check_text(source, "source") or CancelSource.OPERATOR_OVERRIDE
        if lease_epoch is not None and type(lease_epoch) is not int:
            raise error("invalid_input", f"lease_epoch: must be an integer, got {lease_epoch!r}")
        expected_lease = parse_uuid(lease_id, "lease_id") if lease_id else None
        expected_attempt = parse_uuid(attempt_id, "attempt_id") if attempt_id else None
        check_storable(parsed)

        def check(locked: LockedExecution) -> None:
            if locked.lifecycle_phase == "terminal":
                raise not_active(locked.found)
            if locked.lifecycle_phase != "active" or source in _OVERRIDING_SOURCES:
                return
            if locked.ownership_state == "lease_revoked":
                raise error("lease_revoked")
            if expected_lease is None or lease_epoch is None:
                raise error(
                    "invalid_input",
                    f"fence_required: source {source!r} may cancel a running execution only with its lease_id and"
                    f" lease_epoch; give both, or use source {CancelSource.OPERATOR_OVERRIDE.value!r}",
                )
            fence = (
                ("lease_id", locked.lease_id, expected_lease),
                ("lease_epoch", locked.lease_epoch, lease_epoch),
                ("attempt_id", locked.attempt_id, expected_attempt or locked.attempt_id),
            )
            for name, found, given in fence:
                if found != given:
                    raise error("stale_lease", f"{name}: the current run has {found}, got {given}")

        async def end(transaction: Transaction) -> tuple[list[LeaseEnd], list[Verdict | Locked]]:
            locked = await lock_execution(transaction, parsed)
            if locked.terminal_outcome == "cancelled":
                return [], []
            check(locked)
            is_lease_lost = locked.lifecycle_phase == "active" and source != CancelSource.LEASE_HOLDER
            lease_end = LeaseEnd(
                parsed,
                Move.CANCELLED,
                reason=reason,
                source=source,
                lost_epoch=locked.lease_epoch if is_lease_lost else None,
            )
            return [lease_end], await self._lease_ends.within(transaction, [lease_end])

        lease_ends, verdicts = await self._store.transact(end, execution_id=parsed)
        await self._lease_ends.after_commit(lease_ends, verdicts)
        return Cancelled(execution_id=parsed, public_state=PublicState.CANCELLED)
