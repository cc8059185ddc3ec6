"""One round of a claim on lanes with limits: what a transaction has found, admitted and left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from flowfabric.db.database import Record
from flowfabric.engine.core.admission import Candidate
from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.core.turns import Changes, Span, Turns
from flowfabric.model.ids import ExecutionId, format_execution_id

PAUSE_SECONDS = 1.0
"""How long a queue without room is passed over, if there are few, unless a hint says that it has room."""

Chosen = tuple[Record, Sequence[int]]
"""A locked execution that was admitted, and the quota keys of which it then holds a slot."""


class Reserved(NamedTuple):
    """The routes of some lanes that only claims with admission serve, and the capabilities that these add."""

    route_nos: frozenset[int]
    capabilities: tuple[str, ...]
    takes_turns: bool
    """Whether one of the lanes serves its queues in turns."""
    valid_until: float
    changes: int
    """How often there may have been a new route or other limits when they were read."""


@dataclass(kw_only=True, slots=True)
class Round:
    """What one transaction of a claim has found and taken."""

    taken: Sequence[Record] = ()
    at_reclaim_limit: list[tuple[ExecutionId, int]] = field(default_factory=list)
    passed: list[UUID] = field(default_factory=list)
    """What the next round must not find again: executions at their reclaim limit, locked ones, and those denied."""
    closed_keys: set[int] = field(default_factory=set)
    """The quota keys whose rate lets nothing through that comes after what it has denied."""
    has_denied: bool = False
    missed: list[tuple[int, int]] = field(default_factory=list)
    """The queues and places of executions that may be within their limits, but were locked."""
    end: int | None = None
    """The position after which it takes nothing: one before it took less of its limits than the estimate assumes."""
    full_queues: dict[int, Sequence[int]] = field(default_factory=dict)
    """The queues that have no room, and the quota keys that limit them."""
    short_queues: dict[int, Sequence[int]] = field(default_factory=dict)
    """The queues that have room for some of their entries only, and the quota keys that limit them."""
    spans: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """How many entries it has read of each span, and the first that it did not lock."""
    kept: dict[tuple[int, int], int] = field(default_factory=dict)
    """The first place that stays unclaimed, for each route and priority band."""
    has_limited: bool = False
    """Whether it has seen entries of routes with limits."""
    is_full: bool = False
    """Whether it has locked as many candidates as it may."""
    is_at_reach: bool = False
    """Whether it has read as many entries as it may."""
    retries_after_ms: dict[int, int] = field(default_factory=dict)
    """When queues without room may have some, unless another execution makes room before."""
    scan_us: int | None = None
    cut_at: int | None = None

    @property
    def hides_others(self) -> bool:
        """Whether others that may be within their limits were not looked at."""
        return bool(self.missed) or self.end is not None or (self.is_full and self.has_denied)

    @property
    def retry_after_ms(self) -> int | None:
        """When the first of them may have room."""
        return min(self.retries_after_ms.values(), default=None)

    @property
    def limiting_keys(self) -> Mapping[int, Sequence[int]]:
        """The queues of which entries had no room, and the quota keys that limit them."""
        return {**self.full_queues, **self.short_queues}

    def fill(self, queue_no: int, quota_key_nos: Sequence[int], retry_after_ms: int | None) -> None:
        """Note a queue without room."""
        self.full_queues[queue_no] = quota_key_nos
        if retry_after_ms is not None:
            self.retries_after_ms[queue_no] = min(retry_after_ms, self.retries_after_ms.get(queue_no, retry_after_ms))

    def keep(self, route_no: int, place: int) -> None:
        """Note an entry that stays unclaimed."""
        band = route_no, place >> BAND_BITS
        self.kept[band] = min(place, self.kept.get(band, place))


def read_round(rows: list[Record], reserved: Reserved, reach: int) -> tuple[Round, list[Record]]:
    """What a statement has found: the candidates, and what it says about the others."""
    # The last row has the number of entries read, the place and the time of the scan in columns of the candidates.
    read = rows.pop()
    found = Round(
        scan_us=read["weight"],
        cut_at=read["place"] if read["is_markable"] else None,
        is_at_reach=read["lease_epoch"] >= reach,
    )
    picked: list[Record] = []
    for row in rows:
        kind, route_no = row[0], row["route_no"]
        if kind == "full":
            found.fill(row["queue_no"], row["quota_key_nos"], row["weight"])
            found.has_limited = True
            continue
        if kind == "short":
            found.short_queues[row["queue_no"]] = row["quota_key_nos"]
            continue
        if kind == "span":
            found.spans[row["weight"] - 1] = row["lease_epoch"], row["place"]
            continue
        found.has_limited = found.has_limited or route_no in reserved.route_nos
        if kind == "missed":
            found.missed.append((row["queue_no"], row["place"]))
            found.passed.append(row["execution_id"])
        elif kind == "kept":
            found.keep(route_no, row["place"])
        elif kind == "reclaim_limit":
            found.keep(route_no, row["place"])
            found.passed.append(row["execution_id"])
            execution_id = format_execution_id(row["partition_key"], row["execution_id"])
            found.at_reclaim_limit.append((execution_id, row["lease_epoch"]))
        else:
            picked.append(row)
    return found, picked


def record_round(turns: Turns, spans: Sequence[Span], found: Round, changes: Changes) -> None:
    """Record in the turns what a committed round has taken of each span, and which queues have no room."""
    places: dict[tuple[int, int], list[int]] = {}
    for row in found.taken:
        places.setdefault((row["queue_no"], row["place"] >> BAND_BITS), []).append(row["place"])
    for number, span in enumerate(spans):
        count, left = found.spans.get(number, (0, None))
        turns.taken(
            span,
            places.get((span.queue_no, span.first_place >> BAND_BITS), ()),
            is_exhausted=count < span.share,
            now_ms=turns.now_ms,
            left=left,
            changes=changes,
        )
    for queue_no in found.full_queues:
        retry_after_ms = found.retries_after_ms.get(queue_no)
        most = None if retry_after_ms is None else retry_after_ms / 1000
        turns.pause(queue_no, PAUSE_SECONDS, most=most, changes=changes)


def candidate_of(row: Record, *, is_in_order: bool) -> Candidate:
    """What admission needs of a row; only a claim in order leaves executions hidden behind others."""
    hidden_nth: int | None = row["hidden_nth"]
    return Candidate(
        partition_key=row["partition_key"],
        execution_id=row["execution_id"],
        queue_no=row["queue_no"],
        quota_key_nos=row["quota_key_nos"],
        budget_detail=row["budget_detail"],
        weight=row["weight"],
        slot_keys=row["slot_keys"] or (),
        is_markable=row["is_markable"],
        nth=row["nth"],
        hidden_nth=hidden_nth if is_in_order and hidden_nth is not None and hidden_nth > row["nth"] else None,
        has_guards=row["has_guards"],
    )
