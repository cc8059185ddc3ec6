"""Fixtures of the sweeps: their samples, and a store whose clock stands still."""

import os
import random
from dataclasses import dataclass

import asyncpg
import pytest

from fixtures import Clock, Engines

from .scene import Scene

IS_WHOLE = os.environ.get("FF_TEST_SWEEP") == "whole"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Whether a sweep runs in full, and the seed of its samples."""

    seed: int
    is_whole: bool

    def sample(self, title: str, count: int, size: int) -> list[int]:
        """A sample of the numbers below `count`, or all of them in a whole sweep."""
        if self.is_whole or count <= size:
            return list(range(count))
        rng = random.Random(f"{self.seed} {title}")
        # Half of the sample is from the beginning of a call, when connections are acquired and transactions begin.
        early = rng.sample(range(min(count, 8)), min(size // 2, count))
        late = rng.sample(range(count), size)
        return sorted(set(early) | set(late[: size - len(early)]))


@pytest.fixture(scope="session")
def sweep() -> Sweep:
    """`FF_TEST_SWEEP=whole` runs every case; `FF_TEST_SEED` chooses other samples."""
    return Sweep(seed=int(os.environ.get("FF_TEST_SEED") or 1), is_whole=IS_WHOLE)


@pytest.fixture
async def scene(engines: Engines, clock: Clock, connection: asyncpg.Connection) -> Scene:
    """The store of a sweep; its clock moves only by advance()."""
    await clock.stop()
    return Scene(await engines(database_pool_size=2), clock, connection)
