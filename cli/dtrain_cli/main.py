"""The `dtrain` command. Heavy modules are imported in the verbs: `--help` must be quick."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from dtrain_cli import checkpoints, cluster, jobs, sessions
from dtrain_cli._output import plain_failure

app = typer.Typer(
    name="dtrain",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # Rich would cost half of the start-up time
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from dtrain import __version__

        typer.echo(f"dtrain {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Data-parallel training as a service inside a Dask cluster.

    \b
    Examples:
      dtrain submit digits.toml         train on this machine
      dtrain cluster start              start a cluster and print its address
      export DTRAIN_SCHEDULER=tcp://127.0.0.1:8786
      dtrain submit digits.toml --detach
      dtrain list
    """


app.command()(jobs.submit)
app.command("list")(jobs.list_)
app.command()(jobs.status)
app.command()(jobs.why)
app.command()(jobs.events)
app.command()(jobs.cancel)
app.command()(jobs.doctor)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(cluster.app, name="cluster")
app.add_typer(sessions.app, name="sessions")


def run() -> None:
    """The script's entry: as ``app()``, but ``--json`` gets its object on wrong usage too."""
    if "--json" not in sys.argv:
        app()
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of Click's usage errors
            raise
        error.show()  # type: ignore[attr-defined]
        usage = plain_failure("UsageError", error.format_message())
        if "submit" in sys.argv:
            usage = jobs.no_job("UsageError", error.format_message())
        print(json.dumps(usage))
        code = 2
    sys.exit(code)
