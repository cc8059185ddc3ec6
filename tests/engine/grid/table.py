"""The expected result of every operation in every state: a move, a refusal, or an answer without effect."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..state import (  # noqa: TID252
    ACTIVE,
    BACKING_OFF,
    CANCELLED,
    CANCELLED_BEFORE_FIRST_ATTEMPT,
    COMPLETED,
    EXPIRED_LEASE,
    FAILED,
    PARKED,
    REPLAYED,
    RESUMABLE,
    REVOKED,
    WAITING,
)
from .operations import HANDLE_CALLS, OPERATIONS, SERVICE_CALLS
from .states import EXPIRED, STATES

EXPIRED_BEFORE_FIRST_ATTEMPT = "terminal/unowned/not_applicable/none/expired/pending_first_attempt/expired"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The call changes the execution: the new state, the events, and the counters.

    The timestamps follow from these: a transition sets `last_transition_at` and `last_mutation_at`, any other change
    only the latter; the first lease sets `started_at`; reaching a terminal state sets `completed_at`.
    """

    answer: str
    to: str | None = None
    """The new vector; None if the state stays."""
    events: tuple[str, ...] = ()
    last: str | None = None
    """The new state of the latest attempt; None if it stays."""
    begins: bool = False
    """Whether a new attempt begins."""
    leases: bool = False
    """Whether a lease is issued, which raises the epoch by one."""
    retries: int = 0
    reclaims: int = 0
    replays: int = 0
    grants: str = "same"
    """How many grants are left: same, none, one, or any if the specification leaves it open."""
    is_transition: bool = True


@dataclass(frozen=True, slots=True)
class Refused:
    """The call is refused and changes nothing, except that it may mark an expired lease."""

    code: str
    marks: bool = False


@dataclass(frozen=True, slots=True)
class Same:
    """The call is answered and changes nothing."""

    answer: str


Expected = Moved | Refused | Same
Row = Mapping[str, Expected]

MARKED = Moved(answer="Marked", to=EXPIRED_LEASE, events=("expired",), is_transition=False)

ABSENT = ("absent",)
UNTRIED = (
    "waiting",
    "delayed",
    "limited",
    "paused",
    "waiting_children",
    "due",
    "past_deadline",
    "granted",
    "grant_expired",
)
TRIED = ("backing_off", "retryable")
BETWEEN = (*TRIED, "replayed")
"""No attempt is in progress, and a new one will follow."""
INTERRUPTED = ("parked", "parked_for_children", "parked_due", "resumable", "resume_granted")
RUNNABLE = (*UNTRIED, *BETWEEN, *INTERRUPTED)
HELD = ("active", "past_timeout", "past_last_timeout")
UNGRANTED = ("lease_expired", "lost_past_timeout", "lease_revoked")
LOST = (*UNGRANTED, "reclaim_granted")
ENDED = ("completed", "failed", "cancelled", "expired")
BLOCKED = ("limited", "paused")
LATER = (*BLOCKED, "delayed", "waiting_children", "due", "backing_off", "parked", "parked_for_children", "parked_due")
"""Runnable, but blocked, or not eligible until a time or until its dependencies are satisfied."""
NEW = ("waiting", "past_deadline")
AGAIN = ("retryable", "replayed")
EVERY = tuple(STATES)


def each(states: Iterable[str], expected: Expected) -> dict[str, Expected]:
    return dict.fromkeys(states, expected)


def whole(*parts: Row) -> Row:
    """One row of the table, with every state; later parts override earlier ones."""
    row: dict[str, Expected] = {}
    for part in parts:
        row.update(part)
    return {state: row[state] for state in STATES}


NOT_FOUND = each(ABSENT, Refused("execution_not_found"))
NOT_ACTIVE = Refused("execution_not_active")
LEASE_EXPIRED = Refused("lease_expired")


# Under a lease: the epoch, the phase, revocation and expiry are checked in this order.


def held(move: Moved, **repeats: Expected) -> Row:
    """A call that only the holder of a live lease may make."""
    return whole(
        NOT_FOUND,
        each((*RUNNABLE, *ENDED), NOT_ACTIVE),
        each(HELD, move),
        {"past_expiry": Refused("lease_expired", marks=True)},
        each(LOST, LEASE_EXPIRED),
        {"lease_revoked": Refused("lease_revoked")},
        repeats,
    )


