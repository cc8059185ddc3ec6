"""Signals: delivering them to waitpoints, many callers in one transaction, and reading what came."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, StoreFault, Transaction
from flowfabric.db.statements import columns_from, statements_beside
from flowfabric.engine.fence import lock_execution
from flowfabric.engine.keys import Keys
from flowfabric.engine.mail import (
    Delivered,
    Mail,
    addressee_of,
    deliveries,
    overflow_of,
    resume_of,
    writes,
)
from flowfabric.engine.resume import SATISFIED, Resumes
from flowfabric.engine.store import Store
from flowfabric.model.delivery import Addressee
from flowfabric.model.errors import EngineError, error
from flowfabric.model.evaluation import SignalDisposition, SignalFacts
from flowfabric.model.handle import Handle, check_handle
from flowfabric.model.ids import (
    ExecutionId,
    SignalId,
    WaitpointId,
    check_lane_id,
    parse_execution_id,
    parse_uuid,
    row_key,
    split_execution_id,
)
from flowfabric.model.signals import (
    DEFAULT_MAXLEN,
    NewSignal,
    ResumeSignal,
)
from flowfabric.model.text import check_text
from flowfabric.model.tokens import WaitpointToken

SQL = statements_beside(__file__)


class Signals:
    """The signal family of operations."""

    def __init__(self, store: Store, keys: Keys, resumes: Resumes) -> None:
        self._store = store
        self._keys = keys
        self._resumes = resumes
        self._open: dict[ExecutionId, Mail] = {}
        """What still takes signals: whatever comes for an execution before its mail leaves goes with it."""
        self._batch: Batch[Mail, list[Delivered | EngineError]] = Batch(
            self._deliver_together, self._deliver_alone, keys=lambda mail: (mail.execution_id,)
        )

    async def deliver(self, signal: NewSignal) -> Delivered:
        """Deliver one signal; concurrent callers share a transaction."""
        mail = self._open.get(signal.execution_id)
        if mail is None or mail.is_full:
            mail = self._open[signal.execution_id] = Mail(signal.execution_id)
            mail.answers = self._batch.put(mail)
            mail.answers.add_done_callback(_notice)
        place = mail.add(signal)
        assert mail.answers is not None, "the mail is queued"
        # The answer is for all who share the mail: one of them who gives up must not take it from the others.
        answer = (await self._store.answer(asyncio.shield(mail.answers)))[place]
        if isinstance(answer, EngineError):
            # An error of its own for each caller: a raised one collects its traceback.
            raise type(answer)(answer.code, answer.detail) from None
        return answer

    async def approve(
        self,
        execution_id: str,
        waitpoint_id: UUID | str,
        signal_name: str,
        idempotency_suffix: str,
        signal_dedup_ttl_ms: int,
        lane_id: str | None,
        maxlen: int | None,
        max_signals_per_execution: int | None,
    ) -> Delivered:
        """Deliver the word of an operator, who does not hold the token."""
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        waitpoint = WaitpointId(parse_uuid(waitpoint_id, "waitpoint_id"))
        check_text(signal_name, "signal_name")
        check_text(idempotency_suffix, "idempotency_suffix")
        if lane_id is not None:
            check_lane_id(lane_id)
        rows = await self._store.fetch(
            SQL.read_for_approval, partition_key=partition, execution_id=uuid, waitpoint_id=waitpoint
        )
        if not rows:
            raise error("execution_not_found")
        stored_lane, token = rows[0]
        if lane_id is not None and lane_id != stored_lane:
            raise error("invalid_input", f"lane_mismatch: args.lane_id={lane_id} exec_core.lane_id={stored_lane}")
        if not token:
            raise error("waitpoint_not_found")
        return await self.deliver(
            NewSignal(
                execution_id=parsed,
                waitpoint_id=waitpoint,
                waitpoint_token=WaitpointToken(token),
                signal_name=signal_name,
                signal_category="approval",
                source_type="operator",
                target_scope="execution",
                idempotency_key=f"approval:{signal_name}:{idempotency_suffix}",
                dedup_ttl_ms=signal_dedup_ttl_ms,
                max_signals_per_execution=max_signals_per_execution,
                signal_maxlen=DEFAULT_MAXLEN if maxlen is None else maxlen,
            )
        )

    async def observe(self, handle: Handle) -> list[ResumeSignal]:
        """Every signal of the suspension of a handle's attempt, in the order of acceptance."""
        handle = check_handle(handle)
        partition, uuid = row_key(handle.execution_id)
        rows = await self._store.fetch(
            SQL.list_observed, partition_key=partition, execution_id=uuid, attempt_index=handle.attempt_index
        )
        if not rows:
            raise error("execution_not_found")
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

    async def drain(self) -> None:
        """Wait until every delivery under way is answered."""
        await self._batch.drain()

    async def _deliver_together(
        self, mails: Sequence[Mail]
    ) -> Sequence[list[Delivered | EngineError] | Locked | Exception]:
        for mail in mails:
            self._seal(mail)
        pairs = [split_execution_id(mail.execution_id) for mail in mails]
        answers: list[list[Delivered | EngineError] | Locked | Exception] = []

        async def deliver(transaction: Transaction) -> list[Record]:
            found = await transaction.fetch(
                SQL.lock_addressees,
                partition_keys=[partition for partition, _ in pairs],
                execution_ids=[uuid for _, uuid in pairs],
            )
            held = [mail for mail, row in zip(mails, found, strict=True) if row["found"] == "held"]
            given, resumed = await self._deliver(transaction, held) if held else ([], [])
            mine = iter(given)
            answers[:] = [
                next(mine)
                if row["found"] == "held"
                else LOCKED
                if row["found"] == "locked"
                else [error("execution_not_found") for _ in mail.signals]
                for mail, row in zip(mails, found, strict=True)
            ]
            return resumed

        try:
            resumed = await self._store.database.transact(deliver)
        except StoreFault as fault:
            if fault.kind != "contention":
                raise
            # Somebody holds a row of a wait and not its execution: whose it is shows when each is tried alone.
            return [LOCKED] * len(mails)
        self._resumes.settle(resumed)
        return answers

    async def _deliver_alone(self, mail: Mail) -> list[Delivered | EngineError]:
        self._seal(mail)

        async def deliver(transaction: Transaction) -> tuple[list[list[Delivered | EngineError]], list[Record]]:
            await lock_execution(transaction, mail.execution_id)
            return await self._deliver(transaction, [mail])

        try:
            (answers,), resumed = await self._store.transact(deliver)
        except EngineError as fault:
            if len(mail.signals) == 1 or fault.retryable or fault.code == "execution_not_found":
                return [fault for _ in mail.signals]
            # One of them that the store refuses must not cost the others their delivery.
            return [(await self._deliver_alone(Mail(mail.execution_id, [one])))[0] for one in mail.signals]
        self._resumes.settle(resumed)
        return answers

    def _seal(self, mail: Mail) -> None:
        if self._open.get(mail.execution_id) is mail:
            del self._open[mail.execution_id]

    async def _deliver(
        self, transaction: Transaction, mails: Sequence[Mail]
    ) -> tuple[list[list[Delivered | EngineError]], list[Record]]:
        """Deliver to executions that the transaction holds; the answers, and what was resumed."""
        keys = await self._keys.ring(transaction)
        rows = await transaction.fetch(SQL.read_deliveries, **deliveries(mails))
        satisfiers = await self._satisfiers(transaction, mails, rows)
        answers: list[list[Delivered | EngineError]] = []
        addressees: list[Addressee] = []
        at = 0
        for nth, mail in enumerate(mails):
            found = rows[at : at + len(mail.signals)]
            at += len(mail.signals)
            addressee = addressee_of(mail, found, satisfiers.get(nth, ()))
            addressees.append(addressee)
            answers.append([])
            for signal, row in zip(mail.signals, found, strict=True):
                try:
                    answers[-1].append(addressee.take(signal, keys, row["earlier_id"]))
                except EngineError as refused:
                    answers[-1].append(refused)
        if any(each.recorded or each.has_token_failure for each in addressees):
            await transaction.fetch(SQL.insert_deliveries, now=rows[0]["now"], **writes(addressees))
        if overflow := overflow_of(addressees):
            await transaction.fetch(SQL.take_overflow, **overflow)
        resumes = [resume_of(each) for each in addressees if each.closer is not None]
        return answers, await self._resumes.within(transaction, resumes, SATISFIED) if resumes else []

    @staticmethod
    async def _satisfiers(
        transaction: Transaction, mails: Sequence[Mail], rows: Sequence[Record]
    ) -> dict[int, list[SignalFacts]]:
        """What the conditions have counted so far, by the place of the mail; most have counted nothing."""
        wanted: list[tuple[object, ...]] = []
        at = 0
        for nth, mail in enumerate(mails):
            key = split_execution_id(mail.execution_id)
            wanted += [(*key, signal_id, nth) for signal_id in rows[at]["satisfier_ids"] or ()]
            at += len(mail.signals)
        found: dict[int, list[SignalFacts]] = {}
        if wanted:
            columns = columns_from(("partition_keys", "execution_ids", "signal_ids", "nths"), wanted)
            for nth, signal_id, name, key, source_type, source_identity in await transaction.fetch(
                SQL.list_satisfiers, **columns
            ):
                facts = SignalFacts(
                    signal_id=SignalId(signal_id),
                    signal_name=name,
                    waitpoint_key=key,
                    source_type=source_type,
                    source_identity=source_identity,
                )
                found.setdefault(nth, []).append(facts)
        return found


def _notice(answers: "asyncio.Future[Any]") -> None:
    """Look at a fault that nobody may be left to hear of."""
    if not answers.cancelled():
        answers.exception()
