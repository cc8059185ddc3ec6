"""Batches of signals of one execution, and the parameters and rows of the statements that deliver them."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import array_text, full_columns, short_columns
from flowfabric.engine.wait.resume import Resume
from flowfabric.model.condition import read_stored_condition
from flowfabric.model.delivery import DeliveryTarget, Wait, Waitpoint
from flowfabric.model.errors import EngineError
from flowfabric.model.evaluation import SignalFacts, Tally, outline_of
from flowfabric.model.ids import ExecutionId, SignalId, SuspensionId, WaitpointId, split_execution_id
from flowfabric.model.signal import Accepted, NewSignal, ReportedEffect, SignalDuplicate, SignalEffect
from flowfabric.model.states import LifecyclePhase, WaitpointState
from flowfabric.model.token import WaitpointToken

Delivered: TypeAlias = Accepted | SignalDuplicate

_DELIVERY_COLUMNS = ("partition_keys", "execution_ids", "waitpoint_ids", "signal_ids", "idempotency_keys", "are_first")
_SIGNAL_COLUMNS = (
    "partition_keys",
    "execution_ids",
    "signal_ids",
    "suspension_ids",
    "waitpoint_ids",
    "waitpoint_keys",
    "signal_names",
    "signal_categories",
    "source_types",
    "source_identities",
    "correlation_ids",
    "idempotency_keys",
    "target_scopes",
    "created_ats",
    "effects",
    "dispositions",
    "payloads",
    "payload_encodings",
)
_COUNT_COLUMNS = ("counted_partitions", "counted_waitpoints", "accepted", "matched")
_WAIT_COLUMNS = ("waiting_partitions", "waiting_executions", "waiting_suspensions", "satisfiers")
_EVENT_COLUMNS = ("event_partitions", "event_executions", "event_details")
_KEY_COLUMNS = ("key_partitions", "key_waitpoints", "keys", "key_signals", "key_expiries")
_PHASES = {phase.value: phase for phase in LifecyclePhase}
_STATES = {state.value: state for state in WaitpointState}
_REPORTED = {
    SignalEffect.APPENDED_TO_WAITPOINT: ReportedEffect.APPENDED_TO_WAITPOINT,
    SignalEffect.RESUME_CONDITION_SATISFIED: ReportedEffect.SATISFIED,
    SignalEffect.BUFFERED_FOR_PENDING_WAITPOINT: ReportedEffect.BUFFERED,
}
_encode = msgspec.json.Encoder().encode


class SignalBatch:
    """Signals of one execution that are delivered in one transaction, in the order they arrived."""

    MAX_SIGNALS = 100
    MAX_BYTES = 1_048_576

    __slots__ = ("_answers", "_bytes", "execution_id", "key", "signals")

    def __init__(self, execution_id: ExecutionId, signals: Iterable[NewSignal] = ()) -> None:
        self.execution_id = execution_id
        self.key = split_execution_id(execution_id)
        self.signals = list(signals)
        self._answers: list[asyncio.Future[Delivered]] = []
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the next signal needs another batch: one statement must hold all signals of a batch."""
        return len(self.signals) >= self.MAX_SIGNALS or self._bytes >= self.MAX_BYTES

    def add(self, signal: NewSignal) -> "asyncio.Future[Delivered]":
        """Add a signal; return the future of its outcome, which its sender may cancel without affecting the others."""
        answer: asyncio.Future[Delivered] = asyncio.get_running_loop().create_future()
        self.signals.append(signal)
        self._answers.append(answer)
        self._bytes += len(signal.payload or b"")
        return answer

    def refuse(self, refusals: Mapping[int, EngineError]) -> None:
        """Fail the signals at these positions and remove them from the batch."""
        for at, refusal in refusals.items():
            if not self._answers[at].done():
                self._answers[at].set_exception(refusal)
        kept = [at for at in range(len(self.signals)) if at not in refusals]
        self.signals = [self.signals[at] for at in kept]
        self._answers = [self._answers[at] for at in kept]

    def answer(self, delivered: "asyncio.Future[list[Delivered | EngineError]]") -> None:
        """Resolve the future of every sender with its outcome, or with the fault that failed the whole batch."""
        fault = delivered.exception()
        answers = [fault] * len(self.signals) if fault is not None else delivered.result()
        for waiting, answer in zip(self._answers, answers, strict=True):
            if waiting.done():
                continue
            if isinstance(answer, BaseException):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)


