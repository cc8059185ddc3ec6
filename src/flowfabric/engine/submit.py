"""Creating executions: once each, however often and however concurrently they are submitted."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, StoreFault, Transaction
from flowfabric.db.statements import columns_of, statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import NewExecution
from flowfabric.model.ids import (
    ExecutionId,
    check_lane_id,
    check_partition,
    format_execution_id,
    mint_uuid_texts,
    parse_execution_id,
    row_key,
    split_execution_id,
)
from flowfabric.model.outcomes import Created, Duplicate
from flowfabric.model.policy import ExecutionPolicy, dedup_window_ms, parse_policy, policy_json
from flowfabric.model.states import PublicState
from flowfabric.model.tags import check_tags
from flowfabric.model.text import check_short, check_text

SQL = statements_beside(__file__)

MAX_BATCH = 1000
MAX_PRIORITY = 9000
MAX_SHAPES = 4096
PATIENCE_SHARED, PATIENCE_ALONE = "50ms", "2s"
"""How long a statement waits for a key or an id that is being taken elsewhere: with others behind it, and alone."""

Submitted = Created | Duplicate

_COLUMNS = (
    "partition_keys",
    "queue_nos",
    "lane_nos",
    "namespace_nos",
    "execution_kinds",
    "creator_identities",
    "payload_encodings",
    "policies",
    "deadlines_ms",
    "retentions_ms",
    "execution_ids",
    "priorities",
    "input_payloads",
    "delays_until",
    "deadlines_at",
    "instance_tags",
    "tags",
    "idempotency_keys",
    "key_ttls_ms",
)
"""What submissions of one shape share, and from the ids on what each has for itself."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What many submissions have in common: checked once, with the numbers the store knows it by."""

    partition: int
    lane_id: str
    namespace: str
    row: tuple[Any, ...]
    delay_until: int | None
    key_ttl_ms: int


class _Submission:
    """A checked item: its row for the statement and what stands beside the row."""

    __slots__ = ("execution_id", "is_minted", "key", "row", "shape")

    def __init__(
        self, execution_id: ExecutionId, shape: _Shape, row: tuple[Any, ...], key: str | None, *, is_minted: bool
    ) -> None:
        self.execution_id = execution_id
        self.shape = shape
        self.row = row
        self.key = key
        self.is_minted = is_minted

    def names(self) -> tuple[Hashable, ...]:
        """What no other submission of a statement may share: a given id, and the idempotency key within its scope."""
        if self.key is None:
            return () if self.is_minted else (self.execution_id,)
        return self.execution_id, (self.row[0], self.shape.namespace, self.key)


class _NotCreated(Exception):
    """Undoes the key of an execution that turned out to exist."""


