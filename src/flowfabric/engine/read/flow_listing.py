"""Lists of flows, page by page, with any combination of filters.

An index finds the flows of a namespace in a state, newest first. If a tag is wanted, the flows are read in that order,
or those with the tag are read and sorted, whichever is shorter: both are tried in turn with budgets that grow fourfold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import required
from flowfabric.engine.read.filters import (
    MAX_TIME,
    check_tag,
    check_texts,
    decode_position,
    encode_position,
    several,
    time_range,
)
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.flow import FlowEntry, FlowPage, FlowState, FlowStatus, status_of_flow
from flowfabric.model.ids import FlowId, Namespace
from flowfabric.model.text import check_limit, shown, word_of

SQL = statements_beside(__file__)

MAX_LIMIT = 1000
LONGEST_READ = 1000
"""How many flows one statement reads in order while it looks for a tag."""
FIRST_CAP = 2_000
GROWTH = 4
_FIRST_ID = UUID(int=0)
_WANTED = [status for status in FlowStatus if status is not FlowStatus.UNKNOWN]
"""The statuses to filter by; the states behind the unknown one are not known."""


class _Position(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A position in the order of flows: before it come newer flows."""

    created_at: int
    flow_id: UUID


@dataclass(frozen=True, kw_only=True, slots=True)
class _Query:
    """The checked filters of one call."""

    namespaces: list[str] | None
    statuses: frozenset[FlowStatus] | None
    tag: tuple[str, str] | None
    created_from: int

    def parameters(self) -> Mapping[str, object]:
        """The filters as parameters of the statements."""
        key, value = (None, None) if self.tag is None else self.tag
        statuses = self.statuses
        pairs = (
            None
            if statuses is None
            else [
                (own, derived) for own in FlowState for derived in FlowState if status_of_flow(own, derived) in statuses
            ]
        )
        return {
            "namespaces": self.namespaces,
            "public_states": None if pairs is None else [own.value for own, _ in pairs],
            "derived_states": None if pairs is None else [derived.value for _, derived in pairs],
            "created_from": self.created_from,
            "tag_key": key,
            "tag_value": value,
        }


class FlowListing:
    """The operation that lists flows."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list_flows(
        self,
        *,
        namespace: str | Iterable[str] | None = None,
        status: FlowStatus | str | Iterable[FlowStatus | str] | None = None,
        tag: tuple[str, str] | None = None,
        created_after: int | None = None,
        created_before: int | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> FlowPage:
        """A page of the flows that match every filter, newest first."""
        limit = check_limit(limit, MAX_LIMIT)
        created_from, created_to = time_range("created", created_after, created_before)
        query = _Query(
            namespaces=check_texts(namespace, "namespace"),
            statuses=None if status is None else frozenset(map(_check_status, several(status, "status"))),
            tag=None if tag is None else check_tag(tag),
            created_from=created_from,
        )
        before = _Position(min(created_to, MAX_TIME - 1) + 1, _FIRST_ID)
        if cursor is not None:
            after = _read_cursor(cursor)
            before = min(before, after, key=lambda position: (position.created_at, position.flow_id))
        if limit == 0 or query.namespaces == [] or query.statuses == frozenset() or created_from > created_to:
            return FlowPage(flows=[], next_cursor=None)
        rows = await self._find(query, before, limit + 1)
        flows = [_entry(row) for row in rows[:limit]]
        last = flows[-1] if len(rows) > limit else None
        return FlowPage(
            flows=flows,
            next_cursor=None if last is None else encode_position(_Position(last.created_at, last.flow_id)),
        )

    async def _find(self, query: _Query, before: _Position, wanted: int) -> Sequence[Record]:
        if query.tag is None:
            return await self._read(query, before, wanted)
        found: list[Record] = []
        start, budget, cap = before, LONGEST_READ, FIRST_CAP
        while True:
            rows = await self._store.fetch(
                SQL.list_tagged_flows, **query.parameters(), **_before(start), depth=wanted, cap=cap
            )
            if rows[0]["is_whole"]:
                return [row for row in rows if row["flow_id"] is not None]
            for _ in range(budget // LONGEST_READ):
                page = await self._read(query, before, LONGEST_READ)
                found += (row for row in page if row["is_match"])
                if len(found) >= wanted or len(page) < LONGEST_READ:
                    return found[:wanted]
                before = _Position(page[-1]["created_at"], page[-1]["flow_id"])
            budget, cap = budget * GROWTH, cap * GROWTH

    async def _read(self, query: _Query, before: _Position, depth: int) -> list[Record]:
        return await self._store.fetch(SQL.list_flows, **query.parameters(), **_before(before), depth=depth)


def _before(position: _Position) -> dict[str, object]:
    return {"before_at": position.created_at, "before_id": position.flow_id}


def _check_status(value: object) -> FlowStatus:
    status = word_of(FlowStatus, value)
    if status is None or status not in _WANTED:
        raise error("invalid_input", f"status: expected one of {', '.join(_WANTED)}, got {shown(value)}")
    return status


def _read_cursor(cursor: object) -> _Position:
    found = decode_position(cursor, _Position)
    if found is None or abs(found.created_at) > MAX_TIME:
        raise error(
            "invalid_input", f"cursor: expected the next_cursor of an earlier list_flows page, got {shown(cursor)}"
        )
    return found


def _entry(row: Record) -> FlowEntry:
    return FlowEntry(
        flow_id=FlowId(row["flow_id"]),
        flow_kind=row["flow_kind"],
        namespace=Namespace(required(row["namespace"], context="list_flows", field="namespace")),
        created_at=row["created_at"],
        status=status_of_flow(row["public_flow_state"], row["derived_state"]),
    )
