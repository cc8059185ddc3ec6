"""Draw the throughputs as bars on a logarithmic scale."""

from pathlib import Path
from typing import Any

from flowfabric.bench.ratios import PEERS
from flowfabric.bench.subject import Figure
from flowfabric.bench.suite import Results

BAR_INCHES = 0.27
COLOURS = {"raw limit": "#8c959f", "FlowFabric": "#0969da", "peer": "#d4a72c"}


def draw(results: Results, path: Path) -> None:
    """Write the chart: executions completed in the upper half, submitted in the lower half."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import patches, pyplot

    rates = {
        name: figure
        for name, figure in results.figures.items()
        if figure.unit == "/s" and not name.startswith("pinned_")
    }
    submitted = {name: figure for name, figure in rates.items() if "submit" in name or "insert" in name}
    done = {name: figure for name, figure in rates.items() if name not in submitted}
    figure, (upper, lower) = pyplot.subplots(
        2,
        sharex=True,
        figsize=(9, 1.8 + BAR_INCHES * len(rates)),
        height_ratios=(len(done), len(submitted)),
        layout="constrained",
    )
    panel(upper, done, title="claimed and completed per second")
    panel(lower, submitted, title="submitted per second")
    lower.set_xlim(100, 2.5 * max(each.value for each in rates.values()))
    lower.set_xlabel("per second, each acknowledged after its commit; logarithmic scale")
    handles = [patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(COLOURS), frameon=False)
    env = results.environment
    figure.suptitle(
        f"One process, no-op work, {env['cores']} cores, Postgres {env['postgres']}, fsync {env['fsync']}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def panel(axes: Any, rates: dict[str, Figure], *, title: str) -> None:
    """Draw bars with their values, the longest on top."""
    ordered = sorted(rates.items(), key=lambda item: item[1].value)
    names = [name.replace("_", " ") for name, _ in ordered]
    bars = axes.barh(names, [each.value for _, each in ordered], color=[COLOURS[kind(name)] for name, _ in ordered])
    axes.bar_label(bars, labels=[f"{each.value:,.0f}" for _, each in ordered], padding=3, fontsize="small")
    axes.set_xscale("log")
    axes.margins(y=0.02)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.tick_params(axis="y", labelsize="small", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def kind(name: str) -> str:
    """The group of a figure: the raw limit, FlowFabric or a peer."""
    if name.startswith("raw_"):
        return "raw limit"
    return "peer" if name.startswith(tuple(f"{peer}_" for peer in PEERS)) else "FlowFabric"