class Submit:
    """The submit family of operations."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batch: Batch[_Submission, Submitted] = Batch(
            self._insert_together, self._insert_alone, keys=_Submission.names
        )
        self._shapes: dict[tuple[Any, ...], _Shape] = {}

    async def create(self, new: NewExecution) -> Submitted:
        """Create one execution; concurrent callers share a statement."""
        submission = await self._check(new, mint_uuid_texts(1)[0])
        if isinstance(submission, Duplicate):
            return submission
        if submission.key is not None and not submission.is_minted:
            return await self._insert_alone(submission)
        return await self._store.answer(self._batch.put(submission))

    async def create_many(self, items: Sequence[NewExecution]) -> list[Submitted | EngineError]:
        """Create up to a thousand executions, each with its own verdict."""
        if not 1 <= len(items) <= MAX_BATCH:
            raise error("invalid_input", f"items: 1 to {MAX_BATCH}, got {len(items)}")
        minted = mint_uuid_texts(len(items))
        checked: list[_Submission | Duplicate | EngineError] = []
        for new, uuid in zip(items, minted, strict=True):
            try:
                checked.append(self._submission(new, uuid) or await self._check(new, uuid))
            except EngineError as refused:
                checked.append(refused)
        good = [item for item in checked if isinstance(item, _Submission)]
        made: Iterator[Submitted | EngineError] = iter(await self._store.answers(self._batch.run(good)))
        answers = [next(made) if isinstance(item, _Submission) else item for item in checked]
        for at, new in enumerate(items):
            # What an item before it took makes a duplicate of one whose tags or policy are wrong.
            if isinstance(checked[at], EngineError) and (new.execution_id is not None or new.idempotency_key):
                with contextlib.suppress(EngineError):
                    again = await self._check(new, minted[at])
                    answers[at] = again if isinstance(again, Duplicate) else answers[at]
        return answers

    async def drain(self) -> None:
        """Wait until every submission under way is answered."""
        await self._batch.drain()

    async def _check(self, new: NewExecution, uuid: str) -> _Submission | Duplicate:
        """The checked item, after a look at the store where its shape is new or its tags and policy are wrong."""
        if (known := self._submission(new, uuid)) is not None:
            return known
        store = self._store
        lane_id = check_lane_id(new.lane_id)
        creator = check_text(new.creator_identity, "creator_identity")
        namespace = check_short(new.namespace, "namespace")
        key = new.idempotency_key or None
        if new.execution_id is not None:
            execution_id = parse_execution_id(new.execution_id)
        else:
            execution_id = format_execution_id(store.rules.partitions.of_lane(lane_id), uuid)
        # A duplicate is answered before its tags and policy are judged, and leaves no names behind.
        if new.execution_id is not None or key is not None:
            (found,) = await self._find_duplicates([(execution_id, namespace, key)])
            if found is not None:
                return found
        check_tags(new.tags)
        policy = parse_policy(new.policy)
        if key is not None and dedup_window_ms(policy) <= 0:
            new = replace(new, idempotency_key=None)
        await store.namespace_no(namespace)
        await store.queue_no(lane_id, _required(policy), registered_by=creator)
        submission = self._submission(new, uuid)
        assert submission is not None
        return submission

    def _submission(self, new: NewExecution, uuid: str) -> _Submission | None:
        """The checked item, or None where only the store can tell."""
        execution_id = None
        if new.execution_id is not None:
            execution_id = parse_execution_id(new.execution_id)
            check_partition(execution_id, self._store.rules.partitions.flow)
        priority = new.priority
        if type(priority) is not int:
            raise error("invalid_input", f"priority: must be an integer, got {priority!r}")
        payload = new.input_payload
        if type(payload) is not bytes:
            payload = _check_bytes(payload)
        key = new.idempotency_key or None
        if key is not None:
            key = check_short(key, "idempotency_key")
        delay_until = new.delay_until
        if delay_until is not None:
            delay_until = _check_time(delay_until, "delay_until")
        deadline_at = new.execution_deadline_at
        if deadline_at is not None:
            deadline_at = _check_time(deadline_at, "execution_deadline_at")
        shape = self._known_shape(new)
        if shape is None or (key is not None and shape.key_ttl_ms <= 0):
            return None
        tags_json = instance_tag = None
        if new.tags:
            try:
                tags = check_tags(new.tags)
            except EngineError:
                return None
            tags_json = msgspec.json.encode(tags).decode()
            instance_tag = tags.get(self._store.rules.instance_tag)
        partition = shape.partition
        if is_minted := execution_id is None:
            execution_id = ExecutionId(f"{{fp:{partition}}}:{uuid}")
        else:
            partition, uuid = row_key(execution_id)
        row = (
            partition,
            *shape.row,
            uuid,
            0 if priority < 0 else min(priority, MAX_PRIORITY),
            payload,
            shape.delay_until if delay_until is None else delay_until,
            deadline_at,
            instance_tag,
            tags_json,
            key,
            None if key is None else shape.key_ttl_ms,
        )
        return _Submission(execution_id, shape, row, key, is_minted=is_minted)

    def _known_shape(self, new: NewExecution) -> _Shape | None:
        """The shape of an item, or None where the store has to be asked for its numbers or its policy is wrong."""
        names = (new.namespace, new.lane_id, new.execution_kind, new.creator_identity, new.payload_encoding, new.policy)
        try:
            shape = self._shapes.get(names)
        except TypeError:
            # A policy given as a dictionary has no hash.
            return self._shape(new)
        if shape is None and (shape := self._shape(new)) is not None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[names] = shape
        return shape

    def _shape(self, new: NewExecution) -> _Shape | None:
        store = self._store
        lane_id = check_lane_id(new.lane_id)
        namespace = check_text(new.namespace, "namespace")
        kind = check_text(new.execution_kind, "execution_kind")
        creator = check_text(new.creator_identity, "creator_identity")
        encoding = new.payload_encoding
        if encoding is not None:
            encoding = check_text(encoding, "payload_encoding")
        try:
            policy = parse_policy(new.policy)
        except EngineError:
            return None
        queue = store.known_queue(lane_id, _required(policy))
        namespace_no = store.known_namespace_no(namespace)
        if queue is None or namespace_no is None:
            return None
        policy_text = delay_until = deadline_ms = retention_ms = None
        if policy is not None:
            policy_text = policy_json(policy)
            delay_until = policy.delay_until
            if policy.timeout_policy is not None:
                deadline_ms = policy.timeout_policy.execution_deadline_ms
            if policy.stream_policy is not None:
                retention_ms = policy.stream_policy.retention_ttl_ms
        queue_no, lane_no = queue
        return _Shape(
            partition=store.rules.partitions.of_lane(lane_id),
            lane_id=lane_id,
            namespace=namespace,
            row=(queue_no, lane_no, namespace_no, kind, creator, encoding, policy_text, deadline_ms, retention_ms),
            delay_until=delay_until,
            key_ttl_ms=dedup_window_ms(policy),
        )

    async def _find_duplicates(self, names: Sequence[tuple[ExecutionId, str, str | None]]) -> list[Duplicate | None]:
        """Of each id, namespace and key: the execution that makes a duplicate of it."""
        pairs = [split_execution_id(execution_id) for execution_id, _, _ in names]
        rows = await self._store.fetch(
            SQL.list_duplicates,
            partition_keys=[partition for partition, _ in pairs],
            execution_ids=[uuid for _, uuid in pairs],
            namespaces=[namespace for _, namespace, _ in names],
            idempotency_keys=[key for _, _, key in names],
        )
        found: list[Duplicate | None] = [None] * len(names)
        for nth, uuid in rows:
            if uuid is not None:
                found[nth - 1] = Duplicate(execution_id=format_execution_id(pairs[nth - 1][0], uuid))
        return found

    async def _insert_together(self, items: Sequence[_Submission]) -> Sequence[Submitted | Locked | Exception]:
        # A caller's own id may have to undo its key, which only a transaction of its own can.
        taken_at = [at for at, item in enumerate(items) if item.key is None or item.is_minted]
        taken = [items[at] for at in taken_at]
        answers: list[Submitted | Locked | Exception] = [LOCKED] * len(items)
        if taken:
            columns = _columns(taken)
            if all(item.is_minted and item.key is None for item in taken):
                del columns["idempotency_keys"], columns["key_ttls_ms"]
                rows = await self._store.database.fetch(SQL.insert_minted, columns)
            else:
                try:
                    rows = await self._store.database.fetch(
                        SQL.insert_executions, {**columns, "patience": PATIENCE_SHARED}, attempts=1
                    )
                except StoreFault as fault:
                    if fault.kind != "contention":
                        raise
                    return answers
            for at, answer in zip(taken_at, await self._judge(taken, rows), strict=True):
                answers[at] = answer
        return answers

    async def _insert_alone(self, item: _Submission) -> Submitted:
        async def insert(transaction: Transaction) -> list[Record]:
            rows = await transaction.fetch(SQL.insert_executions, **_columns([item]), patience=PATIENCE_ALONE)
            if item.key is not None and rows[0]["lane_accepts"] and not rows[0]["is_new"]:
                raise _NotCreated
            return rows

        answer: Submitted | Locked | Exception = LOCKED
        while isinstance(answer, Locked):
            try:
                rows = await self._store.transact(insert)
            except _NotCreated:
                (answer,) = await self._duplicates([item])
            else:
                (answer,) = await self._judge([item], rows)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _duplicates(self, items: Sequence[_Submission]) -> list[Duplicate | Locked | EngineError]:
        """What makes duplicates of items that were not created, or LOCKED where that has run out meanwhile."""
        try:
            found = await self._find_duplicates([(item.execution_id, item.shape.namespace, item.key) for item in items])
        except EngineError as failed:
            return [failed] * len(items)
        return [one or LOCKED for one in found]

    async def _judge(
        self, items: Sequence[_Submission], rows: Sequence[Record]
    ) -> list[Submitted | Locked | Exception]:
        """The answers of a statement that has committed, after waking who waits for what it brought."""
        waiting = PublicState.WAITING
        answers: list[Submitted | Locked | Exception] = [
            Created(execution_id=item.execution_id, public_state=waiting) for item in items
        ]
        wakeups = self._store.wakeups
        judged = 0
        lanes: dict[int, dict[int, int]] = {}
        open_at: list[int] = []
        for nth, lane_no, queue_no, place, created, is_new, lane_accepts, due_in_ms in rows:
            if nth == 0:
                judged += created
                lanes.setdefault(lane_no, {})[queue_no] = place
                continue
            judged += 1
            item = items[nth - 1]
            if is_new:
                answers[nth - 1] = Created(execution_id=item.execution_id, public_state=PublicState.DELAYED)
                wakeups.timer(due_in_ms)
            elif lane_accepts and item.key is None:
                answers[nth - 1] = Duplicate(execution_id=item.execution_id)
            else:
                open_at.append(nth - 1)
                if not lane_accepts:
                    refusal = f"lane_id: lane {item.shape.lane_id!r} accepts no submissions"
                    answers[nth - 1] = error("invalid_input", refusal)
        if judged != len(items):
            raise error("internal", f"{len(items)} submissions were given, {judged} were judged")
        for lane_no, places in lanes.items():
            wakeups.work(self._store.lane_id(lane_no), places)
        if open_at:
            for at, found in zip(open_at, await self._duplicates([items[at] for at in open_at]), strict=True):
                # A refusal by the lane stands, unless the item is a duplicate.
                if not (isinstance(found, Locked) and isinstance(answers[at], EngineError)):
                    answers[at] = found
        return answers


def _required(policy: ExecutionPolicy | None) -> tuple[str, ...]:
    return () if policy is None else policy.required_capabilities


def _columns(items: Sequence[_Submission]) -> dict[str, Any]:
    return columns_of(_COLUMNS, [item.row for item in items])


def _check_bytes(value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise error("invalid_input", f"input_payload: must be bytes, got {type(value).__name__}")


def _check_time(value: object, field: str) -> int:
    if type(value) is not int or not -(2**62) < value < 2**62:
        raise error("invalid_input", f"{field}: must be milliseconds since the epoch, got {value!r}")
    return value
