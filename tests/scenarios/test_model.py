"""Random operations by several workers, with crashes and a moved clock: the engine and a plain model never differ.

`FF_TEST_EXAMPLES=1000` looks further than the fixed examples of every run; a failure prints how to repeat it.
"""

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .model_machine import EngineAgainstModel
from .model_rows import Stage

EXAMPLES = int(os.environ.get("FF_TEST_EXAMPLES", "0"))
STEPS = 50


@pytest.fixture
def stage(url: str) -> Iterator[Stage]:
    """The test's database, with a clock that only the test moves."""
    stage = Stage(url)
    yield stage
    stage.close()


@pytest.mark.timeout(1200)
def test_the_engine_and_the_model_never_differ_whatever_hypothesis_tries(stage: Stage) -> None:
    machine = type("EngineAgainstModel", (EngineAgainstModel,), {"stage": stage})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or 30,
            stateful_step_count=STEPS,
            derandomize=not EXAMPLES,
            print_blob=True,
            deadline=None,
            database=None,
            # To make a failure small takes minutes.
            phases=list(Phase) if EXAMPLES else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(1200)
def test_the_engine_and_the_model_never_differ_on_long_walks(stage: Stage) -> None:
    machine = type("EngineAgainstModel", (EngineAgainstModel,), {"stage": stage})
    for seed in range(EXAMPLES or 35):
        walker = machine()
        try:
            walker.walk(random.Random(seed), STEPS)
        except AssertionError as difference:
            pytest.fail("\n".join((f"seed {seed}:", *walker.taken, str(difference))))
        finally:
            walker.teardown()
