"""What training gives back: parameters, history, predictions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtrain import metrics as metrics_of
from dtrain.errors import DataError, SpecError
from dtrain.machines.ledger import Ledger
from dtrain.runtime.modelfile import Saved, save
from dtrain.runtime.modelfile import load as load_saved

#: Rows that predictions and evaluations look at in one go.
_ROWS = 8192


class Result:
    """A trained model and how it came to be.

    Attributes
    ----------
    params : dict of str to ndarray
    version : int
        Steps (updates) applied.
    history : list of dict
        One per epoch: ``epoch, step, loss, samples, seconds, samples_per_s, val_loss,
        val_<metric>``.
    metrics : dict
        The last values of these.
    ledger : Ledger or None
        What became of every gradient and sample; None for a loaded model.
    classes : ndarray or None
        The labels in the order of the scores' columns; None if they are 0..K-1.
    """

    def __init__(
        self,
        *,
        model: Any,
        params: Mapping[str, np.ndarray],
        version: int,
        history: list[dict[str, Any]],
        metrics: Mapping[str, Any],
        ledger: Ledger | None,
        classes: np.ndarray | None,
        classification: bool,
        metric_names: tuple[str, ...] = (),
        output: str | None = None,
    ) -> None:
        self.model = model
        self.params = dict(params)
        self.version = version
        self.history = history
        self.metrics = dict(metrics)
        self.ledger = ledger
        self.classes = classes
        self.classification = classification
        self.output = output
        self._metric_names = metric_names

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.metrics.items() if isinstance(v, float)}
        words = ", ".join(f"{name}={value:.4g}" for name, value in shown.items())
        return f"<Result of {self.model!r}: version {self.version}{', ' if words else ''}{words}>"

    def scores(self, X: Any) -> Any:
        """Raw scores of the model; shape (n,) or (n, K); lazy for a dask array."""
        return self._map(X, lambda scores: scores)

    def predict(self, X: Any) -> Any:
        """Labels for a classifier, numbers otherwise; shape (n,) or (n, outputs).

        Eager for NumPy; for a dask array of row chunks a dask array, block by block.
        """
        return self._map(X, self._labels if self.classification else lambda scores: scores)

    def predict_proba(self, X: Any) -> Any:
        """Class probabilities, shape (n, K), in the order of ``classes``."""
        if not self.classification:
            raise SpecError(f"predict_proba: {self.model!r} is for regression")
        return self._map(X, metrics_of.probabilities)

    def _labels(self, scores: np.ndarray) -> np.ndarray:
        indices = metrics_of.class_indices(scores)
        return indices if self.classes is None else self.classes[indices]

    def _map(self, X: Any, finish: Any) -> Any:
        from dtrain.inputs import is_dask

        if is_dask(X):
            return _lazy(self.model, self.params, X, finish)
        X = np.asarray(X)
        if X.ndim < 2:
            raise DataError(f"X: found shape {X.shape}, expected (rows, features)")
        return finish(_scores(self.model, self.params, X))

    def evaluate(self, X: Any, y: Any, sample_weight: Any = None) -> dict[str, float]:
        """``loss`` and the job's metrics on other rows; exact, also block by block.

        Parameters
        ----------
        X, y, sample_weight : ndarray or dask.array.Array
            As for training.
        """
        from dtrain.inputs import is_dask

        arrays = [array for array in (X, y, sample_weight) if array is not None]
        if any(map(is_dask, arrays)):
            return self._evaluate_blocks(*arrays)
        return self._value(self._sums(*map(np.asarray, arrays)))

    def _evaluate_blocks(self, *arrays: Any) -> dict[str, float]:
        import dask

        arrays = _alike(arrays)
        for name, array in zip(("y", "sample_weight"), arrays[1:], strict=False):
            if not is_same_rows(arrays[0], array):
                raise DataError(
                    f"X has chunks {arrays[0].chunks} and {name} {array.chunks}, "
                    f"expected the same chunks of rows in both"
                )
        blocks = zip(arrays[0].chunks[0], *(a.to_delayed().ravel() for a in arrays), strict=True)
        sums = dask.compute(
            *(dask.delayed(self._sums, pure=False)(*some) for rows, *some in blocks if rows)
        )
        if not sums:
            raise DataError("X has no rows, expected some to evaluate on")
        total: dict[str, list[float]] = {}
        for partial in sums:
            for name, values in partial.items():
                total[name] = metrics_of.add(total.get(name), tuple(values))
        return self._value(total)

    def _sums(self, X: np.ndarray, y: np.ndarray, *w: np.ndarray) -> dict[str, list[float]]:
        from dtrain.runtime.replica import mean_loss

        if len(X) != len(y) or not len(X):
            raise DataError(f"X has {len(X)} rows and y has {len(y)}, expected as many, and some")
        if any(len(some) != len(X) for some in w):
            raise DataError(f"sample_weight: found {len(w[0])} rows, expected {len(X)}, as X has")
        arrays = (X, self._encode(y), *w)
        sums: dict[str, list[float]] = {}
        for start in range(0, len(X), _ROWS):
            batch = tuple(array[start : start + _ROWS] for array in arrays)
            loss = mean_loss(self.model, self.params, batch)
            sums["loss"] = metrics_of.add(sums.get("loss"), metrics_of.loss_sums(loss, batch))
            if self._metric_names:
                scores = np.asarray(self.model.predict(self.params, batch[0]))
                for name in self._metric_names:
                    one = metrics_of.sums(name, scores, *batch[1:])
                    sums[name] = metrics_of.add(sums.get(name), one)
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
        if len(unseen := np.setdiff1d(y, self.classes)):
            raise DataError(f"y: found the label {unseen[0].item()!r}, expected those of training")
        return np.searchsorted(self.classes, y)

    @staticmethod
    def _value(sums: Mapping[str, list[float]]) -> dict[str, float]:
        return {
            name: metrics_of.mean_loss(values) if name == "loss" else metrics_of.value(name, values)
            for name, values in sums.items()
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the model to a directory: safetensors and JSON, whole or not at all.

        A saved model that is there is replaced; anything else there is a SpecError.
        """
        return save(
            path,
            Saved(
                params=self.params,
                model=self.model,
                classes=self.classes,
                classification=self.classification,
                version=self.version,
                metrics=self._metric_names,
                history=tuple(self.history),
            ),
        )


