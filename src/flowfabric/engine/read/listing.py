"""Lists of executions, page by page, with any combination of filters.

The members of a flow are read from an index in creation order. For other lists there are two ways to find a page. A
scan reads executions in creation order and keeps those that match: fast if many match. A collection reads candidates
from small tables, such as the timers, and sorts them: fast if few match. Both are tried in turn with budgets that grow
fourfold, so a page costs a small multiple of the cheaper way.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import corruption, literal, required
from flowfabric.engine.read.filters import (
    MAX_TIME,
    check_lanes,
    check_states,
    check_tag,
    check_texts,
    decode_position,
    encode_position,
    time_range,
)
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import ExecutionPage, ExecutionSummary
from flowfabric.model.ids import (
    ExecutionId,
    FlowId,
    LaneId,
    Namespace,
    format_execution_id,
    parse_execution_id,
    parse_uuid,
    split_execution_id,
)
from flowfabric.model.states import ENDED_STATES, PublicState
from flowfabric.model.text import check_limit, shown, word_of

SQL = statements_beside(__file__)

MAX_LIMIT = 1000
FIRST_SCAN, LONGEST_SCAN = 1_000, 16_000
"""Executions that the first statement of a scan reads, and the most that any statement reads."""
FIRST_CAP = 2_000
"""Candidates that the first collection reads from each source."""
FIRST_FAN_OUT = 64
"""Pairs of namespace and lane that the first step of a scan reads."""
GROWTH = 4
MIN_DEPTH = 8
_LOWEST, _HIGHEST = str(UUID(int=0)), str(UUID(int=2**128 - 1))
"""The first and the last UUID."""

_COMMON = frozenset({PublicState.WAITING, PublicState.COMPLETED})

_SOURCES: Mapping[PublicState, str] = {
    PublicState.WAITING: "ready",
    PublicState.DELAYED: "delayed",
    PublicState.ACTIVE: "leased",
    PublicState.SUSPENDED: "suspended",
    PublicState.COMPLETED: "ended",
    PublicState.RATE_LIMITED: "limited",
}
"""The source of `list_candidates` that contains the executions of a state, beside the table `listed`."""
_LISTED = frozenset(PublicState) - {PublicState.DELAYED, PublicState.SUSPENDED, PublicState.COMPLETED}
"""The states with rows in the table `listed`: it has every execution of the states without a source. Of the others it
has the executions that are blocked or have lost their lease; so those that are rate limited, but only because their
queue has no room, are not in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Collection:
    """Small tables that together contain every match."""

    sources: frozenset[str] = frozenset()
    listed: frozenset[PublicState] = frozenset()

    @classmethod
    def of_states(cls, states: frozenset[PublicState]) -> "_Collection":
        """The tables that contain every execution of some states."""
        return cls(sources=frozenset(_SOURCES[state] for state in states if state in _SOURCES), listed=states & _LISTED)


class ListOrder(StrEnum):
    """The order of a list by creation time."""

    NEWEST = "newest"
    OLDEST = "oldest"


