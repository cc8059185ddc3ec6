"""What becomes of signals: the checks of a delivery in their order, and what those accepted do to a wait."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flowfabric.model.conditions import Condition
from flowfabric.model.errors import EngineError, error
from flowfabric.model.evaluation import SignalDisposition, SignalFacts, Tally
from flowfabric.model.ids import ExecutionId, SignalId, SuspensionId, WaitpointId
from flowfabric.model.signals import Accepted, NewSignal, SignalDuplicate, smallest_limit
from flowfabric.model.states import LifecyclePhase, WaitpointState
from flowfabric.model.suspension import ResumePolicy
from flowfabric.model.tokens import RingKey, WaitpointToken, verify_token

_TOKEN_FAILURES = frozenset({"missing_token", "invalid_token", "token_expired"})


@dataclass(kw_only=True, slots=True)
class Waitpoint:
    """A waitpoint as deliveries find it."""

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
    """An open suspension: what it waits for and what has come so far."""

    suspension_id: SuspensionId
    waitpoint_ids: frozenset[WaitpointId]
    resume_policy: ResumePolicy
    tally: Tally
    satisfiers: list[SignalId]

    @classmethod
    def of(
        cls,
        suspension_id: SuspensionId,
        waitpoint_ids: Iterable[WaitpointId],
        condition: Condition,
        resume_policy: ResumePolicy,
        satisfiers: Iterable[SignalFacts],
    ) -> "Wait":
        """Give the wait of a condition that earlier signals have added to."""
        wait = cls(
            suspension_id=suspension_id,
            waitpoint_ids=frozenset(waitpoint_ids),
            resume_policy=resume_policy,
            tally=Tally(condition),
            satisfiers=[],
        )
        for facts in satisfiers:
            wait.tally.take(facts)
            wait.satisfiers.append(facts.signal_id)
        return wait


@dataclass(frozen=True, slots=True)
class Recorded:
    """A signal that was accepted, where, and as what."""

    signal: NewSignal
    waitpoint: Waitpoint
    disposition: SignalDisposition


@dataclass(kw_only=True, slots=True)
class Addressee:
    """An execution as the rows that a delivery holds show it; signals are taken one after the other."""

    execution_id: ExecutionId
    phase: LifecyclePhase
    limit: int | None
    """What the policy of the execution sets; 0 sets none."""
    count: int
    waitpoints: Mapping[WaitpointId, Waitpoint]
    wait: Wait | None
    now: int
    recorded: list[Recorded] = field(default_factory=list)
    closer: NewSignal | None = None
    """The signal that met the condition of a suspended execution."""
    has_token_failure: bool = False
    """Whether a token was refused at a waitpoint of this execution."""

    @property
    def counts(self) -> dict[WaitpointId, tuple[int, int]]:
        """How many signals each waitpoint has taken, and how many of them the condition asks for."""
        counts: dict[WaitpointId, tuple[int, int]] = {}
        for record in self.recorded:
            taken, matched = counts.get(record.waitpoint.waitpoint_id, (0, 0))
            counts[record.waitpoint.waitpoint_id] = taken + 1, matched + record.disposition.is_matched
        return counts

    def take(
        self, signal: NewSignal, keys: Mapping[str, RingKey], earlier: SignalId | None
    ) -> Accepted | SignalDuplicate:
        """Judge the next signal; `earlier` is the stored signal that it repeats."""
        waitpoint = self._authenticated(signal, keys)
        earlier = earlier or self._repeated(signal)
        if earlier is not None:
            return SignalDuplicate(existing_signal_id=earlier)
        self._check_open(waitpoint)
        limit = smallest_limit(signal.max_signals_per_execution, self.limit)
        if limit is not None and self.count >= limit:
            raise error("signal_limit_exceeded", f"the execution has taken {self.count} signals, its limit is {limit}")
        disposition = self._disposition(signal, waitpoint)
        self.count += 1
        waitpoint.signal_count += 1
        self.recorded.append(Recorded(signal, waitpoint, disposition))
        return Accepted(signal_id=signal.id, effect=disposition.effect, disposition=disposition)

    def _authenticated(self, signal: NewSignal, keys: Mapping[str, RingKey]) -> Waitpoint:
        waitpoint = self.waitpoints.get(signal.waitpoint_id)
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
            if waitpoint is not None and refused.code in _TOKEN_FAILURES:
                self.has_token_failure = True
            raise
        assert waitpoint is not None, "no token passes without a stored one"
        return waitpoint

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
            raise error("target_not_signalable")
        match waitpoint.state:
            case WaitpointState.ACTIVE:
                return
            case WaitpointState.PENDING if waitpoint.expires_at is None or waitpoint.expires_at > self.now:
                return
            case WaitpointState.PENDING:
                raise error("waitpoint_closed")
        # A waitpoint that was closed before any wait used it says so; one of a wait that is over says that it is over.
        if self.phase is LifecyclePhase.SUSPENDED or waitpoint.activated_at is None:
            raise error("waitpoint_closed")
        raise error("target_not_signalable")

    def _disposition(self, signal: NewSignal, waitpoint: Waitpoint) -> SignalDisposition:
        if waitpoint.state is WaitpointState.PENDING:
            return SignalDisposition.BUFFERED_FOR_PENDING_WAITPOINT
        wait = self.wait
        if wait is None or wait.suspension_id != waitpoint.suspension_id:
            return SignalDisposition.NO_OP
        disposition = wait.tally.take(
            SignalFacts(
                signal_id=signal.id,
                signal_name=signal.signal_name,
                waitpoint_key=waitpoint.waitpoint_key,
                source_type=signal.source_type,
                source_identity=signal.source_identity,
            )
        )
        if disposition.is_adding:
            wait.satisfiers.append(signal.id)
        is_met = disposition is SignalDisposition.RESUME_CONDITION_SATISFIED
        if is_met and self.phase is LifecyclePhase.SUSPENDED:
            self._close(signal, wait)
        return disposition

    def _close(self, signal: NewSignal, wait: Wait) -> None:
        self.closer = signal
        self.phase = LifecyclePhase.RUNNABLE
        for waitpoint in self.waitpoints.values():
            if waitpoint.waitpoint_id in wait.waitpoint_ids:
                waitpoint.state = WaitpointState.CLOSED
