"""The command `ff`."""

from typing import Annotated

import typer

from flowfabric.cli.demo import demo
from flowfabric.cli.migrate import migrate
from flowfabric.version import __version__

app = typer.Typer(
    name="ff",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(migrate)
app.command()(demo)


@app.callback(invoke_without_command=True)
def options(*, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Durable execution on nothing but Postgres."""
    if version:
        typer.echo(f"flowfabric {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    app()
