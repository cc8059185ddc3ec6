"""A model of flows in plain objects: what the end of each member means for the others, without a database.

It uses no code of the engine. Edges are resolved one by one, in the order of the ends. Members are numbers; time is a
number that the caller moves.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

HOUR_MS = 3_600_000
MAX_REPLAYS = 10
FAILED_OUTCOMES = ("failed", "cancelled", "expired")
_ENDED = {"success": "completed"}
_PUBLIC = {
    "active": "active", "lost": "active", "blocked": "waiting_children", "held": "waiting", "held lost": "active",
}  # fmt: skip
_RUNNABLE = ("waiting", "delayed", "blocked")


class Refusal(Exception):
    """An operation that the engine refuses with this code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class Member:
    """A member of the flow; `phase` is waiting, active, lost (active without its lease), delayed, suspended, blocked,
    held or held lost (by the cancellation of the flow), or ended."""

    payload: bytes
    phase: str = "waiting"
    is_interrupted: bool = False
    outcome: str | None = None
    result: bytes | None = None
    delay_until: int | None = None
    deadline_ms: int | None = None
    deadline_at: int | None = None
    replays: int = 0
    ends: list[str] = field(default_factory=list)

    @property
    def public(self) -> str:
        """The public state."""
        if self.outcome is not None:
            return _ENDED.get(self.outcome, self.outcome)
        if self.phase == "waiting":
            return "resumable" if self.is_interrupted else "waiting"
        return _PUBLIC.get(self.phase, self.phase)

    @property
    def is_held(self) -> bool:
        """Whether the cancellation of its flow holds it back from claims."""
        return self.phase in ("held", "held lost")

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.outcome is None


@dataclass
class Edge:
    """A dependency of `down` on `up`; edges are resolved in the order in which they were staged."""

    key: str
    up: int
    down: int
    has_data: bool
    state: str = "staged"


@dataclass
class Group:
    """The inbound edges of a member."""

    policy: str = "all_of"
    k: int = 1
    cancels_siblings: bool = False
    staged: int = 0
    applied: int = 0
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    state: str = "pending"
    is_flagged: bool = False
    siblings: set[int] = field(default_factory=set)
    reason: str | None = None

    @property
    def needed(self) -> int:
        """How many successes decide it."""
        return self.staged if self.policy == "all_of" else self.k

    @property
    def resolved(self) -> int:
        """How many of its edges are resolved."""
        return self.succeeded + self.failed + self.skipped


