"""What the master keeps of one job beside its machine, and how it tells of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtrain.errors import FencedError
from dtrain.machines.cursor import Plan, len_of_split
from dtrain.machines.jobs import JobMachine, Restored, State
from dtrain.machines.ledger import Ledger
from dtrain.messages import Batch
from dtrain.runtime.data import DataPlan
from dtrain.spec import JobSpec

if TYPE_CHECKING:
    from distributed import Future


class Record:
    """What the master keeps of one job beside its machine."""

    def __init__(
        self, machine: JobMachine, spec: JobSpec, client: str | None, data: DataPlan
    ) -> None:
        self.machine = machine
        self.spec = spec
        #: an attached job ends with the last of its clients
        self.attached = not spec.detach
        self.owners = {client} if self.attached and client is not None else set()
        #: the name under which the data's keys are held
        self.hold = f"dtrain-data-{machine.id}"
        self.model = b""
        self.data: DataPlan | None = data
        self.rows = data.x.rows
        self.total_steps = _total_steps(spec, data)
        self.futures: dict[str, Future] = {}
        #: the result of a success once more, at another worker
        self.copy: Future | None = None
        self.watchers: list[asyncio.Task[Any]] = []
        self.changed = asyncio.Condition()
        #: set once nothing is left of an ended job on the workers
        self.clean = asyncio.Event()
        #: all workers that have ever had a part in it, and those that got its NumPy arrays
        self.touched: set[str] = set()
        self.holders = set(data.holders)
        #: the name of the file that has the job's NumPy arrays
        self.file = data.file
        #: address -> the last generation that was told to stop there
        self.told: dict[str, int] = {}
        #: the newest step that has been heard of
        self.seen = 0
        #: the arrival of workers that was last looked at
        self.spread = 0.0
        #: address -> the host's last summary, and when it came
        self.reports: dict[str, dict[str, Any]] = {}
        self.created = time.time()

    @property
    def id(self) -> str:
        return self.machine.id

    @property
    def progress(self) -> dict[str, Any]:
        """Of the hosts' last summaries: step, loss, samples, ledger, and when they came."""
        reports = self.reports.values()
        found = [r for r in reports if "account" in r]
        if not found:
            return {}
        accounts = [r["account"] for r in found]
        losses = [a["loss"] for a in accounts if a["loss"] == a["loss"]]
        return {
            "step": max(a["step"] for a in accounts),
            "loss": sum(losses) / len(losses) if losses else None,
            "samples": sum(a["samples"] for a in accounts),
            "ledger": Ledger.total(a["ledger"] for a in accounts).to_dict(),
            "at": max(r["at"] for r in found),
        }

    @property
    def replicas(self) -> int:
        assert self.spec.replicas is not None
        return self.spec.replicas

    @property
    def shards(self) -> int:
        assert self.spec.shards is not None
        return self.spec.shards

    def check(self, generation: int) -> None:
        """Raise FencedError unless it is the newest generation of a job that is not over."""
        newest = self.machine.generation
        if generation != newest or self.machine.terminal:
            raise FencedError(
                f"job {self.id}: generation {generation} is over, expected {newest}, "
                f"{self.machine.state}"
            )

    def restored(self, said: Mapping[str, Any]) -> Restored:
        """What a chief has found, and how many steps that had been seen are not in it."""
        step, memory = said["step"], said["source"] == "memory"
        seen = max([e["step"] for e in self.machine.history], default=0)
        lost = 0 if memory or self.machine.generation == 1 else max(self.seen, seen) - step
        if not memory:
            self.seen = step
        return Restored(
            step,
            said["source"],
            tuple(said["history"]),
            said["ledger"],
            max(lost, 0),
            tuple(Batch(*batch) for batch in said["suspects"]),
        )

    def hanging(
        self, now: float, patience: float, first: float, steps: int
    ) -> list[tuple[str, str]]:
        """The workers whose user code does not return, with the reason in words.

        A step may take ``patience`` seconds, or ``steps`` times as long as it usually does; the
        first one of a host, ``first``.
        """
        found = []
        for address, report in self.reports.items():
            if report["computing"] is None or report["generation"] != self.machine.generation:
                continue
            replica, spent = report["computing"]
            usual = report["usual"]
            most = first if usual is None else max(patience, steps * usual)
            spent += now - report["at"]
            if spent > most:
                words = f"has been in user code for {spent:.0f} s, with replica {replica}"
                found.append((address, words))
        return found

    def events(self) -> list[dict[str, Any]]:
        """All that has happened, in order: when (seconds since 1970), in which state, in words."""
        began = self.machine.submitted
        return [
            {"time": self.created + at - began, "state": str(state), "message": words}
            for at, state, words in self.machine.story
        ]

    # -- the status, as the master's handlers give it ------------------------------------------

    def describe(
        self, now: float, stall: float, silence: float, *, brief: bool = False
    ) -> dict[str, Any]:
        """The job in plain values; ``brief`` leaves out what can be long.

        A replica that has been in user code for ``stall`` seconds is named, and a worker that
        has not been heard of for ``silence``.
        """
        machine, spec, progress = self.machine, self.spec, self.progress
        failure = machine.outcome.failure if machine.outcome else None
        shown = None if machine.state is State.SUCCEEDED else failure
        last = machine.history[-1] if machine.history else {}
        # Between two generations nobody reports, and the job is no less far for that.
        step = max(last.get("step", 0), progress.get("step", 0), self.seen)
        fresh = step > last.get("step", 0)
        described = {
            "id": self.id,
            "name": spec.name,
            "state": str(machine.state),
            "reason": shown.reason if shown and machine.state is State.FAILED else None,
            "message": shown.message if shown else None,
            "mode": spec.mode,
            "step": step,
            "epoch": min(len(machine.history) + (not machine.terminal), spec.epochs),
            "epochs": spec.epochs,
            "steps": spec.steps,
            "loss": progress.get("loss") if fresh else last.get("loss"),
            "samples_per_s": self._speed(),
            "samples": progress.get("samples", sum(e["samples"] for e in machine.history)),
            "total_steps": self.total_steps,
            "rows": self.rows,
            "replicas": {str(i): h.address for h in machine.hosts for i in h.replicas},
            "shards": {str(s): h.address for h in machine.hosts for s in h.shards},
            "ledger": machine.ledger or progress.get("ledger"),
            "metrics": _last_metrics(last),
            "output": spec.output if machine.state is State.SUCCEEDED else None,
            "result": None,  # the master knows where it lies
            "attached": self.attached,
            "generation": machine.generation,
            "losses": machine.losses,
            "saved": machine.saved,
            "submitted": self.created,
            "seconds": (machine.ended or now) - machine.submitted,
            "why": self._why(now, stall, silence),
        }
        if not brief:
            described["history"] = machine.history
            described["traceback"] = shown.traceback if shown else None
            described["exception"] = shown.exception if shown else None
        return described

    @property
    def result_keys(self) -> list[Any]:
        """Under which keys the result of a success is kept."""
        return [f.key for f in (*self.futures.values(), self.copy) if f is not None]

    def _speed(self) -> float | None:
        machine, progress = self.machine, self.progress
        done = sum(e["samples"] for e in machine.history)
        spent = sum(e["seconds"] for e in machine.history)
        if machine.state is State.RUNNING and progress.get("samples", 0) > done:
            done = progress["samples"]
            spent += progress["at"] - machine.epoch_began
        return done / spent if spent > 0 and done else None

    def _why(self, now: float, stall: float, silence: float) -> str:
        """Who waits for whom, in words."""
        machine = self.machine
        if machine.terminal:
            failure = machine.outcome.failure if machine.outcome else None
            return f"it has ended: {machine.state}, {failure.message if failure else 'done'}"
        names = ", ".join(str(h) for h in machine.waiting())
        spent = now - machine.entered
        if machine.state is State.PREPARING:
            return f"waiting for {names} to get ready, for {spent:.1f} s"
        if machine.state is State.RECOVERING:
            least = self.spec.recovery.min_workers
            waits = f"for {names} to get ready" if machine.hosts else f"for {least} workers"
            return f"recovering, waiting {waits}, for {spent:.1f} s: {machine.story[-1][2]}"
        if machine.state is State.STOPPING:
            return f"stopping, waiting for {names}, for {spent:.1f} s"
        heard = {
            host: self.reports.get(host.address, {}).get("at", machine.entered)
            for host in machine.hosts
        }
        mute = [
            f"{host}, not heard of for {now - at:.1f} s"
            for host, at in heard.items()
            if now - at > silence
        ]
        if machine.state is State.RUNNING and mute:
            return f"step {self.progress.get('step', 0)} waits for {' and '.join(mute)}"
        slow = self._computing_long(now, stall)
        if machine.state is State.RUNNING and slow:
            return f"step {self.progress.get('step', 0)} waits for {' and '.join(slow)}"
        for (epoch, phase), payloads in machine.reached.items():
            late = [str(h) for h in machine.hosts if h.replicas and h.address not in payloads]
            return f"the end of epoch {epoch + 1} ({phase}) waits for {', '.join(late)}"
        return "it is running; nobody waits"

    def _computing_long(self, now: float, stall: float) -> list[str]:
        """The replicas that have been in user code for longer than a stall, in words."""
        found = []
        for host in self.machine.hosts:
            report = self.reports.get(host.address)
            if report is None or report["computing"] is None:
                continue
            replica, seconds = report["computing"]
            if seconds >= stall:
                spent = seconds + now - report["at"]
                found.append(f"replica {replica} on {host}, computing for {spent:.1f} s")
        return found


def _total_steps(spec: JobSpec, data: DataPlan) -> int:
    """Steps in all: of all replicas together in sync mode, of each on its own in async mode."""
    rows = data.x.rows - len_of_split(data.x.rows, spec.validation_split)
    plan = Plan(rows, spec.replicas or 1, spec.batch_size, spec.epochs, spec.steps)
    if spec.mode == "sync":
        return plan.total_steps
    return spec.steps or plan.batches_per_epoch * spec.epochs


def _last_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("loss", "samples_per_s")
    return {k: v for k, v in record.items() if k in kept or k.startswith("val_")}
