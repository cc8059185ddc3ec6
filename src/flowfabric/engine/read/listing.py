"""Listing executions: a page at a time, by the cheaper of two ways, whatever the filters.

One way walks the order of creation and keeps what matches; it is quick where matches are plentiful. The other collects
what a narrow table leads to, if that is not too much, and sorts it; it is quick where matches are rare. Both are tried
in turn, each time four times as far, so a page costs a small multiple of the cheaper one.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import corruption, literal, required
from flowfabric.engine.read.filters import check_lanes, check_states, check_texts
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import ExecutionPage, ExecutionSummary
from flowfabric.model.ids import (
    FlowId,
    LaneId,
    Namespace,
    flow_partition,
    format_execution_id,
    parse_execution_id,
    parse_uuid,
)
from flowfabric.model.states import ENDED_STATES, PublicState
from flowfabric.model.tag import check_tag_key
from flowfabric.model.text import check_limit, check_range, check_text, shown, word_of

SQL = statements_beside(__file__)

MAX_LIMIT = 1000
MAX_TIME = 2**63 - 1
FIRST_WALK, LONGEST_WALK = 1_000, 16_000
"""Executions that are looked at in the order of creation in the first statement, and at most in one."""
FIRST_CAP = 2_000
"""Entries of a narrow table that are collected at first."""
FIRST_FAN_OUT = 64
"""Pairs of a namespace and a lane that are walked along at first."""
GROWTH = 4
LEAST_DEPTH = 8

_USUAL = frozenset({PublicState.WAITING, PublicState.COMPLETED})

_SOURCES: Mapping[PublicState, str] = {
    PublicState.WAITING: "ready",
    PublicState.DELAYED: "delayed",
    PublicState.ACTIVE: "leased",
    PublicState.SUSPENDED: "suspended",
    PublicState.COMPLETED: "ended",
}
"""The source of `list_candidates` that leads to the executions of a state."""
_LISTED = frozenset(PublicState) - {PublicState.DELAYED, PublicState.SUSPENDED, PublicState.COMPLETED}
"""The states that the table `listed` leads to: those without a source; of the others what is blocked or has lost its
lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Detour:
    """Narrow tables that together lead to every match."""

    sources: frozenset[str] = frozenset()
    listed: frozenset[PublicState] = frozenset()

    @classmethod
    def of_states(cls, states: frozenset[PublicState]) -> "_Detour":
        """The tables that hold every execution of some states."""
        return cls(sources=frozenset(_SOURCES[state] for state in states if state in _SOURCES), listed=states & _LISTED)


class ListOrder(StrEnum):
    """Which end of a list comes first."""

    NEWEST = "newest"
    OLDEST = "oldest"


class _Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place of the last execution of a page in one order."""

    order: ListOrder
    created_at: int
    execution_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
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
    def is_hopeless(self) -> bool:
        """Whether nothing can match."""
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
        """Whether few executions are likely to match: most have no such tag, are in no such flow, wait or succeeded."""
        has_rare_states = self.states is not None and self.states.isdisjoint(_USUAL)
        return self.tag is not None or self.flow_id is not None or has_rare_states

    def parameters(self) -> dict[str, object]:
        """What every statement of a list takes."""
        return {
            "states": None if self.states is None else sorted(self.states),
            "flow_id": self.flow_id,
            "completed_from": self.completed_from,
            "completed_to": self.completed_to,
            "tag_key": None if self.tag is None else self.tag[0],
            "tag_value": None if self.tag is None else self.tag[1],
            "after_at": None if self.after is None else self.after.created_at,
            "after_id": None if self.after is None else self.after.execution_id,
        }

    def detours(self) -> list[_Detour]:
        """The ways around the order of creation, each of which leads to every match."""
        found = []
        if self.tag is not None:
            found.append(_Detour(sources=frozenset({"tagged"})))
        if self.flow_id is not None:
            found.append(_Detour(sources=frozenset({"partition"})))
        if self.states is not None:
            found.append(_Detour.of_states(self.states))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    """The numbers of the namespaces, lanes and kinds' queues asked for; None where any will do."""

    namespaces: list[int] | None = None
    lanes: list[int] | None = None
    queues: list[int] | None = None

    @property
    def is_hopeless(self) -> bool:
        """Whether none of the names of a filter is known."""
        return [] in (self.namespaces, self.lanes, self.queues)


