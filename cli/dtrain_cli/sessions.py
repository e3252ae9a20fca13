"""The verbs on sessions."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dtrain_cli._connect import Json, Scheduler, need_address
from dtrain_cli._output import columns, command, pairs, when

app = typer.Typer(no_args_is_help=True, help="The sessions of a cluster.", rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of a session.")]


@app.callback()
def sessions() -> None:
    """The sessions of a cluster: variables, queues and readers that processes share by name."""


@app.command("list")
def list_(scheduler: Scheduler = None, as_json: Json = False) -> None:
    """List the sessions of a cluster.

    \b
    Example:
      dtrain sessions list
    """
    with command(as_json) as report:
        import dtrain

        found = dtrain.sessions.find(need_address(scheduler))
        report.document = {"sessions": found}
        if not found:
            report.note("no sessions")
            return
        rows = [
            [
                s["name"],
                s["state"],
                s["clients"],
                len(set(s["hosts"])),
                s["bytes"],
                s["queues"],
            ]
            for s in found
        ]
        report.show = columns(["NAME", "STATE", "CLIENTS", "WORKERS", "BYTES", "QUEUES"], rows)


@app.command()
def show(name: Name, scheduler: Scheduler = None, as_json: Json = False) -> None:
    """Show a session: who has created it, and where its variables lie.

    \b
    Examples:
      dtrain sessions show ctr
      dtrain sessions show ctr --json | jq .variables
    """
    with command(as_json) as report:
        import dtrain

        found = dtrain.sessions.show(name, need_address(scheduler))
        report.document = found
        summary = pairs(_summary(found))
        table = _variables(found)
        rows = [[q["kind"], q["name"], q["worker"], q["handles"]] for q in found["queues"]]
        queues = columns(["KIND", "NAME", "WORKER", "HANDLES"], rows)

        def print_all(console: Any) -> None:
            summary(console)
            if found["variables"]:
                console.print()
                table(console)
            if found["queues"]:
                console.print()
                queues(console)

        report.show = print_all


@app.command()
def reset(name: Name, scheduler: Scheduler = None, as_json: Json = False) -> None:
    """End a session: its variables and queues are gone, and whoever has them is told.

    \b
    Example:
      dtrain sessions reset ctr
    """
    with command(as_json) as report:
        import dtrain

        dtrain.sessions.reset(name, need_address(scheduler))
        report.document = {"name": name, "reset": True}
        report.note(f"session {name} was reset")


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    shards = found["shards"].values()
    saved = found["saved"]
    return {
        "name": found["name"],
        "state": found["state"],
        "problem": found["problem"],
        "variables": found["spec"],
        "since": when(found["since"]),
        "clients": found["clients"],
        "waiting": len(found["waiting"]) or None,
        "version": min((s["version"] for s in shards), default=None),
        "pushes": min((s["pushes"] for s in shards), default=None),
        "saved": f"{saved[0]}, step {saved[1]}" if saved else None,
    }


def _variables(found: dict[str, Any]) -> Any:
    rows = [
        [
            v["name"],
            v["dtype"],
            "x".join(map(str, v["shape"])) or "number",
            v["shard"],
            "{}:{}".format(*v["rows"]),
            v["worker"],
            v["device"],
            v["bytes"],
        ]
        for v in found["variables"]
    ]
    headings = ["VARIABLE", "DTYPE", "SHAPE", "SHARD", "ROWS", "WORKER", "DEVICE", "BYTES"]
    return columns(headings, rows)
