"""The verbs on checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dtrain_cli._output import FAILED, REFUSED, Report, columns, command, when

app = typer.Typer(no_args_is_help=True, help="The checkpoints of a job.", rich_markup_mode=None)

Place = Annotated[str, typer.Argument(metavar="DIR", help="A folder, or a URL of fsspec.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.callback()
def checkpoints() -> None:
    """The checkpoints in a folder or at a URL."""


@app.command("list")
def list_(directory: Place, as_json: Json = False) -> None:
    """List the checkpoints there, newest first.

    \b
    Example:
      dtrain checkpoints list ckpt
    """
    with command(as_json) as report:
        import dtrain

        _show(report, directory, dtrain.checkpoints.find(directory))


@app.command()
def verify(directory: Place, as_json: Json = False) -> None:
    """Read every file there and hold it against its checksum.

    Exit code 1 if one is damaged, 2 if there is none. Nothing is changed.

    \b
    Example:
      dtrain checkpoints verify ckpt
    """
    with command(as_json) as report:
        import dtrain

        found = dtrain.checkpoints.verify(directory)
        _show(report, directory, found)
        if not found:
            report.code = REFUSED
        elif any(entry["problem"] is not None for entry in found):
            report.code = FAILED


def _show(report: Report, directory: str, found: list[dict[str, Any]]) -> None:
    report.document = {"checkpoints": found}
    if not found:
        report.note(f"no checkpoints in {directory}")
        return
    rows = [
        [e["name"], e["step"], e["job"], when(e["saved"]), e["nbytes"], e["problem"] or "ok"]
        for e in found
    ]
    report.show = columns(["NAME", "STEP", "JOB", "SAVED", "BYTES", ""], rows)
