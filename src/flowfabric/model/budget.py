"""Budgets: what may be spent per dimension, what a report of usage leads to, and the answers of their operations."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import UUID

from flowfabric.model.edge import AlreadyApplied
from flowfabric.model.errors import error
from flowfabric.model.text import check_items, check_range, check_short, check_text, shown

MAX_TOTAL = 2**63 - 1
"""Totals stay at this value instead of growing further."""
MAX_DELTA = 2**64 - 1
MAX_INTERVAL_MS = 2**53
MAX_DIMENSIONS = 1000
"""The most dimensions of one call."""
KEY_TTL_MS = 86_400_000
"""How long the key of a report or of a settlement is remembered."""
FIXED_DIMENSIONS = ("input_tokens", "output_tokens", "wall_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetCreated:
    """The budget was created."""

    budget_id: UUID


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetAlreadySatisfied:
    """The budget was created before; nothing of it was changed."""

    budget_id: UUID


@dataclass(frozen=True, kw_only=True, slots=True)
class Ok:
    """The usage was counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftBreach:
    """The usage was counted, and is above the soft limit of a dimension."""

    dimension: str
    current_usage: int
    soft_limit: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HardBreach:
    """The hard limit of a dimension does not allow it.

    `current_usage` includes what is reserved. `on_hard_limit` is what the creator of the budget wants to happen.
    """

    dimension: str
    current_usage: int
    hard_limit: int
    on_hard_limit: str = ""


UsageOutcome: TypeAlias = Ok | SoftBreach | HardBreach | AlreadyApplied
"""The answer to a report; only `Ok` and `SoftBreach` mean that it was counted by this call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetReset:
    """The counters of the budget were set to zero; `next_reset_at` is 0 if none is scheduled."""

    next_reset_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetLimit:
    """The limits of one dimension; 0 is no limit, None leaves a limit as it is."""

    hard: int | None = None
    soft: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetLimitsChanged:
    """The limits of the dimensions that were changed, before and after."""

    previous: Mapping[str, BudgetLimit]
    current: Mapping[str, BudgetLimit]


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetStatus:
    """A budget with its limits and counters; times are milliseconds since the epoch."""

    budget_id: UUID
    scope_type: str
    scope_id: str
    enforcement_mode: str
    on_hard_limit: str
    on_soft_limit: str
    reset_interval_ms: int
    usage: Mapping[str, int]
    reserved: Mapping[str, int]
    hard_limits: Mapping[str, int]
    soft_limits: Mapping[str, int]
    breach_count: int
    soft_breach_count: int
    reset_count: int
    last_breach_at: int | None
    last_breach_dim: str | None
    last_reset_at: int | None
    next_reset_at: int | None
    created_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetUsageAndLimits:
    """What admission reads: limits as decimal text by `hard:<dimension>` and `soft:<dimension>`, usage by dimension."""

    limits: Mapping[str, str]
    usage: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class CountersReconciled:
    """How many budgets had wrong counters and were corrected, and how many could not be."""

    processed: int
    errors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """The amounts are reserved; `remaining` is what is left of the dimensions with a hard limit."""

    remaining: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyReserved:
    """This lease has a reservation under this key; nothing was compared or changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The true cost was booked, and the reservation returned; `breach` is the hard limit that the cost has passed."""

    breach: HardBreach | None = None

    @property
    def is_over(self) -> bool:
        """Whether more was spent than reserved, and the budget is above a hard limit now."""
        return self.breach is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadySettled:
    """This lease has settled a reservation under this key before; nothing was changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageDimensions:
    """What a run has used; `dedup_key` lets a repeated report count once."""

    input_tokens: int = 0
    output_tokens: int = 0
    wall_ms: int | None = None
    custom: Mapping[str, int] = field(default_factory=dict)
    dedup_key: str | None = None

    @property
    def deltas(self) -> dict[str, int]:
        """The amount of each dimension, checked; the fixed dimensions only if they are not zero."""
        found = check_amounts(self.custom, "custom", is_empty_allowed=True)
        for name in FIXED_DIMENSIONS:
            if name in found:
                raise error("invalid_input", f"custom: {name!r} has a field of its own; write {name}={found[name]}")
            amount = getattr(self, name)
            if name == "wall_ms" and amount is None:
                continue
            check_range(amount, name, 0, MAX_DELTA)
            if amount:
                found[name] = amount
        return found


