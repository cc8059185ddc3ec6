"""What the sweeps share: their seed, how much of them runs, and a clock that stands still."""

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
    """How much of a sweep runs, and by which seed its samples are drawn."""

    seed: int
    is_whole: bool

    def sample(self, title: str, count: int, most: int) -> list[int]:
        """Some of the numbers below `count`, or all of them in a whole sweep."""
        if self.is_whole or count <= most:
            return list(range(count))
        chance = random.Random(f"{self.seed} {title}")
        # The first few are where a conversation begins, and are always worth a try.
        early = chance.sample(range(min(count, 8)), min(most // 2, count))
        late = chance.sample(range(count), most)
        return sorted(set(early) | set(late[: most - len(early)]))


@pytest.fixture(scope="session")
def sweep() -> Sweep:
    """`FF_TEST_SWEEP=whole` runs every case; `FF_TEST_SEED` draws other samples."""
    return Sweep(seed=int(os.environ.get("FF_TEST_SEED") or 1), is_whole=IS_WHOLE)


@pytest.fixture
async def scene(engines: Engines, clock: Clock, connection: asyncpg.Connection) -> Scene:
    """The store of a sweep; its clock moves by the test's word alone."""
    await clock.stop()
    return Scene(await engines(database_pool_size=2), clock, connection)
