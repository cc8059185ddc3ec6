"""Checks of submissions: of each one, and only once of what many of them share."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from flowfabric.engine.core.queues import AdmissionKey, QueueNames, QueueNumbers
from flowfabric.engine.execution.limits import NOTHING, NOTHING_LOOKED_UP, Inherited, LimitRules, Limits, Looked
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import NewExecution
from flowfabric.model.ids import ExecutionId, check_lane_id, check_partition, id_prefix, parse_execution_id, row_key
from flowfabric.model.limit import Facts
from flowfabric.model.policy import ExecutionPolicy, dedup_window_ms, parse_policy, policy_json
from flowfabric.model.policy_checks import MAX_MS
from flowfabric.model.tag import check_tags
from flowfabric.model.text import check_range, check_short, check_text, shorten, shown

MAX_PRIORITY = 9000
MAX_SHAPES = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """What many submissions share, checked once, with the ids of its names in the store."""

    partition: int
    id_prefix: str
    """The prefix of every generated id of this partition."""
    lane_id: str
    namespace: str
    columns: Mapping[str, Any]
    """The stored values that they share, by the names of the statements' parameters."""
    delay_until: int | None
    key_ttl_ms: int
    names: QueueNames
    """The names of the queue; without the admission key, if that depends on the execution."""
    limits: Limits | None = None
    """What is read from each execution; None if it is nothing."""
    variants: dict[tuple[AdmissionKey, int | None], "Shape"] = field(default_factory=dict, compare=False)
    """The same shape with what was read from executions."""

    def at(self, queue: QueueNumbers, weight: int | None) -> "Shape":
        """The same shape, of executions that go to this queue with this weight."""
        columns = {
            **self.columns,
            "queue_no": queue.queue_no,
            "route_no": queue.route_no,
            "lane_no": queue.lane_no,
            "namespace_no": queue.namespace_no,
            "quota_weight": weight,
        }
        return replace(self, columns=columns, limits=None, variants={})


@dataclass(slots=True)
class Submission:
    """A checked submission."""

    shape: Shape
    uuid: str
    execution_id: ExecutionId
    is_minted: bool
    priority: int
    payload: bytes
    delay_until: int | None
    delay_ms: int | None
    deadline_at: int | None
    tags: Mapping[str, str] | None
    key: str | None

    def unique_keys(self) -> tuple[Hashable, ...]:
        """The keys that only one submission of a statement may have: its own id, and its scoped idempotency key."""
        if self.key is None:
            return () if self.is_minted else (self.execution_id,)
        return self.execution_id, (self.shape.namespace, self.shape.lane_id, self.key)

    def description(self) -> str:
        """How error messages name it: by the caller's idempotency key and id."""
        key = [] if self.key is None else [f"idempotency key {shown(self.key)}"]
        return " or ".join(key if self.is_minted and key else [*key, f"execution {self.execution_id}"])

    @property
    def partition(self) -> int:
        """The partition of the execution: that of the caller's id, else that of its lane."""
        return self.shape.partition if self.is_minted else row_key(self.execution_id)[0]

    def possible_duplicate(self) -> "PossibleDuplicate":
        """The values by which the store finds the execution that this submission duplicates."""
        shape, columns = self.shape, self.shape.columns
        return PossibleDuplicate(
            self.execution_id,
            shape.partition,
            shape.namespace,
            shape.lane_id,
            self.key,
            columns["execution_kind"],
            columns["payload_encoding"],
            self.payload,
            columns["policy"] or "",
        )

    def is_plain(self) -> bool:
        """Whether it can start at once unless its lane refuses it."""
        is_delayed = self.delay_until is not None or self.delay_ms is not None
        return self.is_minted and self.key is None and not is_delayed and self.deadline_at is None


class PossibleDuplicate(NamedTuple):
    """A submission that may be a duplicate: by its id, or by its idempotency key with the same content."""

    execution_id: ExecutionId
    lane_partition: int
    namespace: str
    lane_id: str
    key: str | None
    execution_kind: str
    payload_encoding: str | None
    payload: bytes
    policy: str | None
    """The JSON of the policy, "" without one; None for an invalid policy, which equals no stored one."""

    def conflict(
        self, owner: ExecutionId, kind: str, encoding: str | None, payload_digest: bytes, policy_digest: bytes
    ) -> EngineError | None:
        """The error if its content differs from what `owner` was submitted with under the same key, else None."""
        differs = []
        encodings: dict[str, object] = {}
        if kind != self.execution_kind:
            differs.append("kind")
        if payload_digest != _digest(self.payload):
            differs.append("payload")
        if encoding != self.payload_encoding:
            differs.append("encoding")
            encodings = {"stored_encoding": shown(encoding), "given_encoding": shown(self.payload_encoding)}
        if self.policy is None or policy_digest != _digest(_comparable_policy(self.policy)):
            differs.append("policy")
        if not differs:
            return None
        return error(
            "idempotency_conflict",
            {
                "idempotency_key": shown(self.key),
                "execution_id": owner,
                "stored_kind": shorten(kind),
                "given_kind": shorten(self.execution_kind),
                **encodings,
                "differs": " and ".join(differs),
                "remedy": "submit what was submitted under this key, or use another key",
            },
        )


