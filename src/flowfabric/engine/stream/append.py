"""Appending of frames to the streams of attempts, many callers in one transaction."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import TypeAlias

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.row import lock_execution
from flowfabric.engine.store import Store, error_of
from flowfabric.engine.stream.expire import check_ms
from flowfabric.engine.stream.frame_batch import FrameBatch, Writer, key_columns, target_columns, write_columns
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Handle, check_handle
from flowfabric.model.ids import check_storable
from flowfabric.model.open_stream import OpenStream, Summary
from flowfabric.model.policy import StreamPolicy
from flowfabric.model.stream import MAX_FRAME_BYTES, AppendFrameOutcome, DurableSummary, Frame
from flowfabric.model.summary import decode_document, read_patch
from flowfabric.model.text import shown

SQL = statements_beside(__file__)

MAX_WEIGHT = 2_000
"""The most frames of one transaction; a large frame counts as several."""
CONCURRENT = 2
"""Concurrent transactions: a frame costs about as much time in Python as in Postgres."""

Appended: TypeAlias = list[AppendFrameOutcome | EngineError]
Refusal: TypeAlias = Callable[[], EngineError]

_POLICY = StreamPolicy()


class Held(Enum):
    """What a transaction has waited for and locked before it reads the state of an append."""

    NOTHING = auto()
    STREAM = auto()
    EXECUTION = auto()
    """The execution, and then the stream."""


class Streams:
    """The operation that appends frames."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._defaults: Mapping[str, object] = {
            "durability_mode": _POLICY.durability_mode.value,
            "retention_maxlen": _POLICY.retention_maxlen,
            "check_ms": check_ms(store.rules),
        }
        self._open: dict[Writer, FrameBatch] = {}
        """Batches that still accept frames: those not handed to a transaction yet."""
        self._batch: Batch[FrameBatch, Appended] = Batch(
            self._append_together,
            self._append_alone,
            keys=lambda batch: (batch.writer.execution_id,),
            size=MAX_WEIGHT,
            streams=CONCURRENT,
            weigh=lambda batch: batch.weight,
        )

    async def append_frame(self, handle: Handle, frame: Frame) -> AppendFrameOutcome:
        """Append a frame to the stream of the handle's attempt; the answer comes after the commit.

        Concurrent calls share a transaction, and frames of one attempt are stored in the order of the calls.
        """
        handle = check_handle(handle)
        check_storable(handle.execution_id)
        if not isinstance(frame, Frame):
            raise error("invalid_input", f"frame: expected a Frame, got {shown(frame)}")
        if (size := len(frame.bytes)) > MAX_FRAME_BYTES:
            raise error(
                "retention_limit_exceeded",
                f"frame of {size} bytes; at most {MAX_FRAME_BYTES} bytes are stored, split it into several frames",
            )
        writer = Writer.of(handle)
        batch = self._open.get(writer)
        if batch is None or batch.is_full:
            batch = self._open[writer] = FrameBatch(writer)
            self._batch.put(batch).add_done_callback(batch.answer)
        try:
            return await batch.add(frame)
        except StoreFault as fault:
            raise error_of(fault) from fault

    async def append_numbered(
        self, handle: Handle, frames: Sequence[Frame], *, first_number: int
    ) -> Sequence[AppendFrameOutcome | EngineError]:
        """Append frames up to the first refused one; repeating the call with the same numbers stores nothing twice.

        The answers are those of the frames tried: those after a refused one are not, so a refusal is always the
        last answer. The worker numbers the frames that it appends under its lease, from 1 on. It repeats a call whose
        outcome is unknown before it makes the next one. The answer to the repeat of a stored frame has the id of the
        newest frame.
        """
        batch = FrameBatch(Writer.of(handle), frames, first_number=first_number)
        try:
            return await self._batch.put(batch)
        except StoreFault as fault:
            raise error_of(fault) from fault

    async def drain(self) -> None:
        """Wait until every append in progress is answered."""
        await self._batch.drain()

    async def _append_together(self, batches: Sequence[FrameBatch]) -> Sequence[Appended | Locked | Exception]:
        for batch in batches:
            self._close(batch)

        async def append(transaction: Transaction) -> list[Appended | Locked]:
            found = await self._locked(transaction, batches, Held.NOTHING)
            return await _append(transaction, batches, found)

        answers = await self._store.database.transact(append)
        self._wake(batches, answers)
        return answers

    async def _append_alone(self, batch: FrameBatch) -> Appended:
        self._close(batch)
        try:
            # The execution is locked only if the stream does not decide: that keeps claims from taking it.
            answer = await self._append_one(batch, Held.STREAM)
            if isinstance(answer, Locked):
                answer = await self._append_one(batch, Held.EXECUTION)
        except EngineError as fault:
            if len(batch.frames) == 1 or fault.retryable or fault.code == "execution_not_found":
                return [fault.copy() for _ in batch.tried]
            # A frame that the store rejects must not fail the others.
            answers: Appended = []
            for one in batch.split():
                answers += await self._append_alone(one)
                if batch.is_numbered and isinstance(answers[-1], EngineError):
                    break
            return answers
        assert not isinstance(answer, Locked), "the rows are locked"
        return answer

    async def _append_one(self, batch: FrameBatch, held: Held) -> Appended | Locked:
        """Append one batch; wait for the locks that `held` names, in the order of every writer."""
        partition, uuid, attempt_index = batch.key

        async def append(transaction: Transaction) -> list[Appended | Locked]:
            if held is Held.EXECUTION:
                await lock_execution(transaction, batch.writer.execution_id)
            await transaction.fetch(
                SQL.lock_stream, partition_key=partition, execution_id=uuid, attempt_index=attempt_index
            )
            found = await self._locked(transaction, [batch], held)
            return await _append(transaction, [batch], found)

        answers = await self._store.transact(append, execution_id=batch.writer.execution_id)
        self._wake([batch], answers)
        return answers[0]

    async def _locked(
        self, transaction: Transaction, batches: Sequence[FrameBatch], held: Held
    ) -> list[OpenStream | Refusal | Locked]:
        """Lock the streams of batches; return each as it is stored, or why nothing may be appended to it.

        LOCKED means that the batch needs a lock that `held` does not name.
        """
        rows = await transaction.fetch(SQL.lock_streams, **target_columns(batches))
        if held is Held.EXECUTION and rows[0]["verdict"] == "lease_expired":
            # A renewal in progress may have extended it.
            partition, uuid, _ = batches[0].key
            await transaction.fetch(SQL.lock_claim, partition_key=partition, execution_id=uuid)
            rows = await transaction.fetch(SQL.lock_streams, **target_columns(batches))
        found = [_judge(batch, row, held) for batch, row in zip(batches, rows, strict=True)]
        absent: list[int] = []
        for at, (batch, row) in enumerate(zip(batches, rows, strict=True)):
            if row["verdict"] == "ok" and not row["is_locked"] and not row["is_present"]:
                if any(_is_valid(frame) for frame in batch.tried):
                    absent.append(at)
                else:
                    # Not created: nothing will be appended.
                    found[at] = OpenStream(now=row["now"], retention_maxlen=0)
        if absent:
            opened = await transaction.fetch(
                SQL.open_streams, **target_columns([batches[at] for at in absent]), **self._defaults
            )
            for at, row in zip(absent, opened, strict=True):
                # The time of the first statement: all frames of a transaction have the same.
                if row["retention_maxlen"] is not None:
                    found[at] = OpenStream(now=rows[at]["now"], retention_maxlen=row["retention_maxlen"])
                elif held is Held.EXECUTION:
                    # The lease has expired since the first statement.
                    found[at] = _refusal(batches[at], row, row["verdict"])
        return found

    def _close(self, batch: FrameBatch) -> None:
        """Add no more frames to a batch: a transaction now appends it."""
        if self._open.get(batch.writer) is batch:
            del self._open[batch.writer]

    def _wake(self, batches: Sequence[FrameBatch], answers: Sequence[Appended | Locked]) -> None:
        grown = [
            batch.writer.execution_id
            for batch, answer in zip(batches, answers, strict=True)
            if not isinstance(answer, Locked) and any(isinstance(each, AppendFrameOutcome) for each in answer)
        ]
        self._store.wakeups.stream(grown)


