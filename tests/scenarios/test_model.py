"""Random operations of several workers, with crashes and a moved clock: the engine always agrees with a plain model.

`make test` runs a sample of fixed examples and `FF_TEST_SWEEP=whole` all of them. `FF_TEST_EXAMPLES=1000` runs that
many new ones; a failure prints how to repeat it.
"""

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.state import rounds

from .model_machine import EngineAgainstModel
from .model_rows import Store

EXAMPLES = int(os.environ.get("FF_TEST_EXAMPLES", "0"))
STEPS = 50


@pytest.fixture
def machine(url: str) -> Iterator[type[EngineAgainstModel]]:
    """The state machine on the database of the test, with a clock that only the machine moves."""
    store = Store(url)
    yield type("EngineAgainstModel", (EngineAgainstModel,), {"store": store})
    store.close()


@pytest.mark.timeout(1200)
def test_the_engine_agrees_with_the_model_on_examples_of_hypothesis(machine: type[EngineAgainstModel]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or len(rounds(15, whole=30)),
            stateful_step_count=STEPS,
            derandomize=not EXAMPLES,
            print_blob=True,
            deadline=None,
            database=None,
            # Shrinking a failure takes minutes.
            phases=list(Phase) if EXAMPLES else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(1200)
def test_the_engine_agrees_with_the_model_on_random_walks(machine: type[EngineAgainstModel]) -> None:
    for seed in range(EXAMPLES) if EXAMPLES else rounds(18, whole=35):
        walker = machine()
        try:
            walker.walk(random.Random(seed), STEPS)
        except AssertionError as difference:
            pytest.fail("\n".join((f"seed {seed}:", *walker.taken, str(difference))))
