"""Random flows with crashes between any two statements: the engine always agrees with a plain model.

`make test` runs a sample of fixed examples and `FF_TEST_SWEEP=whole` more of them. `FF_TEST_EXAMPLES=1000` runs that
many new ones; a failure prints how to repeat it.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from engine.state import rounds
from flowfabric.engine.flow import cascade
from flowfabric.model.errors import EngineError

from .graph_player import STEPS, Player
from .graph_scripts import WEIGHTS, Script, random_script, scripts
from .graph_store import CRASHES, GraphStore

EXAMPLES = int(os.environ.get("FF_TEST_EXAMPLES", "0"))
LENGTH = 40


@pytest.fixture
def store(url: str) -> Iterator[GraphStore]:
    """The database of the test, with a clock that only the test moves, and two engines on it."""
    store = GraphStore(url)
    yield store
    store.close()


def play(store: GraphStore, script: Script) -> Counter[str]:
    """Play a script; return how often each step was taken."""
    player = Player(store, script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cascade, "EDGE_LIMIT", script.edge_limit)
        try:
            store.run(player.play())
        except (AssertionError, EngineError) as difference:
            pytest.fail("\n".join((str(script), *player.taken, str(difference))))
    return player.counts


@pytest.mark.timeout(1200)
def test_flows_of_hypothesis_end_as_the_model_predicts(store: GraphStore) -> None:
    @settings(
        max_examples=EXAMPLES or len(rounds(10, whole=60)),
        derandomize=not EXAMPLES,
        print_blob=True,
        deadline=None,
        database=None,
        # Shrinking a failure takes minutes.
        phases=list(Phase) if EXAMPLES else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(scripts(LENGTH))
    def check(script: Script) -> None:
        play(store, script)

    check()


@pytest.mark.timeout(1200)
def test_random_flows_end_as_the_model_predicts(store: GraphStore) -> None:
    counts: Counter[str] = Counter()
    for seed in range(EXAMPLES) if EXAMPLES else rounds(24, whole=150):
        try:
            counts += play(store, random_script(random.Random(seed), LENGTH))
        except pytest.fail.Exception as failure:
            pytest.fail(f"seed {seed}: {failure}")
    assert {*STEPS} == {*WEIGHTS}
    # The sample reaches every step and every form of a crash.
    assert {*STEPS, *CRASHES} <= {*counts}
