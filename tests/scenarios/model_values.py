"""The values of the model: executions, attempts, leases, grants and policies, and what steps choose from."""

from dataclasses import dataclass, field
from typing import Any

DAY_MS = 86_400_000
GRANT_MEMORY_MS = 600_000
LOST = ("lease_expired_reclaimable", "lease_revoked")

# What a step chooses from.
NTH = (0, 0, 1, 2, 3, 4, 5)
"""The place of a lease or execution among those known; the ones with the most possible operations come first."""
NAMES = (*NTH, -1)
"""The place of an execution; -1 is one that does not exist."""
START = 1_800_000_000_000
"""The time at which every run of the machine begins."""
LANES = ("north", "south")
LANE_SETS = (("north",), ("south",), LANES)
WORKERS = ("ann", "bob", "cyd")
OFFERS = ((), ("gpu",))
KINDS = (None, None, ("job",), ("other", "job"))
TTLS = (1_000, 30_000)
CLASSES = ("transient", "transient", "timeout", "infra_crash", "permanent", "cancelled")


class Refusal(Exception):
    """A refusal of an operation with this code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy of an execution; None for a field that is omitted."""

    max_retries: int | None = None
    delay_ms: int | None = None
    """A fixed backoff; None: it doubles from a second up to a minute."""
    categories: tuple[str, ...] = ()
    timeout_ms: int | None = None
    max_reclaims: int | None = None
    max_replays: int | None = None

    def as_json(self) -> dict[str, object]:
        """The policy as the argument of a create."""
        found: dict[str, object] = {}
        if self.max_retries is not None:
            retry: dict[str, object] = {"max_retries": self.max_retries, "retryable_categories": list(self.categories)}
            if self.delay_ms is not None:
                retry["backoff"] = {"type": "fixed", "delay_ms": self.delay_ms}
            found["retry_policy"] = retry
        if self.timeout_ms is not None:
            found["timeout_policy"] = {"attempt_timeout_ms": self.timeout_ms}
        if self.max_reclaims is not None:
            found["max_reclaim_count"] = self.max_reclaims
        if self.max_replays is not None:
            found["max_replay_count"] = self.max_replays
        return found

    def backoff_ms(self, retries: int, category: str) -> int | None:
        """The milliseconds before the next attempt; None if there is no further attempt."""
        if self.max_retries is None or retries >= self.max_retries or category in ("permanent", "cancelled"):
            return None
        if self.categories and category not in self.categories:
            return None
        return min(1000 * 2**retries, 60_000) if self.delay_ms is None else self.delay_ms


@dataclass(frozen=True)
class Lease:
    """A lease as its worker remembers it."""

    execution: str
    epoch: int
    attempt: int
    ttl_ms: int


@dataclass
class Attempt:
    """An attempt of an execution."""

    type: str
    state: str
    started_at: int
    ended_at: int | None = None
    reason: str | None = None
    category: str | None = None
    previous: int | None = None


@dataclass
class Grant:
    """A reservation of an execution for one worker."""

    kind: str
    worker: str
    expires_at: int
    is_purged: bool = False


@dataclass
class Execution:
    """An execution with its attempts and events."""

    name: str
    lane: str
    priority: int
    order: int
    policy: Policy | None
    required: frozenset[str]
    kind: str
    deadline_at: int | None
    phase: str = "runnable"
    ownership: str = "unowned"
    eligibility: str = "eligible_now"
    blocking: str = "waiting_for_worker"
    outcome: str = "none"
    attempt_state: str = "pending_first_attempt"
    epoch: int = 0
    retries: int = 0
    reclaims: int = 0
    replays: int = 0
    delay_until: int | None = None
    lease_expires_at: int | None = None
    timeout_at: int | None = None
    remaining_ms: int | None = None
    started_at: int | None = None
    completed_at: int | None = None
    transition_at: int = 0
    mutation_at: int = 0
    reason: str | None = None
    """Why it failed, expired or was cancelled."""
    cancelled_by: str | None = None
    progress: int | None = None
    holds_attempt: bool = False
    """Whether the row still names the latest attempt; a scheduled retry clears it."""
    grant: Grant | None = None
    attempts: list[Attempt] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    @property
    def public(self) -> str:
        """The public state."""
        if self.phase == "terminal":
            return {"success": "completed"}.get(self.outcome, self.outcome)
        if self.phase == "active":
            return "active"
        if self.eligibility == "not_eligible_until_time":
            return "delayed"
        return "resumable" if self.attempt_state == "attempt_interrupted" else "waiting"

    @property
    def vector(self) -> str:
        """The seven state dimensions."""
        stored = (self.phase, self.ownership, self.eligibility, self.blocking, self.outcome, self.attempt_state)
        return "/".join((*stored, self.public))

    @property
    def is_claimable(self) -> bool:
        """Whether a search can find it."""
        return self.eligibility == "eligible_now" or self.ownership in LOST

    @property
    def reclaim_limit(self) -> int:
        """How often it can be reclaimed."""
        if self.policy is None:
            return 1000
        return 100 if self.policy.max_reclaims is None else self.policy.max_reclaims

    @property
    def replay_limit(self) -> int:
        """How often it can be replayed."""
        return 10 if self.policy is None or self.policy.max_replays is None else self.policy.max_replays

    def replay(self, now: int) -> None:
        """Make an ended execution claimable again: its next attempt is a new one, with all retries."""
        if self.phase != "terminal":
            raise Refusal("execution_not_terminal")
        if self.replays >= self.replay_limit:
            raise Refusal("max_replays_exhausted")
        self.replays, self.retries, self.reclaims, self.holds_attempt = self.replays + 1, 0, 0, False
        self.phase, self.eligibility, self.blocking, self.outcome = (
            "runnable",
            "eligible_now",
            "waiting_for_worker",
            "none",
        )
        self.attempt_state = "pending_replay_attempt"
        self.completed_at = self.reason = self.cancelled_by = None
        self.deadline_at = self.deadline_at if self.deadline_at is not None and self.deadline_at > now else None
        self.transition_at = self.mutation_at = now
        self.add_event("replay_initiated normal")
        self.add_event("operator_action replayed")

    def add_event(self, event: str) -> None:
        """Add an event with the current epoch."""
        self.events.append(f"{event} in {self.epoch}")


POLICIES = (
    None,
    Policy(),
    Policy(max_retries=2, delay_ms=1000, timeout_ms=20_000),
    Policy(max_retries=9, delay_ms=0),
    Policy(max_retries=1, categories=("timeout", "transient"), timeout_ms=40_000, max_reclaims=1),
    Policy(max_retries=3, max_reclaims=0, max_replays=1),
)


def identity(worker: str) -> dict[str, Any]:
    """The arguments that name a worker."""
    return {"worker_id": worker, "worker_instance_id": worker}
