"""Budgets that are declared in code, and the error of a run that would exceed one."""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, get_args
from uuid import UUID, uuid5

from flowfabric.engine.engine import Engine
from flowfabric.engine.lifecycle import StoreKey
from flowfabric.engine.parts import parts_of
from flowfabric.model.budget import MAX_TOTAL, BudgetStatus, check_amounts
from flowfabric.model.duration import Duration, milliseconds
from flowfabric.model.errors import InvalidInputError, error
from flowfabric.model.ids import parse_uuid
from flowfabric.model.text import check_short, shown

OnBreach: TypeAlias = Literal["refuse", "fail", "cancel_flow", "ask"]
"""What happens to a run that would exceed a budget."""
BudgetRef: TypeAlias = "Budget | UUID | str"
"""A budget, or the id of one."""

_SCOPE = UUID("0b0e6c4e-6a37-5c5e-9d0b-3b8a4a4a4f3d")
"""The namespace of the ids of budgets that have a name."""


class BudgetExceeded(Exception):
    """The hard limit of a budget does not allow what a run wants to spend; nothing was reserved or counted.

    `used` includes what other runs have reserved. `is_final` says that a person has refused it: the run is not retried.
    """

    code = "budget_exceeded"

    def __init__(self, budget: str, dimension: str, used: int, limit: int, *, is_final: bool = False) -> None:
        super().__init__(budget, dimension, used, limit)
        self.budget = budget
        """The name of the budget, or its id if it has no name."""
        self.dimension = dimension
        self.used = used
        self.limit = limit
        self.is_final = is_final

    def __str__(self) -> str:
        """Return which budget it is, and how much of it is used."""
        refused = ", and a person has refused more" if self.is_final else ""
        return f"budget {self.budget}: {self.dimension} {self.used}/{self.limit}{refused}"


class Budget:
    """A budget that is declared in code with `fabric.budget(...)`; its first use creates it.

    A handler spends from it with `ctx.reserve(budget, tokens=4000)`.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        name: str,
        *,
        namespace: str,
        limits: Mapping[str, int],
        soft: Mapping[str, int] | None,
        every: Duration | None,
        on_breach: OnBreach,
        id: UUID | str | None,
    ) -> None:
        self._engine = engine
        self.name = check_short(name, "name")
        """The name of the budget."""
        self.id: UUID = uuid5(_SCOPE, f"{namespace}\0{name}") if id is None else parse_uuid(id, "id")
        """The id of the budget, for operations of the engine; it follows from the namespace and the name."""
        hard = check_amounts(limits, "limits", least=1, most=MAX_TOTAL, is_empty_allowed=True)
        warned = check_amounts(soft or {}, "soft", least=1, most=MAX_TOTAL, is_empty_allowed=True)
        if on_breach not in get_args(OnBreach):
            raise error(
                "invalid_input", f"on_breach: must be one of {', '.join(get_args(OnBreach))}, got {shown(on_breach)}"
            )
        self._on_breach = on_breach
        self._reset_ms = 0 if every is None else milliseconds(every, "every", least=1)
        dimensions = list(dict.fromkeys((*hard, *warned)))
        self._dimensions = dimensions
        self._hard = [hard.get(dimension, 0) for dimension in dimensions]
        self._soft = [warned.get(dimension, 0) for dimension in dimensions]
        self._created: set[StoreKey] = set()

    def __repr__(self) -> str:
        """Return `Budget(<name>)`."""
        return f"Budget({self.name!r})"

    async def status(self) -> BudgetStatus:
        """Read what is used and reserved, the limits, and how often a limit was hit."""
        engine = self._engine()
        await self.create(engine)
        return await engine.get_budget_status(self.id)

    async def raise_to(self, **limits: int) -> None:
        """Raise hard limits: `await budget.raise_to(tokens=2_000_000)`; a limit that is higher already stays."""
        engine = self._engine()
        await self.create(engine)
        ceilings = check_amounts(limits, "limits", least=1, most=MAX_TOTAL, example="tokens=5")
        await raise_limits(engine, self.id, ceilings, field="raise_to")

    async def reset(self) -> None:
        """Set what is used to zero; what is reserved stays reserved."""
        engine = self._engine()
        await self.create(engine)
        await engine.reset_budget(self.id)

    async def create(self, engine: Engine) -> None:
        """Create the budget unless this process knows that it exists; one that exists is not changed."""
        store = parts_of(engine).store_key
        if store in self._created:
            return
        await engine.create_budget(
            self.id,
            scope_type="budget",
            scope_id=self.name,
            enforcement_mode="strict",
            on_hard_limit=self._on_breach,
            on_soft_limit="warn",
            reset_interval_ms=self._reset_ms,
            dimensions=self._dimensions,
            hard_limits=self._hard,
            soft_limits=self._soft,
        )
        self._created.add(store)


def budget_id_of(budget: object, field: str = "budget") -> UUID:
    """Return the id of a budget that is given as it is or by its id."""
    if isinstance(budget, Budget):
        return budget.id
    try:
        return parse_uuid(budget, field)
    except InvalidInputError:
        raise error(
            "invalid_input",
            f"{field}: expected a budget or its UUID, got {shown(budget)}; fabric.budget(name, tokens=1000) makes one",
        ) from None


async def raise_limits(
    engine: Engine, budget_id: UUID, ceilings: Mapping[str, int], *, field: str | None = None
) -> None:
    """Raise hard limits that are lower than these; with a field to name, refuse a dimension that has none."""
    status = await engine.get_budget_status(budget_id)
    limited = [dimension for dimension, limit in status.hard_limits.items() if limit]
    if field is not None and (unlimited := [each for each in ceilings if each not in limited]):
        raise error(
            "invalid_input",
            f"{field}: budget {status.scope_id or budget_id} has no hard limit of {shown(unlimited[0])} to raise; it "
            f"limits {', '.join(map(shown, limited)) or 'nothing'}",
        )
    lower = {
        dimension: {"hard": ceiling}
        for dimension, ceiling in ceilings.items()
        if 0 < status.hard_limits.get(dimension, 0) < ceiling
    }
    if lower:
        await engine.change_budget_limits(budget_id, limits=lower)
