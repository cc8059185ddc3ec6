"""The consistency check: finds stored rows that no operation can have written."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.read.flow_consistency import check_flows, check_members
from flowfabric.engine.read.limit_consistency import check_limits
from flowfabric.engine.store import Store
from flowfabric.model.execution import Inconsistency
from flowfabric.model.ids import ExecutionId, format_execution_id
from flowfabric.model.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    StateVector,
    TerminalOutcome,
    illegal,
)
from flowfabric.model.text import check_limit

SQL = statements_beside(__file__)

RANGE_SIZE = 2_000
"""Executions checked in one statement; one long statement for the whole table would hold back vacuum."""
MAX_LIMIT = 100_000
OVERDUE_MS = 3_600_000
"""A stream without an execution is reported when the sweep that deletes it is late by this much."""
_START = -(2**15), "00000000-0000-0000-0000-000000000000"

_WORDS: Mapping[str, type[StrEnum]] = {
    "lifecycle_phase": LifecyclePhase,
    "ownership_state": OwnershipState,
    "eligibility_state": EligibilityState,
    "blocking_reason": BlockingReason,
    "terminal_outcome": TerminalOutcome,
    "attempt_state": AttemptState,
    "public_state": PublicState,
}


class Consistency:
    """The consistency check of stored rows."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find_inconsistencies(self, *, limit: int = 1000) -> list[Inconsistency]:
        """Return up to `limit` inconsistencies of stored rows: of executions, in order, then of flows and of limits.

        This reads every row.
        """
        limit = check_limit(limit, MAX_LIMIT)
        found: list[Inconsistency] = []
        after: tuple[int, object] = _START
        while len(found) < limit:
            start = {"after_partition": after[0], "after_id": after[1]}
            ends = await self._store.fetch(SQL.read_range_end, size=RANGE_SIZE, **start)
            if not ends:
                found += _inconsistencies(
                    await self._store.fetch(SQL.list_orphans, limit=limit - len(found), overdue_ms=OVERDUE_MS)
                )
                found += await check_flows(self._store, limit - len(found))
                found += await check_limits(self._store, limit - len(found))
                break
            after = ends[0]["partition_key"], ends[0]["execution_id"]
            found += await self._check({**start, "last_partition": after[0], "last_id": after[1]}, limit - len(found))
        return found[:limit]

    async def _check(self, range_: Mapping[str, object], limit: int) -> list[Inconsistency]:
        found: list[Inconsistency] = []
        for vector in await self._store.fetch(SQL.list_vectors, **range_):
            words = dict(vector)
            if (problem := _problem(words)) is not None:
                rows = await self._store.fetch(SQL.list_with_vector, limit=limit, **range_, **words)
                found += (Inconsistency(execution_id=_id(row), problem=problem) for row in rows)
        found += _inconsistencies(
            await self._store.fetch(
                SQL.list_broken_rules, limit=limit, instance_tag=self._store.rules.instance_tag, **range_
            )
        )
        found += await check_members(self._store, range_, limit)
        return sorted(found, key=lambda one: one.execution_id or "")


def _problem(words: Mapping[str, str]) -> str | None:
    """What is wrong with a stored state vector, or None."""
    for dimension, literals in _WORDS.items():
        if words[dimension] not in set(literals):
            return f"{dimension}: unknown literal {words[dimension]!r}"
    return illegal(
        StateVector(
            lifecycle_phase=LifecyclePhase(words["lifecycle_phase"]),
            ownership_state=OwnershipState(words["ownership_state"]),
            eligibility_state=EligibilityState(words["eligibility_state"]),
            blocking_reason=BlockingReason(words["blocking_reason"]),
            terminal_outcome=TerminalOutcome(words["terminal_outcome"]),
            attempt_state=AttemptState(words["attempt_state"]),
            public_state=PublicState(words["public_state"]),
        )
    )


def _inconsistencies(rows: Iterable[Record]) -> list[Inconsistency]:
    return [Inconsistency(execution_id=_id(row), problem=row["problem"]) for row in rows]


def _id(row: Record) -> ExecutionId:
    return format_execution_id(row["partition_key"], row["execution_id"])
