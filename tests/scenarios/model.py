"""A model of the engine in plain objects: what every operation should do, without a database or concurrency.

It uses no code of the engine. A lease is identified by its epoch; time is a number that the caller moves. Operations
return tuples or raise `Refusal` with the error code of the engine.
"""

from collections.abc import Iterable, Sequence

from .model_operators import Answer, Operators
from .model_values import DAY_MS, GRANT_MEMORY_MS, LOST, Attempt, Execution, Grant, Lease, Policy, Refusal

EXEMPT = ("operator_override", "flow_cascade", "system_timeout")

Lanes = Sequence[str]
Kinds = Sequence[str] | None


class Model(Operators):
    """All executions and the time."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.executions: dict[str, Execution] = {}
        self.keys: dict[tuple[str, str], tuple[str, int]] = {}

    # Creating and finding.

    def create(
        self,
        name: str,
        *,
        lane: str,
        priority: int,
        policy: Policy | None,
        required: Iterable[str],
        kind: str,
        delay_until: int | None,
        deadline_at: int | None,
        key: str | None,
    ) -> Answer:
        owner, counts_until = self.keys.get((lane, key or ""), ("", self.now))
        if counts_until > self.now:
            first = self.executions[owner]
            # A policy of defaults equals no policy.
            same_policy = (first.policy or Policy()) == (policy or Policy())
            if not same_policy or (first.kind, first.required) != (kind, frozenset(required)):
                raise Refusal("idempotency_conflict")
            return "Duplicate", owner
        if name in self.executions:
            return "Duplicate", name
        made = Execution(
            name,
            lane,
            max(0, min(priority, 9000)),
            len(self.executions),
            policy,
            frozenset(required),
            kind,
            deadline_at,
            transition_at=self.now,
            mutation_at=self.now,
        )
        if delay_until is not None and delay_until > self.now:
            made.eligibility, made.blocking = "not_eligible_until_time", "waiting_for_delay"
            made.delay_until = delay_until
        self.executions[name] = made
        if key is not None:
            self.keys[lane, key] = name, self.now + DAY_MS
        return "Created", name, made.public

    def find(self, name: str) -> Execution:
        if name not in self.executions:
            raise Refusal("execution_not_found")
        return self.executions[name]

    def live_grant(self, execution: Execution) -> Grant | None:
        grant = execution.grant
        return grant if grant is not None and grant.expires_at > self.now else None

    # Claiming.

    def search(self, lanes: Lanes, offered: Iterable[str], kinds: Kinds) -> list[Execution]:
        """The claimable executions for a worker, the best first."""
        found = [
            one
            for one in self.executions.values()
            if one.lane in lanes
            and one.is_claimable
            and one.required <= frozenset(offered)
            and (kinds is None or one.kind in kinds)
            and self.live_grant(one) is None
        ]
        return sorted(found, key=lambda one: (-one.priority, one.order))

    def claim(self, lanes: Lanes, offered: Iterable[str], kinds: Kinds, limit: int, ttl_ms: int) -> list[Answer]:
        claimed: list[Answer] = []
        for one in self.search(lanes, offered, kinds):
            if len(claimed) == limit:
                break
            if one.ownership in LOST and one.reclaims >= one.reclaim_limit:
                self.end_at_reclaim_limit(one)
            elif one.ownership in LOST:
                claimed.append(self.reclaim(one, ttl_ms))
            elif one.attempt_state == "attempt_interrupted":
                claimed.append(self.resume(one, ttl_ms, "claim_resumed"))
            else:
                claimed.append(self.start_attempt(one, ttl_ms, None))
        return claimed

    def claim_for_worker(self, lane: str, worker: str, offered: Iterable[str], kinds: Kinds, ttl_ms: int) -> Answer:
        for one in self.search((lane,), offered, kinds):
            if one.ownership in LOST and one.reclaims >= one.reclaim_limit:
                self.end_at_reclaim_limit(one)
                continue
            kind = "reclaim" if one.ownership in LOST else "claim"
            return self._grant(one, kind, worker, ttl_ms)
        return ("NoWork",)

    def issue_claim_grant(self, name: str, worker: str, offered: Iterable[str], ttl_ms: int) -> Answer:
        one = self.find(name)
        if one.phase != "runnable" or one.eligibility != "eligible_now":
            raise Refusal("execution_not_eligible")
        if self.live_grant(one):
            raise Refusal("grant_already_exists")
        if not one.required <= frozenset(offered):
            one.mutation_at = self.now
            raise Refusal("capability_mismatch")
        return self._grant(one, "claim", worker, ttl_ms)

    def claim_execution(self, name: str, worker: str, ttl_ms: int) -> Answer:
        one = self.find(name)
        grant = one.grant
        live = self.live_grant(one)
        if one.ownership in LOST and live and (live.kind, live.worker) == ("reclaim", worker):
            one.grant = None
            if one.reclaims >= one.reclaim_limit:
                self.end_at_reclaim_limit(one)
                return "ReclaimCapExceeded", name
            return self.reclaim(one, ttl_ms)
        if one.phase != "runnable" or one.eligibility != "eligible_now":
            raise Refusal("execution_not_leaseable")
        if one.attempt_state == "attempt_interrupted":
            raise Refusal("use_claim_resumed_execution")
        if grant is None or grant.is_purged or grant.worker != worker:
            raise Refusal("invalid_claim_grant")
        if grant.expires_at <= self.now:
            raise Refusal("claim_grant_expired")
        return self.start_attempt(one, ttl_ms, None)

    def claim_resumed_execution(self, name: str, worker: str, ttl_ms: int) -> Answer:
        one = self.find(name)
        if one.phase != "runnable" or one.eligibility != "eligible_now":
            raise Refusal("execution_not_leaseable")
        if one.attempt_state != "attempt_interrupted":
            raise Refusal("not_a_resumed_execution")
        grant = self.live_grant(one)
        if grant is not None and grant.worker != worker:
            raise Refusal("invalid_claim_grant")
        return self.resume(one, ttl_ms, "claim_resumed")

    def issue_grant_and_claim(self, name: str, ttl_ms: int) -> Answer:
        one = self.find(name)
        if one.phase != "runnable":
            raise Refusal("execution_not_eligible")
        if self.live_grant(one):
            raise Refusal("grant_already_exists")
        if one.eligibility != "eligible_now":
            raise Refusal("execution_not_eligible or execution_not_in_eligible_set")
        if one.attempt_state == "attempt_interrupted":
            return self.resume(one, ttl_ms, "issue_grant_and_claim_resumed")
        return self.start_attempt(one, ttl_ms, "issue_grant_and_claim")

    def issue_reclaim_grant(self, name: str, worker: str, offered: Iterable[str], ttl_ms: int) -> Answer:
        one = self.find(name)
        self.mark_if_expired(one)
        if one.ownership not in LOST:
            return "NotReclaimable", name
        if one.reclaims >= one.reclaim_limit:
            self.end_at_reclaim_limit(one)
            return "ReclaimCapExceeded", name
        if self.live_grant(one):
            raise Refusal("grant_already_exists")
        if not one.required <= frozenset(offered):
            one.mutation_at = self.now
            return "NotReclaimable", name
        return self._grant(one, "reclaim", worker, ttl_ms)

    def reclaim_execution(self, name: str, worker: str, ttl_ms: int) -> Answer:
        one = self.find(name)
        is_expired = one.ownership == "leased" and (one.lease_expires_at or 0) <= self.now
        if one.ownership not in LOST and not is_expired:
            return "NotReclaimable", name
        grant = self.live_grant(one)
        if grant is None:
            return "GrantNotFound", name
        if grant.worker != worker:
            raise Refusal("invalid_claim_grant")
        one.grant = None
        if one.reclaims >= one.reclaim_limit:
            self.end_at_reclaim_limit(one)
            return "ReclaimCapExceeded", name
        return self.reclaim(one, ttl_ms)

    def _grant(self, one: Execution, kind: str, worker: str, ttl_ms: int) -> Answer:
        one.grant, one.mutation_at = Grant(kind, worker, self.now + ttl_ms), self.now
        return "Granted", one.name

    def start_attempt(self, one: Execution, ttl_ms: int, reason: str | None) -> Answer:
        """Lease an execution for a new attempt."""
        types = {"pending_retry_attempt": "retry", "pending_replay_attempt": "replay"}
        previous = len(one.attempts) - 1 if one.attempts else None
        one.attempts.append(Attempt(types.get(one.attempt_state, "initial"), "started", self.now, previous=previous))
        return self._lease(one, "Fresh", ttl_ms, f"acquired {reason}" if reason else "acquired")

    def resume(self, one: Execution, ttl_ms: int, reason: str) -> Answer:
        """Lease an execution to continue its attempt."""
        one.attempts[-1].state = "started"
        return self._lease(one, "Resumed", ttl_ms, f"acquired {reason}")

    def reclaim(self, one: Execution, ttl_ms: int) -> Answer:
        """Lease an execution whose lease was lost: its attempt ends and a new one starts."""
        self._end_attempt(one, "interrupted_reclaimed", f"lease_{one.ownership}", None)
        one.attempts.append(Attempt("reclaim", "started", self.now, previous=len(one.attempts) - 1))
        one.reclaims += 1
        return self._lease(one, "Reclaimed", ttl_ms, "reclaimed")

    def _lease(self, one: Execution, kind: str, ttl_ms: int, event: str) -> Answer:
        is_new = kind != "Resumed"
        timeout_ms = (one.policy.timeout_ms if one.policy else None) if is_new else one.remaining_ms
        one.timeout_at = None if timeout_ms is None else self.now + timeout_ms
        one.remaining_ms = None
        one.epoch += 1
        one.lease_expires_at = self.now + ttl_ms
        one.delay_until = one.grant = None
        one.holds_attempt = True
        if one.started_at is None:
            one.started_at = self.now
        self._move(one, "active", "leased", "not_applicable", "none", "none", "running_attempt")
        one.add_event(event)
        return kind, one.name, one.epoch, len(one.attempts) - 1, one.attempts[-1].type, self.now + ttl_ms

    # Under a lease.

    def check(self, lease: Lease, stale: str) -> Execution:
        """The execution of a lease that is still valid."""
        one = self.find(lease.execution)
        if one.epoch != lease.epoch:
            raise Refusal(stale)
        return self.check_live(one)

    def check_live(self, one: Execution) -> Execution:
        """The execution itself, if it is leased."""
        if one.phase != "active":
            raise Refusal("execution_not_active")
        if one.ownership == "lease_revoked":
            raise Refusal("lease_revoked")
        self.mark_if_expired(one)
        if one.ownership != "leased":
            raise Refusal("lease_expired")
        return one

    def find_if_latest(self, lease: Lease) -> Execution | None:
        """The execution of a lease if no other attempt has started since."""
        one = self.find(lease.execution)
        is_last = one.epoch == lease.epoch and one.holds_attempt and lease.attempt == len(one.attempts) - 1
        return one if is_last else None

    def renew(self, lease: Lease, stale: str = "lease_conflict", ttl_ms: int | None = None) -> Answer:
        one = self.check(lease, stale)
        one.lease_expires_at = self.now + (lease.ttl_ms if ttl_ms is None else ttl_ms)
        one.mutation_at = self.now
        one.add_event("renewed")
        return "Renewed", one.lease_expires_at, one.epoch

    def report(self, lease: Lease, percent: int) -> Answer:
        one = self.check(lease, "lease_conflict")
        one.progress, one.mutation_at = percent, self.now
        return ("done",)

    def complete(self, lease: Lease) -> Answer:
        try:
            self._complete(self.check(lease, "lease_conflict"))
        except Refusal as refusal:
            one = self.find_if_latest(lease)
            if refusal.code != "execution_not_active" or one is None or one.outcome != "success":
                raise
        return ("done",)

    def complete_execution(self, name: str, lease: Lease | None) -> Answer:
        one = self.check(lease, "stale_lease") if lease else self.check_live(self.find(name))
        self._complete(one)
        return "Completed", one.name

    def _complete(self, one: Execution) -> None:
        self._end_attempt(one, "ended_success", None, None)
        self._end(one, "success", None, "completed")

    def fail(self, lease: Lease, reason: str, category: str) -> Answer:
        try:
            return self._fail(self.check(lease, "lease_conflict"), reason, category)
        except Refusal as refusal:
            if refusal.code != "execution_not_active":
                raise
            last = self.find_if_latest(lease)
            if last is not None and last.outcome == "failed":
                return ("TerminalFailed",)
            one = self.find(lease.execution)
            if one.attempt_state == "pending_retry_attempt" and one.phase == "runnable":
                return "RetryScheduled", one.delay_until or one.transition_at
            raise

    def fail_execution(self, name: str, lease: Lease | None, reason: str, category: str) -> Answer:
        one = self.check(lease, "stale_lease") if lease else self.check_live(self.find(name))
        return self._fail(one, reason, category)

    def _fail(self, one: Execution, reason: str, category: str) -> Answer:
        backoff = one.policy.backoff_ms(one.retries, category) if one.policy else None
        self._end_attempt(one, "ended_failure", reason, category)
        if backoff is None:
            self._end(one, "failed", reason, "failed_terminal")
            return ("TerminalFailed",)
        return self._retry(one, backoff, "failed_retry_scheduled")

    def _retry(self, one: Execution, backoff: int, event: str) -> Answer:
        was_leased = one.ownership == "leased"
        one.retries, one.holds_attempt = one.retries + 1, False
        self._clear_lease(one)
        one.delay_until = self.now + backoff if backoff else None
        later = ("not_eligible_until_time", "waiting_for_retry_backoff", "none", "pending_retry_attempt")
        soon = ("eligible_now", "waiting_for_worker", "none", "pending_retry_attempt")
        self._move(one, "runnable", "unowned", *(later if backoff else soon))
        if was_leased:
            one.add_event(f"released {event}")
        return "RetryScheduled", self.now + backoff

    def delay(self, lease: Lease, until: int) -> Answer:
        one = self.check(lease, "lease_conflict")
        self._release(one, "worker_delay")
        one.delay_until = until
        later = ("not_eligible_until_time", "waiting_for_delay", "none", "attempt_interrupted")
        self._move(one, "runnable", "unowned", *later)
        return ("done",)

    def wait_children(self, lease: Lease, event: str = "waiting_children") -> Answer:
        one = self.check(lease, "lease_conflict")
        self._release(one, event)
        self._move(one, "runnable", "unowned", "eligible_now", "waiting_for_worker", "none", "attempt_interrupted")
        return ("done",)

    def _release(self, one: Execution, event: str) -> None:
        remaining = None if one.timeout_at is None else max(one.timeout_at - self.now, 1)
        self._clear_lease(one)
        one.remaining_ms = remaining
        one.attempts[-1].state = "suspended"
        one.add_event(f"released {event}")

    # Cancelling.

    def cancel(self, lease: Lease, reason: str) -> Answer:
        try:
            self._cancel(self.check(lease, "lease_conflict"), reason, "lease_holder")
        except Refusal as refusal:
            one = self.find_if_latest(lease)
            if refusal.code != "execution_not_active" or one is None or one.outcome != "cancelled":
                raise
        return ("done",)

    def cancel_execution(self, name: str, reason: str, source: str, lease: Lease | None) -> Answer:
        one = self.find(name)
        if one.outcome == "cancelled":
            return "Cancelled", name
        if one.phase == "terminal":
            raise Refusal("execution_not_active")
        if one.phase == "active" and source not in EXEMPT:
            if one.ownership == "lease_revoked":
                raise Refusal("lease_revoked")
            if lease is None:
                raise Refusal("invalid_input")
            if lease.epoch != one.epoch:
                raise Refusal("stale_lease")
        self._cancel(one, reason, source)
        return "Cancelled", name

    def _cancel(self, one: Execution, reason: str, source: str) -> None:
        self._end_attempt(one, "ended_cancelled", f"cancelled: {reason}", None)
        self._end(one, "cancelled", reason, "cancelled")
        one.cancelled_by = source

    # Time.

    def mark_if_expired(self, one: Execution) -> bool:
        """Mark the lease as expired if it is; return whether it was."""
        if one.ownership != "leased" or (one.lease_expires_at or 0) > self.now:
            return False
        one.ownership, one.blocking = "lease_expired_reclaimable", "waiting_for_worker"
        one.attempt_state, one.mutation_at = "attempt_interrupted", self.now
        one.add_event("expired")
        return True

    def mark_lease_expired_if_due(self, name: str) -> Answer:
        if name not in self.executions:
            return "AlreadySatisfied", "execution_not_found"
        one = self.executions[name]
        if self.mark_if_expired(one):
            return ("Marked",)
        if one.phase != "active":
            return "AlreadySatisfied", "not_active"
        reasons = {"lease_revoked": "already_revoked", "leased": "not_yet_expired"}
        return "AlreadySatisfied", reasons.get(one.ownership, "already_expired")

    def promote_if_due(self, one: Execution) -> bool:
        """Make a delayed execution claimable if its delay is over; return whether it was."""
        if one.eligibility != "not_eligible_until_time" or (one.delay_until or 0) > self.now:
            return False
        one.delay_until = None
        self._move(one, "runnable", "unowned", "eligible_now", "waiting_for_worker", "none", one.attempt_state)
        return True

    def promote_delayed(self, name: str) -> Answer:
        if name not in self.executions:
            return "AlreadySatisfied", "execution_not_found"
        one = self.executions[name]
        if one.eligibility != "not_eligible_until_time":
            return "AlreadySatisfied", "not_delayed"
        return ("Promoted", one.public) if self.promote_if_due(one) else ("AlreadySatisfied", "not_yet_due")

    def expire(self, one: Execution, phase: str) -> Answer:
        """Expire an execution whose attempt timeout or deadline has passed."""
        if one.phase == "terminal":
            return ("AlreadyTerminal",)
        if phase == "execution_deadline":
            if one.deadline_at is None or one.deadline_at > self.now:
                return ("NotYetDue",)
        elif one.phase != "active" or one.timeout_at is None or one.timeout_at > self.now:
            return ("NotYetDue",)
        self._end_attempt(one, "ended_failure", phase, "timeout")
        if phase == "attempt_timeout":
            backoff = one.policy.backoff_ms(one.retries, "timeout") if one.policy else None
            if backoff is not None:
                return self._retry(one, backoff, f"expired:{phase}")
        self._end(one, "expired", phase, f"expired:{phase}")
        return "Expired", one.name

    def expire_execution(self, name: str, phase: str) -> Answer:
        return self.expire(self.find(name), phase)

    def sweep(self, what: str) -> int:
        """Run one sweep; return how many executions it has changed."""
        every = self.executions.values()
        if what == "leases":
            return sum(self.mark_if_expired(one) for one in every)
        if what == "delays":
            return sum(self.promote_if_due(one) for one in every)
        for grant in filter(None, [one.grant for one in every]):
            grant.is_purged = grant.expires_at + GRANT_MEMORY_MS <= self.now
        done = ("Expired", "RetryScheduled")
        return sum(
            self.expire(one, "execution_deadline")[0] in done or self.expire(one, "attempt_timeout")[0] in done
            for one in every
        )

    # Shared by the operations.

    def end_at_reclaim_limit(self, one: Execution) -> None:
        """Fail an execution that was reclaimed too often."""
        reason = "max_reclaims_exceeded"
        self._end_attempt(one, "interrupted_reclaimed", reason, None)
        self._end(one, "failed", reason, None)
        one.events[-1] = f"released {reason}>failed in {one.epoch}"

    def _end(self, one: Execution, outcome: str, reason: str | None, event: str | None) -> None:
        was_leased = one.ownership == "leased"
        self._clear_lease(one)
        one.delay_until = None
        one.completed_at, one.reason = self.now, reason
        attempt_state = "attempt_terminal" if one.attempts else one.attempt_state
        self._move(one, "terminal", "unowned", "not_applicable", "none", outcome, attempt_state)
        one.add_event(f"released {event}>{outcome}" if was_leased and event else f"ended>{outcome}")

    def _end_attempt(self, one: Execution, state: str, reason: str | None, category: str | None) -> None:
        if one.attempt_state in ("running_attempt", "attempt_interrupted"):
            attempt = one.attempts[-1]
            attempt.state, attempt.ended_at = state, self.now
            attempt.reason, attempt.category = reason, category

    @staticmethod
    def _clear_lease(one: Execution) -> None:
        one.lease_expires_at = one.timeout_at = one.remaining_ms = None
        one.grant = None

    def _move(
        self, one: Execution, phase: str, ownership: str, eligibility: str, blocking: str, outcome: str, attempt: str
    ) -> None:
        one.phase, one.ownership, one.eligibility = phase, ownership, eligibility
        one.blocking, one.outcome, one.attempt_state = blocking, outcome, attempt
        one.transition_at = one.mutation_at = self.now