def delivery_columns(batches: Sequence[SignalBatch]) -> Mapping[str, object]:
    """The parameters of `read_deliveries`. Generated signal ids are passed as None: they cannot be duplicates."""
    rows = [
        (*batch.key, signal.waitpoint_id, None if signal.is_minted else signal.id, signal.dedup_key, position == 0)
        for batch in batches
        for position, signal in enumerate(batch.signals)
    ]
    return short_columns(_DELIVERY_COLUMNS, rows)


def key_rows(first: Record) -> list[dict[str, object]]:
    """The signing keys, which the first row of `read_deliveries` carries."""
    columns = [first[name] or () for name in ("kids", "secrets", "are_current", "installed_ats", "key_expiries")]
    names = ("kid", "secret", "is_current", "installed_at", "expires_at")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def target_of(batch: SignalBatch, phase: str, rows: Sequence[Record]) -> DeliveryTarget:
    """The delivery target of a batch, without its wait, which is read only after a signal is authenticated."""
    waitpoints: dict[WaitpointId, Waitpoint] = {}
    for signal, row in zip(batch.signals, rows, strict=True):
        if (state := row["state"]) is not None:
            waitpoints[signal.waitpoint_id] = Waitpoint(
                waitpoint_id=signal.waitpoint_id,
                waitpoint_key=row["waitpoint_key"],
                token=WaitpointToken(row["token"]),
                state=_STATES[state],
                suspension_id=row["waitpoint_suspension_id"],
                activated_at=row["activated_at"],
                expires_at=row["expires_at"],
                signal_count=row["signal_count"],
            )
    first = rows[0]
    return DeliveryTarget(
        execution_id=batch.execution_id,
        phase=_PHASES[phase],
        stored_limit=first["signal_limit"],
        count=first["signals_accepted"],
        waitpoints=waitpoints,
        now=first["now"],
    )


def wait_of(row: Record) -> Wait | None:
    """The open suspension of an execution, or None.

    If `has_uncounted` is set, the signals counted earlier must be loaded before the condition is evaluated.
    """
    if row["suspension_id"] is None:
        return None
    outline = outline_of(read_stored_condition(row["condition"]))
    before = row["satisfied_before"]
    return Wait(
        suspension_id=row["suspension_id"],
        waitpoint_ids=row["waitpoint_ids"],
        stored_policy=row["resume_policy"],
        tally=Tally(outline, before if outline.is_count_of_signals else 0),
        satisfied_before=before,
        has_uncounted=before > 0 and not outline.is_count_of_signals,
    )


def facts_of(row: Record) -> SignalFacts:
    """The fields of a stored signal that a condition evaluates."""
    return SignalFacts(
        signal_id=SignalId(row["signal_id"]),
        signal_name=row["signal_name"],
        waitpoint_key=row["waitpoint_key"],
        source_type=row["source_type"],
        source_identity=row["source_identity"],
    )


