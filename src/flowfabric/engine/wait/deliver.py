"""Delivery of signals to waitpoints, many callers in one transaction, and reads of delivered signals."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.faults import StoreFault, fault_of
from flowfabric.db.statements import full_columns, statements_beside
from flowfabric.engine.core.keys import Keys
from flowfabric.engine.core.row import lock_execution
from flowfabric.engine.store import Store, error_of
from flowfabric.engine.wait.resume import SATISFIED, Resumes
from flowfabric.engine.wait.signal_batch import (
    Delivered,
    SignalBatch,
    delivery_columns,
    facts_of,
    key_rows,
    overflow_columns,
    resume_of,
    target_of,
    wait_of,
    write_columns,
)
from flowfabric.engine.wait.token_stamps import TokenStamps
from flowfabric.model.delivery import DeliveryTarget, RefusedToken, Waitpoint
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.handle import Handle, check_handle
from flowfabric.model.ids import (
    ExecutionId,
    SignalId,
    SuspensionId,
    WaitpointId,
    check_lane_id,
    parse_execution_id,
    parse_uuid,
    row_key,
    split_execution_id,
)
from flowfabric.model.policy_checks import MAX_MS
from flowfabric.model.signal import (
    DEFAULT_DEDUP_TTL_MS,
    DEFAULT_MAXLEN,
    MAX_TEXT,
    Accepted,
    NewSignal,
    ResumeSignal,
    SignalDisposition,
    SignalDuplicate,
    approval_key,
)
from flowfabric.model.states import LifecyclePhase, PublicState
from flowfabric.model.text import check_length, check_range
from flowfabric.model.token import WaitpointToken

SQL = statements_beside(__file__)

MAX_EXECUTIONS = 256
"""Executions whose signals share a transaction."""
STREAMS = 3
"""Concurrent transactions: a signal costs about as much time in Python as in Postgres."""


class _LockedElsewhere(Exception):
    """Another session locked a row of a wait without its execution; retrying the whole batch would meet it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalTarget:
    """Where a signal for a wait would go, as far as its execution has come."""

    state: PublicState
    waitpoint_id: WaitpointId | None
    """The waitpoint that already has the signal or, if none has it, the open waitpoint of the wait, if any."""
    open_keys: tuple[str, ...]
    """If there is none, the keys of other open waitpoints, at most ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """The outcomes of each batch, the resumed executions, the refused tokens and whether events were written."""

    answers: Sequence[list[Delivered | EngineError]] = ()
    resumed: Sequence[Record] = ()
    refused: Sequence[RefusedToken] = ()
    has_events: bool = False


class Signals:
    """The signal operations."""

    def __init__(self, store: Store, keys: Keys, resumes: Resumes) -> None:
        self._store = store
        self._keys = keys
        self._resumes = resumes
        self._stamps = TokenStamps(store)
        self._open: dict[ExecutionId, SignalBatch] = {}
        """Batches that still accept signals: those not handed to a transaction yet."""
        self._batch: Batch[SignalBatch, list[Delivered | EngineError]] = Batch(
            self._deliver_together,
            self._deliver_alone,
            keys=lambda batch: (batch.execution_id,),
            size=MAX_EXECUTIONS,
            streams=STREAMS,
        )

    async def deliver_signal(
        self,
        *,
        execution_id: ExecutionId | str,
        waitpoint_id: WaitpointId | UUID | str,
        waitpoint_token: WaitpointToken | str | None,
        signal_name: str,
        signal_category: str = "external",
        source_type: str = "external",
        source_identity: str = "",
        signal_id: SignalId | UUID | str | None = None,
        payload: bytes | None = None,
        payload_encoding: str = "json",
        correlation_id: str | None = None,
        idempotency_key: str | None = None,
        target_scope: str = "waitpoint",
        created_at: int | None = None,
        dedup_ttl_ms: int = DEFAULT_DEDUP_TTL_MS,
        resume_delay_ms: int | None = None,
        max_signals_per_execution: int | None = None,
        signal_maxlen: int = DEFAULT_MAXLEN,
    ) -> Accepted | SignalDuplicate:
        """Record a signal on a waitpoint once, and resume the execution if the signal satisfies its condition."""
        return await self._add(
            NewSignal.of(
                execution_id=execution_id,
                waitpoint_id=waitpoint_id,
                waitpoint_token=waitpoint_token,
                signal_name=signal_name,
                signal_category=signal_category,
                source_type=source_type,
                source_identity=source_identity,
                signal_id=signal_id,
                payload=payload,
                payload_encoding=payload_encoding,
                correlation_id=correlation_id,
                idempotency_key=idempotency_key,
                target_scope=target_scope,
                created_at=created_at,
                dedup_ttl_ms=dedup_ttl_ms,
                resume_delay_ms=resume_delay_ms,
                max_signals_per_execution=max_signals_per_execution,
                signal_maxlen=signal_maxlen,
            )
        )

    async def _add(self, signal: NewSignal) -> Delivered:
        """Deliver one signal; concurrent callers share a transaction."""
        batch = self._open.get(signal.execution_id)
        if batch is None or batch.is_full:
            batch = self._open[signal.execution_id] = SignalBatch(signal.execution_id)
            self._batch.put(batch).add_done_callback(batch.answer)
        try:
            return await batch.add(signal)
        except StoreFault as fault:
            raise error_of(fault) from fault

    async def deliver_approval_signal(
        self,
        *,
        execution_id: ExecutionId | str,
        waitpoint_id: WaitpointId | UUID | str,
        signal_name: str,
        idempotency_suffix: str,
        source_identity: str = "",
        signal_dedup_ttl_ms: int = DEFAULT_DEDUP_TTL_MS,
        lane_id: str | None = None,
        maxlen: int | None = None,
        max_signals_per_execution: int | None = None,
    ) -> Accepted | SignalDuplicate:
        """Record an approval by an operator, who needs no token; a repeated suffix is a duplicate.

        `source_identity` names the operator: a condition that counts distinct sources counts distinct operators.
        """
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        waitpoint = WaitpointId(parse_uuid(waitpoint_id, "waitpoint_id"))
        check_length(signal_name, "signal_name", MAX_TEXT)
        check_length(idempotency_suffix, "idempotency_suffix", MAX_TEXT)
        check_length(source_identity, "source_identity", MAX_TEXT)
        check_range(signal_dedup_ttl_ms, "signal_dedup_ttl_ms", 0, MAX_MS)
        if lane_id is not None:
            check_lane_id(lane_id)
        rows = await self._store.fetch(
            SQL.read_for_approval, partition_key=partition, execution_id=uuid, waitpoint_id=waitpoint
        )
        if not rows:
            raise error("execution_not_found", parsed)
        stored_lane, token = rows[0]
        if lane_id is not None and lane_id != stored_lane:
            raise error("invalid_input", f"lane_mismatch: args.lane_id={lane_id} exec_core.lane_id={stored_lane}")
        if not token:
            raise error("waitpoint_not_found")
        return await self._add(
            NewSignal(
                execution_id=parsed,
                waitpoint_id=waitpoint,
                waitpoint_token=WaitpointToken(token),
                signal_name=signal_name,
                signal_category="approval",
                source_type="operator",
                source_identity=source_identity,
                target_scope="execution",
                idempotency_key=approval_key(signal_name, idempotency_suffix, source_identity),
                dedup_ttl_ms=signal_dedup_ttl_ms,
                max_signals_per_execution=max_signals_per_execution,
                signal_maxlen=DEFAULT_MAXLEN if maxlen is None else maxlen,
            )
        )

    async def deliver_trusted(
        self,
        *,
        execution_id: ExecutionId,
        waitpoint_id: WaitpointId,
        signal_name: str,
        source_identity: str,
        signal_id: SignalId | None,
        payload: bytes,
        idempotency_key: str | None,
    ) -> Accepted | SignalDuplicate:
        """Record a signal of a sender that has read the waitpoint from the store and so needs no valid token."""
        return await self._add(
            NewSignal(
                execution_id=execution_id,
                waitpoint_id=waitpoint_id,
                waitpoint_token=None,
                signal_name=signal_name,
                source_identity=source_identity,
                signal_id=signal_id,
                payload=payload,
                idempotency_key=idempotency_key,
                is_trusted=True,
            )
        )

    async def read_target(
        self, execution_id: ExecutionId, waitpoint_key: str, signal_id: SignalId | None
    ) -> SignalTarget | None:
        """Return where a signal for the wait of this key would go now; None if the execution does not exist."""
        partition, uuid = row_key(execution_id)
        rows = await self._store.fetch(
            SQL.read_signal_target,
            partition_key=partition,
            execution_id=uuid,
            waitpoint_key=waitpoint_key,
            signal_id=signal_id,
        )
        if not rows:
            return None
        state, waitpoint_id, open_keys = rows[0]
        return SignalTarget(
            state=PublicState(state),
            waitpoint_id=waitpoint_id and WaitpointId(waitpoint_id),
            open_keys=tuple(open_keys or ()),
        )

    async def observe_signals(self, handle: Handle, *, suspension_id: UUID | str | None = None) -> list[ResumeSignal]:
        """The signals of a suspension, by default the current one of the attempt, in the order of acceptance."""
        handle = check_handle(handle)
        parsed = None if suspension_id is None else parse_uuid(suspension_id, "suspension_id")
        return _resume_signals(await self._observed(handle, parsed))

    async def signals_of_past_wait(self, handle: Handle, suspension_id: SuspensionId) -> list[ResumeSignal] | None:
        """The signals of a closed suspension in the order of acceptance; None if there is no such closed suspension."""
        rows = await self._observed(check_handle(handle), suspension_id)
        return _resume_signals(rows) if rows[0]["is_closed"] else None

    async def _observed(self, handle: Handle, suspension_id: UUID | None) -> list[Record]:
        partition, uuid = row_key(handle.execution_id)
        rows = await self._store.fetch(
            SQL.list_observed,
            partition_key=partition,
            execution_id=uuid,
            attempt_index=handle.attempt_index,
            suspension_id=suspension_id,
        )
        if not rows:
            raise error("execution_not_found", handle.execution_id)
        return rows

    async def drain(self) -> None:
        """Wait until running deliveries are done and refused tokens are recorded."""
        await self._batch.drain()
        await self._stamps.drain()

    async def _deliver_together(
        self, batches: Sequence[SignalBatch]
    ) -> Sequence[list[Delivered | EngineError] | Locked | Exception]:
        for batch in batches:
            self._close(batch)
        answers: list[list[Delivered | EngineError] | Locked | Exception] = []

        async def deliver(transaction: Transaction) -> _Outcome:
            try:
                return await deliver_locked(transaction)
            except Exception as fault:
                if (known := fault_of(fault)) is None or known.kind != "contention":
                    raise
                raise _LockedElsewhere from fault

        async def deliver_locked(transaction: Transaction) -> _Outcome:
            found = await transaction.fetch(
                SQL.lock_targets,
                partition_keys=[batch.key[0] for batch in batches],
                execution_ids=[batch.key[1] for batch in batches],
            )
            deliverable = [
                (batch, row["phase"]) for batch, row in zip(batches, found, strict=True) if row["phase"] is not None
            ]
            outcome = await self._deliver(transaction, deliverable) if deliverable else _Outcome()
            delivered = iter(outcome.answers)
            answers[:] = [
                next(delivered)
                if row["phase"] is not None
                else LOCKED
                if row["exists"]
                else [error("execution_not_found", batch.execution_id) for _ in batch.signals]
                for batch, row in zip(batches, found, strict=True)
            ]
            return outcome

        try:
            self._after_commit(await self._store.database.transact(deliver))
        except _LockedElsewhere:
            # The batch then tries each execution alone, so only the blocked one waits.
            answers = [LOCKED] * len(batches)
        locked = [batch for batch, answer in zip(batches, answers, strict=True) if answer is LOCKED]
        if locked:
            await self._refuse_unauthenticated(locked)
        return [answer if batch.signals else [] for batch, answer in zip(batches, answers, strict=True)]

    async def _refuse_unauthenticated(self, batches: Sequence[SignalBatch]) -> None:
        """Fail signals with invalid tokens and keep the others: only a valid token may wait for a lock.

        Tokens and waitpoint keys never change, so no lock is needed.
        """
        try:
            rows = await self._store.fetch(SQL.read_deliveries, **delivery_columns(batches))
        except EngineError:
            # The delivery itself meets the fault and reports it.
            return
        keys = self._keys.ring(key_rows(rows[0]))
        refused: list[RefusedToken] = []
        at = 0
        for batch in batches:
            batch_rows = rows[at : at + len(batch.signals)]
            at += len(batch.signals)
            if batch_rows[0]["signals_accepted"] is None:
                # The execution does not exist; the delivery reports it.
                continue
            target = target_of(batch, LifecyclePhase.SUSPENDED, batch_rows)
            authenticated = [target.authenticate(signal, keys) for signal in batch.signals]
            refused += target.refused
            batch.refuse({nth: each for nth, each in enumerate(authenticated) if isinstance(each, EngineError)})
        self._stamps.note(refused)

    async def _deliver_alone(self, batch: SignalBatch) -> list[Delivered | EngineError]:
        self._close(batch)

        async def deliver(transaction: Transaction) -> _Outcome:
            locked = await lock_execution(transaction, batch.execution_id)
            return await self._deliver(transaction, [(batch, locked.lifecycle_phase)])

        try:
            outcome = await self._store.transact(deliver, execution_id=batch.execution_id)
        except EngineError as fault:
            if len(batch.signals) == 1 or fault.retryable or fault.code == "execution_not_found":
                return [fault.copy() for _ in batch.signals]
            # A signal that the store rejects must not fail the others.
            return [(await self._deliver_alone(SignalBatch(batch.execution_id, [one])))[0] for one in batch.signals]
        self._after_commit(outcome)
        (answers,) = outcome.answers
        return answers

    def _after_commit(self, outcome: "_Outcome") -> None:
        self._resumes.after_commit(outcome.resumed, SATISFIED)
        if outcome.has_events:
            self._store.wakeups.events(EventFamily.SIGNAL)
        self._stamps.note(outcome.refused)

    def _close(self, batch: SignalBatch) -> None:
        """Add no more signals to a batch: a transaction now delivers it."""
        if self._open.get(batch.execution_id) is batch:
            del self._open[batch.execution_id]

    async def _deliver(self, transaction: Transaction, locked: Sequence[tuple[SignalBatch, str]]) -> "_Outcome":
        """Deliver to executions that the transaction has locked, given with their phases."""
        rows = await transaction.fetch(SQL.read_deliveries, **delivery_columns([batch for batch, _ in locked]))
        keys = self._keys.ring(key_rows(rows[0]))
        targets: list[DeliveryTarget] = []
        found: list[tuple[Record, Waitpoint | EngineError]] = []
        for batch, phase in locked:
            batch_rows = rows[len(found) : len(found) + len(batch.signals)]
            target = target_of(batch, phase, batch_rows)
            authenticated = [target.authenticate(signal, keys) for signal in batch.signals]
            # Only an authenticated sender makes the engine parse the stored wait.
            if any(isinstance(each, Waitpoint) for each in authenticated):
                target.wait = wait_of(batch_rows[0])
            targets.append(target)
            found += zip(batch_rows, authenticated, strict=True)
        await self._load_counted(transaction, targets)
        next_found = iter(found)
        answers: list[list[Delivered | EngineError]] = [
            [
                target.accept(signal, waitpoint, row["earlier_id"]) if isinstance(waitpoint, Waitpoint) else waitpoint
                for signal, (row, waitpoint) in zip(batch.signals, next_found, strict=False)
            ]
            for target, (batch, _) in zip(targets, locked, strict=True)
        ]
        has_events = any(each.delivered for each in targets)
        if has_events:
            await transaction.fetch(SQL.insert_deliveries, now=rows[0]["now"], **write_columns(targets))
        if overflow := overflow_columns(targets):
            await transaction.fetch(SQL.take_overflow, **overflow)
        resumes = [resume_of(each) for each in targets if each.closing_signal is not None]
        return _Outcome(
            answers=answers,
            resumed=await self._resumes.within(transaction, resumes, SATISFIED) if resumes else [],
            refused=[token for each in targets for token in each.refused],
            has_events=has_events,
        )

    @staticmethod
    async def _load_counted(transaction: Transaction, targets: Sequence[DeliveryTarget]) -> None:
        """Load the signals that conditions counted earlier, for conditions that need more than their number."""
        waits = [(each.execution_id, each.wait) for each in targets if each.wait and each.wait.has_uncounted]
        if not waits:
            return
        given = [(*split_execution_id(execution_id), wait.suspension_id) for execution_id, wait in waits]
        for row in await transaction.fetch(
            SQL.list_satisfiers, **full_columns(("partition_keys", "execution_ids", "suspension_ids"), given)
        ):
            waits[row["nth"] - 1][1].tally.count(facts_of(row))


def _resume_signals(rows: Sequence[Record]) -> list[ResumeSignal]:
    """The signals in rows of `list_observed`, which has a row of nulls if there are none."""
    return [
        ResumeSignal(
            signal_id=SignalId(row["signal_id"]),
            signal_name=row["signal_name"],
            signal_category=row["signal_category"],
            source_type=row["source_type"],
            source_identity=row["source_identity"],
            correlation_id=row["correlation_id"] or "",
            accepted_at=row["accepted_at"],
            payload=row["payload"],
            disposition=SignalDisposition(row["disposition"]),
            satisfier=row["satisfier"],
        )
        for row in rows
        if row["signal_id"] is not None
    ]