def stale(code: str) -> Row:
    """A call with a lease of another epoch."""
    return whole(each(EVERY, Refused(code)), NOT_FOUND)


RENEWED = Moved(answer="Renewed", events=("renewed",), is_transition=False)
COMPLETING = Moved(answer="nothing", to=COMPLETED, events=("released completed>success",), last="ended_success")
COMPLETING_NAMED = Moved(answer="Completed", to=COMPLETED, events=("released completed>success",), last="ended_success")
RETRYING = Moved(
    answer="RetryScheduled",
    to=BACKING_OFF,
    events=("released failed_retry_scheduled",),
    last="ended_failure",
    retries=1,
)
FAILING = Moved(answer="TerminalFailed", to=FAILED, events=("released failed_terminal>failed",), last="ended_failure")
REPEATED_FAILURE: dict[str, Expected] = {
    **each(TRIED, Same("RetryScheduled")),
    "failed": Same("TerminalFailed"),
}
CANCELLING = Moved(answer="nothing", to=CANCELLED, events=("released cancelled>cancelled",), last="ended_cancelled")

BY_HANDLE: dict[str, Row] = {
    "renew": held(RENEWED),
    "renew_many": held(RENEWED),
    "progress": held(Moved(answer="nothing", is_transition=False)),
    "complete": held(COMPLETING, completed=Same("nothing")),
    "complete_many": held(COMPLETING_NAMED, completed=Same("Completed")),
    "fail": held(RETRYING, past_last_timeout=FAILING, **REPEATED_FAILURE),
    "fail permanently": held(FAILING, **REPEATED_FAILURE),
    "delay": held(Moved(answer="nothing", to=PARKED, events=("released worker_delay",), last="suspended")),
    "wait_children": held(
        Moved(answer="nothing", to=RESUMABLE, events=("released waiting_children",), last="suspended")
    ),
    "hand_back": held(Moved(answer="nothing", to=RESUMABLE, events=("released handed_back",), last="suspended")),
    "cancel": held(CANCELLING, cancelled=Same("nothing")),
}
BY_FENCE: dict[str, Row] = {
    "renew_lease": held(RENEWED),
    "complete_execution": held(COMPLETING_NAMED),
    "fail_execution": held(RETRYING, past_last_timeout=FAILING),
    "fail_execution permanently": held(FAILING),
}
WITHOUT_FENCE = whole(each(EVERY, Refused("invalid_input")))


# Claims.


FRESH = Moved(answer="Fresh", to=ACTIVE, events=("acquired",), begins=True, leases=True)
RESUMED = Moved(answer="Resumed", to=ACTIVE, events=("acquired claim_resumed",), last="started", leases=True)
RECLAIMED = Moved(
    answer="Reclaimed",
    to=ACTIVE,
    events=("reclaimed",),
    last="interrupted_reclaimed",
    begins=True,
    leases=True,
    reclaims=1,
)
MARKED_AND_RECLAIMED = Moved(
    answer="Reclaimed",
    to=ACTIVE,
    events=("expired", "reclaimed"),
    last="interrupted_reclaimed",
    begins=True,
    leases=True,
    reclaims=1,
)
# An expired grant counts as absent; the specification does not say when its row is deleted.
FRESH_PAST_A_GRANT = Moved(answer="Fresh", to=ACTIVE, events=("acquired",), begins=True, leases=True, grants="any")
SEARCHED = whole(
    each(EVERY, Same("nothing")),
    each((*NEW, "due", *AGAIN), FRESH),
    {"grant_expired": FRESH_PAST_A_GRANT},
    each(("resumable", "parked_due"), RESUMED),
    each(UNGRANTED, RECLAIMED),
    {"past_expiry": MARKED_AND_RECLAIMED},
)

GRANTED = Moved(answer="Granted", grants="one", is_transition=False)
GRANTED_DUE = Moved(answer="Granted", to=WAITING, grants="one")
MARKED_AND_GRANTED = Moved(answer="Granted", to=EXPIRED_LEASE, events=("expired",), grants="one", is_transition=False)
NOT_ELIGIBLE = Refused("execution_not_eligible")
NOT_LEASEABLE = Refused("execution_not_leaseable")
NOT_RESUMED = Refused("not_a_resumed_execution")
GRANT_EXISTS = Refused("grant_already_exists")
NO_GRANT = Refused("invalid_claim_grant")
NOT_RECLAIMABLE = Same("NotReclaimable")

