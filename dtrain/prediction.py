"""What a trained model says of rows: at once for those in memory, lazily for Dask collections.

Of a collection each block is looked at by itself, where it lies.  The trained model is one node of
the graph, which Dask sends to each worker once, however many blocks there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dtrain import metrics
from dtrain.errors import DataError
from dtrain.frames import Columns, is_frame
from dtrain.inputs import is_sized
from dtrain.metrics import Function
from dtrain.runtime.data import apart
from dtrain.runtime.replica import mean_loss
from dtrain.sources import array_of, features_of, is_dask

#: Rows that predictions and evaluations look at in one go.
_ROWS = 8192

Sums = dict[str, list[float]]


@dataclass(frozen=True, eq=False)
class Trained:
    """A model with its parameters, and what its scores and features stand for.

    Attributes
    ----------
    model : object
    params : mapping of str to ndarray
    classes : ndarray or None
        The labels in the order of the class indices; None if they are these.
    columns : Columns or None
        Those of the frame that it was trained on, if it was one.
    metrics : tuple of str
    functions : mapping of str to callable
        The metrics that are functions of the user's.
    """

    model: Any
    params: Mapping[str, np.ndarray]
    classification: bool
    classes: np.ndarray | None
    columns: Columns | None
    metrics: tuple[str, ...] = ()
    functions: Mapping[str, Function] = field(default_factory=dict)

    def scores(self, X: np.ndarray) -> np.ndarray:
        """Raw scores, shape (n,) or (n, k)."""
        record = X.dtype if X.dtype.names is not None else None
        if record is None and X.ndim < 2:
            raise DataError(f"X: found shape {X.shape}, expected (rows, features)")
        parts = [
            np.array(self.model.predict(self.params, apart(X[start : start + _ROWS], record)))
            for start in range(0, max(len(X), 1), _ROWS)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def labels(self, X: np.ndarray) -> np.ndarray:
        """For a classifier the label of each row, else its scores."""
        if not self.classification:
            return self.scores(X)
        indices = metrics.class_indices(self.scores(X))
        return indices if self.classes is None else self.classes[indices]

    def probabilities(self, X: np.ndarray) -> np.ndarray:
        """Shape (n, K)."""
        return metrics.probabilities(self.scores(X))

    # -- what is predicted, of what ------------------------------------------------------------

    def predict(self, X: Any, kind: str) -> Any:
        """What the method ``kind`` says of an array, a frame, or a Dask collection of these."""
        if is_frame(X):
            columns = self.columns or Columns.of(X, "X")
            if not hasattr(X, "__dask_graph__"):
                return _framed(self, kind, columns, X)
            missing = [name for name in columns.names if name not in X.columns]
            if not missing:
                X = X[list(columns.names)]
            meta = _framed(self, kind, columns, X._meta)
            return X.map_partitions(_frame, self._packed(), kind, columns, meta=meta)
        X = array_of(X, "X") if isinstance(X, Mapping) else X
        if is_dask(X):
            return self._lazy(X, kind)
        return getattr(self, kind)(np.asarray(X))

    def _packed(self) -> Any:
        """One node of a graph, of the same name whenever it is the same model."""
        from dask import delayed

        return delayed(self, name=f"dtrain-model-{self._token()}", traverse=False)

    def _token(self) -> str:
        from dask.base import tokenize

        meaning = (self.classification, self.classes, self.columns)
        rest = (self.model, *meaning, self.metrics, dict(self.functions))
        token: str = tokenize(dict(self.params), *rest)
        return token

    def _lazy(self, X: Any, kind: str) -> Any:
        if any(len(chunks) > 1 for chunks in X.chunks[1:]):
            raise DataError(f"X: found chunks {X.chunks}, expected chunks of rows alone")
        sample = getattr(self, kind)(np.zeros((1, *X.shape[1:]), X.dtype))
        return X.map_blocks(
            _block,
            self._packed(),
            kind,
            dtype=sample.dtype,
            chunks=(X.chunks[0], *((n,) for n in sample.shape[1:])),
            drop_axis=list(range(1, X.ndim)) if sample.ndim == 1 else [],
            meta=sample[:0],
        )

    # -- what it is worth ----------------------------------------------------------------------

    def evaluate(self, X: Any, y: Any, sample_weight: Any) -> dict[str, float]:
        """Loss and metrics over all rows; exact, also block by block."""
        arrays = [features_of(X, self.columns, "X"), array_of(y, "y", labels=True)]
        if sample_weight is not None:
            arrays.append(array_of(sample_weight, "sample_weight"))
        total = self._summed(arrays) if any(map(is_dask, arrays)) else self.sums(*arrays)
        if not total:
            raise DataError("X has no rows, expected some to evaluate on")
        return {
            name: metrics.mean_loss(values) if name == "loss" else metrics.value(name, values)
            for name, values in total.items()
        }

    def _summed(self, arrays: Sequence[Any]) -> Sums:
        import dask

        arrays = _alike(arrays)
        for name, array in zip(("y", "sample_weight"), arrays[1:], strict=False):
            if not _same_rows(arrays[0], array):
                raise DataError(
                    f"X has chunks {arrays[0].chunks} and {name} {array.chunks}, "
                    f"expected the same chunks of rows in both"
                )
        sums = dask.delayed(_sums, pure=False)
        packed = self._packed()
        blocks = zip(*(array.to_delayed().ravel() for array in arrays), strict=True)
        total: Sums = {}
        for partial in dask.compute(*(sums(packed, *some) for some in blocks)):
            for name, values in partial.items():
                total[name] = metrics.add(total.get(name), tuple(values))
        return total

    def sums(self, X: np.ndarray, y: np.ndarray, *w: np.ndarray) -> Sums:
        """The sums of loss and metrics over rows in memory; none of no rows."""
        for name, array in zip(("y", "sample_weight"), (y, *w), strict=False):
            if len(array) != len(X):
                raise DataError(f"{name}: found {len(array)} rows, expected {len(X)}, as X has")
        if not len(X):
            return {}
        arrays = (X, self._encode(y), *w)
        record = X.dtype if X.dtype.names is not None else None
        sums: Sums = {}
        for start in range(0, len(X), _ROWS):
            x, *rest = (array[start : start + _ROWS] for array in arrays)
            batch = (apart(x, record), *rest)
            loss = mean_loss(self.model, self.params, batch)
            sums["loss"] = metrics.add(sums.get("loss"), metrics.loss_sums(loss, batch))
            if self.metrics:
                scores = np.asarray(self.model.predict(self.params, batch[0]))
                for name in self.metrics:
                    one = metrics.sums(name, scores, *batch[1:], functions=self.functions)
                    sums[name] = metrics.add(sums.get(name), one)
        return sums

    def _encode(self, y: np.ndarray) -> np.ndarray:
        if not self.classification:
            return y
        y = y.reshape(len(y))
        if self.classes is None:
            known = getattr(self.model, "n_classes", None)
            if y.dtype.kind not in "iub" or y.min() < 0 or (known and y.max() >= known):
                raise DataError(f"y: found labels that are not class indices 0..{(known or 0) - 1}")
            return y.astype(np.int64)
        if y.dtype == object:
            y = y.astype(self.classes.dtype)
        if len(unseen := np.setdiff1d(y, self.classes)):
            raise DataError(f"y: found the label {unseen[0].item()!r}, expected those of training")
        return np.searchsorted(self.classes, y)


# -- tasks ----------------------------------------------------------------------------------------


def _block(block: np.ndarray, trained: Trained, kind: str) -> np.ndarray:
    found: np.ndarray = getattr(trained, kind)(block)
    return found


def _frame(part: Any, trained: Trained, kind: str, columns: Columns) -> Any:
    return _framed(trained, kind, columns, part)


def _framed(trained: Trained, kind: str, columns: Columns, frame: Any) -> Any:
    """What is said of a pandas frame, with its index: a Series, or a DataFrame of columns."""
    import pandas as pd

    found = getattr(trained, kind)(columns.encode(frame))
    if found.ndim == 1:
        return pd.Series(found, index=frame.index)
    names: Any = range(found.shape[1])
    if kind == "probabilities" and trained.classes is not None:
        names = trained.classes
    return pd.DataFrame(found, index=frame.index, columns=list(names))


def _sums(trained: Trained, *arrays: np.ndarray) -> Sums:
    return trained.sums(*arrays)


# -- blocks of rows -------------------------------------------------------------------------------


def _alike(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """All as dask arrays; a NumPy one is cut at the rows of those that are."""
    import dask.array as da

    rows = next(array.chunks[0] for array in arrays if is_dask(array))

    def cut(array: Any) -> Any:
        array = np.asarray(array)
        if any(map(math.isnan, rows)):
            raise DataError(
                f"found an array of shape {array.shape} beside partitions of unknown sizes, "
                f"expected collections of Dask, or arrays alone"
            )
        if array.shape[:1] != (sum(rows),):
            raise DataError(f"found shape {array.shape}, expected {sum(rows)} rows")
        return da.from_array(array, chunks=(rows, *((n,) for n in array.shape[1:])))

    return tuple(array if is_dask(array) else cut(array) for array in arrays)


def _same_rows(X: Any, y: Any) -> bool:
    """Whether two arrays are cut at the same rows, and nowhere else, as far as it is known."""
    if any(len(chunks) != 1 for chunks in (*X.chunks[1:], *y.chunks[1:])):
        return False
    if is_sized(X) and is_sized(y):
        return bool(X.chunks[0] == y.chunks[0])
    return len(X.chunks[0]) == len(y.chunks[0])
