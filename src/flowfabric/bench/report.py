"""The results for people: tables on the terminal."""

from rich.console import Console
from rich.table import Table

from flowfabric.bench.subject import Figure
from flowfabric.bench.suite import Results


def show(results: Results, console: Console) -> None:
    """Print figures, ratios and errors."""
    where = results.environment
    title = f"Postgres {where['postgres']}, fsync {where['fsync']}, {where['cores']} cores, Python {where['python']}"
    table = Table("figure", "", "unit", title=title, title_justify="left")
    table.columns[1].justify = "right"
    for name, figure in results.figures.items():
        table.add_row(name, written(figure), figure.unit)
    console.print(table)
    if results.ratios:
        table = Table("ratio", "")
        table.columns[1].justify = "right"
        for name, value in results.ratios.items():
            table.add_row(name, f"{value:.2f}")
        console.print(table)
    for subject, error in results.errors.items():
        console.print(f"[red]{subject} was not measured:[/red] {error}", highlight=False)


def written(figure: Figure) -> str:
    """A number with the digits it deserves."""
    return f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:,.2f}"