@dataclass(slots=True)
class Counter:
    """One dimension of a budget."""

    hard_limit: int = 0
    soft_limit: int = 0
    used: int = 0
    reserved: int = 0
    before: int = field(init=False)

    def __post_init__(self) -> None:
        """Remember what was counted at first."""
        self.before = self.total

    @property
    def total(self) -> int:
        """What is used and reserved."""
        return min(self.used + self.reserved, MAX_TOTAL)

    @property
    def is_freed(self) -> bool:
        """Whether it was used up at first and is not any more."""
        return 0 < self.hard_limit <= self.before and self.total < self.hard_limit

    def allows(self, amount: int) -> bool:
        """Whether so much more is within the hard limit."""
        return not self.hard_limit or min(self.total + amount, MAX_TOTAL) <= self.hard_limit

    def use(self, amount: int) -> None:
        """Count what was spent."""
        self.used = min(self.used + amount, MAX_TOTAL)


@dataclass(slots=True)
class Account:
    """The counters of a budget in a transaction that has locked them; `breach` is the last dimension breached in it."""

    on_hard_limit: str = ""
    counters: dict[str, Counter] = field(default_factory=dict)
    breach_count: int = 0
    soft_breach_count: int = 0
    breach: str | None = None
    changed: set[str] = field(default_factory=set)

    @property
    def is_freed(self) -> bool:
        """Whether a dimension was used up at first and is not any more."""
        return any(counter.is_freed for counter in self.counters.values())

    def report(self, deltas: Mapping[str, int]) -> Ok | SoftBreach | HardBreach:
        """Count usage in every dimension, or in none if the hard limit of one would be passed."""
        if (breach := self._refusal(deltas)) is not None:
            return breach
        for dimension, delta in deltas.items():
            self._use(dimension, delta)
        for dimension in sorted(deltas):
            counter = self.counters[dimension]
            if 0 < counter.soft_limit < counter.used:
                self.soft_breach_count += 1
                return SoftBreach(dimension=dimension, current_usage=counter.used, soft_limit=counter.soft_limit)
        return Ok()

    def reserve(self, amounts: Mapping[str, int]) -> Reserved | HardBreach:
        """Reserve every amount, or none if the hard limit of a dimension would be passed."""
        if (breach := self._refusal(amounts)) is not None:
            return breach
        remaining = {}
        for dimension, amount in sorted(amounts.items()):
            counter = self.counters[dimension]
            counter.reserved = min(counter.reserved + amount, MAX_TOTAL)
            self.changed.add(dimension)
            if counter.hard_limit:
                remaining[dimension] = counter.hard_limit - counter.total
        return Reserved(remaining=remaining)

    def settle(self, costs: Mapping[str, int], reserved: Mapping[str, int]) -> Settled:
        """Count what was spent, whatever the limits are, and return what was reserved for it."""
        self.release(reserved)
        for dimension, cost in costs.items():
            self._use(dimension, cost)
        for dimension in sorted(costs):
            if costs[dimension] > reserved.get(dimension, 0) and not self.counters[dimension].allows(0):
                return Settled(breach=self._breached(dimension))
        return Settled()

    def release(self, reserved: Mapping[str, int]) -> None:
        """Return what was reserved."""
        for dimension, amount in reserved.items():
            counter = self.counters[dimension]
            counter.reserved = max(counter.reserved - amount, 0)
            self.changed.add(dimension)

    def _use(self, dimension: str, amount: int) -> None:
        if amount:
            self.counters[dimension].use(amount)
            self.changed.add(dimension)

    def _refusal(self, amounts: Mapping[str, int]) -> HardBreach | None:
        for dimension in sorted(amounts):
            if not self.counters[dimension].allows(amounts[dimension]):
                return self._breached(dimension)
        return None

    def _breached(self, dimension: str) -> HardBreach:
        counter = self.counters[dimension]
        self.breach_count += 1
        self.breach = dimension
        return HardBreach(
            dimension=dimension,
            current_usage=counter.total,
            hard_limit=counter.hard_limit,
            on_hard_limit=self.on_hard_limit,
        )


