"""What operators do with executions of the model."""

from abc import ABC, abstractmethod

from .model_values import Execution, Refusal

Answer = tuple[object, ...]


class Operators(ABC):
    """The operations of operators: revokes, priorities, replays."""

    now: int

    @abstractmethod
    def find(self, name: str) -> Execution:
        """The execution of a name."""

    @abstractmethod
    def mark_if_expired(self, one: Execution) -> bool:
        """Mark the lease as expired if it is; return whether it was."""

    def revoke_lease(self, name: str) -> Answer:
        one = self.find(name)
        if one.phase != "active":
            return "AlreadySatisfied", "no_active_lease"
        if self.mark_if_expired(one) or one.ownership == "lease_expired_reclaimable":
            return "AlreadySatisfied", "already_expired"
        if one.ownership == "lease_revoked":
            return "AlreadySatisfied", "already_revoked"
        one.ownership, one.blocking = "lease_revoked", "waiting_for_worker"
        one.attempt_state, one.mutation_at = "attempt_interrupted", self.now
        one.add_event("revoked x")
        return ("Revoked",)

    def change_priority(self, name: str, priority: int) -> Answer:
        one = self.find(name)
        if one.eligibility != "eligible_now":
            raise Refusal("execution_not_eligible")
        clamped = max(0, min(priority, 9000))
        if clamped != one.priority:
            one.priority, one.mutation_at = clamped, self.now
            one.add_event("operator_action priority_changed")
        return "Changed", name

    def replay_execution(self, name: str) -> Answer:
        self.find(name).replay(self.now)
        return ("Replayed",)
