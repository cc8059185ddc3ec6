"""Each optimisation that the benchmark can switch off exists, and executions complete without it."""

import asyncio
import re
import sys
from inspect import iscoroutinefunction
from pathlib import Path
from types import ModuleType

import pytest

from flowfabric.bench.ours import LANE, noop
from flowfabric.bench.ours_submit import create_one
from flowfabric.bench.run import SUBJECTS
from flowfabric.bench.without import OPTIMISATIONS, Optimisation, resolve, returning, switch_off, value
from flowfabric.engine.engine import Engine
from flowfabric.outcomes import Created
from flowfabric.settings import Settings

README = Path(__file__).parents[2] / "bench" / "README.md"


@pytest.mark.parametrize("name", OPTIMISATIONS)
def test_everything_that_an_optimisation_replaces_exists(name: str) -> None:
    optimisation = OPTIMISATIONS[name]
    for target, substitute in optimisation.replacements.items():
        owner, attribute = resolve(target)
        original = vars(owner)[attribute]
        # A plain function in place of an async one would go unnoticed: a batch that fails is repeated item by item.
        assert iscoroutinefunction(substitute(original)) == iscoroutinefunction(original)
        assert callable(substitute(original)) == callable(original)
    assert optimisation.replacements
    assert optimisation.figures
    assert optimisation.subject in SUBJECTS


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("flowfabric.engine.nowhere:Marks.spans", "nowhere"),
        ("flowfabric.db.batch:Nothing.put", "no class Nothing"),
        ("flowfabric.db.batch:Batch.nothing", "no nothing"),
        ("flowfabric.db.batch:NOTHING", "no NOTHING"),
        # Inherited from object, not defined by the class.
        ("flowfabric.db.batch:Batch.__eq__", "no __eq__"),
    ],
)
def test_a_target_that_does_not_exist_raises_an_error_that_names_the_missing_part(target: str, missing: str) -> None:
    with pytest.raises(LookupError, match=f"^{target} does not exist: .*{missing}"):
        resolve(target)


def test_switching_off_replaces_methods_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("replaced")
    exec("LIMIT = 2\nclass Marks:\n    def spans(self):\n        return [1]\n", vars(module))
    monkeypatch.setitem(sys.modules, "replaced", module)
    optimisation = Optimisation(
        does="nothing",
        replacements={"replaced:Marks.spans": returning([]), "replaced:LIMIT": value(1)},
        subject="work",
        figures=("figure",),
    )
    monkeypatch.setitem(OPTIMISATIONS, "test", optimisation)
    switch_off("test")
    assert vars(module)["Marks"]().spans() == []
    assert vars(module)["LIMIT"] == 1


@pytest.mark.parametrize("name", OPTIMISATIONS)
async def test_executions_complete_without_the_optimisation(
    name: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(name, set_attribute=monkeypatch.setattr)
    # Not a fixture: the engine must be closed before monkeypatch switches the optimisation on again.
    async with Engine.connect(settings=Settings(database_url=url)) as engine:
        await complete_twenty_executions(engine)


async def complete_twenty_executions(engine: Engine) -> None:
    """Create, claim and complete executions, in batches and one by one, and wait for their results."""
    created = await engine.create_many([noop() for _ in range(10)])
    await asyncio.gather(*(create_one(engine) for _ in range(10)))
    assert all(isinstance(each, Created) for each in created)
    claims = [
        await engine.claim_many(lanes=[LANE], worker_id="w", worker_instance_id="w-1", limit=15) for _ in range(3)
    ]
    claimed = [each for claim in claims for each in claim]
    ids = {each.execution_id for each in claimed}
    assert len(ids) == 20
    await engine.complete_many([(each.handle, b"1") for each in claimed[:10]])
    await asyncio.gather(*(engine.complete(each.handle, b"1") for each in claimed[10:]))
    endings = await asyncio.gather(*(engine.wait_for_ending(each, timeout=30) for each in ids))
    assert [ending.result for ending in endings] == [b"1"] * 20


def test_the_readme_describes_every_optimisation() -> None:
    text = README.read_text(encoding="utf-8").partition("What an optimisation is worth")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \|$", text, re.MULTILINE)
    shown = {name: tuple(re.findall(r"`(\w+)`", figures)) for name, figures in rows}
    assert shown == {name: optimisation.figures for name, optimisation in OPTIMISATIONS.items()}