def check_amounts(
    value: object,
    name: str,
    *,
    least: int = 0,
    most: int = MAX_DELTA,
    is_empty_allowed: bool = False,
    example: str = "{'usd': 5}",
) -> dict[str, int]:
    """Return the amounts of dimensions by name, each a whole number of at least `least`."""
    if not isinstance(value, Mapping):
        raise error(
            "invalid_input",
            f"{name}: expected a mapping of dimensions to numbers, got {shown(value)}; e.g. {example}",
        )
    if not value and not is_empty_allowed:
        raise error("invalid_input", f"{name}: must have at least one dimension, e.g. {example}")
    _check_count(value, name)
    found: dict[str, int] = {}
    for dimension, amount in value.items():
        check_short(dimension, f"{name}: the name of a dimension")
        check_range(amount, f"{name}[{shown(dimension)}]", least, most)
        found[dimension] = amount
    return found


def pair_amounts(dimensions: object, amounts: object, names: tuple[str, str]) -> dict[str, int]:
    """Return the amounts of dimensions that were given as two lists of equal length."""
    keys, values = (check_items(each, name) for each, name in zip((dimensions, amounts), names, strict=True))
    if len(keys) != len(values):
        raise error(
            "invalid_input",
            f"{names[1]}: must be as long as {names[0]}, which has {len(keys)} items, got {len(values)}",
        )
    _check_count(keys, names[0])
    found: dict[str, int] = {}
    for dimension, amount in zip(keys, values, strict=True):
        text = check_short(dimension, f"{names[0]}: the name of a dimension")
        if text in found:
            raise error("invalid_input", f"{names[0]}: {shown(text)} is given twice; add its amounts up")
        check_range(amount, f"{names[1]} of {shown(text)}", 0, MAX_DELTA)
        assert isinstance(amount, int)
        found[text] = amount
    return found


def check_limits(value: object) -> dict[str, BudgetLimit]:
    """Return new limits by dimension, each a BudgetLimit or a mapping with `hard` and `soft`."""
    if not isinstance(value, Mapping) or not value:
        raise error(
            "invalid_input",
            f"limits: expected a mapping of dimensions to limits, got {shown(value)}; e.g. {{'usd': {{'hard': 500}}}}",
        )
    _check_count(value, "limits")
    found: dict[str, BudgetLimit] = {}
    for dimension, given in value.items():
        check_short(dimension, "limits: the name of a dimension")
        if isinstance(given, Mapping) and given.keys() <= {"hard", "soft"}:
            given = BudgetLimit(hard=given.get("hard"), soft=given.get("soft"))
        where = f"limits[{shown(dimension)}]"
        if not isinstance(given, BudgetLimit) or given.hard is given.soft is None:
            raise error(
                "invalid_input", f"{where}: expected {{'hard': …, 'soft': …}} or one of both, got {shown(given)}"
            )
        for side, limit in (("hard", given.hard), ("soft", given.soft)):
            if limit is not None:
                check_range(limit, f"{where}.{side}", 0, MAX_DELTA)
        found[dimension] = given
    return found


def check_key(value: object, name: str) -> str:
    """Return a key that lets a repeated call count once, or an empty text for none."""
    return "" if value is None or value == "" else check_short(value, name)


def check_definition(texts: Mapping[str, object], reset_interval_ms: object) -> None:
    """Check the texts of a new budget, which are stored as they are, and its interval."""
    for name, text in texts.items():
        check_text(text, name)
    check_range(reset_interval_ms, "reset_interval_ms", 0, MAX_INTERVAL_MS)


def storable_limits(limits: Iterable[int]) -> Sequence[int]:
    """Return limits as they are stored: one above MAX_TOTAL can never be passed."""
    return [min(limit, MAX_TOTAL) for limit in limits]


def _check_count(dimensions: Collection[object], name: str) -> None:
    if len(dimensions) > MAX_DIMENSIONS:
        raise error("invalid_input", f"{name}: must have at most {MAX_DIMENSIONS} dimensions, got {len(dimensions)}")