class Listing:
    """The list of executions."""

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
        """A page of the executions that meet every filter, in the order of their creation."""
        most = check_limit(limit, MAX_LIMIT)
        created_from, created_to = _span("created", created_after, created_before)
        completed_from, completed_to = _span("completed", completed_after, completed_before)
        wants_ended = completed_after is not None or completed_before is not None
        states = check_states(public_state)
        if wants_ended:
            states = ENDED_STATES if states is None else states & ENDED_STATES
        direction = _check_order(order)
        question = _Question(
            namespaces=check_texts(namespace, "namespace"),
            lanes=check_lanes(lane_id),
            states=states,
            kinds=check_texts(execution_kind, "execution_kind"),
            tag=None if tag is None else _check_tag(tag),
            flow_id=None if flow_id is None else FlowId(parse_uuid(flow_id, "flow_id")),
            created_from=created_from,
            created_to=created_to,
            completed_from=completed_from if completed_after is not None else None,
            completed_to=completed_to if completed_before is not None else None,
            order=direction,
            after=None if cursor is None else _read_cursor(cursor, direction),
        )
        if most == 0 or question.is_hopeless:
            return ExecutionPage(executions=[], next_cursor=None)
        rows = await self._find(question, most + 1)
        executions = [_summary(row) for row in rows[:most]]
        return ExecutionPage(
            executions=executions,
            next_cursor=_write_cursor(direction, executions[-1]) if len(rows) > most else None,
        )

    async def _find(self, question: _Question, wanted: int) -> list[Record]:
        numbers = await self._numbers(question)
        if numbers.is_hopeless:
            return []
        walk = _Walk(self._store, question, numbers, wanted)
        detours = question.detours()
        budget, cap = FIRST_WALK, FIRST_CAP
        is_detour_first = question.is_rare
        while is_detour_first or not await walk.go_on(budget):
            is_detour_first = False
            for detour in detours:
                found = await self._collect(question, numbers, detour, cap, wanted)
                if found is not None:
                    return found
            budget, cap = budget * GROWTH, cap * GROWTH
        return walk.found

    async def _numbers(self, question: _Question) -> _Numbers:
        """The numbers of the names in the filters."""
        names = {"namespaces": question.namespaces, "lanes": question.lanes, "kinds": question.kinds}
        if not any(given is not None for given in names.values()):
            return _Numbers()
        (row,) = await self._store.fetch(SQL.read_numbers, **names)
        return _Numbers(
            namespaces=None if question.namespaces is None else row["namespace_nos"],
            lanes=None if question.lanes is None else row["lane_nos"],
            queues=None if question.kinds is None else row["queue_nos"],
        )

    async def _collect(
        self, question: _Question, numbers: _Numbers, detour: _Detour, cap: int, wanted: int
    ) -> list[Record] | None:
        """The first matches by way of narrow tables, or None where those hold more than the cap."""
        flow_id = question.flow_id
        rows = await self._store.fetch(
            SQL.list_candidates,
            sources=sorted(detour.sources),
            listed_states=sorted(detour.listed),
            cap=cap,
            wanted=wanted,
            namespace_nos=numbers.namespaces,
            lane_nos=numbers.lanes,
            queue_nos=numbers.queues,
            created_from=question.created_from,
            created_to=question.created_to,
            flow_partition=None if flow_id is None else flow_partition(flow_id, self._store.rules.partitions.flow),
            is_newest_first=question.order is ListOrder.NEWEST,
            **question.parameters(),
        )
        return [row for row in rows if row["execution_id"] is not None] if rows[0]["is_whole"] else None