CLAIM_EXECUTION: dict[str, Expected] = {
    **NOT_FOUND,
    **each((*LATER, *HELD, "past_expiry", *LOST, *ENDED), NOT_LEASEABLE),
    **each(("resumable", "resume_granted"), Refused("use_claim_resumed_execution")),
    **each((*NEW, *AGAIN), NO_GRANT),
}
CLAIM_RESUMED: dict[str, Expected] = {
    **NOT_FOUND,
    **each((*LATER, *HELD, "past_expiry", *LOST, *ENDED), NOT_LEASEABLE),
    **each((*NEW, "limited", "granted", "grant_expired", *AGAIN), NOT_RESUMED),
    "resumable": RESUMED,
}
RECLAIM: dict[str, Expected] = {
    **NOT_FOUND,
    **each((*RUNNABLE, *HELD, *ENDED), NOT_RECLAIMABLE),
    **each(("past_expiry", *UNGRANTED), Same("GrantNotFound")),
}
FUSED = Moved(
    answer="GrantedClaim",
    to=ACTIVE,
    events=("acquired issue_grant_and_claim",),
    begins=True,
    leases=True,
    grants="none",
)
FUSED_RESUMED = Moved(
    answer="GrantedClaim",
    to=ACTIVE,
    events=("acquired issue_grant_and_claim_resumed",),
    last="started",
    leases=True,
    grants="none",
)

BY_GRANT: dict[str, Row] = {
    "claim_for_worker": whole(
        each(EVERY, Same("NoWork")),
        each((*NEW, *AGAIN, "resumable", "grant_expired", *UNGRANTED), GRANTED),
        {"due": GRANTED_DUE, "parked_due": replace(GRANTED_DUE, to=RESUMABLE), "past_expiry": MARKED_AND_GRANTED},
    ),
    "scan_eligible_executions": whole(
        each(EVERY, Same("nothing")),
        each((*NEW, *AGAIN, "resumable", "grant_expired"), Same("found")),
    ),
    "issue_claim_grant": whole(
        NOT_FOUND,
        each((*LATER, *HELD, "past_expiry", *LOST, *ENDED), NOT_ELIGIBLE),
        each((*NEW, *AGAIN, "resumable", "grant_expired"), GRANTED),
        # A limit refuses no call that names the execution.
        {"limited": GRANTED_DUE},
        each(("granted", "resume_granted"), GRANT_EXISTS),
    ),
    "claim_execution": whole(
        CLAIM_EXECUTION,
        {
            "granted": replace(FRESH, grants="none"),
            "grant_expired": Refused("claim_grant_expired"),
            "reclaim_granted": replace(RECLAIMED, grants="none"),
        },
    ),
    "claim_execution, another worker": whole(CLAIM_EXECUTION, each(("granted", "grant_expired"), NO_GRANT)),
    "claim_resumed_execution": whole(
        CLAIM_RESUMED, {"limited": NOT_RESUMED, "resume_granted": replace(RESUMED, grants="none")}
    ),
    "claim_resumed_execution, another worker": whole(
        CLAIM_RESUMED, {"limited": NOT_RESUMED, "resume_granted": NO_GRANT}
    ),
    "claim_from_resume_grant": whole(
        each(EVERY, Same("nothing")),
        NOT_FOUND,
        {"resumable": NO_GRANT, "resume_granted": replace(RESUMED, grants="none")},
    ),
    "issue_grant_and_claim": whole(
        NOT_FOUND,
        each((*HELD, "past_expiry", *LOST, *ENDED), NOT_ELIGIBLE),
        each((*BLOCKED, "delayed", "waiting_children", "due", "backing_off"), Refused("execution_not_in_eligible_set")),
        each(("parked", "parked_for_children", "parked_due"), NOT_ELIGIBLE),
        each((*NEW, *AGAIN, "grant_expired"), FUSED),
        {"limited": FUSED, "resumable": FUSED_RESUMED},
        each(("granted", "resume_granted"), GRANT_EXISTS),
    ),
    "issue_reclaim_grant": whole(
        NOT_FOUND,
        each((*RUNNABLE, *HELD, *ENDED), NOT_RECLAIMABLE),
        {"past_expiry": MARKED_AND_GRANTED},
        each(UNGRANTED, GRANTED),
        {"reclaim_granted": GRANT_EXISTS},
    ),
    "reclaim_execution": whole(RECLAIM, {"reclaim_granted": replace(RECLAIMED, grants="none")}),
    "reclaim_execution, another worker": whole(RECLAIM, {"reclaim_granted": NO_GRANT}),
}


