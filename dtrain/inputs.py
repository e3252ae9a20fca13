"""From what people hand in to rows on the cluster: checks, labels, and the way there.

NumPy arrays and pandas frames go into one file on each machine of the workers, which outlives any
of them.  Dask collections stay where they lie; of data frames arrays are made there, partition by
partition.  Nothing passes through the scheduler.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.cluster import Control
from dtrain.config import settings
from dtrain.errors import ClusterWarning, DataError
from dtrain.frames import Columns, is_frame
from dtrain.job import Job, task_of
from dtrain.runtime.data import DataPlan, Parts
from dtrain.runtime.inputfile import Contents, Delivery, FileRef
from dtrain.runtime.rows import ArrayRef
from dtrain.runtime.spool import as_rows
from dtrain.sources import array_of, features_of, is_dask
from dtrain.sources.ready import on_chunks, ready

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
    arrays, columns = taken(job)
    held: list[Any] = []
    # How many rows partitions have is known only once they are there.
    unsized = {name: array for name, array in arrays.items() if not is_sized(array)}
    if not unsized:
        checked(job, arrays, replicas)
    else:
        _check_model(arrays["x"], arrays["y"], NAMES["x"], job.model)
    arrays = dict(zip(arrays, ready(client, list(arrays.values()), held), strict=True))
    if unsized:
        checked(job, arrays, replicas)
    classification = task_of(job.model) == "classification"
    classes, encoded = None, False
    if classification:
        labels = labels_of(client, arrays["y"])
        classes = encode_labels(labels, getattr(job.model, "n_classes", None))
        if "valid_y" in arrays:
            _check_labels(labels_of(client, arrays["valid_y"]), labels, classes, job.model)
        targets = {name: arrays[name] for name in ("y", "valid_y") if name in arrays}
        encoded = any(is_dask(y) and y.dtype.kind in "OUS" for y in targets.values())
        if encoded:
            # The lengths of strings, and so the types of arrays, differ from chunk to chunk.
            made = [encoded_labels(y, labels) for y in targets.values()]
            arrays.update(zip(targets, ready(client, made, held), strict=True))
    mean_weight = mean_of(client, arrays["w"], "sample_weight") if "w" in arrays else 1.0
    if "valid_w" in arrays:
        mean_of(client, arrays["valid_w"], "validation weights")
    refs, delivery = placed(client, workers, {"": arrays, **(blobs or {})}, stacklevel=8)
    lying: Any = refs[""]
    record = arrays["x"].dtype
    plan = DataPlan(
        **lying,
        columns=columns,
        fields=None if record.names is None else record,
        classification=classification,
        classes=classes,
        encoded=encoded,
        mean_weight=mean_weight,
        file=None if delivery is None else delivery.file.name,
        holders=() if delivery is None else tuple(workers),
        blobs={name: some for name, some in refs.items() if name},
    )
    return Inputs(plan, held, delivery)


#: What the arrays of a job are called in messages, by their names in a :class:`DataPlan`.
NAMES = {
    "x": "X",
    "y": "y",
    "w": "sample_weight",
    "valid_x": "validation X",
    "valid_y": "validation y",
    "valid_w": "validation weights",
}


def taken(job: Job) -> tuple[dict[str, Any], Columns | None]:
    """What a job is given, as NumPy and Dask arrays, by their names in a :class:`DataPlan`.

    Of a frame, the second says what its columns are.  Nothing is computed or sent; what cannot be
    trained on whatever its rows are is a DataError.
    """
    given = {"x": job.X, "y": job.y, "w": job.sample_weight}
    given.update(zip(("valid_x", "valid_y", "valid_w"), job.validation_data or (), strict=False))
    columns = Columns.of(job.X, NAMES["x"]) if is_frame(job.X) else None
    arrays = {}
    for name, value in given.items():
        if value is None and name in ("w", "valid_w"):
            continue
        shown = NAMES[name]
        if value is None:
            raise DataError(f"{shown}: found None, expected one target for each row")
        if name in ("x", "valid_x"):
            arrays[name] = features_of(value, columns, shown)
        else:
            arrays[name] = array_of(value, shown, labels=True)
    return arrays, columns


def checked(job: Job, arrays: Mapping[str, Any], replicas: int) -> Parts:
    """See that arrays fit each other and the model; which rows are whose.

    Nothing is computed or sent.  Raises DataError as :func:`prepare` does.
    """
    for name, array in arrays.items():
        if not is_sized(array):
            raise DataError(
                f"{NAMES[name]}: found partitions of unknown sizes, expected known ones; "
                f"compute_chunk_sizes() of an array, or to_dask_array(lengths=True), finds them"
            )
    x = arrays["x"]
    _check(x, arrays["y"], NAMES["x"], NAMES["y"], job.model)
    if "w" in arrays:
        _check_weights(arrays["w"], NAMES["w"], x, NAMES["x"])
    if "valid_x" in arrays:
        valid_x = arrays["valid_x"]
        _check(valid_x, arrays["valid_y"], NAMES["valid_x"], NAMES["valid_y"], job.model, like=x)
        if "valid_w" in arrays:
            _check_weights(arrays["valid_w"], NAMES["valid_w"], valid_x, NAMES["valid_x"])
    # Whether there are rows enough, before anything is sent.
    return Parts.of(
        x.shape[0],
        None if "valid_x" not in arrays else arrays["valid_x"].shape[0],
        fraction=job.validation_split,
        replicas=replicas,
        batch_size=job.batch_size,
        epochs=job.epochs,
        steps=job.steps,
        seed=job.seed,
    )


# -- shapes -------------------------------------------------------------------------------------


def is_sized(array: Any) -> bool:
    """Whether it is known how many rows an array has."""
    return not math.isnan(array.shape[0])


def rows_of(value: Any) -> int | None:
    """How many rows what people hand in has; None if only computing would tell."""
    if not hasattr(value, "__dask_graph__"):
        return len(value)
    return int(value.shape[0]) if is_dask(value) and is_sized(value) else None


def _check(x: Any, y: Any, x_name: str, y_name: str, model: Any, like: Any = None) -> None:
    """Numbers with as many rows each, that fit the model."""
    if x.dtype.names is None and x.ndim < 2:
        raise DataError(
            f"{x_name}: found shape {x.shape}, expected (rows, features); "
            f"one feature is {x_name}.reshape(-1, 1)"
        )
    if like is not None and x.shape[1:] != like.shape[1:]:
        raise DataError(
            f"{x_name}: found rows of shape {x.shape[1:]}, expected {like.shape[1:]} as in X"
        )
    if like is not None and x.dtype.names != like.dtype.names:
        raise DataError(
            f"{x_name}: found the inputs {x.dtype.names}, expected {like.dtype.names} as in X"
        )
    if x.dtype.names is None and x.dtype.kind not in "fiub":
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
    _check_model(x, y, x_name, model)


def _check_model(x: Any, y: Any, x_name: str, model: Any) -> None:
    """What a model itself says of shapes and types; how many rows there are may be unknown."""
    if hasattr(model, "check"):
        if x.dtype.names is not None:
            raise DataError(
                f"{x_name}: found a dict, expected one array for {type(model).__name__}"
            )
        model.check(x.shape, x.dtype, y.shape)


def _check_weights(w: Any, name: str, x: Any, x_name: str) -> None:
    """One number for each row."""
    if w.dtype.kind not in "fiub":
        raise DataError(f"{name}: found dtype {w.dtype}, expected numbers")
    if w.shape != (x.shape[0],):
        raise DataError(
            f"{name}: found shape {w.shape}, expected ({x.shape[0]},), one for each row of {x_name}"
        )


def mean_of(client: Client, w: Any, name: str) -> float:
    """The mean weight; DataError for weights that are not numbers from 0 up, or all 0."""
    found = on_chunks(client, w, extent) if is_dask(w) else [extent(w)]
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


# -- labels -------------------------------------------------------------------------------------


def labels_of(client: Client, y: Any) -> np.ndarray:
    """The sorted unique labels; those of a dask array are found where its chunks lie."""
    if is_dask(y):
        found = np.unique(np.concatenate(on_chunks(client, y, np.unique)))
    else:
        found = np.unique(y)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise DataError("y: found NaN or infinite labels, expected a label for each row")
    if found.dtype.kind not in "iubfUSO":
        raise DataError(f"y: found labels of dtype {found.dtype}, expected integers or strings")
    return found


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


def encoded_labels(y: Any, labels: np.ndarray) -> Any:
    """The places of labels among the sorted ``labels``, int64, of the same chunks."""
    if not is_dask(y):
        return np.searchsorted(labels, y.astype(labels.dtype))
    return y.map_blocks(_places, labels, dtype=np.int64, meta=np.zeros((0,) * y.ndim, np.int64))


def _places(y: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.searchsorted(labels, as_rows(y).astype(labels.dtype))


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
