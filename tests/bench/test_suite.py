"""Runs of the benchmark that compare this checkout with another one, or with itself without an optimisation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowfabric.bench import subject as subject_of_this_checkout
from flowfabric.bench.overlay import overlaid
from flowfabric.bench.ratios import medians, ratios, ratios_of_versions
from flowfabric.bench.server import Server
from flowfabric.bench.subject import Figure
from flowfabric.bench.suite import Plan, measure_all, measure_without

ROOT = Path(__file__).parents[2]
TINY = Plan(rounds=1, scale=0.001, seconds=120)


def figure(value: float) -> Figure:
    return Figure(value=value, unit="/s")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another checkout of this project, whose package has a name of its own to be recognised by."""
    package = tmp_path / "other" / "src" / "flowfabric"
    (package / "bench").mkdir(parents=True)
    (package / "__init__.py").write_text("from flowfabric.inner import NAME\n")
    (package / "inner.py").write_text('NAME = "other"\n')
    (package / "bench" / "__init__.py").write_text("")
    return tmp_path / "other"


def test_an_overlay_has_the_benchmark_of_this_checkout_and_the_package_of_the_other(other: Path) -> None:
    program = "import flowfabric, flowfabric.bench.subject as s; print(flowfabric.NAME, s.BATCH, s.__file__)"
    with overlaid(other) as source:
        out = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    assert out[:2] == ["other", str(subject_of_this_checkout.BATCH)]
    assert Path(out[2]).is_relative_to(source)
    assert not source.exists()
    assert (other / "src" / "flowfabric" / "inner.py").exists()


def test_an_overlay_of_a_folder_that_is_not_a_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path} is not a checkout of this project"), overlaid(tmp_path):
        pass


async def test_a_comparison_with_another_checkout_has_the_figures_of_both(server: str) -> None:
    results = await measure_all(Server(server), TINY, report=lambda _: None, beside=ROOT, only=["submit"])
    assert results.errors == {}
    names = [name for name in results.figures if not name.startswith("before:")]
    assert {"submit", "submit_100_callers", "submit_batch"} <= set(names)
    assert list(results.figures) == [*names, *(f"before:{name}" for name in names)]
    assert set(results.ratios) == {f"{name}/before" for name in names}


async def test_a_comparison_without_an_optimisation_has_the_figures_that_show_its_effect(server: str) -> None:
    results = await measure_without(Server(server), TINY, ["group_commit"], report=lambda _: None)
    assert results.errors == {}
    assert set(results.figures) == {"submit_100_callers", "without_group_commit:submit_100_callers"}
    assert set(results.ratios) == {"submit_100_callers/without_group_commit"}


def test_a_ratio_is_the_median_over_the_rounds_with_both_figures() -> None:
    rounds = [
        {"a": figure(2), "b": figure(1)},
        {"a": figure(3), "b": figure(1)},
        {"a": figure(8), "b": figure(1)},
        {"a": figure(5)},
        {"a": figure(7), "b": figure(0)},
    ]
    assert ratios(rounds, {"a/b": ("a", "b")}) == {"a/b": 3}
    assert ratios(rounds[3:], {"a/b": ("a", "b")}) == {}
    assert medians(rounds)["a"] == figure(5)


def test_versions_are_compared_figure_by_figure_and_each_version_has_the_ratios_of_an_ordinary_run() -> None:
    rounds = [{"submit": figure(3), "before:submit": figure(2), "new": figure(1)}]
    assert ratios(rounds, ratios_of_versions(rounds)) == {"submit/before": 1.5}
    first, second = "worker_default_slots", "worker_end_to_end"
    rounds = [{first: figure(3), second: figure(4), f"before:{first}": figure(1), f"before:{second}": figure(2)}]
    assert ratios(rounds, ratios_of_versions(rounds)) == {
        f"{first}/before": 3,
        f"{second}/before": 2,
        f"{first}/{second}": 0.75,
        f"before:{first}/{second}": 0.5,
    }