@dataclass(slots=True)
class _Walk:
    """The way along the order of creation, as far as it was gone.

    Of many pairs of a namespace and a lane it goes along with those that come first, to where the next one begins.
    """

    store: Store
    question: _Question
    numbers: _Numbers
    wanted: int
    found: list[Record] = field(default_factory=list)
    created_from: int = 0
    created_to: int = 0
    pairs: list[tuple[int, int, int]] | None = None
    """Namespace, lane and the time of what comes first of them; in the order of those times, once they are known."""
    fan_out: int = 0
    limit: int = 0
    """The last time up to which the pairs within the fan-out are all there are."""

    def __post_init__(self) -> None:
        self.created_from, self.created_to = self.question.created_from, self.question.created_to
        if (after := self.question.after) is not None:
            if self.is_newest_first:
                self.created_to = min(self.created_to, after.created_at)
            else:
                self.created_from = max(self.created_from, after.created_at)

    @property
    def is_newest_first(self) -> bool:
        """Whether it goes from the newest to the oldest."""
        return self.question.order is ListOrder.NEWEST

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of the time asked for."""
        return self.created_from > self.created_to

    async def go_on(self, budget: int) -> bool:
        """Look at about so many more entries; whether the page is full or nothing is left."""
        if self.pairs is None:
            self.pairs = await self._read_pairs()
            self._widen(self.pairs)
        while budget > 0 and self.pairs and not self.is_over:
            budget -= await self._step(self.pairs[: self.fan_out], min(budget, LONGEST_WALK))
            if len(self.found) >= self.wanted:
                return True
            self._widen(self.pairs)
        return self.is_over or not self.pairs

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
        """Take in more pairs until those within the fan-out have something left before the next one begins."""
        while not self.fan_out or (self._is_spent() and self.fan_out < len(pairs)):
            self.fan_out = self.fan_out * GROWTH or FIRST_FAN_OUT
            if self.fan_out >= len(pairs):
                self.limit = self.created_from if self.is_newest_first else self.created_to
            else:
                self.limit = pairs[self.fan_out][2] + (1 if self.is_newest_first else -1)

    def _is_spent(self) -> bool:
        return self.limit > self.created_to if self.is_newest_first else self.limit < self.created_from

    async def _step(self, pairs: list[tuple[int, int, int]], budget: int) -> int:
        """Look at the next entries of some pairs; about how many those are."""
        depth = max(budget // len(pairs) + 1, LEAST_DEPTH)
        rows = await self.store.fetch(
            SQL.list_newest if self.is_newest_first else SQL.list_oldest,
            namespace_nos=[namespace_no for namespace_no, _, _ in pairs],
            lane_nos=[lane_no for _, lane_no, _ in pairs],
            queue_nos=self.numbers.queues,
            created_from=self.limit if self.is_newest_first else self.created_from,
            created_to=self.created_to if self.is_newest_first else self.limit,
            depth=depth,
            wanted=self.wanted - len(self.found),
            **self.question.parameters(),
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
        raise error("invalid_input", f"order: one of {', '.join(ListOrder)}, got {shown(value)}")
    return order


def _check_tag(tag: object) -> tuple[str, str]:
    if isinstance(tag, str) or not isinstance(tag, Sequence) or len(tag) != 2:
        raise error("invalid_input", "tag: a key and a value")
    key, value = tag
    return check_tag_key(key), check_text(value, "tag")


def _span(field: str, after: int | None, before: int | None) -> tuple[int, int]:
    """The first and the last time of a half-open span."""
    for name, time in (("after", after), ("before", before)):
        if time is not None:
            check_range(time, f"{field}_{name}", -MAX_TIME, MAX_TIME)
    return -MAX_TIME if after is None else after, MAX_TIME if before is None else before - 1


def _write_cursor(order: ListOrder, last: ExecutionSummary) -> str:
    text = msgspec.json.encode(_Cursor(order, last.created_at, last.execution_id))
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def _read_cursor(cursor: object, order: ListOrder) -> _Cursor:
    try:
        if not isinstance(cursor, str):
            raise ValueError
        found = msgspec.json.decode(
            base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True), type=_Cursor
        )
        if parse_execution_id(found.execution_id) != found.execution_id or abs(found.created_at) > MAX_TIME:
            raise ValueError
    except (ValueError, binascii.Error, msgspec.MsgspecError, EngineError):
        raise error("invalid_input", "cursor: not one this list gave") from None
    if found.order is not order:
        raise error("invalid_input", f"cursor: of a list in the order {found.order}, not {order}")
    return found


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
