"""What training gives back: parameters, history, predictions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.errors import SpecError
from dtrain.frames import Columns
from dtrain.machines.ledger import Ledger
from dtrain.metrics import Function
from dtrain.prediction import Trained
from dtrain.runtime.modelfile import Saved, save
from dtrain.runtime.modelfile import load as load_saved


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
    columns : Columns or None
        What the columns are of the frame that was trained on; None if it was an array.
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
        functions: Mapping[str, Function] | None = None,
        columns: Columns | None = None,
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
        self.columns = columns
        self.output = output
        self._metric_names = metric_names
        self._functions = functions or {}

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.metrics.items() if isinstance(v, float)}
        words = ", ".join(f"{name}={value:.4g}" for name, value in shown.items())
        return f"<Result of {self.model!r}: version {self.version}{', ' if words else ''}{words}>"

    @property
    def trained(self) -> Trained:
        """What predictions are made with."""
        return Trained(
            model=self.model,
            params=self.params,
            classification=self.classification,
            classes=self.classes,
            columns=self.columns,
            metrics=self._metric_names,
            functions=self._functions,
        )

    def scores(self, X: Any) -> Any:
        """Raw scores of the model; shape (n,) or (n, K).  As :meth:`predict` otherwise."""
        return self.trained.predict(X, "scores")

    def predict(self, X: Any) -> Any:
        """Labels for a classifier, numbers otherwise; shape (n,) or (n, outputs).

        Parameters
        ----------
        X : array or frame
            Of NumPy and pandas at once; of Dask lazily, block by block, and blocks may be of
            unknown size.  A frame has the columns of the one that was trained on, by their names
            and whatever else it has.

        Returns
        -------
        array, or Series or DataFrame
            Of the same library; what is said of a frame has its index.
        """
        return self.trained.predict(X, "labels")

    def predict_proba(self, X: Any) -> Any:
        """Class probabilities, shape (n, K), in the order of ``classes``.

        Of a frame, a frame with a column for each class.  As :meth:`predict` otherwise.
        """
        if not self.classification:
            raise SpecError(f"predict_proba: {self.model!r} is for regression")
        return self.trained.predict(X, "probabilities")

    def evaluate(self, X: Any, y: Any, sample_weight: Any = None) -> dict[str, float]:
        """``loss`` and the job's metrics on other rows; exact, also block by block.

        Parameters
        ----------
        X, y, sample_weight : array, frame or series
            As for training; collections of Dask have the same blocks of rows.
        """
        return self.trained.evaluate(X, y, sample_weight)

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
                columns=self.columns,
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
        columns=saved.columns,
        output=os.fspath(path),
    )
