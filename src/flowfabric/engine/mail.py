"""Signals for one execution that travel together, and the rows their statements take and give."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from flowfabric.db.database import Record
from flowfabric.db.statements import array_text, columns_from, columns_of
from flowfabric.engine.resume import Resume
from flowfabric.model.conditions import read_stored_condition
from flowfabric.model.delivery import Addressee, Recorded, Wait, Waitpoint
from flowfabric.model.errors import EngineError
from flowfabric.model.evaluation import SignalFacts
from flowfabric.model.ids import ExecutionId, WaitpointId, split_execution_id
from flowfabric.model.signals import DEFAULT_SIGNAL_LIMIT, Accepted, NewSignal, SignalDuplicate
from flowfabric.model.states import LifecyclePhase, WaitpointState
from flowfabric.model.suspension import read_stored_resume_policy
from flowfabric.model.tokens import WaitpointToken

Delivered: TypeAlias = Accepted | SignalDuplicate

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
_WAIT_COLUMNS = ("waiting_partitions", "waiting_executions", "satisfiers")
_KEY_COLUMNS = ("key_partitions", "key_waitpoints", "keys", "key_signals", "key_expiries")
_REFUSED_COLUMNS = ("refused_partitions", "refused_executions")


class Mail:
    """Signals for one execution that are delivered together, in the order they came in."""

    MOST = 100
    MOST_BYTES = 1_048_576

    __slots__ = ("_bytes", "answers", "execution_id", "signals")

    def __init__(self, execution_id: ExecutionId, signals: Iterable[NewSignal] = ()) -> None:
        self.execution_id = execution_id
        self.signals = list(signals)
        self._bytes = 0
        self.answers: asyncio.Future[list[Delivered | EngineError]] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the next signal is for another mail: what shares a transaction must fit a statement."""
        return len(self.signals) >= self.MOST or self._bytes >= self.MOST_BYTES

    def add(self, signal: NewSignal) -> int:
        """Take one more signal; answers its place."""
        self.signals.append(signal)
        self._bytes += len(signal.payload or b"")
        return len(self.signals) - 1


def deliveries(mails: Sequence[Mail]) -> Mapping[str, object]:
    """What is asked of the store about the signals of some mails."""
    rows = [
        (*split_execution_id(mail.execution_id), signal.waitpoint_id, signal.id, signal.dedup_key, place == 0)
        for mail in mails
        for place, signal in enumerate(mail.signals)
    ]
    names = ("partition_keys", "execution_ids", "waitpoint_ids", "signal_ids", "idempotency_keys", "are_first")
    return columns_of(names, rows)


def addressee_of(mail: Mail, rows: Sequence[Record], satisfiers: Iterable[SignalFacts]) -> Addressee:
    """An execution as the rows found for its mail show it."""
    first = rows[0]
    waitpoints = {
        signal.waitpoint_id: Waitpoint(
            waitpoint_id=signal.waitpoint_id,
            waitpoint_key=row["waitpoint_key"],
            token=WaitpointToken(row["token"]),
            state=WaitpointState(row["state"]),
            suspension_id=row["waitpoint_suspension_id"],
            activated_at=row["activated_at"],
            expires_at=row["expires_at"],
            signal_count=row["signal_count"],
        )
        for signal, row in zip(mail.signals, rows, strict=True)
        if row["state"] is not None
    }
    wait = None
    if first["suspension_id"] is not None:
        wait = Wait.of(
            first["suspension_id"],
            first["waitpoint_ids"],
            read_stored_condition(first["condition"]),
            read_stored_resume_policy(first["resume_policy"]),
            satisfiers,
        )
    limit = first["signal_limit"]
    return Addressee(
        execution_id=mail.execution_id,
        phase=LifecyclePhase(first["lifecycle_phase"]),
        limit=DEFAULT_SIGNAL_LIMIT if limit is None else limit,
        count=first["signals_taken"],
        waitpoints=waitpoints,
        wait=wait,
        now=first["now"],
    )


