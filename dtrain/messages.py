"""What machines are told and what they answer: frozen, small, and fenced.

Every message of the data plane carries the generation of its job and the step (the version of
the parameters that it was computed from), so that an old one is recognised and refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Contribution:
    """One replica's part in a step; its gradient travels beside it.

    ``weight`` is the batch's sample count over the nominal batch size, so that full batches
    weigh exactly 1.0 and need no scaling.  ``part`` and ``batch`` say which rows it came from.
    """

    replica: int
    weight: float
    samples: int
    loss: float
    part: int
    batch: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """Gradients of ``step`` have reached a shard."""

    generation: int
    step: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """Whose gradients make ``step`` is known: those of ``members``, sorted, and no other's."""

    generation: int
    step: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A shard has summed and applied ``step`` into its other buffer; ``problem`` if it must not."""

    generation: int
    step: int
    shard: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A shard has been through a stage of the optimizer that is not its last.

    ``blocks`` are the numbers of its blocks within the model, ``sums`` (float64, shape (sums,
    blocks)) what it has summed over each; ``problem`` if the step must not be.
    """

    generation: int
    step: int
    stage: int
    shard: int
    problem: str | None
    blocks: Any = field(repr=False)
    sums: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class Measures:
    """All shards have been through a stage: the sums over all blocks of the model, in order.

    ``problem`` (of ``shard``) instead, if one of them has refused the step.
    """

    generation: int
    step: int
    stage: int
    sums: Any = field(default=None, repr=False)
    problem: str | None = None
    shard: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a step, for all shards; recorded before anything flips.

    ``ok``: the job goes on with the next version; ``applied``: that version has the step's update
    in it, else it is the one before once more.
    """

    generation: int
    step: int
    members: tuple[int, ...]
    weight: float
    ok: bool
    problem: str | None = None
    applied: bool = True


@dataclass(frozen=True, slots=True)
class Reduce:
    """Command: sum the gradients of ``members`` and apply them into the other buffer."""

    step: int
    members: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Command: tell the lead."""

    event: Reduced


@dataclass(frozen=True, slots=True)
class Flip:
    """Command: ``version`` is now the one to read."""

    version: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Command: ``version`` is now the one to read, and is equal to the one before."""

    version: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Command: the step was refused; nothing flips."""

    step: int
    problem: str


@dataclass(frozen=True, slots=True)
class Decide:
    """Command: the verdict is recorded; tell everyone."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to train on: batch ``index`` of ``part`` in ``epoch``."""

    epoch: int
    part: int
    index: int


@dataclass(frozen=True, slots=True)
class Push:
    """An asynchronous replica's exchange with one shard.

    ``request`` numbers the exchanges of a replica, so that a repeated one is recognised;
    ``version`` is the shard's version that the gradient was computed from; no contribution and
    no gradients: a mere pull.
    """

    replica: int
    request: int
    version: int
    contribution: Contribution | None
    epoch: int
    grads: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed, as far as a host can say.

    ``exception`` is the pickled exception of user code: opaque here, opened by the client alone.
    """

    reason: str
    message: str
    traceback: str = ""
    exception: bytes | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "message": self.message,
            "traceback": self.traceback,
            "exception": self.exception,
        }
