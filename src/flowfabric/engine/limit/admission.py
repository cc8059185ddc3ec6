"""Admission: which of the executions that a claim has locked are within their limits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import array_text, statements_beside
from flowfabric.engine.core.admission import Admitted, Candidate, Denied
from flowfabric.engine.core.transition import BLOCKS
from flowfabric.model.quota import ConcurrencyExceeded, KeyState, QuotaLimits, RateExceeded
from flowfabric.model.states import BlockingReason

SQL = statements_beside(__file__)


class Key(KeyState):
    """A quota key that the transaction has locked, and what a claim takes of it."""

    def __init__(self, row: Record) -> None:
        limits = QuotaLimits(
            max_requests_per_window=row["max_requests_per_window"] or 0,
            requests_per_window_seconds=row["window_seconds"] or 0,
            active_concurrency_cap=row["max_concurrent"] or 0,
            jitter_ms=row["jitter_ms"] or 0,
        )
        entries = [*zip(row["window_ats"], row["window_tokens"], strict=True)]
        super().__init__(limits=limits, used=row["used"], entries=entries)
        self.quota_policy_id: UUID = row["quota_policy_id"]
        self.has_guards: bool = row["has_guards"]
        self.slots = 0
        """The slots that the claim takes."""
        self.sweep(row["now"])


class Guard(NamedTuple):
    """The guard of an execution: whether it is live, so that no second token is taken, and whether it holds a slot."""

    is_live: bool
    has_slot: bool


_NO_GUARD = Guard(is_live=False, has_slot=False)


@dataclass(kw_only=True, slots=True)
class Claiming:
    """The state of one admission: the locked keys, the guards, and what has to be stored."""

    now: int
    keys: dict[int, Key]
    guards: dict[tuple[int, UUID], Guard]
    guarded: list[tuple[int, Candidate, int]]
    """The guards to write: quota key, execution, and until when; 0 keeps the time."""

    def judge(self, candidate: Candidate) -> Admitted | Denied:
        """Admit one execution, or say which limit it exceeds; what it takes is taken from the keys."""
        if candidate.budget_detail is not None:
            return Denied(reason=BlockingReason.WAITING_FOR_BUDGET, detail=candidate.budget_detail)
        needs = [(key_no, self.keys[key_no], *self._needs(candidate, key_no)) for key_no in candidate.quota_key_nos]
        for _, key, needs_token, needs_slot in needs:
            denial = key.denial(self.now, weight=candidate.weight, needs_token=needs_token, needs_slot=needs_slot)
            if denial is not None:
                return _denied(key, denial)
        slot_keys: list[int] = []
        for key_no, key, needs_token, needs_slot in needs:
            key.admit(self.now, weight=candidate.weight, needs_token=needs_token, needs_slot=needs_slot)
            if key.limits.active_concurrency_cap:
                slot_keys.append(key_no)
                key.slots += needs_slot
            guard = self._guard(candidate, key_no)
            if needs_token and key.limits.max_requests_per_window:
                self.guarded.append((key_no, candidate, self.now + key.limits.window_ms))
            elif guard.has_slot:
                # The slot of the guard passes to the lease.
                self.guarded.append((key_no, candidate, 0))
            if guard.has_slot and not guard.is_live:
                # The slot of an expired guard was free already.
                key.slots -= 1
        return Admitted(slot_keys=slot_keys)

    def _guard(self, candidate: Candidate, key_no: int) -> Guard:
        return self.guards.get((key_no, candidate.execution_id), _NO_GUARD)

    def _needs(self, candidate: Candidate, key_no: int) -> tuple[bool, bool]:
        """Whether an execution needs a token and a slot of a key."""
        guard = self._guard(candidate, key_no)
        has_slot = (guard.is_live and guard.has_slot) or key_no in candidate.slot_keys
        return not guard.is_live, not has_slot


class Admission:
    """Admits the executions of claims."""

    async def admit(self, transaction: Transaction, candidates: Sequence[Candidate]) -> Sequence[Admitted | Denied]:
        """Admit locked executions in the order given, as far as their limits allow, and book what they take."""
        key_nos = sorted({key_no for candidate in candidates for key_no in candidate.quota_key_nos})
        claiming = Claiming(now=0, keys={}, guards={}, guarded=[])
        if key_nos:
            rows = await transaction.fetch(SQL.lock_admitting_keys, quota_key_nos=key_nos)
            claiming.keys = {row["quota_key_no"]: Key(row) for row in rows}
            claiming.now = max(row["now"] for row in rows)
            await self._read_guards(transaction, claiming, candidates)
        verdicts = [claiming.judge(candidate) for candidate in candidates]
        await self._book(transaction, claiming)
        await self._mark(transaction, zip(candidates, verdicts, strict=True))
        return verdicts

    async def take_slots(self, transaction: Transaction, partition_key: int, execution_id: UUID) -> Sequence[int]:
        """Take the slots of a locked execution without a test; return the quota keys of which it then holds one."""
        rows = await transaction.fetch(
            SQL.lock_keys_of_execution, partition_key=partition_key, execution_id=execution_id
        )
        held = set(rows[0]["slot_keys"] or ()) if rows else set[int]()
        missing = [row["quota_key_no"] for row in rows if row["quota_key_no"] not in held]
        if missing:
            await transaction.fetch(SQL.take_slots, quota_key_nos=missing)
        return sorted({*held, *missing})

    @staticmethod
    async def _read_guards(transaction: Transaction, claiming: Claiming, candidates: Sequence[Candidate]) -> None:
        pairs = [
            (key_no, candidate)
            for candidate in candidates
            for key_no in candidate.quota_key_nos
            if claiming.keys[key_no].has_guards
        ]
        if pairs:
            rows = await transaction.fetch(
                SQL.list_guards,
                quota_key_nos=[key_no for key_no, _ in pairs],
                execution_ids=[candidate.execution_id for _, candidate in pairs],
                now=claiming.now,
            )
            for row in rows:
                key_no, candidate = pairs[row["at"]]
                claiming.guards[key_no, candidate.execution_id] = Guard(row["is_live"], row["has_slot"])

    @staticmethod
    async def _book(transaction: Transaction, claiming: Claiming) -> None:
        guarded = claiming.guarded
        rated = {key_no for key_no, _, guard_until in guarded if guard_until}
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
            guard_keys=[key_no for key_no, _, _ in guarded],
            partition_keys=[candidate.partition_key for _, candidate, _ in guarded],
            execution_ids=[candidate.execution_id for _, candidate, _ in guarded],
            guards_until=[guard_until for _, _, guard_until in guarded],
            now=claiming.now,
        )

    @staticmethod
    async def _mark(transaction: Transaction, judged: Iterable[tuple[Candidate, Admitted | Denied]]) -> None:
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


def _denied(key: Key, denial: RateExceeded | ConcurrencyExceeded) -> Denied:
    limits = key.limits
    if isinstance(denial, RateExceeded):
        rate = limits.max_requests_per_window
        return Denied(
            reason=BlockingReason.WAITING_FOR_QUOTA,
            detail=f"quota {key.quota_policy_id}: rate limit {rate}/{rate} per {limits.window_ms // 1000}s window",
            retry_after_ms=denial.retry_after_ms,
        )
    return Denied(
        reason=BlockingReason.WAITING_FOR_QUOTA,
        detail=f"quota {key.quota_policy_id}: concurrency cap {limits.active_concurrency_cap}",
    )
