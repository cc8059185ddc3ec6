"""Random flows with crashes between any two statements and locked rows: the engine always agrees with a plain model.

`make test` runs a sample of fixed examples; `FF_TEST_SWEEP=whole` and `FF_TEST_EXAMPLES=1000` (so many for each test)
run new ones, of a seed that a failure prints and that `FF_TEST_SEED` repeats.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from engine.state import IS_WHOLE, rounds
from flowfabric.db import session as sessions
from flowfabric.engine.core import quarantine
from flowfabric.engine.execution.cancel_many import CancelMany
from flowfabric.engine.flow import backlog, cascade, siblings
from flowfabric.model.errors import EngineError

from .graph_faults import CRASHES
from .graph_player import STEPS, Player
from .graph_scripts import WEIGHTS, Script, random_script, scripts
from .graph_store import GraphStore

EXAMPLES = int(os.environ.get("FF_TEST_EXAMPLES") or 0)
IS_NEW = IS_WHOLE or EXAMPLES > 0
SEED = int(os.environ.get("FF_TEST_SEED") or (random.randrange(10**9) if IS_NEW else 0))
LENGTH = 40

CRASHED = (
    "submit", "complete", "fail", "suspend", "wait for children", "cancel", "add", "stage", "apply", "settle",
    "reconcile", "drain siblings", "reconcile siblings", "replay", "cancel the flow", "cancel the header",
    "cancel what is owed",
)  # fmt: skip
"""The calls of which one has to crash in the sample; others may."""
REACHED = 20 if IS_WHOLE else 5
"""How many calls of the sample have so many statements that calls must have crashed all along them."""
WINDOW = 3 if IS_WHOLE else 8
"""At one of so many statements in a row a call crashes at least."""


@pytest.fixture
def store(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphStore]:
    """The database of the test, with a clock that only the test moves, and two engines that wait briefly for locks."""
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "10ms")
    defaults: dict[str, Any] = CancelMany.cancel.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "patience_seconds", 0.01)
    for name in ("PATIENCE_SECONDS", "SWEEP_PATIENCE_SECONDS"):
        monkeypatch.setattr(backlog, name, 0.01)
    monkeypatch.setattr(cascade, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(cascade, "TRIES", 2)
    # What could not be locked is tried again at once.
    monkeypatch.setattr(cascade, "SKIPPED_SECONDS", 0.0)
    monkeypatch.setattr(quarantine, "pause_after", lambda *_: 0.0)
    monkeypatch.setattr(siblings, "GROUP_PATIENCE_SECONDS", 0.01)
    store = GraphStore(url)
    yield store
    store.close()


class Sample:
    """Scripts that were played, and what they have reached."""

    def __init__(self, store: GraphStore) -> None:
        self._store = store
        self.counts: Counter[str] = Counter()
        self.points: Counter[int] = Counter()
        self.lengths: Counter[int] = Counter()

    def play(self, script: Script) -> None:
        """Play a script; fail where the engine and the model differ."""
        player = Player(self._store, script)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cascade, "EDGE_LIMIT", script.edge_limit)
            try:
                self._store.run(player.play())
            except (AssertionError, EngineError) as difference:
                self._store.run(self._store.clear())
                pytest.fail("\n".join((f"FF_TEST_SEED={SEED}", str(script), *player.taken, str(difference))))
        self.counts += player.counts
        self.points += player.points
        self.lengths += player.lengths

    def check_reach(self) -> None:
        """Check that the sample has every step, crashes of every form, all along every call, and locks that matter."""
        wanted = [*STEPS, *CRASHES, *(f"settle: left behind a locked {kind}" for kind in ("child", "group", "flow"))]
        missing = [name for name in wanted if not self.counts[name]]
        missing += [
            f"a crash of {call}" for call in CRASHED if not any(self.counts[f"{call}: {form}"] for form in CRASHES)
        ]
        # Calls that were cut had more statements than were counted.
        lengths = sorted(self.lengths.elements())
        missing += [
            f"a crash at statement {nth} to {nth + WINDOW - 1}"
            for nth in range(1, lengths[-REACHED] - WINDOW + 2)
            if not any(self.points[nth + each] for each in range(WINDOW))
        ]
        assert not missing, f"FF_TEST_SEED={SEED} does not reach {missing}"


@pytest.mark.timeout(1200)
def test_flows_of_hypothesis_end_as_the_model_predicts(store: GraphStore) -> None:
    sample = Sample(store)

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES or len(rounds(6, whole=60)),
        print_blob=True,
        deadline=None,
        database=None,
        # Shrinking a failure takes minutes.
        phases=list(Phase) if EXAMPLES else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(scripts(LENGTH))
    def check(script: Script) -> None:
        sample.play(script)

    check()


@pytest.mark.timeout(1200)
def test_random_flows_end_as_the_model_predicts(store: GraphStore) -> None:
    assert {*STEPS} == {*WEIGHTS}
    sample = Sample(store)
    count = EXAMPLES or len(rounds(40, whole=200))
    for each in range(SEED, SEED + count):
        try:
            sample.play(random_script(random.Random(each), LENGTH))
        except pytest.fail.Exception as failure:
            pytest.fail(f"repeat with FF_TEST_SEED={each} FF_TEST_EXAMPLES=1: {failure}")
    if not EXAMPLES:
        sample.check_reach()