def writes(addressees: Sequence[Addressee]) -> Mapping[str, object]:
    """What deliveries leave behind, but for the waits they have ended."""
    signals: list[tuple[object, ...]] = []
    counted: list[tuple[object, ...]] = []
    waiting: list[tuple[object, ...]] = []
    keyed: list[tuple[object, ...]] = []
    refused: list[tuple[object, ...]] = []
    for addressee in addressees:
        partition, uuid = split_execution_id(addressee.execution_id)
        for record in addressee.recorded:
            signal, waitpoint_id = record.signal, record.waitpoint.waitpoint_id
            signals.append((partition, uuid, *_stored(record)))
            if signal.dedup_key is not None:
                expiry = addressee.now + signal.dedup_ttl_ms
                keyed.append((partition, waitpoint_id, signal.dedup_key, signal.id, expiry))
        counts = addressee.counts
        wait = addressee.wait
        # A suspension that is met, and the waitpoint of the signal that met it, are written when they are closed.
        if addressee.closer is not None:
            del counts[addressee.closer.waitpoint_id]
        elif wait is not None and not wait.waitpoint_ids.isdisjoint(counts):
            waiting.append((partition, uuid, array_text(wait.satisfiers)))
        counted += [(partition, waitpoint_id, *count) for waitpoint_id, count in counts.items()]
        if addressee.has_token_failure:
            refused.append((partition, uuid))
    return {
        **(columns_of(_SIGNAL_COLUMNS, signals) if signals else columns_from(_SIGNAL_COLUMNS, [])),
        **columns_from(_COUNT_COLUMNS, counted),
        **columns_from(_WAIT_COLUMNS, waiting),
        **columns_from(_KEY_COLUMNS, keyed),
        **columns_from(_REFUSED_COLUMNS, refused),
    }


def _stored(record: Recorded) -> tuple[object, ...]:
    signal, waitpoint = record.signal, record.waitpoint
    return (
        signal.id,
        waitpoint.suspension_id,
        waitpoint.waitpoint_id,
        waitpoint.waitpoint_key,
        signal.signal_name,
        signal.signal_category,
        signal.source_type,
        signal.source_identity,
        signal.correlation_id,
        signal.idempotency_key or None,
        signal.target_scope,
        signal.created_at,
        record.disposition.effect,
        record.disposition,
        signal.payload,
        signal.payload_encoding,
    )


def overflow_of(addressees: Sequence[Addressee]) -> Mapping[str, object] | None:
    """The waitpoints that have taken more than their logs keep, each with the last limit given for it."""
    trimmed: dict[tuple[int, WaitpointId], tuple[int, str]] = {}
    for addressee in addressees:
        partition, _ = split_execution_id(addressee.execution_id)
        satisfiers = array_text(addressee.wait.satisfiers if addressee.wait is not None else ())
        for record in addressee.recorded:
            if record.waitpoint.signal_count > record.signal.signal_maxlen:
                trimmed[partition, record.waitpoint.waitpoint_id] = record.signal.signal_maxlen, satisfiers
    if not trimmed:
        return None
    rows = [(*key, *kept) for key, kept in trimmed.items()]
    return columns_from(("partition_keys", "waitpoint_ids", "maxlens", "satisfiers"), rows)


def resume_of(addressee: Addressee) -> Resume:
    """The resume of an execution whose condition a signal has met."""
    closer, wait = addressee.closer, addressee.wait
    assert closer is not None, "a signal met the condition"
    assert wait is not None, "a signal met the condition"
    delay_ms = wait.resume_policy.delay_ms(closer.resume_delay_ms)
    accepted, matched = addressee.counts[closer.waitpoint_id]
    return Resume(
        execution_id=addressee.execution_id,
        delay_ms=delay_ms,
        delay_detail=f"resume delay {delay_ms}ms after signal {closer.signal_name}",
        satisfiers=wait.satisfiers,
        closing_waitpoint_id=closer.waitpoint_id,
        accepted=accepted,
        matched=matched,
    )