class _Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The position of the last execution of a page."""

    order: ListOrder
    created_at: int
    execution_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Query:
    """The checked filters of one call."""

    namespaces: list[str] | None
    lanes: list[LaneId] | None
    states: frozenset[PublicState] | None
    kinds: list[str] | None
    tag: tuple[str, str] | None
    flow_id: FlowId | None
    created_from: int
    created_to: int
    completed_from: int | None
    completed_to: int | None
    order: ListOrder
    after: _Cursor | None

    @property
    def matches_nothing(self) -> bool:
        """Whether the filters exclude every execution."""
        given = (self.namespaces, self.lanes, self.states, self.kinds)
        return (
            self.created_from > self.created_to
            or (
                self.completed_from is not None
                and self.completed_to is not None
                and self.completed_from > self.completed_to
            )
            or any(values is not None and not values for values in given)
        )

    @property
    def is_rare(self) -> bool:
        """Whether few executions are likely to match.

        A given tag is rare, and most executions are waiting or completed.
        """
        has_rare_states = self.states is not None and self.states.isdisjoint(_COMMON)
        return self.tag is not None or has_rare_states

    def parameters(self) -> dict[str, object]:
        """The parameters that all statements of a list share."""
        return {
            "states": None if self.states is None else sorted(self.states),
            "completed_from": self.completed_from,
            "completed_to": self.completed_to,
            "tag_key": None if self.tag is None else self.tag[0],
            "tag_value": None if self.tag is None else self.tag[1],
        }

    def position(self) -> dict[str, object]:
        """The parameters of the last execution of the previous page."""
        after = self.after
        return {
            "after_at": None if after is None else after.created_at,
            "after_id": None if after is None else after.execution_id,
        }

    def collections(self) -> list[_Collection]:
        """The collections that the filters allow; each contains every match."""
        found = []
        if self.tag is not None:
            found.append(_Collection(sources=frozenset({"tagged"})))
        if self.states is not None:
            found.append(_Collection.of_states(self.states))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    """The stored numbers of the filtered namespaces, lanes and kinds; None without a filter."""

    namespaces: list[int] | None = None
    lanes: list[int] | None = None
    queues: list[int] | None = None

    @property
    def matches_nothing(self) -> bool:
        """Whether a filter names only unknown names."""
        return [] in (self.namespaces, self.lanes, self.queues)


class Listing:
    """The list operation."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list_executions(
        self,
        *,
        namespace: str | Iterable[str] | None = None,
        lane_id: str | Iterable[str] | None = None,
        public_state: PublicState | str | Iterable[PublicState | str] | None = None,
        execution_kind: str | Iterable[str] | None = None,
        tag: tuple[str, str] | None = None,
        flow_id: UUID | str | None = None,
        created_after: int | None = None,
        created_before: int | None = None,
        completed_after: int | None = None,
        completed_before: int | None = None,
        order: str = "newest",
        cursor: str | None = None,
        limit: int = 50,
    ) -> ExecutionPage:
        """A page of the executions that match every filter, in creation order."""
        limit = check_limit(limit, MAX_LIMIT)
        created_from, created_to = time_range("created", created_after, created_before)
        completed_from, completed_to = time_range("completed", completed_after, completed_before)
        wants_ended = completed_after is not None or completed_before is not None
        states = check_states(public_state)
        if wants_ended:
            states = ENDED_STATES if states is None else states & ENDED_STATES
        direction = _check_order(order)
        query = _Query(
            namespaces=check_texts(namespace, "namespace"),
            lanes=check_lanes(lane_id),
            states=states,
            kinds=check_texts(execution_kind, "execution_kind"),
            tag=None if tag is None else check_tag(tag),
            flow_id=None if flow_id is None else FlowId(parse_uuid(flow_id, "flow_id")),
            created_from=created_from,
            created_to=created_to,
            completed_from=completed_from if completed_after is not None else None,
            completed_to=completed_to if completed_before is not None else None,
            order=direction,
            after=None if cursor is None else _read_cursor(cursor, direction),
        )
        if limit == 0 or query.matches_nothing:
            return ExecutionPage(executions=[], next_cursor=None)
        rows = await self._find(query, limit + 1)
        executions = [_summary(row) for row in rows[:limit]]
        return ExecutionPage(
            executions=executions,
            next_cursor=_write_cursor(direction, executions[-1]) if len(rows) > limit else None,
        )

    async def _find(self, query: _Query, wanted: int) -> list[Record]:
        numbers = await self._numbers(query)
        if numbers.matches_nothing:
            return []
        if query.flow_id is not None:
            return await self._find_members(query, numbers, wanted)
        scan = _Scan(self._store, query, numbers, wanted)
        collections = query.collections()
        budget, cap = FIRST_SCAN, FIRST_CAP
        starts_with_collection = query.is_rare
        while starts_with_collection or not await scan.advance(budget):
            starts_with_collection = False
            for collection in collections:
                found = await self._collect(query, numbers, collection, cap, wanted)
                if found is not None:
                    return found
            budget, cap = budget * GROWTH, cap * GROWTH
        return scan.found

    async def _find_members(self, query: _Query, numbers: _Numbers, wanted: int) -> list[Record]:
        """The first matching members of a flow, which has an index in creation order."""
        is_newest_first = query.order is ListOrder.NEWEST
        if is_newest_first:
            at, last = min(query.created_to + 1, MAX_TIME), _LOWEST
        else:
            at, last = query.created_from - 1, _HIGHEST
        if (after := query.after) is not None and (after.created_at < at) is is_newest_first:
            at, last = after.created_at, split_execution_id(ExecutionId(after.execution_id))[1]
        found: list[Record] = []
        depth = wanted
        while True:
            rows = await self._store.fetch(
                SQL.list_newest_members if is_newest_first else SQL.list_oldest_members,
                flow_id=query.flow_id,
                namespace_nos=numbers.namespaces,
                lane_nos=numbers.lanes,
                queue_nos=numbers.queues,
                depth=depth,
                wanted=wanted - len(found),
                **(
                    {"created_from": query.created_from, "before_at": at, "before_id": last}
                    if is_newest_first
                    else {"created_to": query.created_to, "after_at": at, "after_id": last}
                ),
                **query.parameters(),
            )
            found += (row for row in rows if row["execution_id"] is not None)
            at, last = rows[0]["reached_at"], rows[0]["reached_id"]
            if at is None or len(found) >= wanted:
                return found
            depth = min(depth * GROWTH, LONGEST_SCAN)

    async def _numbers(self, query: _Query) -> _Numbers:
        """Look up the numbers of the names in the filters."""
        names = {"namespaces": query.namespaces, "lanes": query.lanes, "kinds": query.kinds}
        if not any(given is not None for given in names.values()):
            return _Numbers()
        (row,) = await self._store.fetch(SQL.read_numbers, **names)
        return _Numbers(
            namespaces=None if query.namespaces is None else row["namespace_nos"],
            lanes=None if query.lanes is None else row["lane_nos"],
            queues=None if query.kinds is None else row["queue_nos"],
        )

    async def _collect(
        self, query: _Query, numbers: _Numbers, collection: _Collection, cap: int, wanted: int
    ) -> list[Record] | None:
        """The first matches of a collection, or None if a source has more than cap rows."""
        rows = await self._store.fetch(
            SQL.list_candidates,
            sources=sorted(collection.sources),
            listed_states=sorted(collection.listed),
            cap=cap,
            wanted=wanted,
            namespace_nos=numbers.namespaces,
            lane_nos=numbers.lanes,
            queue_nos=numbers.queues,
            created_from=query.created_from,
            created_to=query.created_to,
            is_newest_first=query.order is ListOrder.NEWEST,
            **query.parameters(),
            **query.position(),
        )
        return [row for row in rows if row["execution_id"] is not None] if rows[0]["is_whole"] else None


