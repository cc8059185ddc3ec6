"""The limits that hold back an execution, as reasons of an explanation."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias
from uuid import UUID

import msgspec

from flowfabric.db.database import Record
from flowfabric.engine.core.transition import LIMITED_STATES
from flowfabric.model.explanation import BudgetReason, QuotaReason
from flowfabric.model.ids import BudgetId, QuotaPolicyId
from flowfabric.model.quota import KeyState, QuotaLimits
from flowfabric.model.states import EligibilityState, StateVector

LimitReason: TypeAlias = BudgetReason | QuotaReason


class _Key(msgspec.Struct, frozen=True, array_like=True):
    """A key of a quota, and what the execution has of it already."""

    quota_policy_id: UUID
    key: str
    key_from: str | None
    max_requests_per_window: int
    window_seconds: int
    max_concurrent: int
    used: int
    window_ats: list[int]
    window_tokens: list[int]
    has_token: bool
    has_slot: bool


_read_keys = msgspec.json.Decoder(list[_Key]).decode
_read_budgets = msgspec.json.Decoder(list[tuple[UUID, str, int, int, int | None]]).decode


def limit_reasons(row: Record, state: StateVector) -> Sequence[LimitReason]:
    """The limits that do not admit an execution now; if none but it is marked as blocked, that they have room."""
    is_marked = state.eligibility_state in LIMITED_STATES
    detail = row["blocking_detail"] if is_marked else None
    found: list[LimitReason] = [*_budgets(row, detail), *_quotas(row, detail)]
    if found or not is_marked:
        return found
    if state.eligibility_state is EligibilityState.BLOCKED_BY_BUDGET:
        return [BudgetReason(detail=detail)]
    return [QuotaReason(detail=detail)]


def _budgets(row: Record, detail: str | None) -> Iterator[BudgetReason]:
    for budget_id, dimension, used, limit, next_reset_at in _read_budgets(row["spent"]) if row["spent"] else []:
        yield BudgetReason(
            budget_id=BudgetId(budget_id),
            dimension=dimension,
            used=used,
            limit=limit,
            next_reset_at=next_reset_at,
            detail=detail,
        )


def _quotas(row: Record, detail: str | None) -> Iterator[QuotaReason]:
    now, weight, run_ms = row["now"], row["quota_weight"] or 1, row["run_ms"]
    for key in _read_keys(row["quota_keys"]) if row["quota_keys"] else []:
        limits = QuotaLimits(
            max_requests_per_window=key.max_requests_per_window,
            requests_per_window_seconds=key.window_seconds,
            active_concurrency_cap=key.max_concurrent,
        )
        entries = list(zip(key.window_ats, key.window_tokens, strict=True))
        standing = KeyState(limits=limits, used=key.used, entries=entries)
        standing.sweep(now)
        policy = QuotaPolicyId(key.quota_policy_id)
        wait = standing.rate_wait(now, weight=weight)
        if wait is not None and not key.has_token:
            yield QuotaReason(
                quota_policy_id=policy,
                key=key.key,
                key_from=key.key_from,
                limit_kind="rate",
                used=standing.tokens_used,
                limit=limits.max_requests_per_window,
                window_ms=limits.window_ms,
                retry_after_ms=wait,
                detail=detail,
            )
        if not standing.has_free_slot and not key.has_slot:
            yield QuotaReason(
                quota_policy_id=policy,
                key=key.key,
                key_from=key.key_from,
                limit_kind="concurrency",
                used=key.used,
                limit=limits.active_concurrency_cap,
                # All slots are in use: one of them becomes free about this often.
                retry_after_ms=None if run_ms is None else run_ms // limits.active_concurrency_cap,
                detail=detail,
            )
