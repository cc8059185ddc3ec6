"""What handlers spend: reservations that settle at the end of a block, and what a breach does to the run."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar
from uuid import UUID, uuid5

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.budget import (
    MAX_TOTAL,
    AlreadySettled,
    HardBreach,
    Settled,
    SoftBreach,
    UsageOutcome,
    check_amounts,
)
from flowfabric.model.errors import error
from flowfabric.model.flow import CancellationPolicy
from flowfabric.model.ids import ExecutionId, SuspensionId
from flowfabric.model.signal import ResumeSignal
from flowfabric.model.suspension import SuspendArgs, SuspendDetails, SuspensionReason
from flowfabric.model.text import check_short, shown
from flowfabric.worker.budget import Budget, BudgetExceeded, BudgetRef, budget_id_of, raise_limits
from flowfabric.worker.running import Running
from flowfabric.worker.waits import HandlerSuspended, is_timeout, suspend_args

Answer = TypeVar("Answer")

ASK = "paused_by_budget"
"""The key of the waitpoint of a run that asks for more of a budget."""
APPROVE, REJECT = "approve", "reject"
"""The names of the signals that answer it."""
CANCEL_SECONDS = 10.0
"""How long a run waits to be cancelled together with its flow."""

logger = logging.getLogger(__name__)


class HandlerOverspent(BaseException):
    """Ends a handler that has exceeded a budget whose policy does not let it go on."""


class Asked(msgspec.Struct, frozen=True):
    """What a run that asks for more of a budget stores for those who answer."""

    budget_id: UUID
    budget: str
    dimension: str
    used: int
    limit: int
    amounts: dict[str, int]


class SpendingContext(Protocol):
    """What this module needs of the context of a handler."""

    @property
    def is_resumed(self) -> bool: ...
    @property
    def attempt_index(self) -> int: ...
    @property
    def lease_lost(self) -> "asyncio.Future[None]": ...
    async def suspend(self, args: SuspendArgs) -> SuspendDetails: ...
    async def _answer(self, call: Callable[[], Awaitable[Answer]]) -> Answer: ...
    def _check_loop(self) -> None: ...
    def from_thread(self, call: Coroutine[Any, Any, Answer]) -> Answer: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Spender:
    """The run that spends."""

    context: SpendingContext
    running: Running
    engine: Engine

    def call(self, budget: BudgetRef, amounts: Mapping[str, int], key: str | None) -> "SpendingCall":
        """Return a new call of this run, named by its key, or by its number among the calls without one."""
        spent = self.running.spent_keys
        budget_id = budget_id_of(budget)
        wanted = check_amounts(amounts, "amounts", least=1, most=MAX_TOTAL, example="tokens=5")
        if key is None:
            number = self.running.spent_calls = self.running.spent_calls + 1
            name = f"call {number}"
        else:
            name = f"key {check_short(key, 'key')}"
            if (budget_id, name) in spent:
                raise error("invalid_input", f"key: {shown(key)} names another call of this run; use a key once")
            spent.add((budget_id, name))
        return SpendingCall(spender=self, budget=budget, budget_id=budget_id, amounts=wanted, key=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpendingCall:
    """One call of a handler that reserves or spends something."""

    spender: Spender
    budget: BudgetRef
    budget_id: UUID
    amounts: Mapping[str, int]
    key: str

    @property
    def lease_key(self) -> str:
        """What lets a repeat of this call count once: what runs again after a wait or a failure spends again."""
        claimed = self.spender.running.claimed
        return f"{claimed.execution_id}:{claimed.lease_epoch}:{self.key}"

    async def reserve(self) -> None:
        """Reserve the amounts, or let the policy of the budget decide."""
        engine, handle = self.spender.engine, self.spender.running.claimed.handle
        answer = await self._within_limits(
            lambda: engine.reserve(handle, self.budget_id, amounts=self.amounts, reservation_key=self.key)
        )
        assert not isinstance(answer, AlreadySettled), "the calls of a run have different keys"

    async def record(self) -> None:
        """Count the amounts as spent, or let the policy of the budget decide."""
        engine, execution_id = self.spender.engine, self.spender.running.execution_id
        answer: UsageOutcome = await self._within_limits(
            lambda: engine.record_spend(
                self.budget_id, execution_id, deltas=self.amounts, idempotency_key=self.lease_key
            )
        )
        if isinstance(answer, SoftBreach):
            text = "%s: budget %s: %s is at %d, above its soft limit %d"
            values = (answer.dimension, answer.current_usage, answer.soft_limit)
            logger.warning(text, self.spender.running, self._budget_name, *values)

    async def settle(self, amounts: Mapping[str, int]) -> bool:
        """Count what was really spent; return whether the budget is above a hard limit by it."""
        engine, handle = self.spender.engine, self.spender.running.claimed.handle
        settled = await self.spender.context._answer(
            lambda: engine.settle(handle, self.budget_id, reservation_key=self.key, amounts=amounts)
        )
        return isinstance(settled, Settled) and settled.is_over

    async def release(self) -> None:
        """Return what is reserved; nothing was spent."""
        engine, handle = self.spender.engine, self.spender.running.claimed.handle
        await self.spender.context._answer(
            lambda: engine.release_reservation(handle, self.budget_id, reservation_key=self.key)
        )

    @property
    def _budget_name(self) -> str:
        return self.budget.name if isinstance(self.budget, Budget) else str(self.budget_id)

    async def _within_limits(self, book: Callable[[], Awaitable[Answer | HardBreach]]) -> Answer:
        context, engine = self.spender.context, self.spender.engine
        context._check_loop()
        if isinstance(budget := self.budget, Budget):
            await context._answer(lambda: budget.create(engine))
        asked, granted = await self._read_answers()
        while True:
            answer = await context._answer(book)
            if not isinstance(answer, HardBreach):
                return answer
            if granted is None:
                await self._react(answer, asked)
            elif granted:
                await self._raise(granted)
                # If that is not enough, the run asks again.
                granted = None
            else:
                amount = self.amounts[answer.dimension]
                await self._raise({answer.dimension: min(answer.current_usage + amount, MAX_TOTAL)})

    async def _react(self, breach: HardBreach, asked: int) -> NoReturn:
        """Do what the policy of the budget says."""
        exceeded = BudgetExceeded(self._budget_name, breach.dimension, breach.current_usage, breach.hard_limit)
        match breach.on_hard_limit:
            case "ask":
                await self._ask(exceeded, asked)
            case "fail" | "cancel_flow":
                if breach.on_hard_limit == "cancel_flow":
                    await self._cancel_flow(exceeded)
                self.spender.running.overspent = exceeded
                raise HandlerOverspent(exceeded)
            case _:
                raise exceeded

    async def _cancel_flow(self, exceeded: BudgetExceeded) -> None:
        context, engine, running = self.spender.context, self.spender.engine, self.spender.running
        flow_id = await context._answer(lambda: engine.resolve_execution_flow_id(running.execution_id))
        if flow_id is None:
            return
        await context._answer(
            lambda: engine.cancel_flow(flow_id, reason=str(exceeded), cancellation_policy=CancellationPolicy.CANCEL_ALL)
        )
        # This run is cancelled with the others.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await context.lease_lost

    async def _ask(self, exceeded: BudgetExceeded, asked: int) -> NoReturn:
        context, running = self.spender.context, self.spender.running
        if running.is_suspending or running.is_suspended:
            # Another call of this handler asks already; this one does so when the handler runs again.
            raise HandlerSuspended
        question = Asked(
            budget_id=self.budget_id,
            budget=exceeded.budget,
            dimension=exceeded.dimension,
            used=exceeded.used,
            limit=exceeded.limit,
            amounts=dict(self.amounts),
        )
        args = suspend_args(
            context.attempt_index,
            {
                "keys": [ASK],
                "reason_code": SuspensionReason.PAUSED_BY_BUDGET,
                "continuation_metadata_pointer": msgspec.json.encode(question).decode(),
            },
            self._suspension_id(asked),
        )
        wanted = self.amounts[exceeded.dimension]
        await context.suspend(replace(args, detail=f"{exceeded}, {wanted} more asked for"))
        raise HandlerSuspended

    def _suspension_id(self, asked: int) -> SuspensionId:
        attempt_id = self.spender.running.claimed.handle.fence.attempt_id
        return SuspensionId(uuid5(attempt_id, f"{self.budget_id}:{asked}:{self.key}"))

    async def _read_answers(self) -> tuple[int, Mapping[str, int] | None]:
        """Return how often this call has asked in this attempt, and what the last answer grants.

        None grants nothing, and an empty mapping as much as the call needs. A refusal is raised.
        """
        context, handle = self.spender.context, self.spender.running.claimed.handle
        signals_of = parts_of(self.spender.engine).signals.signals_of_past_wait
        asked: int = 0
        granted: Mapping[str, int] | None = None
        while context.is_resumed:
            read = partial(signals_of, handle, self._suspension_id(asked))
            if (found := await context._answer(read)) is None:
                break
            asked += 1
            granted = await self._granted_by(next((each for each in found if each.satisfier), None))
        return asked, granted

    async def _granted_by(self, answer: ResumeSignal | None) -> Mapping[str, int] | None:
        if answer is None:
            return None
        if is_timeout(answer) or answer.signal_name == REJECT:
            status = await self.spender.engine.get_budget_status(self.budget_id)
            dimension = min(self.amounts, key=lambda each: _room(status.hard_limits, status.usage, each))
            used = status.usage.get(dimension, 0) + status.reserved.get(dimension, 0)
            limit = status.hard_limits.get(dimension, 0)
            raise BudgetExceeded(self._budget_name, dimension, used, limit, is_final=True)
        # An operator has resumed the run, or somebody has sent it something else.
        return read_ceilings(answer.payload) if answer.signal_name == APPROVE else None

    async def _raise(self, ceilings: Mapping[str, int]) -> None:
        engine = self.spender.engine
        await self.spender.context._answer(lambda: raise_limits(engine, self.budget_id, ceilings))


def _room(limits: Mapping[str, int], usage: Mapping[str, int], dimension: str) -> float:
    return limits[dimension] - usage.get(dimension, 0) if limits.get(dimension) else float("inf")


def read_ceilings(payload: bytes | None) -> Mapping[str, int]:
    """Return the ceilings in the payload of an approval; none at all without a payload."""
    try:
        given: object = {} if payload is None else msgspec.json.decode(payload) or {}
    except msgspec.DecodeError:
        given = payload
    return check_amounts(given, "the payload of the approval", least=1, most=MAX_TOTAL, is_empty_allowed=True)


async def raise_for(engine: Engine, execution_id: ExecutionId, ceilings: Mapping[str, int]) -> None:
    """Raise the limits of the budget that a run asks for more of, by default by as much as it needs."""
    found = await engine.describe_execution(execution_id)
    if found is None or found.continuation_metadata_pointer is None:
        return
    asked = msgspec.json.decode(found.continuation_metadata_pointer, type=Asked)
    field = "raise_to" if ceilings else None
    if not ceilings:
        status = await engine.get_budget_status(asked.budget_id)
        ceilings = {
            dimension: status.usage.get(dimension, 0) + status.reserved.get(dimension, 0) + amount
            for dimension, amount in asked.amounts.items()
        }
    await raise_limits(engine, asked.budget_id, ceilings, field=field)


class Spend:
    """What a block of a handler may spend: `async with ctx.reserve(budget, tokens=4000) as spend: ...`.

    A `def` handler writes `with` instead of `async with`. At the end of the block, what `used` has said is counted and
    the rest is returned; without a call of `used`, everything is counted.
    """

    __slots__ = ("_call", "_is_entered", "_said", "is_over")

    def __init__(self, call: SpendingCall) -> None:
        self._call = call
        self._said: dict[str, int] = {}
        self._is_entered = False
        self.is_over = False
        """Whether more was spent than reserved, and the budget is above a hard limit now; known after the block."""

    @property
    def reserved(self) -> Mapping[str, int]:
        """The amounts that are reserved."""
        return self._call.amounts

    def used(self, **amounts: int) -> None:
        """Say what the block has really used so far, each dimension by its name: `spend.used(tokens=3120)`."""
        self._said |= check_amounts(amounts, "amounts")

    async def __aenter__(self) -> Self:
        """Reserve the amounts."""
        if self._is_entered:
            raise error("invalid_input", "reserve: one call of ctx.reserve is for one block; call it again for another")
        self._is_entered = True
        await self._call.reserve()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Count what was used, and return the rest."""
        spent = {**self._call.amounts, **self._said} if kind is None else self._said
        if any(spent.values()):
            self.is_over = await self._call.settle(spent)
        else:
            await self._call.release()

    def __enter__(self) -> Self:
        """Reserve the amounts, in a `def` handler."""
        return self._call.spender.context.from_thread(self.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Count what was used, and return the rest."""
        self._call.spender.context.from_thread(self.__aexit__(kind, raised, trace))
