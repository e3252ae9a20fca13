"""What became of every gradient and every sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from dtrain.machines.plan import Plan


@dataclass
class Ledger:
    """The account of a job.

    Attributes
    ----------
    applied, late, rejected, replayed, duplicates : int
        Gradients.  Each ends in exactly one of the first three; the others say how often one
        came again.
    samples : list of int
        Samples committed, per epoch.
    staleness : Counter of int
        Age of a gradient (updates applied between its pull and its apply) -> how many.
    """

    applied: int = 0
    late: int = 0
    rejected: int = 0
    replayed: int = 0
    duplicates: int = 0
    samples: list[int] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of_steps(cls, plan: Plan, steps: int) -> Ledger:
        """The account of the first ``steps`` synchronous steps of a job, all of them committed."""
        ledger = cls()
        epochs, rest = plan.locate(steps)
        ledger.samples = [plan.rows] * epochs
        ledger.applied = epochs * plan.batches_per_epoch
        ledger.staleness[0] = ledger.applied
        for step in range(steps - rest, steps):
            epoch, index = plan.locate(step)
            for part in plan.members(step):
                ledger.commit(epoch, plan.samples(part, index), age=0)
        ledger.staleness = +ledger.staleness
        return ledger

    def commit(self, epoch: int, samples: int, age: int) -> None:
        """One gradient was applied."""
        self.applied += 1
        while len(self.samples) <= epoch:
            self.samples.append(0)
        self.samples[epoch] += samples
        self.staleness[age] += 1

    def add(self, epoch: int, samples: int, ages: Mapping[int, int]) -> None:
        """Gradients of an epoch that were applied: how many of which age, and of how many rows."""
        while len(self.samples) <= epoch:
            self.samples.append(0)
        self.samples[epoch] += samples
        self.applied += sum(ages.values())
        self.staleness.update(ages)

    def to_dict(self) -> dict[str, Any]:
        return {
            "applied": self.applied,
            "late": self.late,
            "rejected": self.rejected,
            "replayed": self.replayed,
            "duplicates": self.duplicates,
            "samples": list(self.samples),
            "staleness": dict(sorted(self.staleness.items())),
        }

    @classmethod
    def total(cls, parts: Iterable[Mapping[str, Any]]) -> Ledger:
        """The sum of the accounts that several hosts have kept, as :meth:`to_dict` gave them."""
        whole = cls()
        for values in parts:
            part = cls.from_dict(values)
            for name in ("applied", "late", "rejected", "replayed", "duplicates"):
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
            pairs = zip_longest(whole.samples, part.samples, fillvalue=0)
            whole.samples = [a + b for a, b in pairs]
            whole.staleness.update(part.staleness)
        return whole

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ledger:
        ages = {int(age): count for age, count in values["staleness"].items()}
        return cls(**{**values, "samples": list(values["samples"]), "staleness": Counter(ages)})