# Cancelling and time.


CANCELLED_UNHELD = Moved(answer="Cancelled", to=CANCELLED, events=("ended>cancelled",), grants="none")
CANCEL: dict[str, Expected] = {
    **NOT_FOUND,
    **each(UNTRIED, replace(CANCELLED_UNHELD, to=CANCELLED_BEFORE_FIRST_ATTEMPT)),
    "grant_expired": replace(CANCELLED_UNHELD, to=CANCELLED_BEFORE_FIRST_ATTEMPT, grants="any"),
    **each(BETWEEN, CANCELLED_UNHELD),
    **each((*INTERRUPTED, *LOST), replace(CANCELLED_UNHELD, last="ended_cancelled")),
    **each((*HELD, "past_expiry"), replace(CANCELLING, answer="Cancelled")),
    **each(("completed", "failed", "expired"), NOT_ACTIVE),
    "cancelled": Same("Cancelled"),
}
CANCEL_REVOKED: dict[str, Expected] = {"lease_revoked": Refused("lease_revoked")}
UNREVOKED = (*HELD, "past_expiry", "lease_expired", "lost_past_timeout", "reclaim_granted")
PROMOTED = Moved(answer="Promoted", to=WAITING)
RESUMING = Moved(answer="Promoted", to=RESUMABLE)
TIMED_OUT = Moved(
    answer="RetryScheduled",
    to=BACKING_OFF,
    events=("released expired:attempt_timeout",),
    last="ended_failure",
    retries=1,
)
TIMED_OUT_LOST = replace(TIMED_OUT, events=())
TIMED_OUT_LAST = Moved(
    answer="Expired", to=EXPIRED, events=("released expired:attempt_timeout>expired",), last="ended_failure"
)
LATE = Moved(answer="Expired", to=EXPIRED_BEFORE_FIRST_ATTEMPT, events=("ended>expired",))
EXPIRE: dict[str, Expected] = {
    **each(EVERY, Same("NotYetDue")),
    **each(ENDED, Same("AlreadyTerminal")),
    **NOT_FOUND,
}

REVOKING = Moved(answer="Revoked", to=REVOKED, events=("revoked x",), is_transition=False)
REVOKE: dict[str, Expected] = {
    **NOT_FOUND,
    **each((*RUNNABLE, *ENDED), Same("no_active_lease")),
    "past_expiry": replace(MARKED, answer="already_expired"),
    **each(("lease_expired", "lost_past_timeout", "reclaim_granted"), Same("already_expired")),
    "lease_revoked": Same("already_revoked"),
}
REPRIORITIZED = Moved(answer="Changed", events=("operator_action priority_changed",), is_transition=False)
REPLAYING = Moved(
    answer="Replayed", to=REPLAYED, events=("replay_initiated normal", "operator_action replayed"), replays=1
)


def _blocked(eligibility: str, public: str, same: str) -> Row:
    """A block of a runnable execution: the attempt stays, and so does the state if it has this block already."""

    def blocks(names: Iterable[str], attempt: str) -> dict[str, Expected]:
        to = f"runnable/unowned/{eligibility}/none/{attempt}/{public}"
        return each(names, Moved(answer="Blocked", to=to, grants="none"))

    return whole(
        each((*HELD, "past_expiry", *LOST), NOT_ELIGIBLE),
        each(ENDED, NOT_ACTIVE),
        NOT_FOUND,
        blocks(UNTRIED, "pending_first_attempt"),
        blocks(TRIED, "pending_retry_attempt"),
        blocks(("replayed",), "pending_replay_attempt"),
        blocks(INTERRUPTED, "attempt_interrupted"),
        {same: Moved(answer="Blocked", is_transition=False)},
    )


