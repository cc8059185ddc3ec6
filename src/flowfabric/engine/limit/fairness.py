"""Fairness: by what the claims of a lane share it among the executions that wait."""

from collections.abc import Mapping

import msgspec

from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.queues import govern_routes, lock_limits
from flowfabric.engine.execution.limits import LimitRules
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.ids import check_lane_id
from flowfabric.model.limit import MAX_KEY_CHARACTERS, check_source
from flowfabric.model.policy_checks import MAX_MS
from flowfabric.model.text import check_range, check_text, shown

SQL = statements_beside(__file__)

BY_NAMESPACE = "namespace"
MAX_WEIGHTS = 1000
MAX_WEIGHT = 1_000_000


class Fairness:
    """The operation that makes a lane fair."""

    def __init__(self, store: Store, rules: LimitRules) -> None:
        self._store = store
        self._rules = rules

    async def set_lane_fairness(
        self,
        *,
        lane_id: str,
        fair_by: str | None = None,
        weights: Mapping[str, float] | None = None,
        ageing_ms: int | None = None,
    ) -> None:
        """Let claims share a lane fairly by namespace or by a key of the executions; without arguments, end that.

        Executions that are queued keep the key they were created with.
        """
        lane_id = check_lane_id(lane_id)
        if fair_by is not None and fair_by != BY_NAMESPACE:
            fair_by = check_source(fair_by, "fair_by")
        checked = _check_weights(weights, fair_by)
        if ageing_ms is not None:
            check_range(ageing_ms, "ageing_ms", 1, MAX_MS)

        async def change(transaction: Transaction) -> None:
            await lock_limits(transaction)
            rows = await transaction.fetch(
                SQL.set_lane_fairness,
                lane_id=lane_id,
                fair_by=fair_by,
                fair_weights=None if checked is None else msgspec.json.encode(checked).decode(),
                ageing_ms=ageing_ms,
            )
            if not rows:
                raise error(
                    "invalid_input", f"lane_id: no lane {lane_id!r}; list_lanes shows them, a submission creates one"
                )
            await govern_routes(transaction, [row["route_no"] for row in rows if row["route_no"] is not None])

        await self._store.transact(change)
        self._rules.forget()
        self._store.wakeups.lane(lane_id)


def _check_weights(weights: object, fair_by: str | None) -> dict[str, float] | None:
    """Return the weights of keys, None if every key weighs the same."""
    if not weights:
        return None
    if not isinstance(weights, Mapping):
        raise error("invalid_input", f"weights: must be a mapping of keys to numbers, got {shown(weights)}")
    if fair_by is None:
        raise error("invalid_input", "weights: must be absent without fair_by")
    if len(weights) > MAX_WEIGHTS:
        raise error("invalid_input", f"weights: must have at most {MAX_WEIGHTS} keys, got {len(weights)}")
    found = {}
    for key, weight in weights.items():
        if not check_text(key, "weights") or len(key) > MAX_KEY_CHARACTERS:
            raise error(
                "invalid_input", f"weights: keys must have 1 to {MAX_KEY_CHARACTERS} characters, got {shown(key)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MAX_WEIGHT:
            raise error(
                "invalid_input",
                f"weights[{shown(key)}]: must be a number above 0 and at most {MAX_WEIGHT}, got {shown(weight)}",
            )
        found[key] = weight
    return found
