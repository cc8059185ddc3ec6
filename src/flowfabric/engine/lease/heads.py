"""The heads of the queues that a claim serves in turns, read by a full scan."""

from collections.abc import Mapping, Sequence

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.turns import Fairness, Head, Turns
from flowfabric.engine.lease.scans import Wanted
from flowfabric.engine.store import Store

SQL = statements_beside(__file__)
_read_weights = msgspec.json.Decoder(dict[str, float]).decode


class Heads:
    """Loads the turns of claims."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def turns_of(self, wanted: Wanted, capabilities: Sequence[str]) -> Turns:
        """The turns of the queues that a claim with these capabilities serves, loaded again if they are too old."""
        turns = self._store.wakeups.watermarks.turns_of(wanted)
        if turns.needs_scan:
            with turns.scanning() as changes:
                fairness = await self._fairness(wanted.lanes)
                kinds, namespace = wanted.kinds, wanted.namespace
                *rows, read = await self._store.fetch(
                    SQL.list_heads,
                    lanes=wanted.lanes,
                    capabilities=capabilities,
                    kind_nos=None if kinds is None else await self._store.kind_nos(kinds),
                    namespace_no=None if namespace is None else await self._store.namespace_no(namespace),
                )
                now = read["created_at"]
                turns.route_nos = frozenset(route_no for _, route_nos in fairness.values() for route_no in route_nos)
                turns.load(
                    [_head(row, now) for row in rows],
                    {lane_id: each for lane_id, (each, _) in fairness.items()},
                    read["place"] / 1_000_000,
                    now,
                    changes=changes,
                )
        return turns

    async def _fairness(self, lanes: Sequence[str]) -> Mapping[str, tuple[Fairness, Sequence[int]]]:
        """How each lane is fair, and its routes."""
        rows = await self._store.fetch(SQL.list_fairness, lanes=lanes)
        return {
            row["lane_id"]: (
                Fairness(
                    is_fair=row["is_fair"],
                    weights=_read_weights(row["fair_weights"]) if row["fair_weights"] else {},
                    ageing_ms=row["ageing_ms"],
                ),
                [route_no for route_no in row["route_nos"] if route_no is not None],
            )
            for row in rows
        }


def _head(row: Record, now: int) -> Head:
    return Head(
        queue_no=row["queue_no"],
        lane_id=row["lane_id"],
        fair_group=row["fair_group"],
        place=row["place"],
        waiting_since=now if row["created_at"] is None else row["created_at"],
    )
