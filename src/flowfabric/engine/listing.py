"""Listing executions: a page at a time, by the cheaper of two ways, whatever the filters.

One way walks the order of creation and keeps what matches; it is quick where matches are plentiful. The other collects
what a narrow index leads to, if that is not too much, and sorts it; it is quick where matches are rare. Both are tried
in turn, each time four times as far, so a page costs a small multiple of the cheaper one.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import (
    FlowId,
    LaneId,
    Namespace,
    check_lane_id,
    flow_partition,
    format_execution_id,
    parse_execution_id,
    parse_uuid,
)
from flowfabric.model.snapshots import ExecutionPage, ExecutionSummary
from flowfabric.model.states import PublicState
from flowfabric.model.tags import check_tag_key
from flowfabric.model.text import check_range, check_text, shorten

SQL = statements_beside(__file__)

MAX_LIMIT = 1000
MAX_TIME = 2**63 - 1
FIRST_WALK, LONGEST_WALK = 1_000, 16_000
"""Entries of the order of creation that are looked at in the first statement, and at most in one."""
FIRST_CAP = 10_000
"""Entries of a narrow index that are collected at first."""
GROWTH = 4
LEAST_DEPTH = 8

_UNHAPPY = frozenset({PublicState.FAILED, PublicState.CANCELLED, PublicState.EXPIRED, PublicState.SKIPPED})
_ENDED = _UNHAPPY | {PublicState.COMPLETED}

_SOURCES: dict[PublicState, frozenset[str]] = {
    PublicState.WAITING: frozenset({"claimable", "blocked"}),
    PublicState.RESUMABLE: frozenset({"claimable"}),
    PublicState.ACTIVE: frozenset({"timed", "claimable"}),
    PublicState.DELAYED: frozenset({"timed"}),
    PublicState.RATE_LIMITED: frozenset({"blocked"}),
    PublicState.SUSPENDED: frozenset({"suspended"}),
    PublicState.COMPLETED: frozenset({"ended"}),
    **dict.fromkeys(_UNHAPPY, frozenset({"unhappy"})),
}
"""The narrow indexes that together hold every execution of a state."""


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
    lanes: list[str] | None
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
        return self.created_from > self.created_to or any(values is not None and not values for values in given)

    def parameters(self) -> dict[str, object]:
        """What every statement of a list takes."""
        return {
            "kinds": self.kinds,
            "states": None if self.states is None else sorted(self.states),
            "flow_id": self.flow_id,
            "completed_from": self.completed_from,
            "completed_to": self.completed_to,
            "tag_key": None if self.tag is None else self.tag[0],
            "tag_value": None if self.tag is None else self.tag[1],
            "after_at": None if self.after is None else self.after.created_at,
            "after_id": None if self.after is None else self.after.execution_id,
        }

    def detours(self) -> list[frozenset[str]]:
        """The sets of narrow indexes each of which leads to every match."""
        found: list[frozenset[str]] = []
        if self.tag is not None:
            found.append(frozenset({"tagged"}))
        if self.flow_id is not None:
            found.append(frozenset({"partition"}))
        if self.states is not None and all(state in _SOURCES for state in self.states):
            sources = frozenset[str]().union(*(_SOURCES[state] for state in self.states))
            found.append(sources - {"unhappy"} if "ended" in sources else sources)
        return found


class Listing:
    """The list of executions."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list_executions(
        self,
        *,
        namespace: str | Iterable[str] | None,
        lane_id: str | Iterable[str] | None,
        public_state: PublicState | str | Iterable[PublicState | str] | None,
        execution_kind: str | Iterable[str] | None,
        tag: tuple[str, str] | None,
        flow_id: UUID | str | None,
        created_after: int | None,
        created_before: int | None,
        completed_after: int | None,
        completed_before: int | None,
        order: ListOrder | str,
        cursor: str | None,
        limit: int,
    ) -> ExecutionPage:
        """A page of the executions that meet every filter, in the order of their creation."""
        check_range(limit, "limit", 0, MAX_TIME)
        created_from, created_to = _span("created", created_after, created_before)
        completed_from, completed_to = _span("completed", completed_after, completed_before)
        wants_ended = completed_after is not None or completed_before is not None
        states = None if public_state is None else frozenset(map(_check_state, _several(public_state, "public_state")))
        if wants_ended:
            states = _ENDED if states is None else states & _ENDED
        direction = _check_order(order)
        question = _Question(
            namespaces=None
            if namespace is None
            else [check_text(n, "namespace") for n in _several(namespace, "namespace")],
            lanes=None if lane_id is None else [check_lane_id(lane) for lane in _several(lane_id, "lane_id")],
            states=states,
            kinds=None
            if execution_kind is None
            else [check_text(kind, "execution_kind") for kind in _several(execution_kind, "execution_kind")],
            tag=None if tag is None else _check_tag(tag),
            flow_id=None if flow_id is None else FlowId(parse_uuid(flow_id, "flow_id")),
            created_from=created_from,
            created_to=created_to,
            completed_from=completed_from if completed_after is not None else None,
            completed_to=completed_to if completed_before is not None else None,
            order=direction,
            after=None if cursor is None else _read_cursor(cursor, direction),
        )
        limit = min(limit, MAX_LIMIT)
        if limit == 0 or question.is_hopeless:
            return ExecutionPage(executions=[], next_cursor=None)
        rows = await self._find(question, limit + 1)
        executions = [_summary(row) for row in rows[:limit]]
        return ExecutionPage(
            executions=executions,
            next_cursor=_write_cursor(direction, executions[-1]) if len(rows) > limit else None,
        )

    async def _find(self, question: _Question, wanted: int) -> list[Record]:
        pairs = await self._store.fetch(SQL.list_pairs, namespaces=question.namespaces, lanes=question.lanes)
        if not pairs:
            return []
        walk = _Walk(self._store, question, [pair[0] for pair in pairs], [pair[1] for pair in pairs], wanted)
        detours = question.detours()
        budget, cap = FIRST_WALK, FIRST_CAP
        # A tag or a flow is rarely on most executions.
        is_detour_first = question.tag is not None or question.flow_id is not None
        while is_detour_first or not await walk.go_on(budget):
            is_detour_first = False
            for sources in detours:
                found = await self._collect(question, walk, sources, cap, wanted)
                if found is not None:
                    return found
            budget, cap = budget * GROWTH, cap * GROWTH
        return walk.found

    async def _collect(
        self, question: _Question, walk: "_Walk", sources: frozenset[str], cap: int, wanted: int
    ) -> list[Record] | None:
        """All the matches by way of narrow indexes, or None where those hold more than the cap."""
        flow_id = question.flow_id
        rows = await self._store.fetch(
            SQL.list_candidates,
            sources=sorted(sources),
            cap=cap,
            wanted=wanted,
            namespace_nos=None if question.namespaces is None else sorted(set(walk.namespace_nos)),
            lane_nos=None if question.lanes is None else sorted(set(walk.lane_nos)),
            created_from=question.created_from,
            created_to=question.created_to,
            flow_partition=None if flow_id is None else flow_partition(flow_id, self._store.rules.partitions.flow),
            is_newest_first=question.order is ListOrder.NEWEST,
            **question.parameters(),
        )
        return [row for row in rows if row["execution_id"] is not None] if rows[0]["is_whole"] else None