BY_ANYONE: dict[str, Row] = {
    "create_execution": whole(each(EVERY, Same("Duplicate")), {"absent": Moved(answer="Created", to=WAITING)}),
    "claim": SEARCHED,
    "claim_many": SEARCHED,
    "cancel_execution": whole(CANCEL),
    "cancel_execution, the holder": whole(CANCEL, CANCEL_REVOKED),
    "cancel_execution, a previous holder": whole(CANCEL, each(UNREVOKED, Refused("stale_lease")), CANCEL_REVOKED),
    "cancel_execution, a holder without a fence": whole(
        CANCEL, each(UNREVOKED, Refused("invalid_input")), CANCEL_REVOKED
    ),
    "replay_execution": whole(each(EVERY, Refused("execution_not_terminal")), NOT_FOUND, each(ENDED, REPLAYING)),
    "set_execution_tag": whole(each(EVERY, Moved(answer="nothing", is_transition=False)), NOT_FOUND),
    "mark_lease_expired_if_due": whole(
        each((*RUNNABLE, *ENDED), Same("not_active")),
        {"absent": Same("execution_not_found"), "past_expiry": MARKED, "lease_revoked": Same("already_revoked")},
        each(HELD, Same("not_yet_expired")),
        each(("lease_expired", "lost_past_timeout", "reclaim_granted"), Same("already_expired")),
    ),
    "revoke_lease": whole(REVOKE, each(HELD, REVOKING)),
    "revoke_lease, of another lease": whole(REVOKE, each(HELD, Refused("stale_lease"))),
    "revoke_lease, of another worker": whole(REVOKE, each(HELD, Same("different_worker_instance_id"))),
    "change_priority": whole(
        each(EVERY, NOT_ELIGIBLE),
        NOT_FOUND,
        each((*NEW, *AGAIN, "resumable", "granted", "grant_expired", "resume_granted"), REPRIORITIZED),
    ),
    "block_execution_for_admission, by a limit": _blocked(
        "blocked_by_quota/waiting_for_quota", "rate_limited", "limited"
    ),
    "block_execution_for_admission, by an operator": _blocked(
        "blocked_by_operator/paused_by_operator", "waiting", "paused"
    ),
    "unblock_execution": whole(
        each(EVERY, NOT_ELIGIBLE), NOT_FOUND, each(BLOCKED, Moved(answer="Unblocked", to=WAITING))
    ),
    "unblock_execution, another reason": whole(each(EVERY, NOT_ELIGIBLE), NOT_FOUND),
    "promote_delayed": whole(
        each(EVERY, Same("not_delayed")),
        {"absent": Same("execution_not_found"), "due": PROMOTED, "parked_due": RESUMING},
        each(("delayed", "backing_off", "parked"), Same("not_yet_due")),
    ),
    "expire_execution, timeout": whole(
        EXPIRE, {"past_timeout": TIMED_OUT, "lost_past_timeout": TIMED_OUT_LOST, "past_last_timeout": TIMED_OUT_LAST}
    ),
    "expire_execution, deadline": whole(EXPIRE, {"past_deadline": LATE}),
    "mark expired leases, sweep": whole(each(EVERY, Same("0")), {"past_expiry": replace(MARKED, answer="1")}),
    "promote delayed executions, sweep": whole(
        each(EVERY, Same("0")),
        {"due": replace(PROMOTED, answer="1"), "parked_due": replace(RESUMING, answer="1")},
    ),
    "unblock executions, sweep": whole(each(EVERY, Same("0")), {"limited": Moved(answer="1", to=WAITING)}),
    "expire overdue executions, sweep": whole(
        each(EVERY, Same("0")),
        {
            "past_timeout": replace(TIMED_OUT, answer="1"),
            "lost_past_timeout": replace(TIMED_OUT_LOST, answer="1"),
            "past_last_timeout": replace(TIMED_OUT_LAST, answer="1"),
            "past_deadline": replace(LATE, answer="1"),
        },
    ),
}

TABLE: Mapping[str, Row] = {
    **BY_ANYONE,
    **BY_GRANT,
    **BY_HANDLE,
    **{f"{name}, a previous holder": stale("lease_conflict") for name in HANDLE_CALLS},
    **BY_FENCE,
    **{f"{name}, a previous fence": stale("stale_lease") for name in SERVICE_CALLS},
    "complete_execution, an operator": BY_FENCE["complete_execution"],
    "fail_execution, an operator": BY_FENCE["fail_execution"],
    "complete_execution, without a fence": WITHOUT_FENCE,
    "fail_execution, without a fence": WITHOUT_FENCE,
}
assert set(TABLE) == set(OPERATIONS)
