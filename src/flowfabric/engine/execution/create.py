"""Create executions exactly once, however often and however concurrently they are submitted."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast
from uuid import UUID

import msgspec

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import short_column, short_columns, statements_beside
from flowfabric.engine.core.payload import INLINE_PAYLOAD_BYTES, any_large
from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.core.queues import QueueNames
from flowfabric.engine.core.row import execution_keys
from flowfabric.engine.core.wakeups import Work
from flowfabric.engine.execution.checking import (
    MAX_PRIORITY,
    PossibleDuplicate,
    Submission,
    Submissions,
    UniformBatch,
)
from flowfabric.engine.execution.limits import LimitRules, check_parent, check_parent_id, quota_policy_of
from flowfabric.engine.store import Store, error_of
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.execution import Created, Duplicate, NewExecution
from flowfabric.model.ids import (
    ExecutionId,
    check_lane_id,
    format_execution_id,
    parse_execution_id,
)
from flowfabric.model.policy import dedup_window_ms, parse_policy, policy_json
from flowfabric.model.states import PublicState
from flowfabric.model.tag import check_tags
from flowfabric.model.text import check_short, check_text

SQL = statements_beside(__file__)

LOCK_TIMEOUT_SHARED, LOCK_TIMEOUT_ALONE = "50ms", "2s"
"""How long a shared statement, and one for a single item, wait for a key or an id that another session is inserting."""

Submitted = Created | Duplicate

_OWN_COLUMNS = (
    "partition_keys",
    "execution_ids",
    "priorities",
    "input_payloads",
    "delays_until",
    "delays_ms",
    "deadlines_at",
    "instance_tags",
    "tags",
    "idempotency_keys",
    "key_partitions",
    "key_ttls_ms",
)
_SHAPE_COLUMNS = (
    "queue_nos",
    "route_nos",
    "lane_nos",
    "namespace_nos",
    "execution_kinds",
    "creator_identities",
    "payload_encodings",
    "policies",
    "deadlines_ms",
    "retentions_ms",
    "quota_weights",
)


KIND_COLUMN = "execution_kind"
"""Not a column of the execution: its queue stores the kind. Only idempotency keys are compared with it."""


class _NotCreated(Exception):
    """Rolls back the idempotency key of an execution that already exists."""


class Create:
    """Inserts executions; concurrent callers share a statement."""

    def __init__(self, store: Store, rules: LimitRules) -> None:
        self._store = store
        self._rules = rules
        self._batch: Batch[Submission, Submitted] = Batch(
            self._insert_together, self._insert_alone, keys=Submission.unique_keys
        )
        self._submissions = Submissions(store, rules)

    async def create(self, new: NewExecution, minted: str, *, is_repeat: bool = False) -> Submitted:
        """Create one execution; concurrent callers share a statement.

        A repeat has the generated id of the first try, which may exist, so it is treated like a caller's own id.
        """
        if self._rules.is_due:
            await self._rules.refresh()
        submission = await self._check(new, minted)
        if isinstance(submission, Duplicate):
            return submission
        if is_repeat:
            submission.is_minted = False
        if submission.key is not None and not submission.is_minted:
            return await self._insert_alone(submission)
        return await self._store.answer(self._batch.put(submission))

    async def create_many(
        self, items: Sequence[NewExecution], minted: Sequence[str], *, is_repeat: bool = False
    ) -> list[Submitted | EngineError]:
        """Create up to a thousand executions, each with its own verdict; `is_repeat` as in `create`."""
        if self._rules.is_due:
            await self._rules.refresh()
        if not is_repeat and (batch := self._submissions.uniform_batch(items, minted)) is not None:
            try:
                return await self._insert_alike(batch)
            except StoreFault as fault:
                if fault.is_store_failure:
                    raise error_of(fault) from fault
                # The store rejects one of the items: below, each gets its own answer.
        checked = await self._check_all(items, minted)
        good = [item for item in checked if isinstance(item, Submission)]
        if is_repeat:
            for item in good:
                item.is_minted = False
        inserted: Iterator[Submitted | EngineError] = iter(await self._store.answers(self._batch.run(good)))
        if len(good) == len(items):
            return list(inserted)
        answers = [next(inserted) if isinstance(item, Submission) else item for item in checked]
        for at, new in enumerate(items):
            if not isinstance(checked[at], EngineError) or not isinstance(new, NewExecution):
                continue
            # An item with invalid tags or policy may duplicate an earlier item of this call, or conflict with it.
            if new.execution_id is not None or new.idempotency_key:
                try:
                    again = await self._check(new, minted[at])
                except EngineError as refused:
                    if refused.code == "idempotency_conflict":
                        answers[at] = refused
                else:
                    answers[at] = again if isinstance(again, Duplicate) else answers[at]
        return answers

    async def drain(self) -> None:
        """Wait until every submission in progress is answered."""
        await self._batch.drain()

    async def _check(self, new: NewExecution, uuid: str) -> Submission | Duplicate:
        """The checked item, or the execution that it duplicates."""
        if (known := self._submissions.check(new, uuid)) is not None:
            return known
        (answer,) = await self._look_up([new], [uuid])
        if isinstance(answer, EngineError):
            raise answer
        return answer

    async def _check_all(
        self, items: Sequence[NewExecution], uuids: Sequence[str]
    ) -> list[Submission | Duplicate | EngineError]:
        """For each: the checked item, the execution that it duplicates, or why it is refused."""
        checked: list[Submission | Duplicate | EngineError | None] = []
        for new, uuid in zip(items, uuids, strict=True):
            try:
                checked.append(self._submissions.check(new, uuid))
            except EngineError as refused:
                checked.append(refused)
        if open_at := [at for at, answer in enumerate(checked) if answer is None]:
            found: Sequence[Submission | Duplicate | EngineError]
            try:
                found = await self._look_up([items[at] for at in open_at], [uuids[at] for at in open_at])
            except EngineError as failed:
                found = [failed.copy() for _ in open_at]
            for at, answer in zip(open_at, found, strict=True):
                checked[at] = answer
        return [answer for answer in checked if answer is not None]

    async def _look_up(
        self, news: Sequence[NewExecution], uuids: Sequence[str]
    ) -> list[Submission | Duplicate | EngineError]:
        """Check items that need the store: their queues are new, or their tags or policies are invalid."""
        answers: list[Submission | Duplicate | EngineError | None] = [None] * len(news)
        possible: list[tuple[int, PossibleDuplicate]] = []
        parents: set[str] = set()
        policies: set[UUID] = set()
        items = list(news)
        for at, new in enumerate(items):
            try:
                check_lane_id(new.lane_id)
                check_text(new.creator_identity, "creator_identity")
                check_short(new.namespace, "namespace")
                check_text(new.execution_kind, "execution_kind")
                # A duplicate is answered before its tags and policy are checked, and registers no names.
                if new.execution_id is not None or new.idempotency_key:
                    possible.append((at, self._possible_duplicate(new, uuids[at])))
            except EngineError as refused:
                answers[at] = refused
        if possible:
            found = await self._find_duplicates([candidate for _, candidate in possible])
            for (at, _), duplicate in zip(possible, found, strict=True):
                answers[at] = duplicate
        for at, new in enumerate(items):
            if answers[at] is not None:
                continue
            try:
                check_tags(new.tags)
                policy = parse_policy(new.policy)
                if new.idempotency_key and dedup_window_ms(policy) <= 0:
                    items[at] = msgspec.structs.replace(new, idempotency_key=None)
                if new.parent_execution_id is not None:
                    parents.add(check_parent_id(new.parent_execution_id))
                if (quota_policy_id := quota_policy_of(policy)) is not None:
                    policies.add(quota_policy_id)
            except EngineError as refused:
                answers[at] = refused
        # What is known of limits may change in between, and then the queues too.
        while open_at := [at for at, answer in enumerate(answers) if answer is None]:
            looked = await self._rules.look_up(parents, policies)
            queues: dict[QueueNames, str] = {}
            for at in open_at:
                try:
                    check_parent(items[at].parent_execution_id, looked)
                    if (names := self._submissions.queue_names(items[at], looked)) is not None:
                        queues.setdefault(names, items[at].creator_identity)
                except EngineError as refused:
                    answers[at] = refused
            await self._store.add_queues(queues)
            for at in open_at:
                try:
                    answers[at] = answers[at] or self._submissions.check(items[at], uuids[at], looked)
                except EngineError as refused:
                    answers[at] = refused
        return [answer for answer in answers if answer is not None]

    def _possible_duplicate(self, new: NewExecution, uuid: str) -> PossibleDuplicate:
        """The values by which the store finds the execution that an item duplicates."""
        lane_partition = self._store.rules.partitions.of_lane(check_lane_id(new.lane_id))
        policy: str | None = None
        with contextlib.suppress(EngineError):
            parsed = parse_policy(new.policy)
            policy = "" if parsed is None else policy_json(parsed)
        return PossibleDuplicate(
            format_execution_id(lane_partition, uuid)
            if new.execution_id is None
            else parse_execution_id(new.execution_id),
            lane_partition,
            new.namespace,
            new.lane_id,
            new.idempotency_key or None,
            new.execution_kind,
            new.payload_encoding,
            bytes(new.input_payload),
            policy,
        )

    async def _find_duplicates(self, candidates: Sequence[PossibleDuplicate]) -> list[Duplicate | EngineError | None]:
        """For each: the execution it duplicates, a conflict if its key was used for other content, or None."""
        rows = await self._store.fetch(
            SQL.list_duplicates,
            **execution_keys(candidate.execution_id for candidate in candidates),
            key_partitions=[candidate.lane_partition for candidate in candidates],
            namespaces=[candidate.namespace for candidate in candidates],
            lanes=[candidate.lane_id for candidate in candidates],
            idempotency_keys=[candidate.key for candidate in candidates],
        )
        found: list[Duplicate | EngineError | None] = [None] * len(candidates)
        for nth, partition, uuid, *stored in rows:
            if uuid is None:
                continue
            execution_id = format_execution_id(partition, uuid)
            is_by_key = stored[0] is not None
            conflict = candidates[nth - 1].conflict(execution_id, *stored) if is_by_key else None
            found[nth - 1] = conflict or Duplicate(execution_id=execution_id)
        return found

    async def _insert_together(self, items: Sequence[Submission]) -> Sequence[Submitted | Locked | Exception]:
        shape = items[0].shape
        if all(item.shape is shape and item.is_plain() for item in items):
            return await self._insert_alike(
                UniformBatch(
                    shape,
                    [item.uuid for item in items],
                    [item.priority for item in items],
                    [item.payload for item in items],
                    [item.tags for item in items],
                )
            )
        # An item with both its own id and a key may have to roll back its key, so it needs its own transaction.
        shared_at = [at for at, item in enumerate(items) if item.key is None or item.is_minted]
        shared = [items[at] for at in shared_at]
        answers: list[Submitted | Locked | Exception] = [LOCKED] * len(items)
        if shared:
            try:
                rows = await self._store.database.fetch(
                    SQL.insert_executions, {**self._columns(shared), "lock_timeout": LOCK_TIMEOUT_SHARED}, attempts=1
                )
            except StoreFault as fault:
                if fault.kind != "contention":
                    raise
                return answers
            for at, answer in zip(shared_at, await self._judge(shared, rows), strict=True):
                answers[at] = answer
        return answers

    async def _insert_alike(self, items: UniformBatch) -> list[Submitted | EngineError]:
        shape, uuids, tags = items.shape, items.uuids, items.tags
        tag_ids = [uuid for uuid, own in zip(uuids, tags, strict=True) if own for _ in own]
        instance_key = self._store.rules.instance_tag
        instance_tags = [own and own.get(instance_key) for own in tags] if tag_ids else []
        has_instance_tags = any(each is not None for each in instance_tags)
        ((first_place, refused_by),) = await self._store.database.fetch(
            SQL.insert_alike_of_instances if has_instance_tags else SQL.insert_alike,
            {
                **{name: value for name, value in shape.columns.items() if name != KIND_COLUMN},
                "partition_key": shape.partition,
                "execution_ids": uuids,
                "priorities": short_column(items.priorities),
                "input_payloads": short_column(items.payloads),
                **_input_limits(items.payloads),
                "are_tagged": short_column([own is not None for own in tags]) if tag_ids else (False,),
                "instance_tags": short_column(instance_tags),
                **({"instance_key": instance_key} if has_instance_tags else {}),
                "tag_ids": tag_ids,
                "tag_keys": short_column([key for own in tags if own for key in own]),
                "tag_values": short_column([value for own in tags if own for value in own.values()]),
            },
        )
        if refused_by is not None:
            return [lane_refusal(shape.lane_id, refused_by) for _ in uuids]
        # Each priority has its own watermark.
        number = first_place & (1 << BAND_BITS) - 1
        firsts = [(MAX_PRIORITY - priority) << BAND_BITS | number for priority in set(items.priorities)]
        route_no, queue_no = shape.columns["route_no"], shape.columns["queue_no"]
        self._store.wakeups.work(Work(shape.lane_id, route_no, queue_no, first) for first in firsts)
        if has_instance_tags:
            self._store.wakeups.events(EventFamily.INSTANCE_TAG)
        head = shape.id_prefix
        return [*Created.each(cast("list[ExecutionId]", [head + uuid for uuid in uuids]), PublicState.WAITING)]

    async def _insert_alone(self, item: Submission) -> Submitted:
        async def insert(transaction: Transaction) -> list[Record]:
            rows = await transaction.fetch(
                SQL.insert_executions, **self._columns([item]), lock_timeout=LOCK_TIMEOUT_ALONE
            )
            if item.key is not None and rows[0]["lane_accepts"] and not rows[0]["is_new"]:
                raise _NotCreated
            return rows

        answer: Submitted | Locked | Exception = LOCKED
        while isinstance(answer, Locked):
            try:
                rows = await self._store.database.transact(insert)
            except StoreFault as fault:
                raise error_of(fault, item.description()) from fault
            except _NotCreated:
                (answer,) = await self._duplicates([item])
            else:
                (answer,) = await self._judge([item], rows)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _columns(self, items: Sequence[Submission]) -> dict[str, object]:
        instance_tag = self._store.rules.instance_tag
        own = short_columns(
            _OWN_COLUMNS,
            [
                (
                    item.partition,
                    item.uuid,
                    item.priority,
                    item.payload,
                    item.delay_until,
                    item.delay_ms,
                    item.deadline_at,
                    item.tags and item.tags.get(instance_tag),
                    item.tags and msgspec.json.encode(item.tags).decode(),
                    item.key,
                    None if item.key is None else item.shape.partition,
                    None if item.key is None else item.shape.key_ttl_ms,
                )
                for item in items
            ],
        )
        of_shapes = short_columns(_SHAPE_COLUMNS, [tuple(item.shape.columns.values()) for item in items])
        return own | of_shapes | _input_limits([item.payload for item in items])

    async def _duplicates(self, items: Sequence[Submission]) -> list[Duplicate | Locked | EngineError]:
        """The duplicates of items that were not created; LOCKED if the key has expired in the meantime."""
        try:
            found = await self._find_duplicates([item.possible_duplicate() for item in items])
        except EngineError as failed:
            return [failed] * len(items)
        return [duplicate or LOCKED for duplicate in found]

    async def _judge(self, items: Sequence[Submission], rows: Sequence[Record]) -> list[Submitted | Locked | Exception]:
        """Wake the waiters for the new work, and return the answers of a committed statement."""
        answers: list[Submitted | Locked | Exception] = [
            *Created.each([item.execution_id for item in items], PublicState.WAITING)
        ]
        wakeups = self._store.wakeups
        judged = 0
        work: list[Work] = []
        undecided: list[int] = []
        for nth, lane_no, route_no, queue_no, place, created, is_new, lane_accepts, due_in_ms, refused_by in rows:
            if nth == 0:
                judged += created
                work.append(Work(self._store.lane_id(lane_no), route_no, queue_no, place))
                continue
            judged += 1
            item = items[nth - 1]
            if is_new:
                answers[nth - 1] = Created(execution_id=item.execution_id, public_state=PublicState.DELAYED)
                wakeups.timer(due_in_ms)
            elif lane_accepts and item.key is None:
                answers[nth - 1] = Duplicate(execution_id=item.execution_id)
            else:
                undecided.append(nth - 1)
                if not lane_accepts:
                    answers[nth - 1] = lane_refusal(item.shape.lane_id, refused_by)
        if judged != len(items):
            raise error("internal", f"insert_executions: {len(items)} items given, {judged} verdicts returned")
        wakeups.work(work)
        instance_key = self._store.rules.instance_tag
        if any(item.tags and instance_key in item.tags for item in items):
            wakeups.events(EventFamily.INSTANCE_TAG)
        if undecided:
            for at, found in zip(undecided, await self._duplicates([items[at] for at in undecided]), strict=True):
                # A duplicate takes precedence over the refusal of the lane.
                if not (isinstance(found, Locked) and isinstance(answers[at], EngineError)):
                    answers[at] = found
        return answers


def _input_limits(payloads: Sequence[bytes]) -> dict[str, object]:
    """The parameters that decide which inputs are stored in execution_input."""
    return {
        "inline_payload_bytes": INLINE_PAYLOAD_BYTES,
        "has_large_inputs": any_large(payloads),
    }


def lane_refusal(lane_id: str, state: str, field: str = "lane_id") -> EngineError:
    """The error for a submission to a lane that is draining or disabled."""
    return error(
        "invalid_input",
        f"{field}: lane {lane_id!r} accepts no submissions: it is {state}; set_lane_state activates it",
    )