class UniformBatch(NamedTuple):
    """Submissions of one shape, as columns, that can all start at once unless their lane refuses them."""

    shape: Shape
    uuids: Sequence[str]
    priorities: Sequence[int]
    payloads: Sequence[bytes]
    tags: Sequence[Mapping[str, str] | None]


class Submissions:
    """Checks submissions, and caches the shapes it has seen."""

    def __init__(self, store: Store, rules: LimitRules) -> None:
        self._store = store
        self._rules = rules
        self._generation = rules.generation
        self._shapes: dict[tuple[Any, ...], Shape] = {}

    def check(self, new: NewExecution, uuid: str, looked: Looked = NOTHING_LOOKED_UP) -> Submission | None:
        """The checked item, or None if it can only be checked with a query of the store."""
        if not isinstance(new, NewExecution):
            raise error("invalid_input", f"items: expected a NewExecution, got {shown(new)}")
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
        delay_ms = new.delay_ms
        if delay_ms is not None:
            if delay_until is not None:
                raise error("invalid_input", "delay_ms: must be absent if delay_until is given; give one of them")
            check_range(delay_ms, "delay_ms", 0, MAX_MS)
        deadline_at = new.execution_deadline_at
        if deadline_at is not None:
            deadline_at = _check_time(deadline_at, "execution_deadline_at")
        shape = self._known_shape(new, looked)
        if shape is None or (key is not None and shape.key_ttl_ms <= 0):
            return None
        tags = None
        if new.tags:
            try:
                tags = check_tags(new.tags)
            except EngineError:
                return None
        if shape.limits is not None and (shape := self._variant(shape, tags, payload)) is None:
            return None
        if is_minted := execution_id is None:
            execution_id = ExecutionId(shape.id_prefix + uuid)
        else:
            _, uuid = row_key(execution_id)
        return Submission(
            shape,
            uuid,
            execution_id,
            is_minted,
            0 if priority < 0 else min(priority, MAX_PRIORITY),
            payload,
            shape.delay_until if delay_until is None and delay_ms is None else delay_until,
            delay_ms,
            deadline_at,
            tags,
            key,
        )

    def uniform_batch(self, items: Sequence[NewExecution], uuids: Sequence[str]) -> UniformBatch | None:
        """The items as one batch if all are valid and of one shape, else None."""
        first = items[0]
        if type(first) is not NewExecution:
            return None
        namespace, lane_id, kind, policy = first.namespace, first.lane_id, first.execution_kind, first.policy
        creator, encoding = first.creator_identity, first.payload_encoding
        tags: list[Mapping[str, str] | None] = []
        try:
            shape = self._known_shape(first, NOTHING_LOOKED_UP)
            if shape is None or shape.delay_until is not None:
                return None
            for new in items:
                if (
                    type(new) is not NewExecution
                    or new.namespace is not namespace
                    or new.lane_id is not lane_id
                    or new.execution_kind is not kind
                    or new.policy is not policy
                    or new.creator_identity is not creator
                    or new.payload_encoding is not encoding
                    or new.execution_id is not None
                    or new.idempotency_key
                    or new.delay_until is not None
                    or new.delay_ms is not None
                    or new.execution_deadline_at is not None
                    or new.parent_execution_id is not None
                    or type(new.input_payload) is not bytes
                    or type(new.priority) is not int
                    or not 0 <= new.priority <= MAX_PRIORITY
                ):
                    return None
                tags.append(check_tags(new.tags) if new.tags else None)
        except EngineError:
            return None
        if shape.limits is not None:
            variants = [self._variant(shape, own, new.input_payload) for own, new in zip(tags, items, strict=True)]
            if variants[0] is None or any(each is not variants[0] for each in variants):
                return None
            shape = variants[0]
        return UniformBatch(shape, uuids, [new.priority for new in items], [new.input_payload for new in items], tags)

    def queue_names(self, new: NewExecution, looked: Looked) -> QueueNames | None:
        """The queue of an item whose lane, kind, namespace and parent are valid; None if its quota must be looked up.

        Raises for invalid tags, an invalid policy and limits that conflict.
        """
        tags = check_tags(new.tags)
        policy = parse_policy(new.policy)
        names = QueueNames(check_lane_id(new.lane_id), new.execution_kind, new.namespace, required_of(policy))
        inherited = _inherited(new, looked) or NOTHING
        limits = self._rules.limits_of(names, policy, inherited, looked.undefined)
        if limits is None:
            return None
        admission, _ = limits.of(Facts(tags, _check_bytes(new.input_payload)))
        return names._replace(admission=admission)

    def _known_shape(self, new: NewExecution, looked: Looked) -> Shape | None:
        """The shape of an item, or None if its queue is not cached or its policy is invalid."""
        inherited = looked.flow
        if new.parent_execution_id is not None and (inherited := _inherited(new, looked)) is None:
            return None
        if self._generation != self._rules.generation:
            self._shapes.clear()
            self._generation = self._rules.generation
        names = (
            new.namespace,
            new.lane_id,
            new.execution_kind,
            new.creator_identity,
            new.payload_encoding,
            new.policy,
            inherited,
        )
        try:
            shape = self._shapes.get(names)
        except TypeError:
            # A policy given as a dictionary is not hashable.
            return self._shape(new, inherited or NOTHING, looked)
        # That of a quota policy that does not exist is not kept: the policy may be created.
        if (
            shape is None
            and (shape := self._shape(new, inherited or NOTHING, looked)) is not None
            and not looked.undefined
        ):
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[names] = shape
        return shape

    def _variant(self, shape: Shape, tags: Mapping[str, str] | None, payload: bytes) -> Shape | None:
        """The shape of an execution with these tags and this payload, or None if its queue is not cached."""
        assert shape.limits is not None
        admission, weight = found = shape.limits.of(Facts(tags, payload))
        if (variant := shape.variants.get(found)) is None:
            queue = self._store.known_queue(shape.names._replace(admission=admission))
            if queue is None:
                return None
            if len(shape.variants) >= MAX_SHAPES:
                shape.variants.clear()
            variant = shape.variants[found] = shape.at(queue, weight)
        return variant

    def _shape(self, new: NewExecution, inherited: Inherited, looked: Looked) -> Shape | None:
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
            names = QueueNames(lane_id, kind, namespace, required_of(policy))
            limits = self._rules.limits_of(names, policy, inherited, looked.undefined)
        except EngineError:
            return None
        if limits is None:
            return None
        queue = None
        if limits.is_fixed:
            names = names._replace(admission=limits.fixed)
            if (queue := store.known_queue(names)) is None:
                return None
        policy_text = delay_until = deadline_ms = retention_ms = None
        if policy is not None:
            policy_text = policy_json(policy)
            delay_until = policy.delay_until
            if policy.timeout_policy is not None:
                deadline_ms = policy.timeout_policy.execution_deadline_ms
            if policy.stream_policy is not None:
                retention_ms = policy.stream_policy.retention_ttl_ms
        partition = store.rules.partitions.of_lane(lane_id)
        shape = Shape(
            partition=partition,
            id_prefix=id_prefix(partition),
            lane_id=lane_id,
            namespace=namespace,
            columns={
                "queue_no": None,
                "route_no": None,
                "lane_no": None,
                "namespace_no": None,
                "execution_kind": kind,
                "creator_identity": creator,
                "payload_encoding": encoding,
                "policy": policy_text,
                "deadline_ms": deadline_ms,
                "retention_ms": retention_ms,
                "quota_weight": None,
            },
            delay_until=delay_until,
            key_ttl_ms=dedup_window_ms(policy),
            names=names,
            limits=limits,
        )
        return shape if queue is None else shape.at(queue, None)


def _inherited(new: NewExecution, looked: Looked) -> Inherited | None:
    """What an item inherits from its parent or its flow; None if nothing, or if its parent must be looked up."""
    return looked.flow if new.parent_execution_id is None else looked.parents.get(new.parent_execution_id)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:16]


def _comparable_policy(policy: str) -> bytes:
    """The form in which a policy's JSON is compared: a policy of defaults equals no policy."""
    return b"" if policy == "{}" else policy.encode()


def required_of(policy: ExecutionPolicy | None) -> tuple[str, ...]:
    """The capabilities that a policy requires."""
    return () if policy is None else policy.required_capabilities


def _check_bytes(value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise error("invalid_input", f"input_payload: must be bytes, got {type(value).__name__}")


def _check_time(value: object, field: str) -> int:
    if type(value) is not int or not -(2**62) < value < 2**62:
        raise error("invalid_input", f"{field}: must be milliseconds since the epoch, got {value!r}")
    return value