def load(path: str | os.PathLike[str], model: Any = None) -> Result:
    """Read a saved model.

    Parameters
    ----------
    path : path
        A directory written by :meth:`Result.save` or by a job with ``output``.
    model : object, optional
        The model, where its class cannot be imported or has no ``config``.

    Raises
    ------
    ModelFileError
        Nothing there, damaged, or of another format.
    """
    saved = load_saved(path, model)
    history = list(saved.history)
    return Result(
        model=saved.model,
        params=saved.params,
        version=saved.version,
        history=history,
        metrics=history[-1] if history else {},
        ledger=None,
        classes=saved.classes,
        classification=saved.classification,
        metric_names=saved.metrics,
        output=os.fspath(path),
    )


def _alike(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """All as dask arrays; a NumPy one is cut at the rows of those that are."""
    import dask.array as da

    from dtrain.inputs import is_dask

    rows = next(array.chunks[0] for array in arrays if is_dask(array))

    def cut(array: Any) -> Any:
        array = np.asarray(array)
        if array.shape[:1] != (sum(rows),):
            raise DataError(f"found shape {array.shape}, expected {sum(rows)} rows")
        return da.from_array(array, chunks=(rows, *((n,) for n in array.shape[1:])))

    return tuple(array if is_dask(array) else cut(array) for array in arrays)


def is_same_rows(X: Any, y: Any) -> bool:
    """Whether two arrays are cut at the same rows, and nowhere else."""
    return (
        hasattr(X, "chunks")
        and hasattr(y, "chunks")
        and X.chunks[0] == y.chunks[0]
        and all(len(c) == 1 for c in (*X.chunks[1:], *y.chunks[1:]))
    )


def _scores(model: Any, params: Mapping[str, np.ndarray], X: np.ndarray) -> np.ndarray:
    parts = [
        np.array(model.predict(params, X[start : start + _ROWS]))
        for start in range(0, max(len(X), 1), _ROWS)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _block(block: np.ndarray, packed: Any, model: Any, finish: Any) -> np.ndarray:
    found: np.ndarray = finish(_scores(model, packed, block))
    return found


def _lazy(model: Any, params: Mapping[str, np.ndarray], X: Any, finish: Any) -> Any:
    """Predictions block by block; the parameters are one node of the graph, shared by all."""
    from dask import delayed

    if any(len(chunks) > 1 for chunks in X.chunks[1:]):
        raise DataError(f"X: found chunks {X.chunks}, expected chunks of rows alone")
    sample = finish(_scores(model, params, np.zeros((1, *X.shape[1:]), X.dtype)))
    packed = delayed(dict(params), pure=True)
    return X.map_blocks(
        _block,
        packed,
        model=model,
        finish=finish,
        dtype=sample.dtype,
        chunks=(X.chunks[0], *((n,) for n in sample.shape[1:])),
        drop_axis=list(range(1, X.ndim)) if sample.ndim == 1 else [],
        meta=sample[:0],
    )
