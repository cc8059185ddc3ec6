"""Shared by the tests of limits: quotas, their rows, and executions that hold slots."""

from typing import Any
from uuid import UUID, uuid4

from fixtures import Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.ids import ExecutionId, format_execution_id

NO_LIMITS = {"window_seconds": 60, "rate_limit": 0, "concurrency_cap": 0}


def some_id() -> ExecutionId:
    """The id of an execution that does not exist."""
    return format_execution_id(7, uuid4())


async def check(engine: Engine, quota: UUID, execution_id: str, dimension: str = "", **limits: Any) -> object:
    """Check an admission; limits that are not given are none, in a window of a minute."""
    return await engine.check_admission(quota, dimension, execution_id=execution_id, **{**NO_LIMITS, **limits})


async def used(rows: Rows, quota: UUID, key: str = "default") -> int:
    """How many slots of a key are in use."""
    (row,) = await rows.of("quota_key", quota_policy_id=quota, key=key)
    returns = await rows.of("slot_return", quota_key_no=row["quota_key_no"])
    return int(row["taken"]) - sum(int(each["returned"]) for each in returns)


async def window(rows: Rows, quota: UUID, key: str = "default") -> list[tuple[int, int]]:
    """The tokens in the window of a key: when, and how many."""
    (row,) = await rows.of("quota_key", quota_policy_id=quota, key=key)
    return list(zip(row["window_ats"], row["window_tokens"], strict=True))


async def key_no(engine: Engine, rows: Rows, quota: UUID, key: str = "default") -> int:
    """The number of a key of a quota, which an admission without limits creates."""
    await check(engine, quota, some_id(), "" if key == "default" else key)
    (row,) = await rows.of("quota_key", quota_policy_id=quota, key=key)
    return int(row["quota_key_no"])


async def quota(
    engine: Engine, *, running: int = 0, rate: int = 0, window: int = 60, key_from: str | None = None
) -> UUID:
    """A new quota policy."""
    quota_policy_id = uuid4()
    await engine.create_quota_policy(
        quota_policy_id,
        window_seconds=window,
        max_requests_per_window=rate,
        max_concurrent=running,
        key_from=key_from,
    )
    return quota_policy_id


def limited(quota_policy_id: UUID, **more: object) -> dict[str, object]:
    """The policy of executions that a quota limits."""
    return {"quota_policy_id": str(quota_policy_id), **more}
