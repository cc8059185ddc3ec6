"""The reasons of lost leases agree with the moves that end leases."""

from flowfabric.engine.core.transition import Move
from flowfabric.engine.core.wakeups import LostReason
from flowfabric.worker.faults import _LOSSES

BY_THE_HOLDER = {
    Move.DELAYED,
    Move.WAITING_CHILDREN,
    Move.CHILDREN_DONE,
    Move.HANDED_BACK,
    Move.NOT_STARTED,
    Move.SUSPENDED,
}
"""Moves that only a call of the lease's holder makes."""
WITHOUT_A_LEASE = {
    Move.SUSPENSION_FAILED,
    Move.SUSPENSION_CANCELLED,
    Move.SUSPENSION_EXPIRED,
    Move.SKIPPED_UNATTEMPTED,
}
"""Moves of executions that have no lease."""
NOT_A_MOVE = {LostReason.RECLAIMED, LostReason.NOT_RENEWED, LostReason.ATTEMPT_TIMEOUT, LostReason.UNKNOWN}


def test_every_move_that_takes_a_lease_away_is_a_reason_with_the_same_name_and_value() -> None:
    moves = {move.name: move.value for move in set(Move) - BY_THE_HOLDER - WITHOUT_A_LEASE}
    reasons = {reason.name: reason.value for reason in set(LostReason) - NOT_A_MOVE}
    assert reasons == moves


def test_every_reason_has_a_text_for_the_log() -> None:
    assert _LOSSES.keys() == set(LostReason)
