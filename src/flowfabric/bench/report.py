"""Print the results as tables on the terminal."""

from rich.console import Console
from rich.table import Table

from flowfabric.bench.subject import Figure
from flowfabric.bench.suite import Results


def show(results: Results, console: Console) -> None:
    """Print figures, ratios and errors."""
    env = results.environment
    title = f"Postgres {env['postgres']}, fsync {env['fsync']}, {env['cores']} cores, Python {env['python']}"
    table = Table("figure", "", "unit", title=title, title_justify="left")
    table.columns[1].justify = "right"
    for name, figure in results.figures.items():
        table.add_row(name, formatted(figure), figure.unit)
    console.print(table)
    if results.ratios:
        table = Table("ratio", "")
        table.columns[1].justify = "right"
        for name, value in results.ratios.items():
            table.add_row(name, f"{value:.2f}")
        console.print(table)
    for subject, error in results.errors.items():
        console.print(f"[red]{subject} was not measured:[/red] {error}", highlight=False)


def formatted(figure: Figure) -> str:
    """The value of a figure: without decimals from 100 on, else with two."""
    return f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:,.2f}"