async def _append(
    transaction: Transaction, batches: Sequence[FrameBatch], found: Sequence[OpenStream | Refusal | Locked]
) -> list[Appended | Locked]:
    """Append to streams that the transaction has locked; the answers are per batch and frame."""
    locked = [(batch, target) for batch, target in zip(batches, found, strict=True) if isinstance(target, OpenStream)]
    patched = [(batch, stream) for batch, stream in locked if batch.has_patches]
    if patched:
        rows = await transaction.fetch(SQL.read_summaries, **key_columns([batch for batch, _ in patched]))
        for (_, stream), row in zip(patched, rows, strict=True):
            stream.summary = _summary(row)
    answers: list[Appended | Locked] = []
    for batch, target in zip(batches, found, strict=True):
        if isinstance(target, OpenStream):
            answers.append(_append_batch(target, batch))
        elif isinstance(target, Locked):
            answers.append(target)
        else:
            answers.append([target() for _ in batch.tried])
    if grown := [(batch, stream) for batch, stream in locked if stream.has_grown]:
        await transaction.fetch(SQL.insert_frames, now=grown[0][1].now, **write_columns(grown))
    return answers


def _append_batch(stream: OpenStream, batch: FrameBatch) -> Appended:
    frames, first = batch.frames, batch.first_number
    if first is None:
        return [_try(stream.append, frame) for frame in frames]
    epoch = batch.writer.lease_epoch
    stored = stream.count_stored(epoch, first, len(frames))
    answers: Appended = [*stream.answers_again(frames[:stored])]
    for nth in range(stored, len(frames)):
        answers.append(_try(partial(stream.append_numbered, epoch=epoch, number=first + nth), frames[nth]))
        if isinstance(answers[-1], EngineError):
            # If a later frame were stored, a repeat would take this one for stored too.
            break
    return answers


