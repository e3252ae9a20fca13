"""The verbs on jobs: submit, list, status, why, cancel; and doctor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from dtrain_cli._connect import (
    Json,
    Scheduler,
    connected,
    embedded_workers,
    find_address,
    need_address,
)
from dtrain_cli._output import FAILED, NO_CLUSTER, Report, columns, command, pairs, when
from dtrain_cli._signals import INTERRUPTED

#: How long an interrupted submit waits for its job to be cancelled, in seconds.
_CANCEL_WAIT = 5.0

JobId = Annotated[str, typer.Argument(metavar="ID", help="The id of the job; see `dtrain list`.")]


def submit(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A TOML file.")],
    scheduler: Scheduler = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return at once; the job goes on without us.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="The job's label.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="The folder to save the model in."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show where everything would be, and start nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train what a spec file describes.

    On the cluster that is named, else on this machine. Waits for the job and shows its progress.
    Ctrl-C cancels it; a second one leaves at once.

    \b
    Exit codes:
      0  succeeded              3    no cluster, or dtrain missing on it
      1  failed                 130  interrupted
      2  refused before it started (usage, keys, files, shapes)

    \b
    Examples:
      dtrain submit digits.toml
      dtrain submit digits.toml --plan
      dtrain submit digits.toml --scheduler tcp://127.0.0.1:8786 --detach
      dtrain submit digits.toml --output runs/7 --json | jq .metrics
    """
    with command(as_json, no_job) as report:
        import dtrain
        from dtrain import SpecError, load_job

        address = find_address(scheduler)
        if detach and address is None:
            raise SpecError(
                "--detach: found no cluster that would outlive this command, "
                "expected --scheduler ADDR or DTRAIN_SCHEDULER"
            )
        if plan and detach:
            raise SpecError("--plan and --detach: found both, expected one")
        job = load_job(spec, name=name, output=output)
        if plan:
            _report_plan(report, job, address)
            return
        with connected(address, workers=embedded_workers(job.replicas)) as client:
            handle = dtrain.submit(job, client=client, detach=detach)
            report.failure = lambda kind, message: {
                **no_job(kind, message),
                "id": handle.id,  # its state is what cannot be told any more
            }
            if detach:
                _report_submitted(report, handle, address)
            else:
                report.note(f"job {handle.id} submitted to {address or 'an embedded cluster'}")
                interrupted = _wait(report, handle)
                _report_end(report, handle.status(), interrupted)


def _report_plan(report: Report, job: Any, address: str | None) -> None:
    """Without a cluster: for the workers that an embedded one would have."""
    import dtrain

    if address is None:
        found = dtrain.plan(job, workers=embedded_workers(job.replicas))
    else:
        with connected(address) as client:
            found = dtrain.plan(job, client=client)
    report.document = found.to_dict()
    report.show = lambda console: console.print(str(found), soft_wrap=True)


def no_job(kind: str, message: str) -> dict[str, Any]:
    return _outcome({"reason": kind, "message": message})


def _outcome(status: dict[str, Any]) -> dict[str, Any]:
    keys = ("id", "state", "reason", "message", "metrics", "history", "output")
    return {**dict.fromkeys(keys), "history": [], **{k: status[k] for k in keys if k in status}}


def _report_submitted(report: Report, handle: Any, address: str | None) -> None:
    report.document = _outcome(handle.status())
    report.show = lambda console: console.print(handle.id)
    report.note(f"job {handle.id} submitted; see `dtrain status {handle.id} --scheduler {address}`")


def _wait(report: Report, handle: Any) -> bool:
    """Wait for the end of a job; True if that was cut short by Ctrl-C or SIGTERM."""
    from dtrain import DeadlineError

    try:
        handle.wait()
    except KeyboardInterrupt:
        report.document = _outcome({"id": handle.id, "reason": "Interrupted"})
        report.note(f"interrupted: cancelling job {handle.id}; again to leave at once")
        handle.cancel()
        with suppress(DeadlineError):
            handle.wait(timeout=_CANCEL_WAIT, progress=False)
        return True
    return False


def _report_end(report: Report, status: dict[str, Any], interrupted: bool) -> None:
    report.document = _outcome(status)
    if status["state"] == "SUCCEEDED":
        report.show = pairs(_summary(status))
    else:
        report.code = FAILED
        report.note(_why_failed(status))
    if interrupted:
        report.code = INTERRUPTED


