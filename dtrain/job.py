"""A job as people write it: a model, its data, and how to train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dtrain.callbacks import Callback, EarlyStopping
from dtrain.devices import check_device, current_device
from dtrain.errors import SpecError
from dtrain.metrics import Function, check_metrics
from dtrain.optim import Optimizer, adam
from dtrain.partition import Partitioner, PlacementFunction, check_placement
from dtrain.spec import (
    Async,
    Checkpoint,
    JobSpec,
    Mode,
    Recovery,
    Sync,
    mode_name,
)


@dataclass(frozen=True, eq=False)
class Job:
    """Everything that :func:`dtrain.submit` needs, checked when made.

    Parameters
    ----------
    model : object
        One of :mod:`dtrain.models`, or any stateless object with ``init``, ``loss_and_grads``
        and ``predict``.
    X : ndarray or dask.array.Array, shape (n, ...)
    y : ndarray or dask.array.Array, shape (n,), (n, 1) or (n, outputs)
    optimizer : dtrain.optim.Optimizer, optional
        Adam with its defaults if not given.
    mode : Sync or Async
    replication : str
        ``"between-graph"``: each replica runs a loop of its own against the shards.
        ``"in-graph"``: one client drives all replicas, each step is one Dask graph (Sync() alone).
    replicas, shards : int, optional
        One per worker if not given.
    partitioner : FixedShards, MinSize or MaxSize, optional
        How many shards the variables are cut into, in place of ``shards``.
    placement : str or callable
        Which workers host the shards: ``"greedy"``, by bytes, the largest first to the worker
        with the fewest; ``"round-robin"``; or a function ``(sizes, workers) -> indices``, of the
        shards' sizes in bytes and the workers' addresses.  It is called on the first of these,
        which must get a shard.
    device : str, optional
        Where replicas compute.  ``"cpu"``: always NumPy.  ``"cuda"``, ``"cuda:<number>"``: CuPy
        on that GPU of each worker, the first by default; workers without it have no part in the
        job.  ``"auto"``: the first GPU of a worker where it has one that CuPy can use, else its
        CPU.  None: that of the innermost :class:`dtrain.device` block, else ``"auto"``.
    batch_size : int
        Samples per replica and step.
    epochs : int
    steps : int, optional
        The number of steps in all; overrides ``epochs``.
    shuffle : bool
        Mix the rows of each replica's part anew in each epoch.
    seed : int
    sample_weight : ndarray or dask.array.Array, shape (n,), optional
        What each row counts, finite and not negative: a step's gradient and loss are the weighted
        means over its rows, and so are an epoch's.  A row that counts 0 is as if it were not there.
        The model gets batches ``(x, y, w)``.  Their scale does not matter.
    validation_data : tuple of X and y, or of X, y and weights; optional
    validation_split : float, optional
        The fraction of the rows, chosen at random by the seed, that is held out.
    metrics : list of str or callable
        Of the validation rows: ``"accuracy"``, ``"log_loss"``, ``"top_5_accuracy"`` (or of any
        other number); ``"mae"``, ``"mse"``, ``"r2"``.  A function ``f(y, scores)`` gets the
        targets of some rows (of a classifier the class indices) and what the model's ``predict``
        says of them, and returns a number for each row, shape (n,), or the mean of these; its name
        is the metric's.
    callbacks : list of EarlyStopping and Callback
        What decides when it is enough, with the job; and what watches it from the process that
        waits for it.
    initial : Result, mapping of str to ndarray, or path; optional
        Parameters to start from, in place of the model's own: those of a result, of a dict, or
        of a saved model.
    checkpoint : Checkpoint, optional
        Where the state is saved, and how often.
    resume : bool
        Go on from the newest checkpoint there, if there is one.
    recovery : Recovery
        How much may be lost before the job is.
    name : str, optional
        A label.
    output : path, optional
        A directory that a worker writes the trained model to.

    Raises
    ------
    SpecError
        Names the argument, what was found and what was expected.
    """

    model: Any
    X: Any
    y: Any = None
    optimizer: Optimizer | None = None
    mode: Mode = field(default_factory=Sync)
    replication: str = "between-graph"
    replicas: int | None = None
    shards: int | None = None
    partitioner: Partitioner | None = None
    placement: str | PlacementFunction = "greedy"
    device: str | None = None
    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None
    shuffle: bool = True
    seed: int = 0
    sample_weight: Any = None
    validation_data: tuple[Any, ...] | None = None
    validation_split: float | None = None
    metrics: Sequence[str | Function] = ()
    callbacks: Sequence[EarlyStopping | Callback] = ()
    initial: Any = None
    checkpoint: Checkpoint | None = None
    resume: bool = False
    recovery: Recovery = field(default_factory=Recovery)
    name: str | None = None
    output: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, type):
            raise SpecError(
                f"model: found the class {self.model.__name__}, expected an object: "
                f"{self.model.__name__}(...)"
            )
        for method in ("init", "loss_and_grads", "predict"):
            if not callable(getattr(self.model, method, None)):
                raise SpecError(
                    f"model: found {type(self.model).__name__} without {method}(), "
                    f"expected an object with init, loss_and_grads and predict"
                )
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise SpecError(
                f"optimizer: found {self.optimizer!r}, expected one of dtrain.optim, "
                f"such as dtrain.optim.adam(1e-3)"
            )
        if not isinstance(self.mode, Sync | Async):
            raise SpecError(f"mode: found {self.mode!r}, expected dtrain.Sync() or dtrain.Async()")
        if self.partitioner is not None and not isinstance(self.partitioner, Partitioner):
            raise SpecError(
                f"partitioner: found {self.partitioner!r}, expected dtrain.FixedShards(...), "
                f"dtrain.MinSize(...) or dtrain.MaxSize(...)"
            )
        if self.device is None:
            object.__setattr__(self, "device", current_device())
        if not callable(self.placement):
            check_placement(self.placement)
        data = self.validation_data
        if data is not None:
            if self.validation_split is not None:
                raise SpecError("validation_data and validation_split: found both, expected one")
            if not isinstance(data, tuple | list) or len(data) not in (2, 3):
                raise SpecError(
                    f"validation_data: found {type(data).__name__}, expected (X, y), or (X, y, w) "
                    f"with weights"
                )
        names, _ = self._metrics
        if self.metrics and data is None and self.validation_split is None:
            raise SpecError(
                f"metrics: found {list(names)} without validation rows; "
                f"expected validation_data or validation_split"
            )
        for callback in self.callbacks:
            if not isinstance(callback, EarlyStopping | Callback):
                raise SpecError(
                    f"callbacks: found {callback!r}, expected dtrain.EarlyStopping(...) or a "
                    f"dtrain.Callback"
                )
        self.spec(detach=True)

    @property
    def _metrics(self) -> tuple[tuple[str, ...], dict[str, Function]]:
        return check_metrics(self.metrics, task_of(self.model))

    @property
    def functions(self) -> dict[str, Function]:
        """The metrics that are functions, by name."""
        return self._metrics[1]

    @property
    def stopping(self) -> tuple[EarlyStopping, ...]:
        """What decides when it is enough; SpecError if that is of no value that epochs have."""
        held_out = self.validation_data is not None or self.validation_split is not None
        values = ["loss", *(f"val_{name}" for name in ("loss", *self._metrics[0]) if held_out)]
        return tuple(c.checked(values) for c in self.callbacks if isinstance(c, EarlyStopping))

    @property
    def watchers(self) -> tuple[Callback, ...]:
        """What watches it from the process that waits for it."""
        return tuple(c for c in self.callbacks if isinstance(c, Callback))

    def spec(self, *, detach: bool) -> JobSpec:
        """What travels to the master."""
        return JobSpec(
            mode=mode_name(self.mode),
            backups=getattr(self.mode, "backups", 0),
            max_staleness=getattr(self.mode, "max_staleness", None),
            replication=self.replication,
            optimizer=(self.optimizer or adam()).to_dict(),
            replicas=self.replicas,
            shards=self.shards,
            partitioner=None if self.partitioner is None else self.partitioner.to_dict(),
            placement="function" if callable(self.placement) else self.placement,
            device=check_device(self.device),
            batch_size=self.batch_size,
            epochs=self.epochs,
            steps=self.steps,
            shuffle=self.shuffle,
            seed=self.seed,
            validation_split=self.validation_split,
            metrics=self._metrics[0],
            name=self.name,
            output=None if self.output is None else os.path.abspath(self.output),
            detach=detach,
            recovery=self.recovery,
            checkpoint=self.checkpoint,
            resume=self.resume,
            stopping=tuple(asdict(policy) for policy in self.stopping),
        )


#: The keyword arguments that fit and submit pass on to a Job.
FIELDS = frozenset(f.name for f in fields(Job))


def task_of(model: Any) -> str:
    """``"classification"`` or ``"regression"``; regression if the model does not say."""
    task = getattr(model, "task", "regression")
    if task not in ("classification", "regression"):
        raise SpecError(f"model.task: found {task!r}, expected 'classification' or 'regression'")
    return str(task)