class GraphModel:
    """One flow."""

    def __init__(self, now: int, derived: str) -> None:
        self.now = now
        self.members: list[Member] = []
        self.edges: list[Edge] = []
        self.groups: dict[int, Group] = {}
        self.queue: list[tuple[int, str]] = []
        """The ends that are not settled, with their outcomes."""
        self.live = 0
        self.failed = 0
        self.derived = derived
        self.is_cancelled = False
        self.owed: set[int] = set()
        """The members that the cancelled flow is still to cancel."""

    # The graph.

    def add(self, member: Member) -> int:
        """Add a member; return its number."""
        if self.is_cancelled:
            raise Refusal("flow_already_terminal")
        self.members.append(member)
        self._count(live=1)
        return len(self.members) - 1

    def stage(self, edge: Edge) -> None:
        """Stage an edge."""
        if self.is_cancelled:
            raise Refusal("flow_already_terminal")
        self.edges.append(edge)
        self.groups.setdefault(edge.down, Group()).staged += 1

    def apply(self, edge: Edge) -> None:
        """Make a staged edge effective; it is resolved at once if its upstream has ended."""
        group, child, up = self.groups[edge.down], self.members[edge.down], self.members[edge.up]
        edge.state = "unsatisfied"
        group.applied += 1
        if group.state == "pending" and child.phase in _RUNNABLE:
            child.phase = "blocked"
        if up.outcome is not None:
            self.resolve(edge, up.outcome)

    # Members.

    def claim(self, number: int) -> None:
        """Lease a member that waits or whose lease was lost."""
        member = self.members[number]
        member.phase, member.is_interrupted, member.delay_until = "active", False, None

    def end(self, number: int, outcome: str, result: bytes | None = None) -> None:
        """End a live member."""
        member = self.members[number]
        assert member.is_live, "a member ends once"
        member.phase, member.outcome, member.result = "ended", outcome, result
        member.ends.append(outcome)
        self.queue.append((number, outcome))

    def release(self, number: int, phase: str, delay_until: int | None = None) -> None:
        """Let an active member give up its lease and continue later."""
        member = self.members[number]
        member.phase, member.is_interrupted, member.delay_until = phase, True, delay_until

    def wait_children(self, number: int) -> None:
        """Let an active member wait for its unresolved edges, if these still decide whether it runs."""
        group = self.groups.get(number)
        waits = group is not None and group.state == "pending" and group.applied > group.resolved
        self.release(number, "blocked" if waits else "waiting")

    def pass_time(self, ms: int) -> None:
        """Let time pass: every lease is lost, delays elapse, deadlines expire."""
        self.now += ms
        for number, member in enumerate(self.members):
            if member.phase == "active":
                member.phase = "lost"
            elif member.phase == "delayed" and (member.delay_until or 0) <= self.now:
                member.phase, member.delay_until = "waiting", None
            if member.is_live and member.deadline_at is not None and member.deadline_at <= self.now:
                self.end(number, "expired")

    def cancel_header(self, policy: str) -> None:
        """Cancel the flow, and hold back those of the members that the policy covers that could be claimed."""
        self.is_cancelled = True
        for number, member in enumerate(self.members):
            if member.is_live and (
                policy == "cancel_all" or (policy == "cancel_pending" and member.phase in _RUNNABLE)
            ):
                self.owed.add(number)
                if member.phase in _RUNNABLE:
                    member.phase, member.delay_until = "held", None
                elif member.phase == "lost":
                    member.phase = "held lost"

    def cancel_owed(self) -> None:
        """Cancel the members that the cancelled flow is still to cancel."""
        for number in sorted(self.owed):
            if self.members[number].is_live:
                self.end(number, "cancelled")
        self.owed.clear()

    def cancel_flow(self, policy: str) -> None:
        """Cancel the flow, and the members that the policy covers."""
        self.cancel_header(policy)
        self.cancel_owed()

    # Resolution.

    def settle(self, ended: Iterable[tuple[int, str]]) -> None:
        """Settle queued ends in this order."""
        for number, outcome in ended:
            self.queue.remove((number, outcome))
            for edge in self._behind(number):
                self.resolve(edge, outcome)
            self._count(live=-1, failed=int(outcome in FAILED_OUTCOMES))

    def resolve_those(self, number: int, outcome: str, is_resolved: Callable[[Edge], bool]) -> None:
        """Resolve some of the edges behind a queued end, and count it later."""
        for edge in self._behind(number):
            if edge.state == "unsatisfied" and is_resolved(edge):
                self.resolve(edge, outcome)

    def _behind(self, number: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.up == number]

    def resolve(self, edge: Edge, outcome: str) -> None:
        """Resolve an applied edge; an edge is resolved once."""
        if edge.state != "unsatisfied":
            return
        is_success = outcome == "success"
        edge.state = "satisfied" if is_success else "impossible"
        group, child, up = self.groups[edge.down], self.members[edge.down], self.members[edge.up]
        bucket = {"success": "succeeded", "skipped": "skipped"}.get(outcome, "failed")
        setattr(group, bucket, getattr(group, bucket) + 1)
        if group.state != "pending":
            return
        if group.succeeded >= group.needed:
            group.state = "satisfied"
        elif group.failed + group.skipped > group.staged - group.needed:
            group.state = "impossible"
        copies = is_success and (group.state == "satisfied" or (group.policy == "all_of" and group.state == "pending"))
        if copies and edge.has_data and up.result is not None and child.is_live:
            child.payload = up.result
        if group.state != "pending":
            self._fire(edge.down, group)

    def _fire(self, number: int, group: Group) -> None:
        child = self.members[number]
        if group.cancels_siblings:
            group.is_flagged = True
            group.reason = f"sibling_quorum_{group.state}"
            group.siblings = {edge.up for edge in self.edges if edge.down == number and self.members[edge.up].is_live}
        if group.state == "satisfied" and child.phase == "blocked":
            self._promote(child)
        elif group.state == "impossible" and child.is_live and not child.is_held:
            self.end(number, "skipped")

    def _promote(self, child: Member) -> None:
        is_delayed = child.delay_until is not None and child.delay_until > self.now
        child.phase = "delayed" if is_delayed else "waiting"
        if not is_delayed:
            child.delay_until = None

    def reconcile(self) -> None:
        """Resolve the edges of blocked members whose upstreams have ended."""
        found = [
            (edge, outcome)
            for edge in self.edges
            if edge.state == "unsatisfied"
            and self.members[edge.down].phase == "blocked"
            and (outcome := self.members[edge.up].outcome) is not None
        ]
        for edge, outcome in found:
            self.resolve(edge, outcome)

    def drain_siblings(self, numbers: Sequence[int] | None = None) -> None:
        """Cancel the siblings of these flagged groups, or of all."""
        for number, group in self.groups.items():
            if group.is_flagged and (numbers is None or number in numbers):
                for sibling in sorted(group.siblings):
                    if self.members[sibling].is_live:
                        self.end(sibling, "cancelled")
                group.is_flagged, group.siblings = False, set()

    def reconcile_siblings(self) -> None:
        """Clear the flags of groups without a live sibling."""
        for group in self.groups.values():
            if group.is_flagged and not any(self.members[sibling].is_live for sibling in group.siblings):
                group.is_flagged, group.siblings = False, set()

    # Replay.

    def replay(self, number: int) -> str:
        """Let an ended member run again; return its public state. Its end must be settled."""
        member = self.members[number]
        if member.outcome is None:
            raise Refusal("execution_not_terminal")
        if member.replays >= MAX_REPLAYS:
            raise Refusal("max_replays_exhausted")
        assert number not in [queued for queued, _ in self.queue]
        group = self.groups.get(number)
        group = group if group is not None and group.applied else None
        was = member.outcome
        waits, succeeded = False, list[Edge]()
        if group is not None and (group.state == "impossible" or was == "skipped"):
            succeeded = self._reset(number, group)
            waits = group.staged > group.succeeded
        elif group is not None and group.state == "pending":
            # Once a member waits for an applied edge, its staged ones count too.
            waits = group.staged > group.resolved
        member.phase = "blocked" if waits else "waiting"
        member.outcome, member.result, member.is_interrupted, member.delay_until = None, None, False, None
        if member.deadline_ms is not None and (member.deadline_at or 0) <= self.now:
            member.deadline_at = self.now + member.deadline_ms
        member.replays += 1
        self.owed.discard(number)
        for other in self.groups.values():
            other.siblings.discard(number)
        self._count(live=1, failed=-int(was in FAILED_OUTCOMES), now_live="blocked" if waits else "open")
        for edge in succeeded if waits else ():
            self.resolve(edge, "success")
        return member.public

    def _reset(self, number: int, group: Group) -> list[Edge]:
        """Make the impossible edges of a group unsatisfied; return those whose upstream has succeeded since.

        There are none of these if more successes are needed than there are edges: the next result skips the member.
        """
        reset = [edge for edge in self.edges if edge.down == number and edge.state == "impossible"]
        for edge in reset:
            edge.state = "unsatisfied"
        group.state, group.failed, group.skipped = "pending", 0, 0
        group.is_flagged, group.siblings, group.reason = False, set(), None
        is_too_small = group.needed > group.staged
        return [edge for edge in reset if self.members[edge.up].outcome == "success" and not is_too_small]

    def _count(self, *, live: int, failed: int = 0, now_live: str = "open") -> None:
        self.live += live
        self.failed += failed
        if self.live > 0:
            self.derived = now_live if self.derived in ("completed", "failed") else self.derived
        else:
            self.derived = "failed" if self.failed > 0 else "completed"