def write_columns(targets: Sequence[DeliveryTarget]) -> Mapping[str, object]:
    """The parameters of `insert_deliveries`: accepted signals, counts, satisfiers, idempotency keys and events."""
    signals: list[tuple[object, ...]] = []
    counted: list[tuple[object, ...]] = []
    waiting: list[tuple[object, ...]] = []
    keyed: list[tuple[object, ...]] = []
    events: list[tuple[object, ...]] = []
    for target in targets:
        partition, uuid = split_execution_id(target.execution_id)
        events += [(partition, uuid, _event_details(signal, answer)) for signal, answer in target.delivered]
        for record in target.recorded:
            signal, waitpoint, disposition = record.signal, record.waitpoint, record.disposition
            signals.append(
                (
                    partition,
                    uuid,
                    signal.signal_id,
                    waitpoint.suspension_id,
                    signal.waitpoint_id,
                    waitpoint.waitpoint_key,
                    signal.signal_name,
                    signal.signal_category,
                    signal.source_type,
                    signal.source_identity,
                    signal.correlation_id,
                    signal.idempotency_key or None,
                    signal.target_scope,
                    signal.created_at,
                    disposition.effect,
                    disposition,
                    signal.payload,
                    signal.payload_encoding,
                )
            )
            if signal.dedup_key is not None:
                expiry = target.now + signal.dedup_ttl_ms
                keyed.append((partition, signal.waitpoint_id, signal.dedup_key, signal.id, expiry))
        wait, counts, closing_signal = target.wait, target.counts, target.closing_signal
        # resume_locked writes a satisfied suspension and the waitpoint of the signal that satisfied it.
        if closing_signal is None and wait is not None and not counts.keys().isdisjoint(wait.waitpoint_ids):
            waiting.append((partition, uuid, wait.suspension_id, array_text(wait.satisfiers)))
        counted += [
            (partition, waitpoint_id, *count)
            for waitpoint_id, count in counts.items()
            if closing_signal is None or waitpoint_id != closing_signal.waitpoint_id
        ]
    return {
        **(short_columns(_SIGNAL_COLUMNS, signals) if signals else full_columns(_SIGNAL_COLUMNS, [])),
        **full_columns(_COUNT_COLUMNS, counted),
        **full_columns(_WAIT_COLUMNS, waiting),
        **full_columns(_KEY_COLUMNS, keyed),
        **full_columns(_EVENT_COLUMNS, events),
    }


def _event_details(signal: NewSignal, answer: Delivered) -> str:
    """The details of the event of a delivery; a duplicate is reported under the id of the signal it repeats."""
    effect: str
    disposition: str
    match answer:
        case Accepted():
            signal_id, effect, disposition = answer.signal_id, _REPORTED[answer.effect], answer.disposition
        case SignalDuplicate():
            signal_id, effect, disposition = answer.existing_signal_id, ReportedEffect.DEDUPED, ReportedEffect.DEDUPED
    details = {
        "signal_id": signal_id,
        "waitpoint_id": signal.waitpoint_id,
        "source_identity": signal.source_identity,
        "effect": effect,
        "disposition": disposition,
    }
    return _encode(details).decode()


def overflow_columns(targets: Sequence[DeliveryTarget]) -> Mapping[str, object] | None:
    """The parameters of `take_overflow`: waitpoints with more signals than their maxlen; None if there are none.

    Signals that a condition has counted are never trimmed, so a waitpoint that has no others is omitted.
    """
    trimmed: dict[tuple[int, WaitpointId], tuple[str, SuspensionId | None, int]] = {}
    for target in targets:
        partition, uuid = split_execution_id(target.execution_id)
        for record in target.recorded:
            waitpoint = record.waitpoint
            if waitpoint.signal_count > max(record.signal.signal_maxlen, _counted(waitpoint, target.wait)):
                values = uuid, waitpoint.suspension_id, record.signal.signal_maxlen
                trimmed[partition, waitpoint.waitpoint_id] = values
    if not trimmed:
        return None
    rows = [(*key, *values) for key, values in trimmed.items()]
    return full_columns(("partition_keys", "waitpoint_ids", "execution_ids", "suspension_ids", "maxlens"), rows)


def _counted(waitpoint: Waitpoint, wait: Wait | None) -> int:
    """At least how many signals of a waitpoint its condition has counted; 0 if the wait has several waitpoints."""
    if wait is None or waitpoint.suspension_id != wait.suspension_id or len(wait.waitpoint_ids) > 1:
        return 0
    return wait.satisfied_before + len(wait.satisfiers)


def resume_of(target: DeliveryTarget) -> Resume:
    """The resume of an execution whose condition a signal has satisfied."""
    closing_signal, wait = target.closing_signal, target.wait
    assert closing_signal is not None, "a signal satisfied the condition"
    assert wait is not None, "a signal satisfied the condition"
    delay_ms = target.delay_ms
    accepted, matched = target.counts[closing_signal.waitpoint_id]
    return Resume(
        execution_id=target.execution_id,
        delay_ms=delay_ms,
        delay_detail=f"resume delay {delay_ms}ms after signal {closing_signal.signal_name}" if delay_ms else "",
        satisfiers=wait.satisfiers[:-1],
        closing_signal_id=closing_signal.signal_id,
        closing_waitpoint_id=closing_signal.waitpoint_id,
        accepted=accepted,
        matched=matched,
    )
