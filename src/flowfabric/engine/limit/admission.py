"""Admission: which of the executions that a claim has locked are within their limits."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import array_text, statements_beside
from flowfabric.engine.core.admission import Admitted, Candidate, Denied
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.core.transition import BLOCKS
from flowfabric.engine.limit.quota import SQL as QUOTA_SQL
from flowfabric.engine.limit.quota import corrupt_field, limits_of
from flowfabric.engine.store import Store
from flowfabric.model.quota import ConcurrencyExceeded, KeyState, RateExceeded
from flowfabric.model.states import BlockingReason

SQL = statements_beside(__file__)

EXPIRED_LIMIT = 1000
"""How many expired grants one statement looks at."""


class Key(KeyState):
    """A quota key that the transaction has locked, and what a claim takes of it."""

    def __init__(self, row: Record) -> None:
        entries = [*zip(row["window_ats"], row["window_tokens"], strict=True)]
        super().__init__(limits=limits_of(row), used=row["used"], entries=entries)
        self.quota_policy_id: UUID = row["quota_policy_id"]
        self.slots = 0
        """The slots that the claim takes."""
        self.is_closed = False
        """Whether its rate has denied an execution, so that it lets none through that comes after it."""
        self.corrupt_field = corrupt_field(row)
        """A stored limit that is negative, if there is one: then the key admits nothing."""
        if self.corrupt_field is None:
            self.sweep(row["now"])


class Guard(NamedTuple):
    """The guard of an execution: whether it is live, so that no second token is taken, and whether it holds a slot."""

    is_live: bool
    has_slot: bool
    token_at: int | None
    tokens: int


class _Need(NamedTuple):
    """What an execution needs of a key."""

    key_no: int
    key: Key
    guard: Guard
    has_slot: bool
    """Whether it has a slot already."""

    @property
    def needs_token(self) -> bool:
        return not self.guard.is_live

    @property
    def is_less(self) -> bool:
        """Whether it needs less than an execution that the key has not admitted before."""
        limits = self.key.limits
        has_token = self.guard.is_live and limits.max_requests_per_window > 0
        return has_token or (self.has_slot and limits.active_concurrency_cap > 0)


_NO_GUARD = Guard(is_live=False, has_slot=False, token_at=None, tokens=0)


class _Guarded(NamedTuple):
    """A guard to write: until when, and when its tokens were entered, and how many; 0 keeps them."""

    key_no: int
    candidate: Candidate
    guard_until: int = 0
    token_at: int = 0
    tokens: int = 0


@dataclass(kw_only=True, slots=True)
class Claiming:
    """The state of one admission: the locked keys, the guards, and what has to be stored."""

    now: int = 0
    keys: dict[int, Key] = field(default_factory=dict)
    guards: dict[tuple[int, UUID], Guard] = field(default_factory=dict)
    guarded: list[_Guarded] = field(default_factory=list)

    def judge(self, candidate: Candidate) -> Admitted | Denied:
        """Admit one execution, or say which limit it exceeds; what it takes is taken from the keys."""
        if candidate.budget_detail is not None:
            return Denied(reason=BlockingReason.WAITING_FOR_BUDGET, detail=candidate.budget_detail)
        needs = [self._need(candidate, key_no) for key_no in candidate.quota_key_nos]
        if denied := self._denied(candidate, needs):
            return replace(denied, end=candidate.hidden_nth if candidate.has_guards else None)
        # Slots of keys that no longer limit it are kept until its lease ends.
        held = set(candidate.slot_keys)
        for need in needs:
            self._take(candidate, need)
            if need.key.limits.active_concurrency_cap:
                held.add(need.key_no)
        return Admitted(
            slot_keys=sorted(held), end=candidate.hidden_nth if any(need.is_less for need in needs) else None
        )

    def _need(self, candidate: Candidate, key_no: int) -> _Need:
        guard = self.guards.get((key_no, candidate.execution_id), _NO_GUARD)
        has_slot = (guard.is_live and guard.has_slot) or key_no in candidate.slot_keys
        return _Need(key_no, self.keys[key_no], guard, has_slot)

    def _denied(self, candidate: Candidate, needs: Sequence[_Need]) -> Denied | None:
        """The first limit that an execution exceeds, if any."""
        found: list[tuple[_Need, RateExceeded | ConcurrencyExceeded]] = []
        for need in needs:
            key = need.key
            if key.corrupt_field is not None:
                return Denied(
                    reason=BlockingReason.WAITING_FOR_QUOTA,
                    detail=f"quota {key.quota_policy_id}: its stored {key.corrupt_field} is negative",
                )
            if key.is_closed and need.needs_token:
                found.append((need, RateExceeded(retry_after_ms=key.retry_after_ms(self.now))))
                continue
            needed = {"needs_token": need.needs_token, "needs_slot": not need.has_slot}
            if denial := key.denial(self.now, weight=candidate.weight, **needed):
                found.append((need, denial))
        if not found:
            return None
        (need, denial), *others = found
        closed_keys: list[int] = []
        if not others and isinstance(denial, RateExceeded):
            # It waits for nothing else: otherwise lighter ones behind it would take the tokens for which it waits.
            need.key.is_closed = True
            closed_keys.append(need.key_no)
        return _detail(need.key, denial, closed_keys)

    def _take(self, candidate: Candidate, need: _Need) -> None:
        key_no, key, guard, has_slot = need
        limits = key.limits
        takes_token = need.needs_token and limits.max_requests_per_window > 0
        if takes_token and guard.token_at is not None and guard.token_at > self.now - limits.window_ms:
            # The guard was released: its tokens move.
            key.take_back(guard.token_at, guard.tokens)
        token_at = key.admit(self.now, weight=candidate.weight, needs_token=need.needs_token, needs_slot=not has_slot)
        if limits.active_concurrency_cap:
            key.slots += not has_slot
        if takes_token:
            tokens = min(candidate.weight, limits.max_requests_per_window)
            self.guarded.append(_Guarded(key_no, candidate, self.now + limits.window_ms, token_at, tokens))
        elif guard.has_slot and (limits.active_concurrency_cap or not guard.is_live):
            # The slot of the guard passes to the lease.
            self.guarded.append(_Guarded(key_no, candidate))
        if guard.has_slot and not guard.is_live:
            # The slot of an expired guard was free already.
            key.slots -= 1


class Admission:
    """Admits the executions of claims."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def admit(
        self, transaction: Transaction, candidates: Sequence[Candidate], *, closed_keys: Collection[int] = ()
    ) -> Sequence[Admitted | Denied | None]:
        """Admit locked executions in the order given, as far as their limits allow, and book what they take."""
        key_nos = {key_no for candidate in candidates for key_no in candidate.quota_key_nos}
        claiming = Claiming()
        if key_nos:
            await transaction.fetch(QUOTA_SQL.lock_quota_keys, quota_key_nos=sorted(key_nos))
            pairs = [(key_no, candidate) for candidate in candidates for key_no in candidate.quota_key_nos]
            rows = await transaction.fetch(
                SQL.read_admitting_keys,
                quota_key_nos=sorted(key_nos),
                guard_keys=[key_no for key_no, _ in pairs],
                execution_ids=[candidate.execution_id for _, candidate in pairs],
            )
            for row in rows:
                if row["execution_id"] is None:
                    claiming.now = row["now"]
                    claiming.keys[row["quota_key_no"]] = key = Key(row)
                    key.is_closed = row["quota_key_no"] in closed_keys
                else:
                    guard = Guard(row["is_live"], row["has_slot"], row["token_at"], row["tokens"])
                    claiming.guards[row["quota_key_no"], row["execution_id"]] = guard
        verdicts: list[Admitted | Denied | None] = []
        end: int | None = None
        for candidate in candidates:
            verdict = None if end is not None and candidate.nth > end else claiming.judge(candidate)
            verdicts.append(verdict)
            if verdict is not None and verdict.end is not None:
                end = verdict.end if end is None else min(end, verdict.end)
        await self._book(transaction, claiming)
        await self._mark(transaction, zip(candidates, verdicts, strict=True))
        return verdicts

    async def take_slots(
        self, transaction: Transaction, execution_id: UUID, quota_key_nos: Sequence[int], held: Sequence[int]
    ) -> Sequence[int]:
        """Take the slots of a locked execution without a test; return the quota keys of which it then holds one."""
        missing = sorted(set(quota_key_nos).difference(held))
        if not missing:
            return held
        await transaction.fetch(QUOTA_SQL.lock_quota_keys, quota_key_nos=missing)
        rows = await transaction.fetch(SQL.take_slots, quota_key_nos=missing, execution_id=execution_id)
        return sorted({*held, *(row["quota_key_no"] for row in rows)})

    async def return_expired(self) -> int:
        """Return the slots of grants that have expired; return how many grants."""
        (row,) = await self._store.fetch(
            SQL.return_expired_slots, limit=EXPIRED_LIMIT, slot_shard=self._store.slot_shard
        )
        if row["freed_keys"]:
            self._store.wakeups.room(row["freed_keys"])
        seen: int = row["seen"]
        return seen

    async def return_since(self, _: int) -> SweepResult:
        """The same as a step of the work that a claim does itself."""
        seen = await self.return_expired()
        return SweepResult(seen, seen >= EXPIRED_LIMIT)

    @staticmethod
    async def _book(transaction: Transaction, claiming: Claiming) -> None:
        guarded = claiming.guarded
        rated = {each.key_no for each in guarded if each.guard_until}
        changed = [(key_no, key) for key_no, key in claiming.keys.items() if key.slots or key_no in rated]
        if not changed and not guarded:
            return
        await transaction.fetch(
            SQL.book,
            quota_key_nos=[key_no for key_no, _ in changed],
            slots=[key.slots for _, key in changed],
            window_ats=[
                array_text(at for at, _ in key.entries) if key_no in rated else None for key_no, key in changed
            ],
            window_tokens=[
                array_text(tokens for _, tokens in key.entries) if key_no in rated else None for key_no, key in changed
            ],
            guard_keys=[each.key_no for each in guarded],
            partition_keys=[each.candidate.partition_key for each in guarded],
            execution_ids=[each.candidate.execution_id for each in guarded],
            guards_until=[each.guard_until for each in guarded],
            tokens_at=[each.token_at for each in guarded],
            tokens=[each.tokens for each in guarded],
            now=claiming.now,
        )

    @staticmethod
    async def _mark(transaction: Transaction, judged: Iterable[tuple[Candidate, Admitted | Denied | None]]) -> None:
        """Mark the first execution that was denied of each queue."""
        first: dict[int, tuple[Candidate, Denied]] = {}
        for candidate, verdict in judged:
            if isinstance(verdict, Denied):
                first.setdefault(candidate.queue_no, (candidate, verdict))
        marked = [(candidate, denied) for candidate, denied in first.values() if candidate.is_markable]
        if marked:
            await transaction.fetch(
                SQL.mark_denied,
                partition_keys=[candidate.partition_key for candidate, _ in marked],
                execution_ids=[candidate.execution_id for candidate, _ in marked],
                to_eligibilities=[BLOCKS[denied.reason] for _, denied in marked],
                to_blockings=[denied.reason for _, denied in marked],
                details=[denied.detail for _, denied in marked],
            )


def _detail(key: Key, denial: RateExceeded | ConcurrencyExceeded, closed_keys: Sequence[int]) -> Denied:
    limits = key.limits
    if isinstance(denial, RateExceeded):
        rate = limits.max_requests_per_window
        return Denied(
            reason=BlockingReason.WAITING_FOR_QUOTA,
            detail=f"quota {key.quota_policy_id}: rate limit {rate}/{rate} per {limits.window_ms // 1000}s window",
            retry_after_ms=denial.retry_after_ms,
            closed_keys=closed_keys,
        )
    return Denied(
        reason=BlockingReason.WAITING_FOR_QUOTA,
        detail=f"quota {key.quota_policy_id}: concurrency cap {limits.active_concurrency_cap}",
    )
