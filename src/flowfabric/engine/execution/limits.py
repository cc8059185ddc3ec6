"""The limits of executions that are being created: their own, and the keys by which quotas count them."""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.queues import UNLIMITED, AdmissionKey, QueueNames, QuotaKey
from flowfabric.engine.core.row import execution_keys
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.ids import ExecutionId, QuotaPolicyId, parse_execution_id, quota_partition, row_key
from flowfabric.model.limit import (
    MAX_BUDGETS,
    Facts,
    Source,
    limit_id,
    other_quota,
    parse_source,
    too_many_budgets,
)
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.quota import DEFAULT_KEY
from flowfabric.tasks import create_shared_task

SQL = statements_beside(__file__)

REFRESH_SECONDS, MAX_AGE_SECONDS = 2.0, 5.0
"""The age at which what is known is read again, in the background, and the age at which a create waits for that."""
MAX_DEFINITIONS = 4096


class Inherited(NamedTuple):
    """The limits that an execution gets from its parent or its flow."""

    quota_policy_id: UUID | None = None
    key: str | None = None
    """The key of the parent; None if the execution has its own."""
    budget_ids: tuple[UUID, ...] = ()
    fair_key: str = ""


NOTHING = Inherited()


class Definition(NamedTuple):
    """Where a quota policy takes the key and the weight of an execution from."""

    key_from: Source | None
    weight_from: Source | None


UNKEYED = Definition(None, None)


class Scopes(NamedTuple):
    """The attached quotas that read something from each execution, and the lanes that are fair by something of it."""

    quotas: Mapping[tuple[str, str], tuple[UUID, Definition]]
    fair_by: Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class Looked:
    """What a call has read about the limits of its executions."""

    parents: Mapping[str, Inherited]
    """By the ids of the parents, as the caller wrote them."""
    undefined: frozenset[UUID] = frozenset()
    """Quota policies that do not exist."""
    flow: Inherited | None = None
    """The limits of the flow whose members are created."""


NOTHING_LOOKED_UP = Looked({})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of executions that are alike; their keys and their weights may differ."""

    fixed: AdmissionKey
    key_from: Source | None = None
    attached: tuple[tuple[UUID, Source], ...] = ()
    fair_by: Source | None = None
    weight_from: Source | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether nothing is read from the executions."""
        return self.key_from is None and not self.attached and self.fair_by is None and self.weight_from is None

    def of(self, facts: Facts) -> tuple[AdmissionKey, int | None]:
        """The admission key and the weight of one execution; the weight None is 1."""
        fixed = self.fixed
        quota, fair_key = fixed.quota, fixed.fair_key
        if self.key_from is not None and quota is not None:
            quota = QuotaKey(quota.quota_policy_id, facts.key(self.key_from) or DEFAULT_KEY)
        if self.fair_by is not None:
            fair_key = facts.key(self.fair_by) or fair_key or DEFAULT_KEY
        attached = tuple(QuotaKey(policy, facts.key(source) or DEFAULT_KEY) for policy, source in self.attached)
        weight = None if self.weight_from is None else facts.weight(self.weight_from)
        return AdmissionKey(quota, attached, fixed.budget_ids, fair_key), weight


PLAIN = Limits(UNLIMITED)


