"""Quotas: how many executions a key may run at once and start per window, and what is left of both."""

import random
from dataclasses import dataclass, field
from typing import TypeAlias

from flowfabric.model.ids import QuotaPolicyId
from flowfabric.model.text import check_range, check_short

DEFAULT_WINDOW_SECONDS = 60
"""The window of a quota whose window is 0."""
DEFAULT_KEY = "default"
"""The key of executions that have none."""
MAX_EXACT_ENTRIES = 100
"""Above this number, a window merges the entries of each hundredth of its length."""
MAX_LIMIT = 2**53 - 1
MAX_WINDOW_SECONDS = MAX_LIMIT // 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaCreated:
    """The quota policy was created."""

    quota_policy_id: QuotaPolicyId


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaAlreadySatisfied:
    """There is a quota policy with this id already; it was not changed."""

    quota_policy_id: QuotaPolicyId


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaChanged:
    """The quota policy has the given limits now."""

    quota_policy_id: QuotaPolicyId


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """The execution has no guard and no slot of the quota."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaReconcile:
    """How many keys of quotas were compared with what really holds their slots, and how many could not be."""

    processed: int
    errors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """The execution was admitted now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyAdmitted:
    """An earlier admission of the execution still holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateExceeded:
    """The rate of the window is used up; try again after `retry_after_ms`."""

    retry_after_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcurrencyExceeded:
    """All slots are taken."""


Denial: TypeAlias = RateExceeded | ConcurrencyExceeded


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaLimits:
    """The limits of a quota; 0 disables one."""

    max_requests_per_window: int
    requests_per_window_seconds: int
    active_concurrency_cap: int
    jitter_ms: int = 0

    @property
    def window_ms(self) -> int:
        """The length of the window."""
        return (self.requests_per_window_seconds or DEFAULT_WINDOW_SECONDS) * 1000


@dataclass(slots=True)
class KeyState:
    """What one key of a quota has admitted; the transaction that changes it has locked the key's row."""

    limits: QuotaLimits
    used: int
    """How many slots are taken."""
    entries: list[tuple[int, int]] = field(default_factory=list)
    """The tokens of the rate taken in the last window, oldest first: when, and how many."""

    def sweep(self, now: int) -> None:
        """Drop the tokens that are older than the window."""
        since = now - self.limits.window_ms
        self.entries = [entry for entry in self.entries if entry[0] > since]

    @property
    def tokens_used(self) -> int:
        """The tokens taken in the window."""
        return sum(tokens for _, tokens in self.entries)

    def denial(self, now: int, *, weight: int = 1, needs_token: bool = True, needs_slot: bool = True) -> Denial | None:
        """Why an execution cannot be admitted now, if so: the rate is tested before the slots."""
        if needs_token and (wait := self.rate_wait(now, weight=weight)) is not None:
            return RateExceeded(retry_after_ms=wait + random.randint(0, self.limits.jitter_ms))
        return None if not needs_slot or self.has_free_slot else ConcurrencyExceeded()

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot is free, or the slots are not limited."""
        return not self.limits.active_concurrency_cap or self.used < self.limits.active_concurrency_cap

    def rate_wait(self, now: int, *, weight: int = 1) -> int | None:
        """The milliseconds until the rate lets an execution through, if no other takes a token; None if it does now."""
        limit = self.limits.max_requests_per_window
        # An execution heavier than the limit is admitted when nothing else is in the window.
        excess = self.tokens_used + min(weight, limit) - limit
        return self._free_after(now, excess) if limit and excess > 0 else None

    def admit(self, now: int, *, weight: int = 1, needs_token: bool = True, needs_slot: bool = True) -> int:
        """Take what an admitted execution needs; return the time at which its tokens were entered."""
        if needs_slot and self.limits.active_concurrency_cap:
            self.used += 1
        if needs_token and self.limits.max_requests_per_window:
            return self._add(now, min(weight, self.limits.max_requests_per_window))
        return now

    def take_back(self, at: int, tokens: int = 1) -> None:
        """Remove tokens that were entered at a time, as far as they are still in the window."""
        for nth, (moment, taken) in enumerate(self.entries):
            if moment >= at:
                left = taken - tokens
                self.entries[nth : nth + 1] = [(moment, left)] if left > 0 else []
                return

    def retry_after_ms(self, now: int) -> int:
        """The milliseconds until the oldest tokens leave the window."""
        return self._free_after(now, 1)

    def _free_after(self, now: int, excess: int) -> int:
        """The milliseconds until this many tokens have left the window."""
        for at, tokens in self.entries:
            excess -= tokens
            if excess <= 0:
                return max(0, at + self.limits.window_ms - now)
        return self.limits.window_ms

    def _add(self, now: int, tokens: int) -> int:
        at = max(now, self.entries[-1][0]) if self.entries else now
        if self.entries and self.entries[-1][0] == at:
            tokens += self.entries.pop()[1]
        self.entries.append((at, tokens))
        if len(self.entries) > MAX_EXACT_ENTRIES:
            part = max(self.limits.window_ms // MAX_EXACT_ENTRIES, 1)
            # Merged into the latest of them: tokens may leave the window later than they could, never earlier.
            merged: dict[int, tuple[int, int]] = {}
            for moment, taken in self.entries:
                earlier = merged.get(moment // part, (0, 0))
                merged[moment // part] = moment, earlier[1] + taken
            self.entries = [*merged.values()]
        return at


def check_limits(
    *, window_seconds: int, max_requests_per_window: int, max_concurrent: int, jitter_ms: int = 0
) -> QuotaLimits:
    """Return the limits of a caller."""
    check_range(window_seconds, "window_seconds", 0, MAX_WINDOW_SECONDS)
    check_range(max_requests_per_window, "max_requests_per_window", 0, MAX_LIMIT)
    check_range(max_concurrent, "max_concurrent", 0, MAX_LIMIT)
    check_range(jitter_ms, "jitter_ms", 0, MAX_LIMIT)
    return QuotaLimits(
        max_requests_per_window=max_requests_per_window,
        requests_per_window_seconds=window_seconds,
        active_concurrency_cap=max_concurrent,
        jitter_ms=jitter_ms,
    )


def check_key(dimension: object) -> str:
    """Return the key of a caller; an empty one is the default."""
    return DEFAULT_KEY if dimension == "" else check_short(dimension, "dimension")