def _why_failed(status: dict[str, Any]) -> str:
    said = [str(status[key]) for key in ("reason", "message") if status.get(key)]
    lines = [f"dtrain: job {status['id']} {status['state']}" + "".join(f": {s}" for s in said)]
    if status.get("reason") == "USER_ERROR" and status.get("traceback"):
        lines.append(str(status["traceback"]).rstrip())
    return "\n".join(lines)


def _summary(status: dict[str, Any]) -> dict[str, Any]:
    """What people want to know of a job, by the names they see."""
    epoch, epochs = status.get("epoch"), status.get("epochs")
    history = status.get("history") or []
    metrics = status.get("metrics") or {}
    known = ("epoch", "epochs", "step", "loss", "samples", "seconds", "samples_per_s")
    trained = sum(record.get("seconds") or 0.0 for record in history)
    return {
        "job": status["id"],
        "name": status.get("name"),
        "state": status["state"],
        "reason": status.get("reason"),
        "message": status.get("message"),
        "epochs": epoch if epochs is None or epoch is None else f"{epoch} of {epochs}",
        "steps": status.get("step"),
        "loss": status.get("loss"),
        **{name: value for name, value in metrics.items() if name not in known},
        "samples/s": status.get("samples_per_s"),
        "seconds": trained or None,
        "workers lost": status.get("losses") or None,
        "saved at step": status.get("saved"),
        "replicas": _places(status.get("replicas"), status.get("devices")),
        "model": status.get("output"),
    }


def _places(replicas: Any, devices: Any) -> str | None:
    """How many there are, on how many workers, and on what they compute."""
    if not isinstance(replicas, dict) or not replicas:
        return None
    workers = len(set(replicas.values()))
    kinds = sorted({device for device in (devices or {}).values() if device})
    what = f" ({', '.join(kinds)})" if kinds else ""
    return f"{len(replicas)} on {workers} worker{'s' if workers > 1 else ''}{what}"


#: So many workers are shown with their bytes.
_SHOWN = 8


def _loads(placement: Any) -> str | None:
    """The bytes of parameters at each worker."""
    if not isinstance(placement, dict) or not placement:
        return None
    from dask.utils import format_bytes

    loads: dict[str, int] = {}
    for shard in placement.values():
        loads[shard["worker"]] = loads.get(shard["worker"], 0) + shard["bytes"]
    words = [f"{format_bytes(load)} at {worker}" for worker, load in loads.items()]
    rest = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


#: The counts of the ledger that say more than that all went well.
_ODD = ("late", "rejected", "replayed", "duplicates")


def _account(ledger: Any) -> dict[str, str | None]:
    """What became of the gradients, where that is not all to be told by the steps."""
    if not isinstance(ledger, dict):
        return {}
    odd = [f"{name} {ledger[name]}" for name in _ODD if ledger.get(name)]
    gradients = ", ".join([f"applied {ledger.get('applied', 0)}", *odd]) if odd else None
    ages = {int(age): count for age, count in (ledger.get("staleness") or {}).items() if count}
    words = ", ".join(f"{count} of age {age}" for age, count in sorted(ages.items()))
    return {"gradients": gradients, "staleness": words if any(ages) else None}


#: So many replicas are shown in a table; --json has all.
_ROWS = 64


def _replicas(status: dict[str, Any]) -> Callable[[Any], None] | None:
    """A table of what each replica has done and does; None if nothing is known of any."""
    steps, doing = status.get("local_steps") or {}, status.get("doing") or {}
    places = status.get("replicas")
    if not isinstance(places, dict) or not (steps or doing):
        return None
    rows = [
        [replica, places[replica], steps.get(replica), doing.get(replica)]
        for replica in sorted(places, key=int)
    ]
    rest = len(rows) - _ROWS
    rows = rows[:_ROWS] + ([[f"and {rest} more", None, None, None]] if rest > 0 else [])
    return columns(["REPLICA", "WORKER", "LOCAL STEPS", "DOES"], rows)


def list_(scheduler: Scheduler = None, as_json: Json = False) -> None:
    """List the jobs of a cluster.

    \b
    Example:
      dtrain list --scheduler tcp://127.0.0.1:8786
    """
    with command(as_json) as report:
        import dtrain

        jobs = [handle.status() for handle in dtrain.jobs(need_address(scheduler))]
        keys = ["id", "name", "state", "reason", "epoch", "epochs", "step", "loss"]
        keys += ["samples_per_s", "replicas", "shards"]
        report.document = {"jobs": [{key: job.get(key) for key in keys} for job in jobs]}
        shown = ["id", "name", "state", "reason", "epoch", "step", "loss", "samples_per_s"]
        headings = ["ID", "NAME", "STATE", "REASON", "EPOCH", "STEP", "LOSS", "SAMPLES/S"]
        if jobs:
            report.show = columns(headings, [[job.get(key) for key in shown] for job in jobs])
        else:
            report.note("no jobs")