def _try(append: Callable[[Frame], AppendFrameOutcome], frame: Frame) -> AppendFrameOutcome | EngineError:
    try:
        return append(frame)
    except EngineError as refusal:
        return refusal


def _summary(row: Record) -> Summary:
    if row["version"] is None:
        return Summary({}, 0, 0)
    document: bytes = row["document"]
    return Summary(decode_document(document), row["version"], row["first_applied_ms"], len(document))


def _is_valid(frame: Frame) -> bool:
    """Whether a frame is refused for no reason of its own."""
    try:
        if isinstance(frame.mode, DurableSummary):
            read_patch(frame.bytes)
    except EngineError:
        return False
    return True


def _judge(batch: FrameBatch, row: Record, held: Held) -> OpenStream | Refusal | Locked:
    verdict: str = row["verdict"]
    if verdict == "lease_expired":
        return _refusal(batch, row, verdict) if held is Held.EXECUTION else LOCKED
    if verdict != "ok":
        return _refusal(batch, row, verdict)
    if not row["is_locked"]:
        return LOCKED
    is_closed = row["closed_reason"] is not None
    if is_closed or row["released_epoch"] >= batch.writer.lease_epoch:
        # The stream was locked after the execution was read, and the lease ended in between. A statement that begins
        # with the lock sees the execution of that end, so it refuses here only a stream that was closed without ending
        # the lease.
        return LOCKED if held is Held.NOTHING else _refusal(batch, row, "closed" if is_closed else "stale")
    return OpenStream(now=row["now"], retention_maxlen=row["retention_maxlen"], stored=row)


def _refusal(batch: FrameBatch, row: Record, verdict: str) -> Refusal:
    """How to build the error of each frame of a batch."""
    writer = batch.writer
    match verdict:
        case "not_found":
            return lambda: error("execution_not_found", writer.execution_id)
        case "not_active":
            detail = f"the execution is {row['lifecycle_phase']}; frames are accepted only while its attempt runs"
            return lambda: error("stream_closed", detail)
        case "closed":
            detail = f"the stream of attempt {writer.attempt_index} was closed: {row['closed_reason']}"
            return lambda: error("stream_closed", detail)
        case "stale":
            detail = f"lease {writer.lease_id} with epoch {writer.lease_epoch} is not the current one"
        case "lease_expired":
            detail = "the lease has expired; renew it in time"
        case _:
            detail = "the lease was lost: it expired or was revoked"
    return lambda: error("stale_owner_cannot_append", detail)
