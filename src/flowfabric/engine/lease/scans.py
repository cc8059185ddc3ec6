"""How claims search the queues: by route, or by queue when a claim wants few of many."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.watermark import ScanWatermarks
from flowfabric.engine.store import Store
from flowfabric.model.kind import check_kinds
from flowfabric.model.policy import DEFAULT_RECLAIM_CAP, POLICY_RECLAIM_CAP, check_capabilities
from flowfabric.model.text import check_short

SQL = statements_beside(__file__)

RECLAIM_LIMITS = {"reclaim_limit": DEFAULT_RECLAIM_CAP, "policy_reclaim_limit": POLICY_RECLAIM_CAP}
"""How often a lease may be lost: without a policy, and with a policy that sets no limit."""


class Wanted(NamedTuple):
    """What a claim may take; None means any kind or any namespace."""

    lanes: tuple[str, ...]
    capabilities: tuple[str, ...]
    kinds: tuple[str, ...] | None
    namespace: str | None

    @classmethod
    def of(
        cls, lanes: Sequence[str], capabilities: Sequence[str], kinds: Sequence[str] | None, namespace: str | None
    ) -> "Wanted":
        """Check the arguments of a claim."""
        return cls(
            tuple(lanes),
            check_capabilities(capabilities),
            None if kinds is None else check_kinds(kinds),
            None if namespace is None else check_short(namespace, "namespace"),
        )


class Scan(NamedTuple):
    """How a claim searches: by route, or by queue when it wants few of many queues."""

    is_by_queue: bool
    watermarks: ScanWatermarks
    parameters: dict[str, object]

    @property
    def where(self) -> dict[str, object]:
        """The parameters of the next statement: what to claim and which spans of places to read."""
        sources, firsts, lasts = self.watermarks.spans()
        return {**self.parameters, "span_sources": sources, "span_firsts": firsts, "span_lasts": lasts, "scanned_to": 0}


class Scans:
    """Chooses how a claim searches.

    A route lists everything a worker may run, in order, so a claim reads only what it takes. A claim for certain kinds
    would read past all others there; when it wants few of the queues, it reads those queues instead.
    """

    MAX_QUEUES = 8
    """The number of queues that one statement can merge."""
    COVERAGE_SECONDS = 30.0
    """How long the number of wanted queues is cached; an old number costs time, never correctness."""
    MAX_CACHED = 1024

    def __init__(self, store: Store) -> None:
        self._store = store
        self._coverage: dict[Wanted, tuple[bool, float]] = {}

    async def of(self, wanted: Wanted, *, by_route: bool = False) -> Scan:
        """Return the scan for a claim."""
        store, watermarks = self._store, self._store.wakeups.watermarks
        is_filtered = wanted.kinds is not None or wanted.namespace is not None
        parameters: dict[str, object] = {
            "lanes": wanted.lanes,
            "capabilities": wanted.capabilities,
            "kind_nos": None if wanted.kinds is None else await store.kind_nos(wanted.kinds),
            "namespace_no": None if wanted.namespace is None else await store.namespace_no(wanted.namespace),
        }
        is_by_queue = is_filtered and not by_route and await self._wants_few(wanted, parameters)
        return Scan(
            is_by_queue,
            watermarks.of_queues(wanted) if is_by_queue else watermarks.of_routes(wanted),
            {**parameters, "is_filtered": is_filtered},
        )

    async def _wants_few(self, wanted: Wanted, parameters: Mapping[str, object]) -> bool:
        now = time.monotonic()
        known = self._coverage.get(wanted)
        if known is None or known[1] < now:
            (row,) = await self._store.fetch(SQL.read_coverage, **parameters)
            if len(self._coverage) >= self.MAX_CACHED:
                self._coverage.clear()
            wants_few = row["wanted"] < row["queues"] and row["wanted"] <= self.MAX_QUEUES
            known = self._coverage[wanted] = wants_few, now + self.COVERAGE_SECONDS
        return known[0]