def status(job_id: JobId, scheduler: Scheduler = None, as_json: Json = False) -> None:
    """Show the state and progress of a job, and what each of its replicas does.

    \b
    Examples:
      dtrain status 3f2a
      dtrain status 3f2a --json | jq .waiting
    """
    with command(as_json) as report:
        import dtrain

        found = dtrain.attach(job_id, need_address(scheduler)).status()
        report.document = found
        loads, above = _loads(found.get("placement")), found.get("imbalance")
        placed = {"parameters": loads, "imbalance": None if above is None else f"{above:.1%}"}
        summary = pairs({**_summary(found), **placed, **_account(found.get("ledger"))})
        table = _replicas(found)

        def show(console: Any) -> None:
            summary(console)
            if table is not None:
                console.print()
                table(console)

        report.show = show
        if found["state"] == "FAILED" and found.get("traceback"):
            report.note(str(found["traceback"]).rstrip())


def why(job_id: JobId, scheduler: Scheduler = None, as_json: Json = False) -> None:
    """Tell who waits for whom in a job: since when, and at which step.

    \b
    Example:
      dtrain why 3f2a
    """
    with command(as_json) as report:
        import dtrain

        handle = dtrain.attach(job_id, need_address(scheduler))
        text, state = handle.why_waiting(), handle.state
        report.document = {"id": job_id, "state": state, "why": text}
        report.show = lambda console: console.print(text)


def events(job_id: JobId, scheduler: Scheduler = None, as_json: Json = False) -> None:
    """Tell all that has happened to a job: states, losses, recoveries, checkpoints.

    \b
    Example:
      dtrain events 3f2a
    """
    with command(as_json) as report:
        import dtrain

        handle = dtrain.attach(job_id, need_address(scheduler))
        found = handle.events()
        report.document = {"id": job_id, "events": found}
        rows = [[when(e["time"]), e["state"], e["message"]] for e in found]
        report.show = columns(["TIME", "STATE", ""], rows)


def cancel(job_id: JobId, scheduler: Scheduler = None, as_json: Json = False) -> None:
    """Cancel a job. One that has ended stays as it is.

    \b
    Example:
      dtrain cancel 3f2a
    """
    with command(as_json) as report:
        import dtrain

        handle = dtrain.attach(job_id, need_address(scheduler))
        handle.cancel()
        state = handle.state
        report.document = {"id": job_id, "state": state}
        report.show = lambda console: console.print(f"{job_id} {state}")


def _devices(worker: dict[str, Any]) -> str:
    """What the replicas of a worker may compute on, and why not on a GPU."""
    why = worker.get("no_gpu")
    return ", ".join(worker["devices"]) + (f" ({why})" if why else "")


def doctor(scheduler: Scheduler = None, as_json: Json = False) -> None:
    """Check this machine and those of the cluster.

    Tells for each what of Python, dtrain and its kin is there, and what does not fit.
    Exit code 3 if something does not. Without a cluster, checks an embedded one.

    \b
    Example:
      dtrain doctor --scheduler tcp://127.0.0.1:8786
    """
    with command(as_json) as report:
        import dtrain

        with connected(find_address(scheduler), workers=1) as client:
            found = dtrain.doctor(client)
        machines = [found["client"], found["scheduler"], *found["workers"]]
        keys = ["where", "python", "dtrain", "dask", "distributed", "numpy"]
        rows = [[*(m[key] for key in keys), "ok" if m["ok"] else m["problem"]] for m in machines]
        table = columns([*(key.upper() for key in keys), ""], rows)
        # Replicas that each had all cores for their BLAS would fight for them.
        blas = sorted({m["blas"] for m in found["workers"] if m.get("blas")})
        devices = sorted({_devices(m) for m in found["workers"] if m.get("devices")})

        def show(console: Any) -> None:
            table(console)
            for words in blas:
                console.print(f"BLAS of the workers: {words}", markup=False)
            for words in devices:
                console.print(f"devices of the workers: {words}", markup=False)

        report.document = found
        report.show = show
        if not all(machine["ok"] for machine in machines):
            report.code = NO_CLUSTER