class LimitRules:
    """What creates know of quotas and fair lanes, a few seconds old at most."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._definitions: dict[UUID, Definition] = {}
        self._scopes = Scopes({}, {})
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self.generation = 0
        """Raised when anything that was known has changed."""

    @property
    def is_due(self) -> bool:
        """Whether a create must call `refresh` first."""
        return time.monotonic() - self._read_at >= REFRESH_SECONDS

    async def refresh(self) -> None:
        """Read everything again in the background; return at once unless what is known is too old."""
        age = time.monotonic() - self._read_at
        if self._reading is None:
            self._reading = create_shared_task(self._read())
            self._reading.add_done_callback(self._done)
        if age >= MAX_AGE_SECONDS:
            await asyncio.shield(self._reading)

    def forget(self) -> None:
        """Let the next create read everything again."""
        self._read_at = float("-inf")

    async def drain(self) -> None:
        """Wait until nothing is being read."""
        if self._reading is not None:
            await asyncio.wait((self._reading,))

    async def look_up(
        self, parents: Iterable[str], quota_policy_ids: Iterable[UUID], flow: Inherited | None = None
    ) -> Looked:
        """Read the limits of parents, and unknown quota policies; a parent that does not exist is left out."""
        found: dict[str, Inherited] = {}
        if ids := {given: parse_execution_id(given) for given in parents}:
            limits = await self._limits_of(list(dict.fromkeys(ids.values())))
            found = {given: limits[parsed] for given, parsed in ids.items() if parsed in limits}
        wanted = {*quota_policy_ids, *(each.quota_policy_id for each in found.values() if each.quota_policy_id)}
        undefined: set[UUID] = set()
        if missing := wanted - self._definitions.keys():
            defined = await self._list_definitions(missing)
            if len(self._definitions) + len(defined) > MAX_DEFINITIONS:
                self._definitions.clear()
            self._definitions |= defined
            undefined = missing - defined.keys()
        return Looked(found, frozenset(undefined), flow)

    def limits_of(
        self, names: QueueNames, policy: ExecutionPolicy | None, inherited: Inherited, undefined: frozenset[UUID]
    ) -> Limits | None:
        """The limits of executions with these names and this policy; None if the quota must be looked up first."""
        quota_policy_id, budget_ids = own_limits(policy, inherited)
        scopes = self._scopes
        if quota_policy_id is None and not budget_ids and not inherited.fair_key and not any(scopes):
            return PLAIN
        definition, quota = UNKEYED, None
        if quota_policy_id is not None:
            if quota_policy_id not in undefined:
                known = self._definitions.get(quota_policy_id)
                if known is None:
                    return None
                definition = known
            quota = QuotaKey(quota_policy_id, inherited.key or DEFAULT_KEY)
        weight_from = definition.weight_from
        attached: dict[UUID, Source] = {}
        for scope in (("lane", names.lane_id), ("namespace", names.namespace), ("kind", names.execution_kind)):
            if (found := scopes.quotas.get(scope)) is not None and found[0] != quota_policy_id:
                policy_id, (key_from, weighs) = found
                if key_from is not None:
                    attached[policy_id] = key_from
                weight_from = weight_from or weighs
        return Limits(
            fixed=AdmissionKey(quota=quota, budget_ids=budget_ids, fair_key=inherited.fair_key),
            key_from=definition.key_from if inherited.key is None else None,
            attached=tuple(sorted(attached.items())),
            fair_by=scopes.fair_by.get(names.lane_id),
            weight_from=weight_from,
        )

    async def _limits_of(self, execution_ids: list[ExecutionId]) -> dict[ExecutionId, Inherited]:
        rows = await self._store.fetch(SQL.list_inherited, **execution_keys(execution_ids))
        return {
            execution_ids[row["nth"] - 1]: Inherited(
                row["quota_policy_id"], row["key"], tuple(row["budget_ids"] or ()), row["fair_key"] or ""
            )
            for row in rows
        }

    async def _list_definitions(self, quota_policy_ids: Collection[UUID]) -> dict[UUID, Definition]:
        count = self._store.rules.partitions.quota
        rows = await self._store.fetch(
            SQL.list_definitions,
            partition_keys=[quota_partition(QuotaPolicyId(each), count) for each in quota_policy_ids],
            quota_policy_ids=list(quota_policy_ids),
        )
        return {row["quota_policy_id"]: _definition(row) for row in rows}

    async def _read(self) -> None:
        began = time.monotonic()
        known = frozenset(self._definitions)
        defined = await self._list_definitions(known) if known else {}
        rows = await self._store.fetch(SQL.list_scope_rules)
        scopes = Scopes(
            {
                (row["scope_type"], row["scope_id"]): (row["quota_policy_id"], _definition(row))
                for row in rows
                if row["scope_type"] != "fair"
            },
            {
                row["scope_id"]: source
                for row in rows
                if row["scope_type"] == "fair" and (source := parse_source(row["key_from"])) is not None
            },
        )
        added = {each: found for each, found in self._definitions.items() if each not in known}
        if (defined | added, scopes) != (self._definitions, self._scopes):
            self._definitions, self._scopes = defined | added, scopes
            self.generation += 1
        self._read_at = began

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._reading = None
        if not task.cancelled():
            # The next create tries again; one that cannot wait longer raises the error.
            task.exception()


def own_limits(policy: ExecutionPolicy | None, inherited: Inherited) -> tuple[UUID | None, tuple[UUID, ...]]:
    """The quota policy and the budgets of an execution itself: of its policy, its parent and its flow."""
    quota_policy_id, budget_ids = inherited.quota_policy_id, inherited.budget_ids
    if policy is None:
        return quota_policy_id, budget_ids
    own = None if policy.quota_policy_id is None else limit_id(policy.quota_policy_id)
    if own is not None:
        if quota_policy_id is not None and own != quota_policy_id:
            raise other_quota("policy.quota_policy_id: the parent or the flow of the execution", own, quota_policy_id)
        quota_policy_id = own
    if policy.budget_ids:
        named = [found for each in policy.budget_ids if (found := limit_id(each)) is not None]
        budget_ids = tuple(dict.fromkeys((*named, *budget_ids)))
        if len(budget_ids) > MAX_BUDGETS:
            raise too_many_budgets("policy.budget_ids, with those of the parent or the flow", budget_ids)
    return quota_policy_id, budget_ids


def joined_limits(own: Inherited, others: Inherited) -> Inherited:
    """The limits of an execution, with those of a flow that it becomes a member of."""
    quota_policy_id, key = own.quota_policy_id, own.key
    if others.quota_policy_id is not None:
        if quota_policy_id is not None and quota_policy_id != others.quota_policy_id:
            raise other_quota("the execution", others.quota_policy_id, quota_policy_id)
        quota_policy_id = others.quota_policy_id
    budget_ids = tuple(dict.fromkeys((*own.budget_ids, *others.budget_ids)))
    if len(budget_ids) > MAX_BUDGETS:
        raise too_many_budgets("the execution, with those of the flow", budget_ids)
    return Inherited(quota_policy_id, key, budget_ids, own.fair_key)


def quota_policy_of(policy: ExecutionPolicy | None) -> UUID | None:
    """The quota policy that an execution names, if its id is well-formed."""
    return None if policy is None or policy.quota_policy_id is None else limit_id(policy.quota_policy_id)


def check_parent_id(given: object) -> str:
    """Return the id of a parent as it was given, if it is an execution id."""
    row_key(parse_execution_id(given))
    return str(given)


def check_parent(parent: object, looked: Looked) -> None:
    """Raise if the parent of an execution does not exist."""
    if parent is not None and parent not in looked.parents:
        raise error("execution_not_found", parse_execution_id(parent))


def _definition(row: Mapping[str, str | None]) -> Definition:
    return Definition(parse_source(row["key_from"]), parse_source(row["weight_from"]))
