"""Reading what handlers have written."""

from collections.abc import Awaitable

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId

LONGEST = 65_536
"""The size of the largest frame."""


async def texts(engine: Engine, run: ExecutionId, attempt_index: int = 0) -> list[str]:
    """The frames of an attempt, as text."""
    found = await engine.read_stream(run, attempt_index, count_limit=10_000)
    assert [frame.position for frame in found.frames] == sorted({frame.position for frame in found.frames})
    return [frame.text for frame in found.frames]


def numbers(count: int, first: int = 0) -> list[str]:
    return [str(number) for number in range(first, first + count)]


async def refusal(call: Awaitable[object]) -> tuple[str, str]:
    """The code and the text of the error that a call raises."""
    with pytest.raises(EngineError) as refused:
        await call
    return refused.value.code, str(refused.value.detail)