@dataclass(slots=True)
class _Scan:
    """A scan in creation order, and how far it has got.

    Each pair of namespace and lane has its own index range. The scan reads the pairs whose first execution comes first,
    up to the time at which the next pair starts.
    """

    store: Store
    query: _Query
    numbers: _Numbers
    wanted: int
    found: list[Record] = field(default_factory=list)
    created_from: int = 0
    created_to: int = 0
    pairs: list[tuple[int, int, int]] | None = None
    """Namespace, lane and first creation time of each pair, sorted by that time; None until they are read."""
    fan_out: int = 0
    limit: int = 0
    """The last creation time before the next pair beyond the fan-out starts."""

    def __post_init__(self) -> None:
        self.created_from, self.created_to = self.query.created_from, self.query.created_to
        if (after := self.query.after) is not None:
            if self.is_newest_first:
                self.created_to = min(self.created_to, after.created_at)
            else:
                self.created_from = max(self.created_from, after.created_at)

    @property
    def is_newest_first(self) -> bool:
        """Whether the newest execution comes first."""
        return self.query.order is ListOrder.NEWEST

    @property
    def is_exhausted(self) -> bool:
        """Whether the whole time range has been read."""
        return self.created_from > self.created_to

    async def advance(self, budget: int) -> bool:
        """Read about budget more executions; return whether the page is full or nothing is left."""
        if self.pairs is None:
            self.pairs = await self._read_pairs()
            self._widen(self.pairs)
        while budget > 0 and self.pairs and not self.is_exhausted:
            budget -= await self._step(self.pairs[: self.fan_out], min(budget, LONGEST_SCAN))
            if len(self.found) >= self.wanted:
                return True
            self._widen(self.pairs)
        return self.is_exhausted or not self.pairs

    async def _read_pairs(self) -> list[tuple[int, int, int]]:
        rows = await self.store.fetch(
            SQL.list_pairs,
            namespace_nos=self.numbers.namespaces,
            lane_nos=self.numbers.lanes,
            created_from=self.created_from,
            created_to=self.created_to,
            is_newest_first=self.is_newest_first,
        )
        pairs = [(row["namespace_no"], row["lane_no"], row["edge"]) for row in rows if row["edge"] is not None]
        return sorted(pairs, key=lambda pair: pair[2], reverse=self.is_newest_first)

    def _widen(self, pairs: list[tuple[int, int, int]]) -> None:
        """Raise the fan-out until its pairs have unread time before the next pair starts."""
        while not self.fan_out or (self._has_reached_limit() and self.fan_out < len(pairs)):
            self.fan_out = self.fan_out * GROWTH or FIRST_FAN_OUT
            if self.fan_out >= len(pairs):
                self.limit = self.created_from if self.is_newest_first else self.created_to
            else:
                self.limit = pairs[self.fan_out][2] + (1 if self.is_newest_first else -1)

    def _has_reached_limit(self) -> bool:
        return self.limit > self.created_to if self.is_newest_first else self.limit < self.created_from

    async def _step(self, pairs: list[tuple[int, int, int]], budget: int) -> int:
        """Read the next executions of some pairs; return about how many."""
        depth = max(budget // len(pairs) + 1, MIN_DEPTH)
        rows = await self.store.fetch(
            SQL.list_newest if self.is_newest_first else SQL.list_oldest,
            namespace_nos=[namespace_no for namespace_no, _, _ in pairs],
            lane_nos=[lane_no for _, lane_no, _ in pairs],
            queue_nos=self.numbers.queues,
            created_from=self.limit if self.is_newest_first else self.created_from,
            created_to=self.created_to if self.is_newest_first else self.limit,
            depth=depth,
            wanted=self.wanted - len(self.found),
            **self.query.parameters(),
            **self.query.position(),
        )
        self.found += (row for row in rows if row["execution_id"] is not None)
        reached: int = self.limit if rows[0]["reached"] is None else rows[0]["reached"]
        if self.is_newest_first:
            self.created_to = reached - 1
        else:
            self.created_from = reached + 1
        return depth * len(pairs)


def _check_order(value: object) -> ListOrder:
    if (order := word_of(ListOrder, value)) is None:
        raise error("invalid_input", f"order: expected one of {', '.join(ListOrder)}, got {shown(value)}")
    return order


def _write_cursor(order: ListOrder, last: ExecutionSummary) -> str:
    return encode_position(_Cursor(order, last.created_at, last.execution_id))


def _read_cursor(cursor: object, order: ListOrder) -> _Cursor:
    found = decode_position(cursor, _Cursor)
    if found is None or not _is_id(found.execution_id) or abs(found.created_at) > MAX_TIME:
        raise error(
            "invalid_input", f"cursor: expected the next_cursor of an earlier list_executions page, got {shown(cursor)}"
        )
    if found.order is not order:
        raise error(
            "invalid_input",
            f"cursor: belongs to a list with order {found.order}, got order {order}; keep the order from page to page",
        )
    return found


def _is_id(text: str) -> bool:
    try:
        return parse_execution_id(text) == text
    except EngineError:
        return False


def _summary(row: Record) -> ExecutionSummary:
    context = "list_executions"
    if row["partition_key"] < 0:
        raise corruption(context, "execution_id", f"partition index {row['partition_key']} is negative")
    return ExecutionSummary(
        execution_id=format_execution_id(row["partition_key"], row["execution_id"]),
        namespace=Namespace(required(row["namespace"], context=context, field="namespace")),
        lane_id=LaneId(required(row["lane_id"], context=context, field="lane_id")),
        execution_kind=required(row["execution_kind"], context=context, field="execution_kind"),
        public_state=literal(PublicState, row["public_state"], context=context, field="public_state"),
        priority=row["priority"],
        created_at=row["created_at"],
    )
