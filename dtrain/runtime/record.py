"""What the master keeps of one job beside its machine, and how it tells of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtrain.errors import FencedError
from dtrain.machines.jobs import JobMachine, Restored, State
from dtrain.machines.ledger import Ledger
from dtrain.machines.plan import Plan, len_of_split
from dtrain.messages import Batch
from dtrain.partition import imbalance, partitioner_of
from dtrain.runtime.data import DataPlan
from dtrain.runtime.why import Why
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
        #: a function of the user's that places the shards, pickled
        self.placement: bytes | None = None
        #: the size of each shard, once the chief knows the model
        self.shard_bytes: list[int] = []
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
        #: address -> what its replicas compute on, once it is ready
        self.devices: dict[str, str] = {}
        #: address -> the last generation that was told to stop there
        self.told: dict[str, int] = {}
        #: the newest step that has been heard of
        self.seen = 0
        #: the arrival of workers that was last looked at
        self.spread = 0.0
        #: address -> the host's last summary, and when it came
        self.reports: dict[str, dict[str, Any]] = {}
        #: replica -> a generation, its steps before that one, and in it
        self._steps: dict[str, tuple[int, int, int]] = {}
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
    def local_steps(self) -> dict[str, int]:
        """Replica -> the gradients that it has computed, as far as is known.

        Those that were in vain count too: late ones, and those of a step that a death has cut.
        """
        order = sorted(self._steps, key=int)
        return {replica: sum(self._steps[replica][1:]) for replica in order}

    def heard(self, address: str, report: Mapping[str, Any], now: float) -> None:
        """A summary of a host of the newest generation has come."""
        self.reports[address] = {**report, "at": now}
        self.seen = max(self.seen, report.get("account", {}).get("step", 0))
        self.count(report["generation"], report["steps"])

    def count(self, generation: int, steps: Mapping[str, int]) -> None:
        """A host says how many gradients its replicas have computed in a generation."""
        for replica, count in steps.items():
            of, before, known = self._steps.get(replica, (generation, 0, 0))
            if of != generation:
                before, known = before + known, 0
            # A heartbeat may be overtaken by the word from a barrier.
            self._steps[replica] = generation, before, max(known, count)

    @property
    def replicas(self) -> int:
        assert self.spec.replicas is not None
        return self.spec.replicas

    @property
    def most_shards(self) -> int | None:
        """How many shards there are at most; None: that takes the model to tell."""
        return partitioner_of(self.spec).most

    @property
    def placement_of_shards(self) -> dict[str, dict[str, Any]]:
        """Shard -> the worker that has it, and its size in bytes; empty until that is known."""
        placed = {s: h.address for h in self.machine.hosts for s in h.shards}
        return {
            str(shard): {"worker": placed[shard], "bytes": self.shard_bytes[shard]}
            for shard in sorted(placed)
        }

    @property
    def imbalance(self) -> float | None:
        """By how much the worker with the most bytes is above the mean of all hosts."""
        hosts = self.machine.hosts
        loads = [sum(self.shard_bytes[s] for s in h.shards) for h in hosts]
        return imbalance(loads) if any(loads) else None

    def check(self, generation: int) -> None:
        """Raise FencedError unless it is the newest generation of a job that is not over."""
        newest = self.machine.generation
        if generation != newest or self.machine.terminal:
            if self.machine.terminal:
                raise FencedError(f"job {self.id} has ended: {self.machine.state}")
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
            replica, spent = report["computing"][:2]
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
        placement = self.placement_of_shards
        why = Why(machine, spec, self.reports, now, stall, silence)
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
            "devices": {
                str(i): self.devices.get(h.address) for h in machine.hosts for i in h.replicas
            },
            "shards": {s: placed["worker"] for s, placed in placement.items()},
            "imbalance": self.imbalance,
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
            "why": why.words(),
        }
        if not brief:
            described["waiting"] = why.waiting()
            described["local_steps"] = self.local_steps
            described["doing"] = why.doing()
            described["placement"] = placement
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


def _total_steps(spec: JobSpec, data: DataPlan) -> int:
    """Steps in all: of all replicas together in sync mode, of each on its own in async mode."""
    rows = data.x.rows - len_of_split(data.x.rows, spec.validation_split)
    plan = Plan(rows, spec.replicas or 1, spec.batch_size, spec.epochs, spec.steps)
    if spec.backups and spec.steps is None:
        # About so many: how many gradients make a step is decided on the way.
        quorum = (spec.replicas or 1) - spec.backups
        return spec.epochs * -(-plan.batches_per_epoch // quorum)
    if spec.mode == "sync":
        return plan.total_steps
    return spec.steps or plan.batches_per_epoch * spec.epochs


def _last_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("loss", "samples_per_s")
    return {k: v for k, v in record.items() if k in kept or k.startswith("val_")}
