"""From what people hand in to rows on the cluster: checks, labels, and the way there.

NumPy arrays go into one file on each machine of the workers, which outlives any of them.  Dask
arrays stay where they lie.  Neither passes through the scheduler.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.cluster import Control
from dtrain.config import settings
from dtrain.errors import ClusterWarning, DataError, DeadlineError, JobFailed
from dtrain.job import Job, task_of
from dtrain.runtime.data import ArrayRef, DataPlan, Parts
from dtrain.runtime.inputfile import Contents, Delivery, FileRef

if TYPE_CHECKING:
    from distributed import Client


@dataclass
class Inputs:
    """Data on the cluster; ``held`` are the futures that keep it there until the job does.

    ``delivery`` has brought the NumPy arrays there; None if there are none.
    """

    plan: DataPlan
    held: list[Any]
    delivery: Delivery | None = None

    @property
    def file(self) -> str | None:
        """The name of the file with the NumPy arrays, for the master to forget at the end."""
        return self.plan.file

    def discard(self) -> None:
        """Take it back: no job has come of it.  Never raises."""
        self.held.clear()
        if self.delivery is not None:
            self.delivery.discard()


def prepare(
    job: Job,
    client: Client,
    workers: list[str],
    replicas: int,
    blobs: Mapping[str, Mapping[str, np.ndarray]] | None = None,
) -> Inputs:
    """Check the data of a job and put it where its replicas can read it.

    Parameters
    ----------
    job : Job
    client : distributed.Client
    workers : list of str
        The addresses of those that can train.
    replicas : int
    blobs : mapping of str to mapping of str to ndarray, optional
        Further arrays for the workers; :func:`dtrain.runtime.data.read_blob` reads them there.

    Raises
    ------
    DataError
        What was found and what was expected.
    StorageError, ClusterError, DeadlineError
        A worker, which is named, could not be given the data.  Nothing is left of it then.
    """
    arrays, _ = checked(job, replicas)
    held: list[Any] = []
    arrays = dict(zip(arrays, persisted(client, list(arrays.values()), held), strict=True))
    classification = task_of(job.model) == "classification"
    classes = None
    if classification:
        labels = _labels(client, arrays["y"])
        classes = encode_labels(labels, getattr(job.model, "n_classes", None))
        if "valid_y" in arrays:
            _check_labels(_labels(client, arrays["valid_y"]), labels, classes, job.model)
    mean_weight = mean_of(client, arrays["w"], "sample_weight") if "w" in arrays else 1.0
    if "valid_w" in arrays:
        mean_of(client, arrays["valid_w"], "validation weights")
    refs, delivery = placed(client, workers, {"": arrays, **(blobs or {})}, stacklevel=8)
    plan = DataPlan(
        **refs[""],
        classification=classification,
        classes=classes,
        mean_weight=mean_weight,
        file=None if delivery is None else delivery.file.name,
        holders=() if delivery is None else tuple(workers),
        blobs={name: some for name, some in refs.items() if name},
    )
    return Inputs(plan, held, delivery)


def checked(job: Job, replicas: int) -> tuple[dict[str, Any], Parts]:
    """The arrays of a job, by their names in a :class:`DataPlan`, and which rows are whose.

    Nothing is computed or sent.  Raises DataError as :func:`prepare` does.
    """
    x, y = _checked(job.X, job.y, "X", "y", job.model)
    arrays = {"x": x, "y": y}
    if job.sample_weight is not None:
        arrays["w"] = _weights(job.sample_weight, "sample_weight", x, "X")
    if job.validation_data is not None:
        valid_x, valid_y, *weights = job.validation_data
        names = ("validation X", "validation y")
        valid_x, valid_y = _checked(valid_x, valid_y, *names, job.model, like=x)
        arrays.update(valid_x=valid_x, valid_y=valid_y)
        if weights:
            arrays["valid_w"] = _weights(weights[0], "validation weights", valid_x, names[0])
    # Whether there are rows enough, before anything is sent.
    parts = Parts.of(
        x.shape[0],
        None if "valid_x" not in arrays else arrays["valid_x"].shape[0],
        fraction=job.validation_split,
        replicas=replicas,
        batch_size=job.batch_size,
        epochs=job.epochs,
        steps=job.steps,
        seed=job.seed,
    )
    return arrays, parts


# -- shapes -------------------------------------------------------------------------------------


def is_dask(array: Any) -> bool:
    return hasattr(array, "__dask_graph__") and hasattr(array, "chunks")


def _checked(
    x: Any, y: Any, x_name: str, y_name: str, model: Any, like: Any = None
) -> tuple[Any, Any]:
    """Arrays of numbers with as many rows each, that fit the model."""
    if y is None:
        raise DataError(f"{y_name}: found None, expected one target for each row of {x_name}")
    x, y = array_of(x, x_name), array_of(y, y_name)
    if x.ndim < 2:
        raise DataError(
            f"{x_name}: found shape {x.shape}, expected (rows, features); "
            f"one feature is {x_name}.reshape(-1, 1)"
        )
    if like is not None and x.shape[1:] != like.shape[1:]:
        raise DataError(
            f"{x_name}: found rows of shape {x.shape[1:]}, expected {like.shape[1:]} as in X"
        )
    if x.dtype.kind not in "fiub":
        raise DataError(f"{x_name}: found dtype {x.dtype}, expected numbers")
    if x.shape[0] != y.shape[0]:
        raise DataError(
            f"{x_name} has {x.shape[0]} rows and {y_name} has {y.shape[0]}, expected as many"
        )
    if task_of(model) == "classification":
        if not (y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1)):
            raise DataError(
                f"{y_name}: found shape {y.shape}, expected (rows,) or (rows, 1): "
                f"one label for each row"
            )
    elif y.dtype.kind not in "fiub":
        raise DataError(f"{y_name}: found dtype {y.dtype}, expected numbers to regress on")
    if hasattr(model, "check"):
        model.check(x.shape, x.dtype, y.shape)
    return x, y


def _weights(w: Any, name: str, x: Any, x_name: str) -> Any:
    """One number for each row."""
    w = array_of(w, name)
    if w.dtype.kind not in "fiub":
        raise DataError(f"{name}: found dtype {w.dtype}, expected numbers")
    if w.shape != (x.shape[0],):
        raise DataError(
            f"{name}: found shape {w.shape}, expected ({x.shape[0]},), one for each row of {x_name}"
        )
    return w


def mean_of(client: Client, w: Any, name: str) -> float:
    """The mean weight; DataError for weights that are not numbers from 0 up, or all 0."""
    if is_dask(w):
        blocks = w.to_delayed().ravel()
        found = client.gather(client.compute([_extent(block) for block in blocks]), direct=True)
    else:
        found = [extent(w)]
    least = min(least for least, _ in found)
    total = math.fsum(total for _, total in found)
    if not (least >= 0 and math.isfinite(total)):
        shown = least if not least >= 0 else total
        raise DataError(f"{name}: found {shown}, expected finite weights that are not negative")
    if total == 0:
        raise DataError(f"{name}: found zeros alone, expected rows that count")
    return total / w.shape[0]


def extent(w: np.ndarray) -> tuple[float, float]:
    """The least of some weights, and their sum; NaN if one is."""
    if not len(w):
        return 0.0, 0.0
    return float(w.min()), float(w.sum(dtype=np.float64))


def _extent(block: Any) -> Any:
    from dask import delayed

    return delayed(extent, pure=False)(block)


def array_of(value: Any, name: str) -> Any:
    """A NumPy or Dask array of rows; DataError, which names it, for what is none."""
    if is_dask(value):
        return _dask_array(value, name)
    if hasattr(value, "__dask_graph__"):
        raise DataError(
            f"{name}: found {type(value).__name__}, expected a NumPy or dask array "
            f"(a dask dataframe has to_dask_array(lengths=True))"
        )
    if np.ma.isMaskedArray(value):
        raise DataError(f"{name}: found a masked array, expected one without masked values")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{name}: found {type(value).__name__}: {error}") from None
    if array.ndim == 0 or (array.dtype == object and array.size and not _strings(array)):
        raise DataError(f"{name}: found {type(value).__name__}, expected an array of rows")
    if array.dtype == object:
        array = array.astype(str)
    return array


def _strings(array: np.ndarray) -> bool:
    return all(isinstance(v, str) for v in array.ravel())


def _dask_array(array: Any, name: str) -> Any:
    if np.ma.isMaskedArray(array._meta):
        raise DataError(f"{name}: found a masked array, expected one without masked values")
    if any(np.isnan(n) for n in array.shape):
        raise DataError(
            f"{name}: found chunks of unknown sizes {array.chunks}, expected known ones; "
            f"call {name}.compute_chunk_sizes() first"
        )
    if array.ndim and any(len(chunks) > 1 for chunks in array.chunks[1:]):
        sizes = dict.fromkeys(range(1, array.ndim), -1)
        raise DataError(
            f"{name}: found chunks along several axes {array.chunks}, expected chunks of rows "
            f"alone; call {name}.rechunk({sizes})"
        )
    return array


# -- labels -------------------------------------------------------------------------------------


def _labels(client: Client, y: Any) -> np.ndarray:
    """The sorted unique labels; those of a dask array are found where its chunks lie."""
    if is_dask(y):
        parts = client.compute([_unique(block) for block in y.to_delayed().ravel()])
        found = np.unique(np.concatenate(client.gather(parts, direct=True)))
    else:
        found = np.unique(y)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise DataError("y: found NaN or infinite labels, expected a label for each row")
    if found.dtype.kind not in "iubfUSO":
        raise DataError(f"y: found labels of dtype {found.dtype}, expected integers or strings")
    return found


def _unique(block: Any) -> Any:
    from dask import delayed

    return delayed(np.unique, pure=False)(block)


def encode_labels(labels: np.ndarray, n_classes: int | None) -> np.ndarray | None:
    """The classes that labels stand for, in order; None if they are class indices themselves.

    Integers all within 0..K-1 are their own classes; other labels are the sorted unique values.
    """
    if labels.dtype.kind == "b":
        labels = labels.astype(np.int64)
    whole = labels.dtype.kind in "iu" and labels[0] >= 0
    if whole and (n_classes is None or labels[-1] < n_classes):
        return None
    if n_classes is not None and len(labels) > n_classes:
        shown = ", ".join(map(str, labels[:5].tolist()))
        raise DataError(
            f"y: found {len(labels)} different labels ({shown}...), "
            f"expected at most {n_classes}, the model's number of classes"
        )
    return labels


def _check_labels(
    found: np.ndarray, known: np.ndarray, classes: np.ndarray | None, model: Any
) -> None:
    if classes is not None:
        unseen = np.setdiff1d(found, classes)
    else:
        n_classes = getattr(model, "n_classes", None) or int(known[-1]) + 1
        whole = found.dtype.kind in "iub"
        unseen = found[(found < 0) | (found >= n_classes)] if whole else found
    if len(unseen):
        raise DataError(
            f"validation y: found the label {unseen[0].item()!r}, expected those of y alone"
        )


# -- the way to the workers ---------------------------------------------------------------------


def persisted(client: Client, arrays: list[Any], held: list[Any]) -> list[Any]:
    """Dask arrays, computed and in memory; others as they are."""
    from distributed import futures_of

    lazy = [a for a in arrays if is_dask(a)]
    if not lazy:
        return arrays
    ready = iter(client.persist(lazy, optimize_graph=True))
    arrays = [next(ready) if is_dask(a) else a for a in arrays]
    futures = futures_of([a for a in arrays if is_dask(a)])
    _wait_for_chunks(client, futures)
    for future in futures:
        if future.status == "error":
            raise client.sync(future._exception)
        if future.status != "finished":
            raise JobFailed(f"data: chunk {future.key!r} is {future.status}, expected it computed")
    held.extend(futures)
    held.extend(arrays)
    return arrays


def _wait_for_chunks(client: Client, futures: list[Any]) -> None:
    """Until all are computed or have failed.

    Computing may take its time; but tasks that no worker may run are told at once, and after
    ``data-deadline`` the rest is.
    """
    # Not `distributed.wait`: it wants a client that is the process's current one.
    from distributed.client import _wait

    config = settings()
    until = time.monotonic() + config.data_deadline
    control = Control(client)
    while True:
        try:
            client.sync(_wait, futures, timeout=config.poll)
            return
        except TimeoutError:
            pending = [f.key for f in futures if f.status == "pending"]
        stuck = control.call("dtrain_stuck")
        if stuck:
            raise DataError(
                f"data: {len(pending)} chunks wait for tasks that no worker may run, such as "
                f"{stuck[0]}; expected workers that satisfy their restrictions"
            )
        if time.monotonic() > until:
            raise DeadlineError(
                f"data: after {config.data_deadline:.0f} s {len(pending)} of {len(futures)} chunks "
                f"are not computed, such as {pending[0]!r}"
            )


def placed(
    client: Client,
    workers: list[str],
    groups: Mapping[str, Mapping[str, Any]],
    stacklevel: int,
) -> tuple[dict[str, dict[str, ArrayRef]], Delivery | None]:
    """Where all arrays are, once those that are not of Dask have been delivered.

    ``stacklevel`` says which caller a warning is about, as seen from here.
    """
    contents = Contents()
    offsets = {
        (group, name): contents.add(array)
        for group, arrays in groups.items()
        for name, array in arrays.items()
        if not is_dask(array)
    }
    file = contents.file()
    delivery = None
    if file is not None:
        config = settings()
        delivery = Delivery(
            client,
            workers,
            file,
            contents,
            owner=Control(client).address,
            deadline=config.call_deadline,
            patience=config.prepare_deadline,
            # Whoever called submit is to see it.
            warn=lambda words: warnings.warn(words, ClusterWarning, stacklevel=stacklevel),
        )
        delivery.deliver()
    refs = {
        group: {
            name: _ref(array, file, offsets.get((group, name))) for name, array in arrays.items()
        }
        for group, arrays in groups.items()
    }
    return refs, delivery


def _ref(array: Any, file: FileRef | None, offset: int | None) -> ArrayRef:
    """What is in the file, or a Dask array where it lies."""
    shape = tuple(int(n) for n in array.shape)
    if file is not None and offset is not None:
        starts = (0, shape[0] if shape else 1)
        return ArrayRef(shape, array.dtype.str, (), starts, file.at(offset))
    keys = [_first(block) for block in array.__dask_keys__()]
    bounds = np.concatenate([[0], np.cumsum(array.chunks[0])]).astype(int)
    return ArrayRef(shape, array.dtype.str, tuple(keys), tuple(int(b) for b in bounds))


def _first(keys: Any) -> Any:
    """The key in a nest of one-element lists: a chunk of rows is whole along the other axes."""
    while isinstance(keys, list):
        keys = keys[0]
    return keys