@dataclass(slots=True)
class _Walk:
    """The way along the order of creation, as far as it was gone."""

    store: Store
    question: _Question
    namespace_nos: list[int]
    lane_nos: list[int]
    wanted: int
    found: list[Record] = field(default_factory=list)
    created_from: int = 0
    created_to: int = 0

    def __post_init__(self) -> None:
        self.created_from, self.created_to = self.question.created_from, self.question.created_to
        if (after := self.question.after) is not None:
            if self.question.order is ListOrder.NEWEST:
                self.created_to = min(self.created_to, after.created_at)
            else:
                self.created_from = max(self.created_from, after.created_at)

    async def go_on(self, budget: int) -> bool:
        """Look at about so many more entries; whether the page is full or nothing is left."""
        is_newest_first = self.question.order is ListOrder.NEWEST
        pairs = len(self.namespace_nos)
        while budget > 0 and self.created_from <= self.created_to:
            depth = max(min(budget, LONGEST_WALK) // pairs + 1, LEAST_DEPTH)
            rows = await self.store.fetch(
                SQL.list_newest if is_newest_first else SQL.list_oldest,
                namespace_nos=self.namespace_nos,
                lane_nos=self.lane_nos,
                created_from=self.created_from,
                created_to=self.created_to,
                depth=depth,
                wanted=self.wanted - len(self.found),
                **self.question.parameters(),
            )
            self.found += (row for row in rows if row["execution_id"] is not None)
            reached: int | None = rows[0]["reached"]
            if len(self.found) >= self.wanted or reached is None:
                return True
            if is_newest_first:
                self.created_to = reached - 1
            else:
                self.created_from = reached + 1
            budget -= depth * pairs
        return self.created_from > self.created_to


def _several(value: object, field: str) -> Sequence[object]:
    """The values of a filter that takes one or several."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, bytes | dict):
        raise error("invalid_input", f"{field}: text or several texts, got {shorten(repr(value))}")
    return tuple(value)


def _check_state(value: object) -> PublicState:
    try:
        return PublicState(str(value))
    except ValueError:
        raise error(
            "invalid_input", f"public_state: one of {', '.join(PublicState)}, got {shorten(repr(value))}"
        ) from None


def _check_order(value: object) -> ListOrder:
    try:
        return ListOrder(str(value))
    except ValueError:
        raise error("invalid_input", f"order: one of {', '.join(ListOrder)}, got {shorten(repr(value))}") from None


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
    if row["partition_key"] < 0:
        raise error("corruption", f"list_executions: execution_id: partition index {row['partition_key']} is negative")
    try:
        state = PublicState(row["public_state"])
    except ValueError:
        raise error("corruption", f"list_executions: public_state: unknown literal {row['public_state']!r}") from None
    return ExecutionSummary(
        execution_id=format_execution_id(row["partition_key"], row["execution_id"]),
        namespace=Namespace(row["namespace"]),
        lane_id=LaneId(row["lane_id"]),
        execution_kind=row["execution_kind"],
        public_state=state,
        priority=row["priority"],
        created_at=row["created_at"],
    )
