"""Signal delivery: its checks in their order, and the effect of accepted signals on a suspension."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from flowfabric.model.errors import EngineError, error
from flowfabric.model.evaluation import SignalFacts, Tally
from flowfabric.model.ids import ExecutionId, SignalId, SuspensionId, WaitpointId
from flowfabric.model.resume import ResumePolicy, read_stored_resume_policy
from flowfabric.model.signal import (
    DEFAULT_SIGNAL_LIMIT,
    Accepted,
    NewSignal,
    SignalDisposition,
    SignalDuplicate,
    smallest_limit,
)
from flowfabric.model.states import LifecyclePhase, WaitpointState
from flowfabric.model.text import shown
from flowfabric.model.token import RingKey, WaitpointToken, verify_token

_TOKEN_FAILURES = frozenset({"missing_token", "invalid_token", "token_expired"})


@dataclass(frozen=True, slots=True)
class RefusedToken:
    """A rejected token: for which waitpoint, which may not exist, and when."""

    execution_id: ExecutionId
    waitpoint_id: WaitpointId
    at: int


@dataclass(kw_only=True, slots=True)
class Waitpoint:
    """A waitpoint as a delivery reads it."""

    waitpoint_id: WaitpointId
    waitpoint_key: str
    token: WaitpointToken
    state: WaitpointState
    suspension_id: SuspensionId | None
    activated_at: int | None
    expires_at: int | None
    signal_count: int


@dataclass(kw_only=True, slots=True)
class Wait:
    """An open suspension: what it waits for and which signals have counted so far."""

    suspension_id: SuspensionId
    waitpoint_ids: Sequence[WaitpointId]
    stored_policy: str
    tally: Tally
    satisfied_before: int
    """How many signals counted for the condition before this delivery."""
    has_uncounted: bool
    """Whether those are not yet in the tally."""
    satisfiers: list[SignalId] = field(default_factory=list)
    """The signals of this delivery that count for the condition."""

    @property
    def resume_policy(self) -> ResumePolicy:
        """What happens when the condition is met."""
        try:
            return read_stored_resume_policy(self.stored_policy)
        except (EngineError, msgspec.MsgspecError):
            raise error(
                "corruption", f"suspension: resume_policy: cannot be read, got {shown(self.stored_policy)}"
            ) from None


@dataclass(slots=True)
class Recorded:
    """An accepted signal, its waitpoint and its disposition."""

    signal: NewSignal
    waitpoint: Waitpoint
    disposition: SignalDisposition


@dataclass(kw_only=True, slots=True)
class DeliveryTarget:
    """An execution as the locked rows of a delivery show it; signals are accepted one after the other."""

    execution_id: ExecutionId
    phase: LifecyclePhase
    stored_limit: str | None
    """The stored signal limit of the execution's policy; 0 means no limit."""
    count: int
    waitpoints: Mapping[WaitpointId, Waitpoint]
    now: int
    wait: Wait | None = None
    recorded: list[Recorded] = field(default_factory=list)
    delivered: list[tuple[NewSignal, Accepted | SignalDuplicate]] = field(default_factory=list)
    """The signals that were not refused, in order; each is reported by an event."""
    counts: dict[WaitpointId, tuple[int, int]] = field(default_factory=dict)
    """For each waitpoint how many signals it accepted in this delivery, and how many of them matched the condition."""
    closing_signal: NewSignal | None = None
    """The signal that met the condition of a suspended execution."""
    delay_ms: int = 0
    """How long after the closing signal the execution becomes claimable."""
    refused: list[RefusedToken] = field(default_factory=list)
    """The rejected tokens."""

    def authenticate(self, signal: NewSignal, keys: Mapping[str, RingKey]) -> Waitpoint | EngineError:
        """Return the waitpoint of a signal, or the error if the token is not that waitpoint's own."""
        waitpoint = self.waitpoints.get(signal.waitpoint_id)
        if signal.is_trusted:
            return waitpoint or error("waitpoint_not_found")
        try:
            verify_token(
                signal.waitpoint_token,
                keys,
                execution_id=self.execution_id,
                waitpoint_id=signal.waitpoint_id,
                stored=None if waitpoint is None else waitpoint.token,
                now=self.now,
            )
        except EngineError as refused:
            if refused.code in _TOKEN_FAILURES:
                self.refused.append(RefusedToken(self.execution_id, signal.waitpoint_id, self.now))
            return refused
        assert waitpoint is not None, "a token verifies only against a stored one"
        return waitpoint

    def accept(
        self, signal: NewSignal, waitpoint: Waitpoint, earlier: SignalId | None
    ) -> Accepted | SignalDuplicate | EngineError:
        """Accept the next authenticated signal, or return why not; `earlier` is a stored signal that it duplicates."""
        earlier = earlier or self._repeated(signal)
        if earlier is not None:
            duplicate = SignalDuplicate(existing_signal_id=earlier)
            self.delivered.append((signal, duplicate))
            return duplicate
        try:
            disposition = self._accepted(signal, waitpoint)
        except EngineError as refused:
            return refused
        self.count += 1
        waitpoint.signal_count += 1
        self.recorded.append(Recorded(signal, waitpoint, disposition))
        accepted, matched = self.counts.get(signal.waitpoint_id, (0, 0))
        self.counts[signal.waitpoint_id] = accepted + 1, matched + disposition.is_matched
        answer = Accepted(signal_id=signal.id, effect=disposition.effect, disposition=disposition)
        self.delivered.append((signal, answer))
        return answer

    def _accepted(self, signal: NewSignal, waitpoint: Waitpoint) -> SignalDisposition:
        self._check_open(waitpoint)
        limit = smallest_limit(signal.max_signals_per_execution, self._limit)
        if limit is not None and self.count >= limit:
            raise error(
                "signal_limit_exceeded",
                f"the execution has accepted {self.count} signals, its limit is {limit};"
                " raise max_signals_per_execution",
            )
        return self._disposition(signal, waitpoint)

    @property
    def _limit(self) -> int:
        if self.stored_limit is None:
            return DEFAULT_SIGNAL_LIMIT
        try:
            return int(self.stored_limit)
        except ValueError:
            raise error(
                "corruption", f"policy: max_signals_per_execution: cannot be read, got {shown(self.stored_limit)}"
            ) from None

    def _repeated(self, signal: NewSignal) -> SignalId | None:
        for known in self.recorded:
            is_same_key = (
                signal.dedup_key is not None
                and known.signal.dedup_key == signal.dedup_key
                and known.signal.waitpoint_id == signal.waitpoint_id
            )
            if is_same_key or known.signal.id == signal.id:
                return known.signal.id
        return None

    def _check_open(self, waitpoint: Waitpoint) -> None:
        if self.phase is LifecyclePhase.TERMINAL:
            raise error("target_not_signalable", f"execution {self.execution_id} has ended and accepts no signals")
        match waitpoint.state:
            case WaitpointState.ACTIVE:
                return
            case WaitpointState.PENDING if waitpoint.expires_at is None or waitpoint.expires_at > self.now:
                return
            case WaitpointState.PENDING:
                raise error(
                    "waitpoint_closed", f"waitpoint {waitpoint.waitpoint_id} has expired and accepts no signals"
                )
        # waitpoint_closed if no wait ever used the waitpoint, target_not_signalable if its wait is over.
        if self.phase is LifecyclePhase.SUSPENDED or waitpoint.activated_at is None:
            raise error("waitpoint_closed", f"waitpoint {waitpoint.waitpoint_id} is closed and accepts no signals")
        raise error("target_not_signalable", f"the wait on waitpoint {waitpoint.waitpoint_id} is over")

    def _disposition(self, signal: NewSignal, waitpoint: Waitpoint) -> SignalDisposition:
        if waitpoint.state is WaitpointState.PENDING:
            return SignalDisposition.BUFFERED_FOR_PENDING_WAITPOINT
        wait = self.wait
        if wait is None or wait.suspension_id != waitpoint.suspension_id:
            return SignalDisposition.NO_OP
        # Read before anything is counted: an unreadable policy rejects the signal.
        policy = wait.resume_policy
        disposition = wait.tally.count(
            SignalFacts(
                signal_id=signal.id,
                signal_name=signal.signal_name,
                waitpoint_key=waitpoint.waitpoint_key,
                source_type=signal.source_type,
                source_identity=signal.source_identity,
            )
        )
        if disposition.is_satisfier:
            wait.satisfiers.append(signal.id)
        is_met = disposition is SignalDisposition.RESUME_CONDITION_SATISFIED
        if is_met and self.phase is LifecyclePhase.SUSPENDED:
            self._close(signal, wait)
            self.delay_ms = policy.delay_ms(signal.resume_delay_ms)
        return disposition

    def _close(self, signal: NewSignal, wait: Wait) -> None:
        self.closing_signal = signal
        self.phase = LifecyclePhase.RUNNABLE
        for waitpoint in self.waitpoints.values():
            if waitpoint.waitpoint_id in wait.waitpoint_ids:
                waitpoint.state = WaitpointState.CLOSED
